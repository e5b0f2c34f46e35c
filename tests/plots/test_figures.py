"""Figures draw what they are given, in the book's style."""

from __future__ import annotations

import matplotlib as mpl
import pytest
import torch
from matplotlib.colors import to_rgb

from iclutils.plots import figures

mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("closed")


def test_halves_draws_both_copies_and_the_even_guess() -> None:
    mean, se = -torch.arange(8.0), torch.full((8,), 0.1)
    axes = figures.halves(mean, se, 4, -6.2).axes[0]
    assert [-6.2, -6.2] in [list(line.get_ydata()) for line in axes.get_lines()]
    assert [text.get_text() for text in axes.texts] == ["first copy", "second copy", "even guess"]
    points = [c.lines[0].get_ydata().tolist() for c in axes.containers]
    assert points == [[0, -1, -2, -3], [-4, -5, -6, -7]]


def test_every_lens_names_tokens_and_lenses_and_keeps_zero_white() -> None:
    written, marked = torch.tensor([[0.2, -0.1], [0.5, 0.0], [0.1, 0.3]]), torch.ones(4, 3)
    figure = figures.every_lens(["a", "b"], written, list("wxyz"), marked)
    left, right = figure.axes[:2]
    assert [t.get_text() for t in left.get_xticklabels()] == ["a", "b"]
    assert [t.get_text() for t in right.get_xticklabels()] == list("wxyz")
    assert left.images[0].get_clim() == (-0.5, 0.5)
    assert right.images[0].get_array().shape == (3, 4)  # layers upwards
    assert not left.yaxis_inverted()


def test_head_maps_share_one_scale_and_write_their_values() -> None:
    scores = torch.tensor([[0.25, 0.75], [0.5, 1.0]])
    figure = figures.head_maps({"a": scores, "b": 1 - scores})
    images = [ax.images[0] for ax in figure.axes[:2]]
    assert [i.get_clim() for i in images] == [(0, 1), (0, 1)]
    assert torch.equal(torch.tensor(images[0].get_array()), scores)
    assert [t.get_text() for t in figure.axes[0].texts] == ["0.25", "0.75", "0.50", "1.00"]


def test_a_position_map_has_zero_in_the_middle_and_true_positions() -> None:
    values = torch.tensor([[0.0, 2.0, -1.0]])
    image = figures.position_map(values, 30, "x").axes[0].images[0]
    assert image.get_clim() == (-2, 2)
    assert image.get_extent() == [29.5, 32.5, 0.5, -0.5]
    figures.position_map(torch.zeros(1, 3), 0, "nothing happened")


def test_bars_carry_values_and_errors() -> None:
    axes = figures.bars({"a": [(1.0, 0.1), (2.0, 0.2)], "b": [(3.0, 0), (4.0, 0)]}, "xy", "y").axes[
        0
    ]
    heights = [
        [p.get_height() for p in c.patches] for c in axes.containers if hasattr(c, "patches")
    ]
    assert heights == [[1, 2], [3, 4]]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["x", "y"]


def test_curves_profiles_and_nulls_draw_their_arrays() -> None:
    panel = figures.curves({"t": {"a": ([0, 100], [1.0, 2.0])}}, "step", log_x=True)
    assert list(panel.axes[0].get_lines()[0].get_ydata()) == [1.0, 2.0]
    lines = figures.profile({"h": torch.tensor([0.1, 0.9])}, {"here": 1}).axes[0].get_lines()
    assert list(lines[1].get_xdata()) == [1, 1]
    null = figures.null_histogram({"other": [0.0, 0.0, 1.0]}, {"found": 0.5}, "x").axes[0]
    assert sum(p.get_height() for p in null.patches) == 3


def test_colours_differ_in_grey_too() -> None:
    def grey(colour: str) -> float:
        r, g, b = to_rgb(colour)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    assert abs(grey(figures.BLUE) - grey(figures.ORANGE)) > 0.04
    assert len(set(figures.COLOURS)) == len(figures.COLOURS)


def test_matrices_write_all_but_the_diagonal_and_leave_their_input_alone() -> None:
    values = torch.tensor([[1.0, 0.2], [0.7, 1.0]])
    figure = figures.matrices({"one": values, "two": values}, ["x", "y"], 0.0, 1.0)
    assert [t.get_text() for t in figure.axes[0].texts] == ["0.20", "0.70"]
    assert [ax.images[0].get_clim() for ax in figure.axes[:2]] == [(0, 1), (0, 1)]
    assert values[0, 0] == 1


def test_tables_frame_the_smallest_entry_of_every_column() -> None:
    values = torch.tensor([[1e-5, 2.0, 3e-3], [4e-4, 1e-1, 5e-3]])
    (axes,) = figures.tables({"ours": values}, ["a", "b"], ["x", "y", "z"]).axes
    assert [patch.get_xy() for patch in axes.patches] == [(-0.5, -0.5), (0.5, 0.5), (1.5, -0.5)]
    assert [text.get_text() for text in axes.texts] == [
        *("1.0e-5", "4.0e-4", "2.0e0", "1.0e-1", "3.0e-3", "5.0e-3")
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def test_panels_with_other_series_have_legends_of_their_own() -> None:
    line = ([1, 2], [0.1, 10.0])
    long = {name * 50: line for name in "ab"}
    same = figures.curves({"p": long, "q": long}, "x", log_y=True)
    assert len(same.legends) == 1
    assert same.axes[1].get_yscale() == "log"
    other = figures.curves({"p": {"a" * 70: line}, "q": {"b" * 70: line}}, "x")
    assert not other.legends
    assert [ax.get_legend().get_texts()[0].get_text() for ax in other.axes] == ["a" * 70, "b" * 70]
    many = figures.curves({"p": {str(i): line for i in range(8)}}, "x")
    assert len(many.axes[0].get_lines()) == 8, "a series beyond the colours is drawn as well"
    seeds = figures.curves({k: {"a": line, "b": line} for k in "pqr"}, "x", in_a_row=3, alike=True)
    assert len({ax.get_subplotspec().rowspan.start for ax in seeds.axes}) == 1
    assert {line.get_color() for ax in seeds.axes for line in ax.get_lines()} == {figures.GREY}
    assert not any(ax.texts for ax in seeds.axes)
    slanted = figures.bars({"": [(1.0, 0.0)] * 10}, ["a long label"] * 10, "y", log_y=True).axes[0]
    assert slanted.get_yscale() == "log"
    assert slanted.get_xticklabels()[0].get_rotation() == 40


def test_rows_keep_their_order_from_the_top() -> None:
    axes = figures.rows({"past": 0.5, "kind": -0.1}, "x").axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.5, -0.1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["past", "kind"]
    assert axes.yaxis_inverted()


def test_dots_show_every_value_of_a_series_in_its_colour() -> None:
    rows = {"cut": {"small": [0.1, 0.2], "large": [0.3]}, "control": {"small": [1.0]}}
    figure = figures.dots({"share": rows, "again": {"cut": {"large": [0.5]}}})
    share, again = figure.axes
    drawn = [(list(x.get_xdata()), x.get_color()) for x in share.get_lines()]
    blue, orange = figures.COLOURS[:2]
    assert drawn == [([0.1, 0.2], blue), ([0.3], orange), ([1.0], blue)]
    assert again.get_lines()[0].get_color() == orange
    assert [label.get_text() for label in share.get_yticklabels()] == ["cut", "control"]
    assert share.yaxis_inverted()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["small", "large"]
