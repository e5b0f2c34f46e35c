"""Isolation: rows of attention by hand, what cannot change, controls."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from random_prompts import prompts_strategy, random_prompts, two_sets

from iclutils.chapters.label_anchors.answers import answers
from iclutils.chapters.label_anchors.isolation import (
    cut_edges,
    hide,
    isolate,
    isolation,
    random_by_set,
    random_positions,
    read_edges,
    wrong_positions,
)
from iclutils.interp.kv_cache import demonstrations
from iclutils.tasks.prompts import Role


def test_what_is_cut_is_all_that_label_words_see_of_earlier_tokens():
    prompts = random_prompts(seed=2, count=4, longest=3)
    for edges, places in zip(cut_edges(prompts), prompts.label_pos.tolist(), strict=True):
        expected = {(p, earlier) for p in places for earlier in range(p)}
        assert {*map(tuple, edges.nonzero().tolist())} == expected


def test_the_last_layer_is_blind(gpt2):
    """Nothing reads the rows of label words that a cut in the last layer changes."""
    prompts = random_prompts(count=5)
    clean = answers(gpt2, prompts).class_logits
    first, last = (isolate(gpt2, prompts, [la]).class_logits for la in (0, gpt2.cfg.n_layers - 1))
    torch.testing.assert_close(last, clean, atol=1e-5, rtol=1e-5)
    assert (first - clean).abs().max() > 0.1


def test_only_the_last_token_loses_sight_of_the_label_words():
    prompts = random_prompts(seed=2, count=4, longest=3)
    places = zip(prompts.target.tolist(), prompts.label_pos.tolist(), strict=True)
    for edges, (last, labels) in zip(read_edges(prompts), places, strict=True):
        assert {*map(tuple, edges.nonzero().tolist())} == {(last, p) for p in labels}


def test_what_is_hidden_has_no_attention_and_the_rest_of_the_row_takes_it(gpt2):
    """A softmax without some scores is the rest of the row, divided by its sum."""
    prompts = random_prompts(count=1)
    (last,), (labels,) = prompts.target.tolist(), prompts.label_pos.tolist()
    hook = "blocks.0.attn.hook_pattern"

    def renormalised(pattern, hook):  # (batch, head, query, key)
        row = pattern[:, :, last].clone()
        row[..., labels] = 0
        pattern[:, :, last] = row / row.sum(-1, keepdim=True)
        return pattern

    logits = gpt2.run_with_hooks(prompts.tokens, fwd_hooks=[(hook, renormalised)])[0, last]
    found = hide(gpt2, prompts, [0]).class_logits[0]
    torch.testing.assert_close(found, logits[prompts.label_words[0]], atol=1e-4, rtol=1e-4)
    assert (found - answers(gpt2, prompts).class_logits[0]).abs().max() > 1e-2


PLACES = {  # of two sets of demonstrations: alike within a set or not, and in the query
    "label words": lambda p: p.label_pos,
    "one cue": lambda p: p.cue_pos[:, :1],
    "random by set": lambda p: random_by_set(p, seeded(3)),
    "random": lambda p: random_positions(p, seeded(3)),
    "in the query": lambda p: p.target[:, None] - torch.arange(3),
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_isolated_is_one_pass_over_every_whole_prompt(model, places):
    prompts, layers = two_sets(), range(model.cfg.n_layers - 1)
    at = places(prompts)
    whole = answers(model, prompts, isolation(model, replace(prompts, label_pos=at), layers))
    for size in (None, 2):
        got = isolate(model, prompts, layers, at, batch_size=size)
        torch.testing.assert_close(got.class_logits, whole.class_logits, atol=2e-4, rtol=1e-4)
        assert torch.equal(got.gold, prompts.gold)


@settings(max_examples=30)
@given(prompts=prompts_strategy(), seed=st.integers(0, 100))
def test_the_control_draws_no_label_and_no_target(prompts, seed):
    drawn, by_set = (draw(prompts, seeded(seed)) for draw in (random_positions, random_by_set))
    assert torch.equal(drawn, random_positions(prompts, seeded(seed)))
    width = prompts.label_pos.shape[1]
    for row in range(len(prompts)):
        labels, shown = {*prompts.label_pos[row].tolist()}, int(demonstrations(prompts)[row].sum())
        for places, end in ((drawn, int(prompts.target[row]) - 1), (by_set, shown)):
            assert len({*places[row].tolist()} - labels) == width
            assert max(places[row]) < end


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
