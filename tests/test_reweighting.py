"""Tests of re-weighting, against hooks on the attention pattern of the whole forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from random_prompts import prompts_strategy, random_prompts
from tiny import save_gpt2, save_neox
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from iclutils.chapters.label_words import reweighting
from iclutils.errors import IclError
from iclutils.interp.readout import target_logits
from iclutils.models import TransformerBridge, load
from iclutils.tasks.prompts import Prompts, Role, class_logits


@pytest.fixture(scope="module", params=["gpt2", "neox"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        save_gpt2(folder, n_positions=128)
    else:
        save_neox(folder)
    return load(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    folder = tmp_path_factory.mktemp("gpt2")
    save_gpt2(folder, n_positions=128)
    return load(folder)


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

    return target_logits(model, prompts, [edit(layer) for layer in range(model.cfg.n_layers)])


def random_beta(model: TransformerBridge, prompts: Prompts) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(model.cfg.n_layers, model.cfg.n_heads, prompts.classes)


def test_zero_is_the_identity(model) -> None:
    prompts = random_prompts(0, count=5)
    beta = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, prompts.classes)
    got = reweighting.apply(model, prompts, beta)
    torch.testing.assert_close(got, target_logits(model, prompts), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shots", [1, 2])
def test_one_step_equals_hooks_on_the_whole(model, shots: int) -> None:
    prompts = random_prompts(5, count=4, shots=shots)
    beta = random_beta(model, prompts)
    got = reweighting.apply(model, prompts, beta, batch_size=3)
    expected = by_hooks(model, prompts, beta, prompts.label_pos)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    assert (got - target_logits(model, prompts)).abs().max() > 0.1


@given(prompts=prompts_strategy())
@settings(max_examples=6, deadline=None)
def test_any_prompts(gpt2, prompts: Prompts) -> None:
    beta = random_beta(gpt2, prompts)
    positions = prompts.cue_pos
    got = reweighting.apply(gpt2, prompts, beta, positions)
    expected = by_hooks(gpt2, prompts, beta, positions)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_gradient_at_zero_is_attention_times_its_gradient(model) -> None:
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

    beta = torch.zeros(len(layers), model.cfg.n_heads, prompts.classes, requires_grad=True)
    step = reweighting.prepare(model, prompts)
    reweighting.losses_of(prompts, step.logits(beta[None])).mean().backward()
    for layer in layers:
        saliency = patterns[layer] * patterns[layer].grad
        for c in range(prompts.classes):
            p = prompts.label_pos[prompts.demo_class == c]
            expected = saliency[rows, :, prompts.target, p].sum(0)
            torch.testing.assert_close(beta.grad[layer, :, c], expected, atol=1e-6, rtol=1e-4)


def test_the_papers_procedure_learns_and_leaves_the_model_alone(model) -> None:
    prompts = random_prompts(7, count=3, shared=True)
    before = target_logits(model, prompts)
    fitted = reweighting.fit(model, prompts, torch.Generator().manual_seed(0))
    assert fitted.losses.shape == (10,)
    assert fitted.losses[-1] < fitted.losses[0]
    assert torch.equal(target_logits(model, prompts), before)
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    again = reweighting.fit(model, prompts, torch.Generator().manual_seed(0))
    assert torch.equal(again.beta, fitted.beta)


def test_first_step_is_adams(gpt2) -> None:
    prompts = random_prompts(7, count=4, shared=True)
    fitted = reweighting.fit(gpt2, prompts, torch.Generator(), epochs=1, batch=None, lr=0.01)
    step = reweighting.prepare(gpt2, prompts)
    beta = torch.zeros_like(fitted.beta)[None].requires_grad_()
    value = reweighting.losses_of(prompts, step.logits(beta)).mean()
    (gradient,) = torch.autograd.grad(value, beta)
    clear = gradient[0].abs() > 1e-4  # Adam's first step is its rate, against the gradient's sign
    torch.testing.assert_close(fitted.beta[clear], -0.01 * gradient[0][clear].sign())
    assert fitted.losses[0].item() == pytest.approx(value.item(), abs=1e-5)


def test_sets_are_fitted_as_if_alone(gpt2) -> None:
    whole = random_prompts(3, count=9)
    sets = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    settings = {"epochs": 4, "batch": None}
    together = reweighting.fit(gpt2, whole, torch.Generator(), sets=sets, **settings)
    for number in range(3):
        part = whole[(sets == number).nonzero()[:, 0]]
        alone = reweighting.fit(gpt2, part, torch.Generator(), **settings)
        torch.testing.assert_close(together.beta[number], alone.beta, atol=1e-4, rtol=1e-3)
    got = reweighting.apply(gpt2, whole, together.beta, sets=sets, batch_size=4)
    first = reweighting.apply(gpt2, whole[:3], together.beta[0])
    torch.testing.assert_close(got[:3], first, atol=1e-5, rtol=1e-5)


def test_comparing_is_fitting_and_scoring_twice(gpt2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scored through hooks, with the fits and the words that were really used."""
    prompts = random_prompts(2, count=60, shared=True)
    train, test = prompts[:24], prompts[24:]
    fits: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    honest = reweighting.fit

    def noted(model, rows, generator, positions, *settings, sets) -> reweighting.Fit:
        assert torch.equal(rows.tokens, train.tokens)
        assert settings == (15, None, 0.2)
        fitted = honest(model, rows, generator, positions, *settings, sets=sets)
        fits.append((positions if positions is None else positions[:1], fitted.beta[0]))
        return fitted

    monkeypatch.setattr(reweighting, "fit", noted)
    generator = torch.Generator().manual_seed(5)
    (gain,) = reweighting.compare(gpt2, [(train, test)], generator, epochs=15, batch=None, lr=0.2)
    (none, anchors), (words, control) = fits
    assert none is None
    assert words is not None
    width = int(test.label_pos.max()) + 1
    assert torch.equal(train.tokens[:, :width], test.tokens[:1, :width].expand(len(train), -1))
    assert (test.roles.gather(1, words.expand(len(test), -1)) == Role.TEXT).all()
    fresh = honest(gpt2, train, torch.Generator(), None, 15, None, 0.2)
    torch.testing.assert_close(anchors, fresh.beta, atol=1e-4, rtol=1e-3)

    def share(logits: torch.Tensor) -> float:
        chosen = logits.gather(1, test.label_words).argmax(-1).tolist()
        pairs = zip(chosen, test.gold.tolist(), strict=True)
        return sum(c == g for c, g in pairs) / len(test)

    with torch.no_grad():
        plain = gpt2(test.tokens)[torch.arange(len(test)), test.target]
    before = share(plain)
    assert gain.before == pytest.approx(before)
    with_anchors = share(by_hooks(gpt2, test, anchors, test.label_pos))
    assert gain.anchors == pytest.approx(with_anchors - before)
    with_words = share(by_hooks(gpt2, test, control, words.expand(len(test), -1)))
    assert gain.control == pytest.approx(with_words - before)
    assert len({0.0, gain.anchors, gain.control}) == 3, "nothing to tell apart"


