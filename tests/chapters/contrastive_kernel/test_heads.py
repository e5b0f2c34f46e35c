"""Dual models of real heads: against transformers alone, and edits by hand there."""

import pytest
import torch
from random_prompts import random_prompts
from tiny import VOCAB, tokens

from iclutils.chapters.contrastive_kernel.ablation import PARTS, change_heads, falls_without
from iclutils.chapters.contrastive_kernel.dual import dual_form
from iclutils.chapters.contrastive_kernel.heads import (
    direct_logit_attribution,
    dual_heads,
    examples,
    explicit_head_step,
)
from iclutils.interp.at_query import read, read_heads

X, SINGLE = tokens(3, 12), 2e-5  # the model computes in float32
MASK = torch.rand(3, 12, generator=torch.Generator().manual_seed(0)) < 0.6  # demonstrations
MASK[:, 1], MASK[:, -2:] = True, False


def close(found, expected, gap=SINGLE):
    torch.testing.assert_close(found.double(), expected.double(), atol=gap, rtol=gap)


def test_start_and_update_are_the_heads_output_and_a_step_of_autograd(case):
    """Fails if q and k are read before their rotation."""
    query = read(case.model, X)
    duals, every = dual_heads(query, MASK), dual_heads(query, MASK | True)
    assert not every.start.any()
    for layer, head in [(0, 1), (1, 3)]:
        z = case.alone.z(X, (layer, head))[:, -1]
        before, stepped = explicit_head_step(query, MASK, (layer, head))
        start, update = (part[:, layer, head] for part in (duals.start, duals.update))
        for found in (start + update, stepped, every.update[:, layer, head]):
            close(found, z)
        close(before, start, 1e-10)


@pytest.mark.parametrize("against", [None, "one", "each"])
def test_direct_contributions_sum_to_the_logit(case, against):
    logits, answer = case.alone.network(X).logits[:, -1], torch.tensor([4, 5, 6])
    each = torch.tensor([[1, 2], [3, 4], [5, 9]])
    others = {None: None, "one": torch.arange(VOCAB)[None], "each": each}[against]
    query = read(case.model, X)
    found = direct_logit_attribution(query, dual_heads(query, MASK), answer, others)
    expected = logits.gather(1, answer[:, None])[:, 0]
    if others is not None:
        expected = expected - logits.gather(1, others.expand(3, -1)).mean(1)
    updates = found.update.sum((1, 2))
    rest = found.start.sum((1, 2)) + found.mlp.sum(1) + found.embedding + found.constant
    close(updates + rest, expected, 1e-4)
    close(found.logit, expected, 1e-4)
    assert float(found.update_share) == pytest.approx(float(updates.mean() / expected.mean()), 1e-3)


@pytest.mark.parametrize("part", PARTS)
def test_a_change_is_z_replaced_by_hand(case, part):
    """One head's z from its keys and values, put into the network alone."""
    query, place = read(case.model, X), (1, 2)
    (parts,) = read_heads(query, place[:1])
    q, key, value = (part[:, place[1]] for part in parts[:3])
    start, update = (part[:, 0] for part in dual_form(q[:, None], key, value, MASK))
    z = case.alone.z(X, place)
    left = {"update": start, "start": update}[part].to(z)
    z = torch.cat([z[:, :-1], left[:, None]], 1)
    expected = case.alone(X, edits=case.alone.with_z(place, z))[:, -1]
    hooks = change_heads(query, MASK, PARTS[part], [place])
    close(query.reread(hooks).log_softmax(-1), expected, 1e-3)
    assert (case.alone(X)[:, -1] - expected).abs().max() > 1e-3


def test_falls_are_those_of_probabilities_with_z_edited_in_every_head(case):
    """All tokens left out: every head at the query then writes nothing."""
    query, answer = read(case.model, X), torch.tensor([4, 5, 6])
    zero = [(f"blocks.{n}.attn.hook_z", lambda z, hook: 0 * z) for n in range(len(query.keys))]
    p = torch.stack([query.logits, query.reread(zero)]).double().softmax(-1)
    p = p.gather(2, answer.expand(2, -1)[..., None])[..., 0]
    expected = [float((x[0] - x[1]).mean()) for x in (p.log(), (p / (1 - p)).log())]
    assert falls_without(query, MASK | True, answer).tolist() == pytest.approx(expected, abs=1e-4)


def test_tokens_know_their_example():
    """From the positions: an example ends with the token after its label word."""
    prompts = random_prompts(seed=1, count=4)
    found = examples(prompts)
    for row in range(len(prompts)):
        for n, place in enumerate(prompts.label_pos[row].tolist()):
            assert found[row, place] == n
        assert found[row, prompts.target[row]] == prompts.label_pos.shape[1]
    assert bool((found.diff(dim=1) >= 0).all())
    assert not found[:, 0].any()
