"""Dual models of real heads: against transformers alone, and edits by hand there."""

from functools import partial

import pytest
import torch
from random_prompts import random_prompts
from tiny import VOCAB, tokens
from torch.nn.functional import scaled_dot_product_attention

from iclutils.chapters.contrastive_kernel import ablation
from iclutils.chapters.contrastive_kernel.ablation import PARTS, change_heads
from iclutils.chapters.contrastive_kernel.dual import contrast, dual_form
from iclutils.chapters.contrastive_kernel.heads import (
    direct_logit_attribution,
    dual_heads,
    examples,
    explicit_head_step,
    share_rising,
)
from iclutils.interp.at_query import read, read_heads
from tools.architectures import Case

X, SINGLE = tokens(3, 12), 2e-5  # the model computes in float32
MASK = torch.rand(3, 12, generator=torch.Generator().manual_seed(0)) < 0.6  # demonstrations
MASK[:, 1], MASK[:, -2:] = True, False


@pytest.fixture(scope="module", params=["GPT-2", "Llama, grouped"])
def case(request, tmp_path_factory):
    return Case.of(request.param, tmp_path_factory.mktemp("case"))


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


CHANGES = {
    "no update": ablation.no_update,
    "no start": ablation.no_start,
    "shorter start": partial(ablation.regularised, alpha=0.7),
    "negative samples": partial(ablation.negative_samples, beta=0.7),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_z_replaced_by_hand(case, name):
    """One head's z from its keys and values, put into the network alone."""
    query, place = read(case.model, X), (1, 2)
    (parts,) = read_heads(query, place[:1])
    q, key, value = (part[:, place[1]] for part in parts[:3])
    start, update = (part[:, 0] for part in dual_form(q[:, None], key, value, MASK))
    last = {"no update": start, "no start": update, "shorter start": 0.3 * start + update}
    changed = scaled_dot_product_attention(q[:, None], key, contrast(value, MASK, 0.7))
    last["negative samples"] = changed[:, 0]
    z = case.alone.z(X, place)
    z = torch.cat([z[:, :-1], last[name].to(z)[:, None]], 1)
    expected = case.alone(X, edits=case.alone.with_z(place, z))[:, -1]
    hooks = change_heads(query, MASK, CHANGES[name], [place])
    close(query.reread(hooks).log_softmax(-1), expected, 1e-3)
    assert (case.alone(X)[:, -1] - expected).abs().max() > 1e-3


def test_what_a_change_removes(case):
    """The part itself, or a share of it."""
    query = read(case.model, X)
    start, update, _ = dual_heads(query, MASK)
    tenth = partial(ablation.regularised, alpha=0.1)
    for change, part in ((PARTS["update"], update), (PARTS["start"], start), (tenth, 0.1 * start)):
        close(ablation.removed_by(query, MASK, change), part, 1e-10)


def test_answers_that_stay_right():
    """Two of three right answers stay; with three choices a guess, one third, is put to 0."""
    whole, changed = (
        ablation.Predictions(torch.zeros(4), torch.tensor(right).bool())
        for right in ([1, 1, 1, 0], [1, 0, 1, 1])
    )
    assert float(ablation.still_right(changed, whole, None).mean()) == pytest.approx(2 / 3)
    three = torch.zeros(4, 3, dtype=torch.long)
    assert float(ablation.still_right(changed, whole, three).mean()) == pytest.approx(1 / 2)
    assert ablation.is_able(whole, None)
    assert not ablation.is_able(whole, three)


def test_the_inner_products_that_rise_with_a_step(gpt2):
    """v_i·ΔW φ(k_i) by loops over heads and demonstrations."""
    mask, rises = MASK[:2], torch.zeros(2)
    query = read(gpt2, X[:2])
    for layer in read_heads(query):
        for row in range(2):
            shown = mask[row].nonzero()[:, 0].tolist()
            for _, key, value, _ in zip(*(part[row] for part in layer), strict=True):
                for i in shown:
                    near = [(key[i] @ key[j] / len(key[i]) ** 0.5).exp() for j in shown]
                    total = sum(w * value[i] @ value[j] for w, j in zip(near, shown, strict=True))
                    rises[row] += float(total > 0) / len(shown)
    close(share_rising(query, mask), rises / (gpt2.cfg.n_layers * gpt2.cfg.n_heads))


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