def test_sets_compared_together_are_as_if_compared_alone(gpt2) -> None:
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


def test_comparing_needs_the_same_demonstrations(gpt2) -> None:
    first, second = (random_prompts(seed, count=3, shared=True) for seed in (1, 2))
    with pytest.raises(IclError, match="same demonstrations"):
        reweighting.compare(gpt2, [(first, second)], torch.Generator())


def test_random_positions_are_text() -> None:
    generator = torch.Generator().manual_seed(0)
    for shared in (True, False):
        prompts = random_prompts(3, count=6, shared=shared)
        drawn = reweighting.random_positions(prompts, generator)
        assert drawn.shape == prompts.label_pos.shape
        assert bool((prompts.roles.gather(1, drawn) == Role.TEXT).all())
        assert all(len(set(row)) == len(row) for row in drawn.tolist())
        assert bool((drawn == drawn[:1]).all()) == shared


def test_bad_input(gpt2, tmp_path: Path) -> None:
    prompts = random_prompts(0, count=3)
    beta = random_beta(gpt2, prompts)
    with pytest.raises(IclError, match="before the target"):
        reweighting.apply(gpt2, prompts, beta, prompts.target[:, None].expand(-1, 3))
    with pytest.raises(IclError, match="columns"):
        reweighting.apply(gpt2, prompts, beta, prompts.label_pos[:, :2])
    with pytest.raises(IclError, match="beta must have shape"):
        reweighting.apply(gpt2, prompts, beta[:, :, :2])
    with pytest.raises(IclError, match="at least one epoch"):
        reweighting.fit(gpt2, prompts, torch.Generator(), epochs=0)
    with pytest.raises(IclError, match="from 0 without gaps"):
        reweighting.fit(gpt2, prompts, torch.Generator(), sets=torch.tensor([0, 2, 2]), batch=None)
    with pytest.raises(IclError, match="vocabulary"):
        reweighting.apply(gpt2, replace(prompts, label_words=prompts.label_words + 60), beta)
    short = replace(prompts, roles=prompts.roles.masked_fill(prompts.roles == Role.TEXT, 1))
    with pytest.raises(IclError, match="fewer text tokens"):
        reweighting.random_positions(short, torch.Generator())
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
        reweighting.apply(load(tmp_path), prompts, beta[:2])
