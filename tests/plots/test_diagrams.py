"""Diagrams draw what they are given; steps need no script."""

import matplotlib as mpl
import pytest
import torch

from iclutils.plots import diagrams

mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("closed")


def said(figure):
    return " ".join(text.get_text().replace("\n", " ") for text in figure.findobj(mpl.text.Text))


def test_a_step_and_its_sum_agree():
    x, y = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([2.0, -1.0, 4.0])
    data, shares = diagrams.descent_step(x, y, 1.5, 0.1).axes
    widths = [bar.get_width() for bar in shares.patches]
    assert widths[-1] == pytest.approx(sum(widths[:-1]))
    weight = 0.1 * (1 * 2 + 2 * 1 + 0.5 * 4)
    assert widths[-1] == pytest.approx(weight * 1.5)
    assert f"w = {weight:.2f}" in said(data.figure)
