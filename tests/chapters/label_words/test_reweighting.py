"""Tests of re-weighting, against hooks on the attention pattern of the whole forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from random_prompts import prompts_strategy, random_prompts
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from iclutils.chapters.label_words import reweighting
from iclutils.chapters.label_words.answers import answers
from iclutils.errors import IclError
from iclutils.interp.readout import target_logits
from iclutils.models import TransformerBridge, load
from iclutils.tasks.prompts import Prompts, Role, class_logits


def by_hooks(
    model: TransformerBridge, prompts: Prompts, beta: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Independent truth: the attention patterns edited entry by entry in a full forward pass."""

    def edit(layer: int):
        def multiply(pattern: torch.Tensor, hook: object) -> torch.Tensor:
            pattern = pattern.clone()
            for row, q in enumerate(prompts.target.tolist()):
                for demo, p in enumerate(positions[row].tolist()):
                    c = int(prompts.demo_class[row, demo])
                    pattern[row, :, q, p] *= beta[layer, :, c].exp()
            return pattern

        return f"blocks.{layer}.attn.hook_pattern", multiply

    hooks = [edit(layer) for layer in range(model.cfg.n_layers)]
    return target_logits(model, prompts, hooks).gather(1, prompts.label_words)


def random_beta(model: TransformerBridge, prompts: Prompts) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(model.cfg.n_layers, model.cfg.n_heads, prompts.classes)


@pytest.mark.parametrize("shots", [1, 2])
def test_one_step_equals_hooks_on_the_whole(model: TransformerBridge, shots: int) -> None:
    prompts = random_prompts(5, count=4, shots=shots)
    beta = random_beta(model, prompts)
    got = reweighting.apply(model, prompts, beta, batch_size=3).class_logits
    expected = by_hooks(model, prompts, beta, prompts.label_pos)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    clean = answers(model, prompts).class_logits
    assert (got - clean).abs().max() > 0.1
    same = reweighting.apply(model, prompts, torch.zeros_like(beta)).class_logits
    torch.testing.assert_close(same, clean, atol=1e-5, rtol=1e-5)


@given(prompts=prompts_strategy())
@settings(max_examples=6, deadline=None)
def test_any_prompts(gpt2: TransformerBridge, prompts: Prompts) -> None:
    beta = random_beta(gpt2, prompts)
    positions = prompts.cue_pos
    got = reweighting.apply(gpt2, prompts, beta, positions).class_logits
    expected = by_hooks(gpt2, prompts, beta, positions)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_gradient_at_zero_is_attention_times_its_gradient(model: TransformerBridge) -> None:
    prompts = random_prompts(2, count=3)
    patterns = {}

    def watch(layer: int):
        def keep(pattern: torch.Tensor, hook: object) -> torch.Tensor:
            pattern = pattern.detach().requires_grad_() if layer == 0 else pattern
            pattern.retain_grad()
            patterns[layer] = pattern
            return pattern

        return f"blocks.{layer}.attn.hook_pattern", keep

    layers = range(model.cfg.n_layers)
    out = model.run_with_hooks(prompts.tokens, fwd_hooks=[watch(layer) for layer in layers])
    rows = torch.arange(len(prompts))
    cross_entropy(class_logits(prompts, out[rows, prompts.target]), prompts.gold).backward()

    beta = torch.zeros(len(layers), model.cfg.n_heads, prompts.classes)
    gradient = reweighting.gradient(model, prompts, beta)
    for layer in layers:
        saliency = patterns[layer] * patterns[layer].grad
        for c in range(prompts.classes):
            p = prompts.label_pos[prompts.demo_class == c]
            expected = saliency[rows, :, prompts.target, p].sum(0)
            torch.testing.assert_close(gradient[layer, :, c], expected, atol=1e-6, rtol=1e-4)


def test_the_papers_procedure_learns_and_leaves_the_model_alone(model: TransformerBridge) -> None:
    prompts = random_prompts(7, count=3, shared=True)
    before = target_logits(model, prompts)
    fitted = reweighting.fit(model, prompts, torch.Generator().manual_seed(0))
    assert fitted.losses.shape == (30,)
    by_epoch = fitted.losses.view(10, 3).mean(1)
    torch.testing.assert_close(fitted.epoch_losses, by_epoch)
    assert by_epoch[-1] < by_epoch[0]
    assert torch.equal(target_logits(model, prompts), before)
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    again = reweighting.fit(model, prompts, torch.Generator().manual_seed(0))
    assert torch.equal(again.beta, fitted.beta)


def test_first_step_is_adams(gpt2: TransformerBridge) -> None:
    prompts = random_prompts(7, count=4, shared=True)
    fitted = reweighting.fit(gpt2, prompts, epochs=1, batch=None, lr=0.01)
    gradient = reweighting.gradient(gpt2, prompts, torch.zeros_like(fitted.beta))
    clear = gradient.abs() > 1e-4  # Adam's first step is its rate, against the gradient's sign
    torch.testing.assert_close(fitted.beta[clear], -0.01 * gradient[clear].sign())
    logits = answers(gpt2, prompts).class_logits
    loss = cross_entropy(logits, prompts.gold).item()
    assert fitted.losses.tolist() == pytest.approx([loss], abs=1e-5)


