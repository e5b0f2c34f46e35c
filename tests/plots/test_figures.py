"""Figures draw what they are given, in the book's style."""

import matplotlib as mpl
import pytest
import torch

from iclutils.plots import figures

mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("closed")


def test_head_maps_share_one_scale_and_write_their_values():
    scores = torch.tensor([[0.25, 0.75], [0.5, 1.0]])
    figure = figures.head_maps({"a": scores, "b": 1 - scores})
    images = [ax.images[0] for ax in figure.axes[:2]]
    assert [i.get_clim() for i in images] == [(0, 1), (0, 1)]
    assert torch.equal(torch.tensor(images[0].get_array()), scores)
    assert [t.get_text() for t in figure.axes[0].texts] == ["0.25", "0.75", "0.50", "1.00"]


def test_curves_profiles_and_nulls_draw_their_arrays():
    panel = figures.curves({"t": {"a": ([0, 100], [1.0, 2.0])}}, "step", log_x=True)
    assert list(panel.axes[0].get_lines()[0].get_ydata()) == [1.0, 2.0]
    lines = figures.profile({"h": torch.tensor([0.1, 0.9])}, {"here": 1}).axes[0].get_lines()
    assert list(lines[1].get_xdata()) == [1, 1]
    null = figures.null_histogram({"other": [0.0, 0.0, 1.0]}, {"found": 0.5}, "x").axes[0]
    assert sum(p.get_height() for p in null.patches) == 3


def test_tables_frame_the_smallest_entry_of_every_column():
    values = torch.tensor([[1e-5, 2.0, 3e-3], [4e-4, 1e-1, 5e-3]])
    (axes,) = figures.tables({"ours": values}, ["a", "b"], ["x", "y", "z"]).axes
    assert [patch.get_xy() for patch in axes.patches] == [(-0.5, -0.5), (0.5, 0.5), (1.5, -0.5)]
    assert [text.get_text() for text in axes.texts] == [
        *("1.0e-5", "4.0e-4", "2.0e0", "1.0e-1", "3.0e-3", "5.0e-3")
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
