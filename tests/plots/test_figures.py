"""Figures and diagrams: ink can be read on white, maps share one colour bar, a sum adds up."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from iclutils.plots import diagrams, figures

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


def test_no_colour_is_nearly_white_on_a_dark_page():
    """There the style sheet inverts figures, turns their hues back and makes them brighter."""
    turn = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
    for colour in (*figures.COLOURS, "#332288"):
        light = np.clip(1.1 * np.clip(turn @ (1 - np.array(to_rgb(colour))), 0, 1), 0, 1)
        assert (np.ptp(light) > 0.3) == (colour != "#332288"), colour


def test_maps_of_heads_have_one_colour_bar_from_0_to_1():
    figure = figures.head_maps({f"score {i}": torch.rand(2, 3) for i in range(5)})
    (bar,) = (ax for ax in figure.axes if ax.axison and not ax.get_title())
    assert bar.get_ylim() == (0, 1)


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


def test_pairs_of_dots_stand_in_the_order_of_loss_and_some_below_a_line():
    rows = {"a": [0.9, 0.8], "b": [0.7, 0.1, 0.95], "c": [0.6, 0.0]}
    colours = {"with": figures.BLUE, "without heads": figures.ORANGE, "whole": "black"}
    figure = figures.dot_pairs(rows, colours, "finding", "share", last=["c"])
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["b", "a", "c"]
    drawn = [list(np.asarray(line.get_xdata())) for line in axis.lines[:3]]
    assert drawn == [rows["b"], rows["a"], rows["c"]]
    assert axis.lines[3].get_ydata()[0] == 1.5
    shown = {text.get_text() for text in axis.texts}
    assert shown == {"with", "without\nheads", "whole"}
    kept = figures.dot_pairs(rows, colours, "finding", "share", as_given=True)
    assert [text.get_text() for text in kept.axes[0].get_yticklabels()] == ["a", "b", "c"]
    low = figures.dot_pairs({"a": (0.9, 0.5, 0.3)}, colours, "finding", "share")
    assert "whole" in {text.get_text() for text in low.axes[0].texts}


def test_a_table_is_markdown_with_real_minus_signs(monkeypatch):
    shown = []
    monkeypatch.setattr(figures, "display", shown.append)
    figures.show_table(["layers 16-20", "lead"], ["`-ing`", -1.5])
    rows = "| layers 16-20 | lead |\n|---|---|\n| `-ing` | \N{MINUS SIGN}1.5 |"
    assert [table.data for table in shown] == [rows]
