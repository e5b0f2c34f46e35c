"""Figures: ink can be read on white, and maps of heads share one colour bar."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from iclutils.plots import figures

mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("closed")


def contrast_on_white(rgb):
    """As WCAG defines it."""
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return 1.05 / (np.dot((0.2126, 0.7152, 0.0722), linear) + 0.05)


def test_ink_darkens_what_is_too_light_to_read_and_nothing_else():
    assert contrast_on_white(to_rgb("#E69F00")) < 4.5
    assert contrast_on_white(figures.ink("#E69F00")) >= 4.5
    assert figures.ink("#0072B2") == to_rgb("#0072B2")
    assert all(contrast_on_white(figures.ink(colour)) >= 4.5 for colour in figures.COLOURS)


@pytest.mark.parametrize("maps", [5, 7], ids=["beside the maps", "in a place left over"])
def test_maps_of_heads_have_one_colour_bar_from_0_to_1(maps):
    figure = figures.head_maps({f"score {i}": torch.rand(2, 3) for i in range(maps)})
    bars = [ax for ax in figure.axes if ax.get_label() == "<colorbar>" or not ax.get_title()]
    shown = [ax for ax in bars if ax.axison]
    assert len(shown) == 1
    assert shown[0].get_ylim() == (0, 1)
    assert sum(bool(ax.get_title()) for ax in figure.axes) == maps


def test_names_of_flows_are_typeset_and_a_name_in_two_lines_stays_level():
    line = {"S_pq": ([0, 1], [0.1, 0.9]), "Hidden_anchor": ([0, 1], [0.5, 0.5])}
    (axes,) = figures.curves({"share": line}, "layer").axes
    assert [x.get_label() for x in axes.get_lines()] == ["$S_{pq}$", "Hidden_anchor"]
    names = ["word\noverlap", *(f"anchors-{i}" for i in range(5)), "ideal"]
    (axes,) = figures.bars({"": [(1.0, 0.0)] * 7}, names, "accuracy").axes
    assert {label.get_rotation() for label in axes.get_xticklabels()} == {0}


def test_the_fifth_and_sixth_line_of_a_panel_are_told_by_stroke_too():
    lines = {f"series {i}": ([0, 1], [i, i]) for i in range(6)}
    drawn = figures.curves({"": lines}, "x").axes[0].get_lines()
    bands = figures.curves({"": {k: (*v, *v[1:] * 2) for k, v in lines.items()}}, "x")
    strokes = [(x.get_linestyle(), x.get_marker()) for x in drawn]
    assert len(set(strokes)) == 3
    assert strokes[:4] == [("-", "o")] * 4
    assert [x.get_linestyle() for x in bands.axes[0].get_lines()] == [s for s, _ in strokes]


def test_a_share_has_the_standard_error_of_its_answers():
    groups = {"right": [(0.5, 0.0), (1.0, 0.0)], "wrong": [(0.2, 0.0), (float("nan"), 0.0)]}
    figure = figures.bars(groups, ["one", "other"], "share")
    figures.share_errors(figure, [101, 6])
    ends = [c.get_segments() for c in figure.axes[0].collections]
    assert [len(segments) for segments in ends] == [2, 2]
    np.testing.assert_allclose(ends[0][0][:, 1], [0.45, 0.55])
    np.testing.assert_allclose(ends[0][1][:, 1], [1.0, 1.0])
    np.testing.assert_allclose(ends[1][0][:, 1], [0.16, 0.24])


def test_a_small_map_of_zeros_says_zero():
    left, right, *_ = figures.signed({"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}, "", "").axes
    assert [x.get_text() for x in left.texts] == ["1.0"] * 4
    assert [x.get_text() for x in right.texts] == ["0.0"] * 4
