"""Re-weighting, against hooks on the attention pattern of the whole forward pass."""

from dataclasses import replace

import pytest
import torch
from random_layers import seeded
from random_prompts import random_prompts, two_sets

from iclutils.chapters.label_anchors.answers import answers
from iclutils.chapters.label_anchors.reweighting import compare, fit, prepare
from iclutils.chapters.label_anchors.saliency import saliency
from iclutils.interp.readout import target_logits


def by_hooks(model, prompts, beta):
    """Independent truth: the attention patterns edited entry by entry in a full forward pass."""

    def edit(layer):
        def multiply(pattern, hook):
            pattern = pattern.clone()
            for row, q in enumerate(prompts.target.tolist()):
                for demo, p in enumerate(prompts.label_pos[row].tolist()):
                    c = int(prompts.demo_class[row, demo])
                    pattern[row, :, q, p] *= beta[layer, :, c].exp()
            return pattern

        return f"blocks.{layer}.attn.hook_pattern", multiply

    hooks = [edit(layer) for layer in range(model.cfg.n_layers)]
    return target_logits(model, prompts, hooks).gather(1, prompts.label_words)


@pytest.mark.parametrize("shots", [1, 2])
def test_one_step_equals_hooks_on_the_whole(model, shots):
    own = random_prompts(5, count=4, shots=shots)
    mixed = two_sets(shots=shots)  # whose demonstrations are read once
    for prompts in (own, replace(own, label_pos=own.cue_pos), mixed):
        shape = model.cfg.n_layers, model.cfg.n_heads, prompts.classes
        beta, step = torch.randn(shape, generator=seeded(1)), prepare(model, prompts)
        got, clean = step.answers(beta).class_logits, answers(model, prompts).class_logits
        torch.testing.assert_close(got, by_hooks(model, prompts, beta), atol=5e-5, rtol=1e-4)
        assert (got - clean).abs().max() > 0.1
        same = step.answers(torch.zeros(shape)).class_logits
        torch.testing.assert_close(same, clean, atol=2e-5, rtol=1e-4)


def test_gradient_at_zero_is_the_saliency_of_the_edge(model):
    """Summed over heads and without sign: of the edge from the label word to the target."""
    prompts, rows = random_prompts(2, count=3), torch.arange(3)
    edges = saliency(model, prompts)[rows, :, prompts.target]  # (batch, layer, src)
    zero = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, prompts.classes, requires_grad=True)
    for row in range(3):
        with torch.enable_grad():
            loss = prepare(model, prompts[row]).losses(zero).sum()
        (slope,) = torch.autograd.grad(loss, zero)
        for c in range(prompts.classes):
            p = int(prompts.label_pos[row, prompts.demo_class[row] == c])
            found = slope[..., c].sum(1).abs()
            torch.testing.assert_close(found, edges[row, :, p], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("batch", "seed"), [(None, 3), (1, None)])
def test_a_fit_is_steps_of_adam(gpt2, batch, seed):
    prompts, draw = random_prompts(7, count=4, shared=True), seeded(seed) if seed else None
    (found,) = fit(gpt2, [prompts], draw, epochs=2, batch=batch)
    assert all(p.grad is None and not p.requires_grad for p in gpt2.parameters())
    beta, draw = torch.zeros_like(found, requires_grad=True), seeded(seed or 0)
    adam = torch.optim.Adam([beta], lr=0.01)
    for _ in range(2):
        order = torch.randperm(4, generator=draw) if seed else torch.arange(4)
        for part in [prompts] if batch is None else [prompts[int(n)] for n in order]:
            adam.zero_grad()
            prepare(gpt2, part).losses(beta).mean().backward()
            adam.step()
    torch.testing.assert_close(found, beta.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("batch_size", [None, 5])
def test_comparing_is_fitting_and_answering_set_by_set(gpt2, batch_size):
    asked = [random_prompts(s, n, shots=2, shared=True) for s, n in ((3, 24), (4, 26))]
    pairs = [(some[:8], some[8:]) for some in asked]
    options = {"epochs": 3, "batch": None, "lr": 0.5}
    found = compare(gpt2, pairs, seeded(2), **options, batch_size=batch_size)
    draw, moved = seeded(2), 0.0
    for (train, test), (before, after) in zip(pairs, found, strict=True):
        (beta,) = fit(gpt2, [train], draw, **options)
        clean, expected = answers(gpt2, test).class_logits, by_hooks(gpt2, test, beta)
        torch.testing.assert_close(before.class_logits, clean, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(after.class_logits, expected, atol=1e-3, rtol=1e-3)
        assert torch.equal(after.gold, test.gold)
        moved = max(moved, (expected - clean).abs().max().item())
    assert moved > 0.1, "or nothing was compared"
