"""Pictures in parts for a narrow page, from figures whose panels are known."""

import io
from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image

from book._ext import panels
from iclutils.plots import diagrams, figures

SERIES = {f"row number {i}": {"one": [0.1], "two": [0.2]} for i in range(4)}
CURVES = {"one": ([0, 1, 2], [1, 5, 3]), "two": ([0, 1, 2], [2, 4, 4])}


def parts(figure):
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    plt.close(figure)
    with Image.open(drawn) as picture:
        return picture.size, panels.parts(picture)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_panel_stands_alone_below_the_words_of_the_title(count):
    shown = {f"panel {i}": CURVES for i in range(count)}
    figure = figures.headed(figures.curves(shown, "step", in_a_row=3), "What was found in 3 cases")
    (width, height), (title, *rest) = parts(figure)
    assert len(title) == 6
    assert [len(row) for row in rest] == [1] * count
    boxes = [box for row in [title, *rest] for box in row]
    assert all(0 <= x < r <= width and 0 <= y < b <= height for x, y, r, b, *_ in boxes)
    for (left,), (right,) in pairwise(rest):
        assert left.right < right.left


def test_names_of_rows_stand_before_every_panel_and_the_legend_is_in_entries():
    figure = figures.dots({"loss": SERIES, "accuracy": SERIES})
    figure.axes[1].set_yticklabels([])
    _, rows = parts(figure)
    assert [len(row) for row in rows] == [1, 2, 2]
    (first,), (names, second), legend = rows
    assert names.left == first.left < names.right < first.right < second.left
    assert max(box.bottom - box.top for box in legend) < panels.LINE


def test_a_scale_of_colours_stays_with_its_map():
    figure, (left, right) = figures.canvas(2)
    figure.colorbar(left.imshow([[0, 1], [1, 0]]), ax=left)
    right.plot([0, 1])
    right.set(ylabel="rate")
    _, rows = parts(figure)
    (one,), (other,) = rows
    assert one.right < other.left
    assert one.right - one.left > other.right - other.left - 60


def test_an_empty_picture_is_one_part():
    assert panels.parts(Image.new("RGB", (40, 30), "white")) == [[panels.Box(0, 0, 40, 30)]]


def test_a_caption_says_left_beside_and_above_where_panels_stack():
    said = panels.sided(
        "<figcaption>Left: a loss that is left; right, a rate. Weights (right).</figcaption>"
    )
    both = '<span class="beside">{}</span><span class="below">{}</span>'.format
    left, right, aside = (
        both(*each) for each in (("Left", "Above"), ("right", "below"), ("(right)", "(below)"))
    )
    assert said == (
        f"<figcaption>{left}: a loss that is left; {right}, a rate. Weights {aside}.</figcaption>"
    )


def test_wide_bars_are_folded_between_groups_and_the_scale_stands_before_each_part():
    pairs = [(i + 1.0, 0.1) for i in range(6)]
    figure = figures.bars({"a": pairs, "b": pairs}, [f"group {i}" for i in range(6)], "loss")
    _, (first, (scale, second), legend) = parts(figure)
    assert scale.left == first[0].left < scale.right < first[0].right == second.left
    assert max(first[0].right - scale.left, second.right - second.left) < panels.WIDE
    assert len(legend) == 2


def test_curves_are_not_folded_but_their_scale_stays_and_their_axis_is_named_in_words():
    wide, (axes,) = figures.canvas()
    axes.plot(torch.zeros(30))
    axes.set(xlabel="distance back, tokens", ylabel="mean attention")
    _, ((scale, rest), words) = parts(wide)
    assert scale.right == rest.left
    assert rest.right - rest.left > panels.WIDE
    assert len(words) == 3


@pytest.mark.parametrize("count", [3, 4])
def test_panels_of_a_grid_come_row_by_row(count):
    shown = {f"panel {i}": CURVES for i in range(count)}
    _, rows = parts(figures.curves(shown, "step"))
    first, second, *below = [box for (box,) in rows]
    assert len(rows) == count
    assert first.top == second.top
    assert first.right < second.left
    assert all(first.bottom <= box.top for box in below)
    assert below[0].left < second.left


def test_bars_with_names_that_lean_are_cut_between_the_names():
    names = [f"a name, number {i}" for i in range(8)]
    figure = figures.bars({"a": [(1.0, 0.1)] * 8, "b": [(2.0, 0.1)] * 8}, names, "loss")
    _, ((first,), (scale, second), _) = parts(figure)
    assert first.right == second.left
    assert scale.bottom < second.bottom
    assert 0 < first.bend == second.bend < second.bottom
    assert first.over == 0 < second.over


def test_names_of_rows_stay_where_a_map_scrolls():
    names = [f"task {i}" for i in range(12)]
    figure = figures.shares(torch.eye(12), names, names, "vector of", "asked")
    _, ((scale, rest), words) = parts(figure)
    assert scale.left < scale.right == rest.left
    assert rest.right - rest.left > panels.WIDE
    assert len(words) == 2


def test_sentences_below_a_diagram_are_in_words():
    before, after = torch.eye(4).roll(1, 0).tril(), torch.zeros(4, 4)
    after[3, 1] = 1.0
    tokens = ["fox", "ink", "oak", "fox"]
    _, ((_,), *lines) = parts(diagrams.induction_pair(tokens, before, after))
    assert min(map(len, lines)) >= 1
    assert max(box.bottom - box.top for line in lines for box in line) < panels.LINE
    assert sum(map(len, lines)) > 30


def test_a_legend_of_long_names_is_a_column_and_the_panel_stays_narrow():
    names = ["repaired, at nine tenths", "repaired, at full strength", "cost to the healthy model"]
    size, (_, *legend) = parts(figures.dots({"loss": {"sink": {name: [0.1] for name in names}}}))
    assert size[0] < panels.WIDE
    assert [len(line) for line in legend] == [1, 1, 1]
