"""Isolation: rows of attention by hand, what cannot change, the random control; loyalty by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from random_prompts import prompts_strategy, random_prompts, two_sets

from iclutils.chapters.label_anchors.answers import (
    Answers,
    answers_by_set,
    centred,
    word_loyalty,
)
from iclutils.chapters.label_anchors.isolation import (
    isolated,
    isolated_by_set,
    isolation,
    random_positions,
    wrong_positions,
)
from iclutils.interp.hooks import ablate_heads, run_with_hooks
from iclutils.interp.readout import target_logits
from iclutils.models import get_act_name
from iclutils.tasks.prompts import Role


def test_only_the_rows_of_label_words_change(model):
    prompts = random_prompts(seed=2, count=4, longest=3)
    name, hooks = get_act_name("pattern", 0), isolation(model, prompts, [0])
    clean, cut = (run_with_hooks(model, prompts.tokens, h, [name])[1][name] for h in ([], hooks))
    for row, places in enumerate(prompts.label_pos.tolist()):
        for p in places:
            assert not cut[row, :, p, :p].any()
            torch.testing.assert_close(cut[row, :, p, p], torch.ones(model.cfg.n_heads))
        others = sorted(set(range(cut.shape[-1])) - {*places})
        assert torch.equal(cut[row][:, others], clean[row][:, others])


@settings(max_examples=6)
@given(prompts=prompts_strategy())
def test_padding_order_and_batch_size_do_not_matter(gpt2, prompts):
    drawn = prompts.label_pos - 1
    whole = isolated(gpt2, prompts, [0, 1], drawn).class_logits
    apart = isolated(gpt2, prompts, [0, 1], drawn, batch_size=1).class_logits
    torch.testing.assert_close(whole, apart, atol=1e-4, rtol=1e-4)
    order = torch.arange(len(prompts)).flip(0)
    again = isolated(gpt2, prompts[order], [0, 1], drawn[order])[order].class_logits
    torch.testing.assert_close(whole, again, atol=1e-4, rtol=1e-4)


@settings(max_examples=40)
@given(prompts=prompts_strategy(), seed=st.integers(0, 100))
def test_the_control_draws_no_label_and_no_target(prompts, seed):
    drawn, again = (random_positions(prompts, seeded(seed)) for _ in range(2))
    assert torch.equal(drawn, again)
    for row, places in enumerate(drawn.tolist()):
        assert len(set(places)) == prompts.label_pos.shape[1]
        assert not set(places) & set(prompts.label_pos[row].tolist())
        assert max(places) <= int(prompts.target[row]) - 2


@settings(max_examples=20)
@given(prompts=prompts_strategy(), seed=st.integers(0, 100))
def test_wrong_positions_are_of_the_same_demonstration(prompts, seed):
    found = wrong_positions(prompts, seeded(seed))
    starts = [[0, *row[:-1]] for row in prompts.label_pos.tolist()]
    for row, start in enumerate(starts):
        for demo, (begin, label) in enumerate(
            zip(start, prompts.label_pos[row].tolist(), strict=True)
        ):
            text = [p for p in range(begin, label) if int(prompts.roles[row, p]) == Role.TEXT]
            assert int(found["first word"][row, demo]) == text[0]
            assert int(found["random word"][row, demo]) in text
            assert int(found["cue"][row, demo]) == label - 1
            after = int(found["token after"][row, demo])
            assert int(prompts.roles[row, after]) != Role.LABEL
            assert {int(r) for r in prompts.roles[row, label:after]} == {Role.LABEL}


def test_demonstrations_read_once_answer_as_whole_prompts(model):
    """Isolated, clean and with heads removed, against one pass over every whole prompt."""
    prompts = two_sets()
    layers, cues = range(model.cfg.n_layers - 1), prompts.cue_pos
    hooks = ablate_heads(model, prompts.tokens, [(0, 1), (1, 0)], "zero", prompts.tokens)
    for got, hooked in (
        (answers_by_set(model, prompts), []),
        (isolated_by_set(model, prompts, layers), isolation(model, prompts, layers)),
        (isolated(model, prompts, layers, batch_size=2), isolation(model, prompts, layers)),
        (isolated(model, prompts, layers, cues), isolation(model, prompts, layers, cues)),
        (
            isolated(model, prompts, layers, cues[:, :1]),
            isolation(model, prompts, layers, cues[:, :1]),
        ),
        (answers_by_set(model, prompts, lambda _: hooks, lambda _: hooks), hooks),
    ):
        whole = Answers.of(prompts, target_logits(model, prompts, hooked))
        torch.testing.assert_close(got.class_logits, whole.class_logits, atol=2e-4, rtol=1e-4)
        assert torch.equal(got.gold, prompts.gold)


def test_shared_demonstrations_are_cut_where_each_prompt_says(model):
    """At positions that differ within a set, or that lie in a query: whole prompts again."""
    prompts, layers = two_sets(), range(model.cfg.n_layers)
    drawn = random_positions(prompts, seeded(3))
    assert (drawn[0] != drawn[2]).any(), "of one set"
    for places in (drawn, prompts.target[:, None] - torch.arange(3)):
        got = isolated(model, prompts, layers, places, batch_size=3)
        hooked = isolation(model, prompts, layers, places)
        whole = Answers.of(prompts, target_logits(model, prompts, hooked))
        torch.testing.assert_close(got.class_logits, whole.class_logits, atol=2e-4, rtol=1e-4)
        assert torch.equal(got.gold, prompts.gold)


def test_a_preference_is_taken_out_within_each_set():
    prompts = two_sets()
    given = Answers(torch.randn(7, 3), torch.zeros(7, 1).long(), prompts.gold)
    first = [0, 2, 5]
    mean = given.class_logits[first].sum(0) / 3
    found = centred(given, prompts).class_logits
    torch.testing.assert_close(found[first], given.class_logits[first] - mean)
    torch.testing.assert_close(found[[1, 3, 4, 6]].sum(0), torch.zeros(3), atol=1e-5, rtol=0)


def test_word_loyalty_and_margin_by_hand():
    one, other = (torch.tensor([row]) for row in ([1, 2, 3, 4, 5], [5, 1, 2, 8, 9]))
    logits, gold = torch.tensor([[1.0, 4.0, 2.5]]), torch.tensor([2])
    a, b = (Answers(logits, words, gold) for words in (one, other))
    assert word_loyalty(a, b).item() == pytest.approx(3 / 7)
    assert word_loyalty(a, b, 2).item() == pytest.approx(1 / 3)
    assert a.margin.item() == -1.5
