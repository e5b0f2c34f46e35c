"""Diagrams draw what they are given; their texts keep apart, and their colours show on both
grounds."""

import re
from html.parser import HTMLParser

import matplotlib as mpl
import pytest
import torch
from matplotlib.colors import to_rgb

from iclutils.plots import diagrams, figures

mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("closed")
WORDS = ["start", "fox", "ink", "oak", "bob", "fox"]


def pair():
    """A perfect previous-token head, and an induction head that finds the token at 2."""
    previous = torch.eye(6).roll(1, 0).tril()
    induction = torch.zeros(6, 6)
    induction[:, 0] = 0.25
    induction[5, 2] = 0.75
    return previous, induction


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


def test_steps_need_no_script_and_show_one_picture_at_a_time():
    steps = diagrams.stepped_pair(WORDS, *pair())
    bundle = steps._repr_mimebundle_()
    html = bundle["text/html"]
    assert repr(steps) == bundle["text/plain"] == "An induction pair, step by step: 3 steps"
    assert "image/png" in bundle
    assert not re.search(r"<script|https?:|onclick", html)
    tags: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))  # type: ignore[method-assign]
    parser.feed(html)
    inputs = [given for tag, given in tags if tag == "input"]
    assert [bool("checked" in given) for given in inputs] == [False, False, True]
    assert {given["for"] for tag, given in tags if tag == "label"} == {g["id"] for g in inputs}
    alts = [given["alt"] for tag, given in tags if tag == "img"]
    assert alts == list(steps.texts)
    assert html == diagrams.stepped_pair(WORDS, *pair()).html(), "the same every time"


def turned(colour):
    """A colour as a dark page shows it: ``invert(1) hue-rotate(180deg)`` of CSS filters."""
    inverse = torch.tensor([1 - part for part in to_rgb(colour)])
    light = torch.tensor([0.213, 0.715, 0.072]).expand(3, 3)
    return tuple((2 * light @ inverse - inverse).clamp(0, 1).tolist())


def luminance(rgb):
    parts = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


@pytest.mark.parametrize("colour", [figures.BLUE, figures.ORANGE, figures.GREEN, figures.GREY])
def test_colours_show_on_a_light_and_on_a_dark_page(colour):
    assert 1.05 / (luminance(to_rgb(colour)) + 0.05) > 3
    dark = luminance(to_rgb("#14181e"))  # the theme's ground
    assert (luminance(turned(colour)) + 0.05) / (dark + 0.05) > 3
