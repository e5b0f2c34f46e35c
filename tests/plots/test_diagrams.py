"""Diagrams draw what they are given; steps need no script."""

import re
from html.parser import HTMLParser

import matplotlib as mpl
import pytest
import torch

from iclutils.plots import diagrams

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