def test_without_a_generator_rows_keep_their_order(gpt2: TransformerBridge) -> None:
    prompts = random_prompts(7, count=4, shared=True)
    fitted = reweighting.fit(gpt2, prompts, epochs=1)
    beta = torch.zeros_like(fitted.beta)
    adam = torch.optim.Adam([beta], lr=0.01)
    for row in range(4):  # one prompt a step, from the first to the last
        beta.grad = reweighting.gradient(gpt2, prompts[row], beta)
        adam.step()
    torch.testing.assert_close(fitted.beta, beta, atol=1e-5, rtol=1e-4)


def test_sets_are_fitted_as_if_alone(gpt2: TransformerBridge) -> None:
    whole = random_prompts(3, count=9)
    sets = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    settings = {"epochs": 4, "batch": None}
    together = reweighting.fit(gpt2, whole, sets=sets, **settings)
    for number in range(3):
        part = whole[(sets == number).nonzero()[:, 0]]
        alone = reweighting.fit(gpt2, part, **settings)
        torch.testing.assert_close(together.beta[number], alone.beta, atol=1e-4, rtol=1e-3)
    got = reweighting.apply(gpt2, whole, together.beta, sets=sets, batch_size=4).class_logits
    first = reweighting.apply(gpt2, whole[:3], together.beta[0]).class_logits
    torch.testing.assert_close(got[:3], first, atol=1e-5, rtol=1e-5)


def test_comparing_is_fitting_and_scoring_twice(gpt2: TransformerBridge) -> None:
    """Scored through hooks, with fits of its own and the words that were drawn."""
    prompts = random_prompts(2, count=60, shared=True)
    train, test = prompts[:24], prompts[24:]
    options = {"epochs": 15, "batch": None, "lr": 0.2}
    pairs, seed = [(train, test)], torch.Generator().manual_seed(5)
    (gain,) = reweighting.compare(gpt2, pairs, seed, **options)
    words = reweighting.random_text(train, torch.Generator().manual_seed(5))[:1]
    assert (test.roles.gather(1, words.expand(len(test), -1)) == Role.TEXT).all()

    def share(logits: torch.Tensor) -> float:
        return (logits.argmax(-1) == test.gold).float().mean().item()

    before = share(answers(gpt2, test).class_logits)
    assert gain.before == pytest.approx(before)
    for at, found in ((None, gain.anchors), (words, gain.control)):
        beta = reweighting.fit(gpt2, train, positions=at, **options).beta
        where = test.label_pos if at is None else at.expand(len(test), -1)
        assert found == pytest.approx(share(by_hooks(gpt2, test, beta, where)) - before)
    assert len({0.0, gain.anchors, gain.control}) == 3, "nothing to tell apart"


def test_sets_compared_together_are_as_if_compared_alone(gpt2: TransformerBridge) -> None:
    pairs = []
    for seed in (3, 4):
        both = random_prompts(seed, count=20, shared=True)
        pairs.append((both[slice(0, 8)], both[slice(8, None)]))
    options = {"epochs": 10, "batch": None, "lr": 0.3}
    generator = torch.Generator()
    whole = reweighting.compare(gpt2, pairs, generator.manual_seed(6), **options)
    alone = [
        reweighting.compare(gpt2, [pair], generator.manual_seed(6), **options)[0] for pair in pairs
    ]
    assert [g.before for g in whole] == [g.before for g in alone]
    assert [g.anchors for g in whole] == pytest.approx([g.anchors for g in alone])
    assert len({g.before for g in whole} | {g.anchors for g in whole}) > 1, "nothing to tell apart"


def test_comparing_needs_the_same_demonstrations(gpt2: TransformerBridge) -> None:
    first, second = (random_prompts(seed, count=3, shared=True) for seed in (1, 2))
    with pytest.raises(IclError, match="same demonstrations"):
        reweighting.compare(gpt2, [(first, second)], torch.Generator())


def test_random_text_is_text() -> None:
    generator = torch.Generator().manual_seed(0)
    for shared in (True, False):
        prompts = random_prompts(3, count=6, shared=shared)
        drawn = reweighting.random_text(prompts, generator)
        assert drawn.shape == prompts.label_pos.shape
        assert bool((prompts.roles.gather(1, drawn) == Role.TEXT).all())
        assert all(len(set(row)) == len(row) for row in drawn.tolist())
        assert bool((drawn == drawn[:1]).all()) == shared


def test_bad_input(gpt2: TransformerBridge, tmp_path: Path) -> None:
    prompts = random_prompts(0, count=3)
    beta = random_beta(gpt2, prompts)
    with pytest.raises(IclError, match="before the target"):
        reweighting.apply(gpt2, prompts, beta, prompts.target[:, None].expand(-1, 3))
    with pytest.raises(IclError, match="beta must have shape"):
        reweighting.apply(gpt2, prompts, beta[:, :, :2])
    with pytest.raises(IclError, match="at least one epoch"):
        reweighting.fit(gpt2, prompts, epochs=0)
    with pytest.raises(IclError, match="from 0 without gaps"):
        reweighting.fit(gpt2, prompts, sets=torch.tensor([0, 2, 2]), batch=None)
    with pytest.raises(IclError, match="vocabulary"):
        reweighting.apply(gpt2, replace(prompts, label_words=prompts.label_words + 60), beta)
    short = replace(prompts, roles=prompts.roles.masked_fill(prompts.roles == Role.TEXT, 1))
    with pytest.raises(IclError, match="fewer text tokens"):
        reweighting.random_text(short, torch.Generator())
    grouped = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
        bos_token_id=59,
        eos_token_id=59,
    )
    LlamaForCausalLM(grouped).save_pretrained(tmp_path)
    with pytest.raises(IclError, match="grouped"):
        reweighting.prepare(load(tmp_path), prompts)
