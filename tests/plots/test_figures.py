"""Figures draw what they are given, in the book's style."""

import matplotlib as mpl
import pytest
import torch

from iclutils.plots import figures

mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("closed")


def test_tables_frame_the_smallest_entry_of_every_column():
    values = torch.tensor([[1e-5, 2.0, 3e-3], [4e-4, 1e-1, 5e-3]])
    (axes,) = figures.tables({"ours": values}, ["a", "b"], ["x", "y", "z"]).axes
    assert [patch.get_xy() for patch in axes.patches] == [(-0.5, -0.5), (0.5, 0.5), (1.5, -0.5)]
    assert [text.get_text() for text in axes.texts] == [
        *("1.0e-5", "4.0e-4", "2.0e0", "1.0e-1", "3.0e-3", "5.0e-3")
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
