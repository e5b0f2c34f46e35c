"""Removals against plain hooks of the Hugging Face network."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded

from iclutils.errors import IclError
from iclutils.interp import removal
from iclutils.interp.clean_corrupt import CleanCorrupt

HEADS = [(0, 1), (1, 0), (1, 3)]
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)


def task(seed=0, rows=4):
    x, other = torch.randint(60, (2, rows, 9), generator=seeded(seed))
    answer, at = torch.arange(rows)[:, None], torch.full((rows, 1), 8)
    return CleanCorrupt(x, other, at, answer, choices=torch.cat([answer, answer + 20], 1))


def by_hand(case, here, new, heads):
    """Outcome of the answer when ``new(head)`` takes the place of what each head hands on; the
    heads are of different layers."""
    edits = {}
    for head in heads:
        edits |= case.alone.with_z(head, new(head).expand(*here.clean.shape, 8))
    logits = case.alone(here.clean, edits=edits)[:, -1]
    pair = logits.gather(1, here.choices)
    right = logits.argmax(-1) == here.answer[:, 0]
    return logits.exp().gather(1, here.answer)[:, 0], pair[:, 0] - pair[:, 1], right.float()


@pytest.mark.parametrize("way", ["zero", "mean", "other"])
def test_what_is_left_without_heads_is_what_plain_hooks_leave(case, way):
    here, model = task(), case.model
    own, other = (partial(case.alone.z, tokens) for tokens in (here.clean, here.corrupt))
    means = [removal.head_means(model, tokens) for tokens in (here.clean, here.corrupt)]
    ours, new = {
        "zero": (removal.zeros(model), lambda head: torch.zeros(())),
        "mean": (
            removal.mean_over(means, "both sides"),
            lambda head: (own(head).mean((0, 1)) + other(head).mean((0, 1))) / 2,
        ),
        "other": (removal.outputs_on(model, here.corrupt, "the corrupt side"), other),
    }[way]
    sets = [HEADS[:2], HEADS[2:], []]
    found = removal.without(model, here, sets, ours)
    for row, heads in enumerate(sets):
        for one, expected in zip(found, by_hand(case, here, new, heads), strict=True):
            close(one[row], expected)


def test_each_row_can_lose_its_own_heads(case):
    here, model = task(), case.model
    rows = removal.controls_by_row(HEADS, model.cfg.n_heads, len(here), seeded(), draws=3)
    assert rows[0] == rows[3]
    assert [sorted(la for la, _ in heads) for heads in rows] == [[0, 1, 1]] * 4
    assert not any({*heads} & {*HEADS} for heads in rows)
    found = removal.without(model, here, [rows], removal.zeros(model))
    for row, heads in enumerate(rows):
        alone = removal.without(model, here[row : row + 1], [heads], removal.zeros(model))
        close(found.margin[0, row], alone.margin[0, 0])
    with pytest.raises(IclError, match="for 2 rows"):
        removal.without(model, here, [rows[:2]], removal.zeros(model))


def test_sets_that_run_together_leave_what_each_leaves_alone(case):
    rows, model = torch.tensor([0, 1, 1, 3]), case.model
    here = replace(task()[rows], at=torch.tensor([[8], [8], [5], [8]]))  # one prompt, two places
    mean = removal.mean_over([removal.head_means(model, here.corrupt)], "the other side")
    ways = [mean, removal.zeros(model), mean, mean]
    sets = [HEADS[:2], HEADS[:2], [*[HEADS[:1]] * 2, *[HEADS[1:]] * 2], HEADS[1:]]
    for new in (ways, [*ways[:3], removal.outputs_on(model, here.corrupt, "it")]):
        found = removal.without(model, here, sets, new)
        for i, heads in enumerate(sets):
            alone = [
                removal.without(model, here[k : k + 1], [heads[k] if i == 2 else heads], one)
                for k, one in enumerate(_by_row(new[i]))
            ]
            close(found.margin[i], torch.cat([x.margin[0] for x in alone]))


def _by_row(new):
    """The replacement of each of four rows."""
    for row in range(4):
        values = {k: v[row : row + 1] if v.ndim == 4 else v for k, v in new.by_layer.items()}
        yield removal.Replacement(new.words, values)


@settings(max_examples=8)
@given(seed=st.integers(0, 99), head=st.integers(0, 3), layer=st.integers(0, 1))
def test_a_mean_over_one_token_is_the_output_there_and_own_outputs_change_nothing(
    case, seed, head, layer
):
    model, here = case.model, task(seed, rows=1)
    one = here.corrupt[:, :1]  # a prompt of one position
    mean = removal.mean_over([removal.head_means(model, one)], "one position")
    ways = mean, removal.outputs_on(model, one, ""), removal.outputs_on(model, here.clean, "")
    heads = [[(layer, head)], []]
    by_mean, by_output, by_own = (removal.without(model, here, heads, way) for way in ways)
    close(by_mean.margin, by_output.margin)
    close(by_own.margin[0], by_own.margin[1])
