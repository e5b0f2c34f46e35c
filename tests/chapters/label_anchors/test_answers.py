"""Answers: demonstrations read once, heads removed, a preference taken out, loyalty by hand."""

import pytest
import torch
from random_prompts import random_prompts, two_sets

from iclutils.chapters.label_anchors.answers import (
    Answers,
    answers,
    answers_by_set,
    answers_by_set_without,
    centre,
    word_loyalty,
)
from iclutils.interp.hooks import ablate_heads, activations, run_with_hooks
from iclutils.models import get_act_name

HEADS = [(0, 1), (1, 2)]


@pytest.mark.parametrize("size", [None, 2, 1])  # two: a pass has queries of both sets
def test_demonstrations_read_once_answer_as_whole_prompts(model, size):
    prompts = two_sets()
    hooks = ablate_heads(model, prompts.tokens, HEADS, "zero", prompts.tokens)
    for ways in ([], hooks):
        same = [lambda _, ways=ways: ways] * 2
        got = answers_by_set(model, prompts, *same, batch_size=size)
        whole = answers(model, prompts, ways)
        torch.testing.assert_close(got.class_logits, whole.class_logits, atol=2e-4, rtol=1e-4)
        assert torch.equal(got.gold, prompts.gold)


def test_heads_are_removed_from_demonstrations_and_queries(model):
    """Against whole prompts, in which the heads write the same mean of other prompts."""
    prompts, others = random_prompts(3, count=4, shared=True), random_prompts(4, count=2)
    name = get_act_name("z", 1)
    mean = activations(model, others.tokens, [name])[name][:, :, 2].mean((0, 1))
    hooks = ablate_heads(model, others.tokens, HEADS, "mean", others.tokens)
    written = run_with_hooks(model, prompts.tokens, hooks, [name])[1][name][:, :, 2]
    torch.testing.assert_close(written, mean.expand_as(written))
    (got,), whole = (
        answers_by_set_without(model, prompts, [HEADS], others),
        answers(model, prompts, hooks),
    )
    torch.testing.assert_close(got.class_logits, whole.class_logits, atol=2e-4, rtol=1e-4)


def test_a_preference_is_taken_out_within_each_set():
    prompts = two_sets()
    told = Answers(torch.randn(7, 3), torch.zeros(7, 1).long(), prompts.gold)
    first = [0, 2, 5]
    mean = told.class_logits[first].sum(0) / 3
    found = centre(told, prompts).class_logits
    torch.testing.assert_close(found[first], told.class_logits[first] - mean)
    torch.testing.assert_close(found[[1, 3, 4, 6]].sum(0), torch.zeros(3), atol=1e-5, rtol=0)


def test_word_loyalty_by_hand():
    one, other = (torch.tensor([row]) for row in ([1, 2, 3, 4, 5], [5, 1, 2, 8, 9]))
    a, b = (Answers(torch.zeros(1, 3), words, torch.tensor([2])) for words in (one, other))
    assert word_loyalty(a, b).item() == pytest.approx(3 / 7)
    assert word_loyalty(a, b, 2).item() == pytest.approx(1 / 3)
