"""Pruning and tuning: against zero ablation, a counter of operations, and bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_gpt2, save_neox, tiny_gpt2, tokens
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from iclutils import IclError, models
from iclutils.chapters.circuits.pruning import cost, prune
from iclutils.interp.graph import Node, all_heads, head
from iclutils.interp.hooks import ablate_heads, run_with_hooks
from iclutils.training import tune
from iclutils.training.language import Batch, LanguageRecipe

HEADS = [head(0, 1), head(0, 3), head(2, 0)]


def recipe(length: int = 9) -> LanguageRecipe:
    """Counting upwards: learnt within a few steps."""

    def batch(step: int) -> Batch:
        start = torch.randint(0, 20, (8, 1), generator=torch.Generator().manual_seed(step))
        return Batch((start + torch.arange(length)) % 20, torch.arange(length - 1).expand(8, -1))

    config = GPT2Config(
        vocab_size=20, n_positions=12, n_embd=16, n_layer=2, n_head=4, bos_token_id=19
    )
    return LanguageRecipe(
        name="toy",
        seed=0,
        config=config,
        batch=batch,
        steps=10,
        checkpoints=(),
        measure=lambda network: {},
        sinusoidal=False,
    )


# Would catch rows taken for columns, another head's slice, and a value bias that stays.
def test_pruning_is_zero_ablation(tmp_path: Path) -> None:
    save_gpt2(tmp_path)
    whole = models.load(tmp_path)
    pruned = models.edit_weights(tmp_path, lambda network: prune(network, HEADS))
    batch = tokens(3, 12)
    places = [(n.layer, n.head) for n in HEADS]
    hooks = ablate_heads(whole, batch, places, "zero", batch)
    expected, _ = run_with_hooks(whole, batch, hooks)
    torch.testing.assert_close(models.logits(pruned, batch), expected, atol=1e-5, rtol=1e-5)
    assert (models.logits(whole, batch) - expected).abs().max() > 0.1
    _, cache = models.cached(pruned, batch, lambda name: name.endswith("hook_z"))
    silent = {
        head(la, h)
        for la in range(3)
        for h in range(4)
        if not cache[f"blocks.{la}.attn.hook_z"][:, :, h].any()
    }
    assert silent == set(HEADS)


# Would catch a second pass that changes more, and an edit of what was not named.
def test_pruning_twice_is_pruning_once(tmp_path: Path) -> None:
    network = save_gpt2(tmp_path)
    before = {n: p.clone() for n, p in network.named_parameters()}
    prune(network, HEADS)
    once = {n: p.clone() for n, p in network.named_parameters()}
    prune(network, HEADS)
    prune(network, [])
    after = dict(network.named_parameters())
    assert all(torch.equal(p, after[n]) for n, p in once.items())
    changed = {n for n, p in before.items() if not torch.equal(p, after[n])}
    assert changed == {
        f"transformer.h.{la}.attn.{part}"
        for la in (0, 2)
        for part in ("c_attn.weight", "c_attn.bias", "c_proj.weight")
    }


def test_what_cannot_be_pruned_is_refused(tmp_path: Path) -> None:
    network = save_gpt2(tmp_path / "gpt2")
    for wrong in (head(3, 0), head(0, 4), Node("mlp", 0), head(0, -1)):
        with pytest.raises(IclError, match="There is no head"):
            prune(network, [wrong])
    save_neox(tmp_path / "neox")
    with pytest.raises(IclError, match="architecture of GPT-2"):
        prune(AutoModelForCausalLM.from_pretrained(tmp_path / "neox"), HEADS)


# PyTorch's own counter is the truth, for the whole and for all heads gone. Would catch a product
# that is forgotten or counted for half of the square.
@pytest.mark.parametrize("length", [5, 17])
def test_cost_is_what_the_counter_counts(tmp_path: Path, length: int) -> None:
    network = save_gpt2(tmp_path)
    model = models.load(tmp_path)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(tokens(1, length), use_cache=False)
    assert 2 * cost(model, length) == counter.get_total_flops()
    by_module = counter.get_flop_counts()
    heads = sum(
        sum(counts.values()) for name, counts in by_module.items() if name.endswith(".attn")
    )
    every = len(all_heads(model))
    assert 2 * cost(model, length, every) == counter.get_total_flops() - heads
    saved = cost(model, length) - cost(model, length, 3)
    assert saved * every == (cost(model, length) - cost(model, length, every)) * 3
    for wrong in (-1, every + 1):
        with pytest.raises(IclError, match="cannot be removed"):
            cost(model, length, wrong)


# Would catch a head that grows back: gradient, weight decay and momentum must leave it at zero.
def test_a_pruned_head_stays_pruned(tmp_path: Path) -> None:
    network = recipe().network()
    prune(network, [head(0, 2), head(1, 0)])
    losses = tune(network, recipe(), 30, 1e-2)
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 1
    for layer, h in ((0, 2), (1, 0)):
        attn = network.transformer.h[layer].attn
        rows = slice(4 * h, 4 * h + 4)
        values = slice(32 + 4 * h, 32 + 4 * h + 4)
        assert not attn.c_proj.weight[rows].any()
        assert not attn.c_attn.weight[:, values].any()
        assert not attn.c_attn.bias[values].any()
    assert network.transformer.h[0].attn.c_proj.weight[:8].all()


# Would catch randomness from outside, and state that is left behind.
def test_tuning_is_deterministic_and_leaves_nothing_behind() -> None:
    results = []
    for noise in (1, 2):
        network = recipe().network().eval()
        torch.manual_seed(noise)
        state, threads = torch.get_rng_state(), torch.get_num_threads()
        tune(network, recipe(), 5, 1e-3)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads
        assert not network.training
        assert all(p.grad is None for p in network.parameters())
        results.append({n: p.clone() for n, p in network.named_parameters()})
    assert all(torch.equal(p, results[1][n]) for n, p in results[0].items())


# Would catch a rate that warms up or decays, and data that training has seen.
def test_the_rate_is_constant_and_the_data_are_new() -> None:
    seen: list[int] = []
    rates: list[float] = []
    toy = recipe()

    class Watched(LanguageRecipe):
        def loss(self, network: GPT2LMHeadModel, step: int) -> torch.Tensor:
            seen.append(step)
            rates.append(self.rate(step))
            return super().loss(network, step)

    watched = Watched(**vars(toy))
    tune(toy.network(), watched, 4, 3e-3)
    tune(toy.network(), watched, 2, 3e-3, first_step=7)
    assert seen == [11, 12, 13, 14, 7, 8]
    assert rates == pytest.approx([3e-3] * 6)


# Would catch gradients that are held back where a model is rebuilt.
def test_a_model_is_rebuilt_pruned_and_tuned(tmp_path: Path) -> None:
    toy, losses = recipe(), []
    toy.network().save_pretrained(tmp_path)

    def edit(network: GPT2LMHeadModel) -> None:
        prune(network, [head(1, 1)])
        losses.extend(tune(network, toy, 12, 1e-2))

    model = models.edit_weights(tmp_path, edit)
    assert losses[-1] < losses[0]
    assert not any(p.requires_grad for p in model.parameters())
    _, cache = models.cached(model, torch.arange(6)[None], ["blocks.1.attn.hook_z"])
    assert not cache["blocks.1.attn.hook_z"][:, :, 1].any()
    small = tiny_gpt2(tmp_path / "other")
    assert small.cfg.n_layers == 3
