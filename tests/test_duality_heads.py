"""Dual models of real heads: against Hugging Face's modules in float64, and edits by hand there."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_prompts import prompts_strategy, random_prompts
from tiny import BOS, CONTEXT, VOCAB, save_gpt2, save_gptj, save_neox, tiny_gpt2, tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from iclutils import IclError, models, zoo
from iclutils.chapters.gradient_descent import gram
from iclutils.chapters.gradient_descent.activations import read_heads
from iclutils.chapters.gradient_descent.attribution import direct
from iclutils.chapters.gradient_descent.heads import (
    alignment_of_head,
    demonstration_of,
    demonstration_tokens,
    dual_heads,
    first_copy,
    path_of_head,
    step_of_head,
)
from iclutils.chapters.gradient_descent.removal import after, answers, carried, frozen_mlps, removal
from iclutils.models import TransformerBridge, get_act_name
from iclutils.tasks.prompts import Role
from iclutils.tasks.repeated import RepeatedTokens

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
KINDS = ("gpt2", "neox", "llama", "induction-0")
SINGLE = 2e-5  # the model computes in float32


def save_llama(folder: Path) -> None:
    """A small random Llama: rotary positions, RMSNorm, two query heads for each key head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=BOS,
        eos_token_id=BOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Both:
    """A model as the package loads it, and the same by Hugging Face alone, in float64."""

    def __init__(self, kind: str, folder: Path) -> None:
        makers = {"gpt2": save_gpt2, "neox": save_neox, "llama": save_llama}
        if kind in makers:
            makers[kind](folder)
            self.model = models.load(folder)
        else:
            folder = zoo.folder(kind)
            self.model = models.load(kind)
        network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.network = network.double().eval()
        name = {"neox": "dense", "llama": "o_proj"}.get(kind, "c_proj")
        self.out = [m for n, m in network.named_modules() if n.split(".")[-1] == name]
        self.out = [m for m in self.out if "mlp" not in self._name(m)]
        self.mlps = [m for n, m in network.named_modules() if n.split(".")[-1] == "mlp"]

    def _name(self, module: nn.Module) -> str:
        return next(name for name, m in self.network.named_modules() if m is module)

    def run(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, z (batch, layer, pos, head, d_head) and attention (batch, layer, head, ...)."""
        seen: list[Tensor] = []
        handles = [m.register_forward_pre_hook(lambda _, a: seen.append(a[0])) for m in self.out]
        given = {}
        if mask is not None:
            fill = torch.finfo(torch.float64).min
            given = {"attention_mask": torch.zeros(mask.shape).double().masked_fill(~mask, fill)}
        with torch.no_grad():
            out = self.network(x, output_attentions=True, **given)
        for handle in handles:
            handle.remove()
        heads = self.model.cfg.n_heads
        z = torch.stack([part.unflatten(-1, (heads, -1)) for part in seen], 1)
        return out.logits, z, torch.stack(out.attentions, 1)

    def run_with_z(self, x: Tensor, layer: int, head: int, z: Tensor) -> Tensor:
        """Logits when one head's z at the last position is replaced."""

        def replace(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            flat = given[0].clone()
            flat.unflatten(-1, (self.model.cfg.n_heads, -1))[:, -1, head] = z
            return (flat,)

        handle = self.out[layer].register_forward_pre_hook(replace)
        with torch.no_grad():
            logits = self.network(x).logits
        handle.remove()
        return logits


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    return tiny_gpt2(tmp_path_factory.mktemp("wide"), n_positions=128)


def some_mask(count: int, size: int, seed: int = 0) -> Tensor:
    """Random demonstrations among the tokens before the last two."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, size, generator=generator) < 0.6
    mask[:, -2:] = False
    mask[:, 1] = True
    return mask


# --- the identity -------------------------------------------------------------------------------


def test_start_and_step_are_the_heads_output(both: Both) -> None:
    """z and attention from Hugging Face. Fails if q and k are read before their rotation."""
    x, mask = tokens(3, 12), some_mask(3, 12)
    _, z, pattern = both.run(x)
    found = dual_heads(both.model, x, mask)
    torch.testing.assert_close(found.start + found.step, z[:, :, -1], atol=SINGLE, rtol=SINGLE)
    share = (pattern[:, :, :, -1] * mask[:, None, None]).sum(-1)
    torch.testing.assert_close(found.share_of_attention, share, atol=SINGLE, rtol=SINGLE)
    assert found.error.shape == share.shape
    assert found.error.max() < SINGLE
    assert found.z.dtype == torch.float64


def test_the_step_is_the_demonstrations_part(gpt2: Both) -> None:
    """Step and start apart, from HF's attention and values. Fails if D lacks some keys."""
    x, mask = tokens(3, 12), some_mask(3, 12)
    _, _, pattern = gpt2.run(x)
    for layer, block in enumerate(gpt2.network.transformer.h):
        held = []
        handle = block.attn.c_attn.register_forward_hook(lambda m, a, out: held.append(out))  # noqa: B023
        gpt2.run(x)
        handle.remove()
        value = held[0].chunk(3, -1)[2].unflatten(-1, (4, 8)).transpose(1, 2)
        weights = pattern[:, layer, :, -1] * mask[:, None]
        expected = torch.einsum("bhs,bhsd->bhd", weights, value)
        found = dual_heads(gpt2.model, x, mask)
        torch.testing.assert_close(found.step[:, layer], expected, atol=SINGLE, rtol=SINGLE)


def test_no_demonstrations_and_nothing_else(both: Both) -> None:
    x = tokens(2, 9)
    none, every = (torch.full((2, 9), fill) for fill in (False, True))
    found = dual_heads(both.model, x, none)
    assert not found.step.any()
    assert not found.share_of_attention.any()
    found = dual_heads(both.model, x, every)
    assert not found.start.any()
    torch.testing.assert_close(found.share_of_attention, torch.ones_like(found.error))
    torch.testing.assert_close(found.step, found.z, atol=SINGLE, rtol=SINGLE)


def test_demonstrations_after_the_query_do_not_count(gpt2: Both) -> None:
    x, mask = tokens(2, 9), some_mask(2, 9)
    at = torch.tensor([4, 6])
    later = mask | (torch.arange(9) > at[:, None])
    for a, b in zip(
        dual_heads(gpt2.model, x, mask, at), dual_heads(gpt2.model, x, later, at), strict=True
    ):
        assert torch.equal(a, b)


@settings(max_examples=5, **QUIET)
@given(prompts=prompts_strategy())
def test_padding_does_not_matter(wide: TransformerBridge, prompts) -> None:
    mask = demonstration_tokens(wide, prompts)
    together = dual_heads(wide, prompts.tokens, mask, prompts.target)
    for row, q in enumerate(prompts.target.tolist()):
        alone = dual_heads(wide, prompts.tokens[row : row + 1, : q + 1], mask[row, None, : q + 1])
        for a, b in zip(together[:4], alone[:4], strict=True):
            torch.testing.assert_close(a[row : row + 1], b, atol=SINGLE, rtol=SINGLE)


# --- the gradient step --------------------------------------------------------------------------


@settings(max_examples=20, **QUIET)
@given(
    seed=st.integers(0, 1000),
    dim=st.integers(1, 6),
    keys=st.integers(1, 9),
    size=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_gram_features_have_the_kernels_products(
    seed: int, dim: int, keys: int, size: float
) -> None:
    """exp(a·b / sqrt(d)) by numpy. With the query the relative error is small at any size."""
    generator = torch.Generator().manual_seed(seed)
    place = {"generator": generator, "dtype": torch.float64}
    q, k = size * torch.randn(dim, **place), size * torch.randn(keys, dim, **place)
    phi_q, phi_k, log_scale = gram.features(q, k)
    assert phi_k.shape == (keys, keys + 1)
    half_q, half_k = (((x**2).sum(-1) / 2 / dim**0.5).numpy() for x in (q, k))
    product = np.exp(k.numpy() @ q.numpy() / dim**0.5 - half_q - half_k.max())
    np.testing.assert_allclose((phi_k @ phi_q).numpy(), product, rtol=1e-11)
    pairs = np.exp(k.numpy() @ k.numpy().T / dim**0.5 - 2 * half_k.max())
    length = np.exp(half_k - half_k.max())
    gap = np.abs((phi_k @ phi_k.T).numpy() - pairs) / (length[:, None] * length)
    assert gap.max() < 1e-12 * keys + 1e-13
    assert log_scale.item() == pytest.approx(half_k.max() - half_q)


@pytest.mark.parametrize("size", [0.3, 3.0, 8.0])
def test_an_explicit_step_is_softmax_attention(size: float) -> None:
    """Autograd in Gram features against softmax, 1e-10, with scores up to 200.

    Fails if the loss has the other sign, or if D is part of what is differentiated.
    """
    generator = torch.Generator().manual_seed(1)
    place = {"generator": generator, "dtype": torch.float64}
    q, k = size * torch.randn(4, 5, **place), size * torch.randn(4, 9, 5, **place)
    v, demos = torch.randn(4, 9, 3, **place), torch.arange(9) < 6
    seen = torch.arange(9) < torch.tensor([9, 8, 7, 6])[:, None]
    weights = ((k @ q[..., None])[..., 0] / 5**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    for rate in (1.0, 0.01):
        found = gram.learned(q, k, v, demos, seen, rate)
        for got, mask in ((found.before, ~demos), (found.after, demos | ~demos)):
            expected = torch.einsum("bk,bkd->bd", weights * mask, v)
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)


def test_features_that_float64_cannot_hold_are_refused() -> None:
    q, k = 40 * torch.ones(2).double(), -40 * torch.ones(3, 2).double()
    every = torch.ones(3, dtype=torch.bool)
    with pytest.raises(IclError, match="subtract the mean key"):
        gram.learned(q, k, k, every, every)


def test_an_explicit_step_gives_the_heads_output(both: Both) -> None:
    x, mask = tokens(3, 12), some_mask(3, 12)
    _, z, _ = both.run(x)
    duals = dual_heads(both.model, x, mask)
    for head in [(0, 1), (1, 3)]:
        found = step_of_head(both.model, x, mask, head, rate=0.5)
        torch.testing.assert_close(
            found.after, z[:, head[0], -1, head[1]], atol=SINGLE, rtol=SINGLE
        )
        start = duals.start[:, head[0], head[1]]
        torch.testing.assert_close(found.before, start, atol=1e-10, rtol=1e-10)


def test_similarities_by_brute_force(both: Both) -> None:
    """v_i·W φ(k_i) summed over pairs by numpy; the explicit W and the kernels must both agree."""
    x, mask, head = tokens(2, 10), some_mask(2, 10), (1, 2)
    at = torch.tensor([9, 7])
    layer = list(read_heads(both.model, x))[1]
    explicit = step_of_head(both.model, x, mask, head, at)
    before, after_step = alignment_of_head(both.model, x, mask, head, at)
    mask &= torch.arange(10) <= at[:, None]
    for b, last in enumerate(at.tolist()):
        q = layer.query[b, 2, last].numpy()
        k, v = (part[b, 2, : last + 1].numpy() for part in (layer.key, layer.value))
        log_d = np.log(np.exp(k @ q / q.shape[-1] ** 0.5).sum())
        expected = np.exp(k @ k.T / q.shape[-1] ** 0.5 - log_d) * (v @ v.T)
        shown = mask[b, : last + 1].numpy()
        first, both_sides = expected[:, ~shown].sum(1)[shown], expected.sum(1)[shown]
        close = {"rtol": 1e-9, "atol": 1e-11 * np.abs(expected).max()}
        for got in (explicit.similarity_before, before.inner):
            np.testing.assert_allclose(got[b][mask[b]], first, **close)
        for got in (explicit.similarity_after, after_step.inner):
            np.testing.assert_allclose(got[b][mask[b]], both_sides, **close)
        assert both_sides.sum() > first.sum()  # the step raises similarity
    assert bool(before.inner[~mask].isnan().all())
    assert bool((after_step.cosine[mask].abs() <= 1 + 1e-12).all())


def test_keys_may_be_centred(both: Both) -> None:
    """One vector added to all keys: same answers to the query, other similarities."""
    x, mask, head = tokens(2, 10), some_mask(2, 10), (1, 2)
    plain, moved = (step_of_head(both.model, x, mask, head, centre=c) for c in (False, True))
    torch.testing.assert_close(plain.after, moved.after, atol=1e-11, rtol=1e-10)
    assert not torch.allclose(plain.similarity_after[mask], moved.similarity_after[mask], rtol=0.01)


# --- one demonstration at a time ----------------------------------------------------------------


def test_the_path_learns_one_demonstration_at_a_time(gpt2: Both) -> None:
    """Entry n is attention over the query's side and the first n, under the whole D."""
    x, mask, head = tokens(2, 12), some_mask(2, 12), (2, 1)
    groups = torch.arange(12).expand(2, 12) // 3
    by_token = path_of_head(gpt2.model, x, mask, head)
    by_group = path_of_head(gpt2.model, x, mask, head, groups=groups)
    assert by_token.shape == (2, 13, 8)
    assert by_group.shape == (2, 5, 8)
    duals = dual_heads(gpt2.model, x, mask)
    for n in range(5):
        learnt = mask & (groups < n)
        part = dual_heads(gpt2.model, x, learnt)
        expected = duals.start[:, 2, 1] + part.step[:, 2, 1]
        torch.testing.assert_close(by_group[:, n], expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(by_token[:, 3 * n], expected, atol=1e-10, rtol=1e-10)
    _, z, _ = gpt2.run(x)
    torch.testing.assert_close(by_token[:, -1], z[:, 2, -1, 1], atol=SINGLE, rtol=SINGLE)


# --- direct -------------------------------------------------------------------------------------


@pytest.mark.parametrize("against", [None, "one", "each"])
def test_direct_contributions_sum_to_the_logit(both: Both, against: str | None) -> None:
    x, mask = tokens(3, 12), some_mask(3, 12)
    logits = both.run(x)[0][:, -1]
    answer = torch.tensor([4, 5, 6])
    others = {
        None: None,
        "one": torch.arange(VOCAB)[None],
        "each": torch.tensor([[1, 2], [3, 4], [5, 9]]),
    }[against]
    found = direct(both.model, x, mask, answer, others)
    expected = logits.gather(1, answer[:, None])[:, 0]
    if others is not None:
        expected = expected - logits.gather(1, others.expand(3, -1)).mean(1)
    total = found.start.sum((1, 2)) + found.step.sum((1, 2)) + found.mlp.sum(1)
    total = total + found.embedding + found.constant
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.logit, expected, atol=1e-4, rtol=1e-4)
    steps = found.step.sum((1, 2)).mean() / expected.mean()
    assert found.share_of_steps.item() == pytest.approx(steps.item(), rel=1e-3)


def test_a_direct_contribution_is_what_its_removal_costs(both: Both) -> None:
    """In the last block nothing else reads a head but its MLP, which is held: with the norm's
    scale held too, removing a step lowers the logit by its direct contribution."""
    x, mask = tokens(2, 11), some_mask(2, 11)
    layer, head, answer = both.model.cfg.n_layers - 1, 2, torch.tensor([4, 5])
    found = direct(both.model, x, mask, answer)
    duals = dual_heads(both.model, x, mask)
    _, cache = models.cached(both.model, x, ["ln_final.hook_scale"])
    hooks = [*removal(both.model, x, mask, heads=[(layer, head)]), *frozen_mlps(both.model, x)]
    hooks.append(("ln_final.hook_scale", lambda value, hook: cache["ln_final.hook_scale"]))
    with torch.no_grad():
        logits = both.model.run_with_hooks(x, fwd_hooks=hooks)[:, -1]
    change = found.logit - logits.gather(1, answer[:, None])[:, 0]
    torch.testing.assert_close(change, found.step[:, layer, head], atol=1e-4, rtol=1e-3)
    assert duals.step[:, layer, head].norm() > 0.1


# --- causal -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["step", "start"])
def test_removal_is_z_replaced_by_hand(both: Both, part: str) -> None:
    """Hugging Face with one head's z set to what is left. Fails if other heads change too."""
    x, mask = tokens(3, 12), some_mask(3, 12)
    duals = dual_heads(both.model, x, mask)
    layer, head = 0, 3
    left = (duals.start if part == "step" else duals.step)[:, layer, head]
    expected = both.run_with_z(x, layer, head, left)
    hooks = removal(both.model, x, mask, part, [(layer, head)])
    with torch.no_grad():
        logits = both.model.run_with_hooks(x, fwd_hooks=hooks)
    torch.testing.assert_close(logits.double(), expected, atol=1e-3, rtol=1e-3)
    assert (both.run(x)[0][:, -1] - expected[:, -1]).abs().max() > 1e-2


@pytest.mark.parametrize("part", ["step", "start"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_renormalised_removal_is_a_mask(both: Both, part: str, everywhere: bool) -> None:
    """Hugging Face with the same edges in its own attention mask, in all heads."""
    x = tokens(2, 12)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, 2:7] = True
    rows = after(mask) if everywhere else None
    allowed = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12).clone()
    edited = slice(7, 12) if everywhere else slice(11, 12)
    cut = mask if part == "step" else ~mask
    allowed[:, 0, edited] &= ~cut[:, None]
    expected, _, _ = both.run(x, allowed)
    hooks = removal(both.model, x, mask, part, rows=rows, renormalise=True)
    with torch.no_grad():
        logits = both.model.run_with_hooks(x, fwd_hooks=hooks)
    torch.testing.assert_close(logits.double(), expected, atol=2e-3, rtol=2e-3)


def test_the_start_is_that_of_the_running_model(gpt2: Both) -> None:
    """With the step out in all layers, layer 1's z is the start of queries that changed."""
    x, mask = tokens(2, 10), some_mask(2, 10)
    hooks = removal(gpt2.model, x, mask)
    seen = []
    watch = (get_act_name("z", 1), lambda value, hook: seen.append(value))
    names = [f"blocks.1.attn.hook_{part}" for part in "qkv"]
    held = {}
    keep = [(n, lambda value, hook, n=n: held.update({n: value})) for n in names]
    with torch.no_grad():
        gpt2.model.run_with_hooks(x, fwd_hooks=[*hooks, watch, *keep])
    q, k, v = (held[n].double().transpose(1, 2) for n in names)
    pattern = (q[:, :, -1:] @ k.mT / 8**0.5).softmax(-1)
    expected = ((pattern * ~mask[:, None, None]) @ v)[:, :, 0]
    torch.testing.assert_close(seen[0][:, -1].double(), expected, atol=SINGLE, rtol=SINGLE)
    assert not torch.allclose(expected, dual_heads(gpt2.model, x, mask).start[:, 1], atol=1e-2)


def test_mlps_are_held(gpt2: Both) -> None:
    """By hand in Hugging Face: z replaced in layer 0, MLPs returning their clean outputs.

    Later heads still see the change, so one layer is edited in a copy with one layer.
    """
    small = copy.deepcopy(gpt2.network)
    small.transformer.h = small.transformer.h[:1]
    x, mask = tokens(2, 10), some_mask(2, 10)
    clean: list[Tensor] = []
    handle = small.transformer.h[0].mlp.register_forward_hook(lambda m, a, out: clean.append(out))
    with torch.no_grad():
        small(x)
    handle.remove()
    start = dual_heads(gpt2.model, x, mask).start[:, 0].flatten(1)

    def replace(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        flat = given[0].clone()
        flat[:, -1] = start
        return (flat,)

    block = small.transformer.h[0]
    block.attn.c_proj.register_forward_pre_hook(replace)
    block.mlp.register_forward_hook(lambda m, a, out: clean[0])
    name = "blocks.0.hook_resid_post"
    held: list[Tensor] = []
    hooks = [*removal(gpt2.model, x, mask), *frozen_mlps(gpt2.model, x)]
    with torch.no_grad():
        expected = small.transformer.h[0](
            small.transformer.wte(x) + small.transformer.wpe(torch.arange(10)),
            attention_mask=torch.full((10, 10), -torch.inf).double().triu(1)[None, None],
        )
        gpt2.model.run_with_hooks(
            x, fwd_hooks=[*hooks, (name, lambda value, hook: held.append(value))]
        )
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(held[0].double(), expected, atol=1e-4, rtol=1e-4)


def test_without_demonstrations_removal_changes_nothing(both: Both) -> None:
    x = tokens(2, 9)
    none = torch.zeros(2, 9, dtype=torch.bool)
    hooks = removal(both.model, x, none, rows=after(none))
    with torch.no_grad():
        assert torch.equal(both.model.run_with_hooks(x, fwd_hooks=hooks), both.model(x))


def test_carried(gpt2: Both) -> None:
    x, mask = tokens(3, 12), some_mask(3, 12)
    answer = torch.tensor([4, 5, 6])
    choices = torch.tensor([[4, 1], [2, 5], [6, 7]])
    logits = gpt2.run(x)[0][:, -1]
    found = carried(gpt2.model, x, mask, answer)
    expected = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
    torch.testing.assert_close(found["whole"].log_prob.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found["whole"].right, logits.argmax(-1) == answer)
    among = carried(gpt2.model, x, mask, answer, choices)
    chosen = logits.gather(1, choices).log_softmax(-1)[torch.arange(3), torch.tensor([0, 1, 0])]
    torch.testing.assert_close(among["whole"].log_prob.double(), chosen, atol=1e-4, rtol=1e-4)
    assert torch.equal(among["whole"].right, chosen > np.log(0.5))
    names = {"whole"} | {
        f"no {part}{how}"
        for part in ("step", "start")
        for how in ("", ", renormalised", ", MLPs held")
    }
    assert set(found) == names
    hooks = removal(gpt2.model, x, mask, "start", [(1, 0)])
    one = answers(gpt2.model, x, answer, hooks=hooks).log_prob
    again = carried(gpt2.model, x, mask, answer, heads=[(1, 0)])["no start"].log_prob
    assert torch.equal(one, again)
    every = carried(gpt2.model, x, torch.ones_like(mask), answer)
    assert "no step, renormalised" not in every
    assert torch.equal(every["no start"].log_prob, every["whole"].log_prob)


def test_carried_asks_at_the_target(wide: TransformerBridge) -> None:
    prompts = random_prompts(seed=3, count=3)
    mask = demonstration_tokens(wide, prompts)
    answer = prompts.label_words.gather(1, prompts.gold[:, None])[:, 0]
    given = (answer, prompts.label_words)
    together = carried(wide, prompts.tokens, mask, *given, prompts.target)
    for row, q in enumerate(prompts.target.tolist()):
        cut = prompts.tokens[row, None, : q + 1], mask[row, None, : q + 1]
        alone = carried(wide, *cut, *(part[row : row + 1] for part in given))
        for name in together:
            a, b = together[name].log_prob[row], alone[name].log_prob[0]
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# --- masks --------------------------------------------------------------------------------------


def test_masks() -> None:
    batch = RepeatedTokens.draw(2, 4, VOCAB, BOS, torch.Generator().manual_seed(0))
    assert first_copy(batch).tolist() == [[False] + 4 * [True] + 4 * [False]] * 2
    assert after(first_copy(batch))[0].tolist() == 5 * [False] + 4 * [True]
    assert bool(after(torch.zeros(1, 3, dtype=torch.bool)).all())


@settings(max_examples=10, **QUIET)
@given(prompts=prompts_strategy())
def test_every_token_has_its_demonstration(wide: TransformerBridge, prompts) -> None:
    number = demonstration_of(prompts)
    mask = demonstration_tokens(wide, prompts)
    for row in range(len(prompts)):
        first = 0
        for demo, last in enumerate(prompts.label_pos[row].tolist()):
            assert number[row, first : last + 1].tolist() == [demo] * (last + 1 - first)
            first = last + 1
        assert mask[row].tolist() == [role <= Role.LABEL for role in prompts.roles[row].tolist()]


def test_bos_is_no_demonstration(wide: TransformerBridge) -> None:
    prompts = random_prompts()
    prompts.tokens[:, 0] = BOS
    with_bos = demonstration_tokens(wide, prompts, with_bos=True)
    without = demonstration_tokens(wide, prompts)
    assert bool(with_bos[:, 0].all())
    assert not bool(without[:, 0].any())
    assert torch.equal(with_bos[:, 1:], without[:, 1:])


# --- bad input ----------------------------------------------------------------------------------


def test_bad_masks(gpt2: Both) -> None:
    x, mask = tokens(2, 9), some_mask(2, 9)
    answer = torch.tensor([1, 2])
    for bad in (mask[:, :-1], mask[:1], mask.float(), mask[0]):
        for call in (dual_heads, removal):
            with pytest.raises(IclError, match="bool mask of the tokens' shape"):
                call(gpt2.model, x, bad)
    with pytest.raises(IclError, match="one query position per prompt"):
        dual_heads(gpt2.model, x, mask, torch.tensor([3, 9]))
    with pytest.raises(IclError, match="one query position per prompt"):
        dual_heads(gpt2.model, x, mask, torch.tensor([3]))
    with pytest.raises(IclError, match="rows must be"):
        removal(gpt2.model, x, mask, rows=mask[:1])
    with pytest.raises(IclError, match="nothing is left once the step"):
        removal(gpt2.model, x, torch.ones_like(mask), renormalise=True)
    with pytest.raises(IclError, match="nothing is left once the start"):
        removal(gpt2.model, x, torch.zeros_like(mask), "start", renormalise=True)
    with pytest.raises(IclError, match="Did you mean 'step'"):
        removal(gpt2.model, x, mask, "steps")
    with pytest.raises(IclError, match=r"no head 3\.0"):
        removal(gpt2.model, x, mask, heads=[(3, 0)])
    with pytest.raises(IclError, match=r"no head 0\.4"):
        path_of_head(gpt2.model, x, mask, (0, 4))
    with pytest.raises(IclError, match="groups must hold"):
        path_of_head(gpt2.model, x, mask, (0, 0), groups=torch.zeros(2, 8, dtype=torch.long))
    with pytest.raises(IclError, match="above 0"):
        step_of_head(gpt2.model, x, mask, (0, 0), rate=0.0)
    with pytest.raises(IclError, match="one answer for each"):
        direct(gpt2.model, x, mask, answer[:1])
    with pytest.raises(IclError, match=r"in the vocabulary, 0\.\.59"):
        answers(gpt2.model, x, answer + 58)
    with pytest.raises(IclError, match="among its choices"):
        answers(gpt2.model, x, answer, torch.tensor([[1, 3]]))
    with pytest.raises(IclError, match="one row for all"):
        direct(gpt2.model, x, mask, answer, torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(IclError, match="no layer 7"):
        list(read_heads(gpt2.model, x, [7]))


def test_models_that_cannot_be_taken_apart(tmp_path: Path) -> None:
    x, mask = tokens(2, 9), some_mask(2, 9)
    save_gptj(tmp_path / "gptj")
    gptj = models.load(tmp_path / "gptj")
    for call in (dual_heads, removal):
        with pytest.raises(IclError, match="only after using it"):
            call(gptj, x, mask)
    other = tmp_path / "scaled"
    network: GPT2LMHeadModel = save_gpt2(other)
    network.config.scale_attn_by_inverse_layer_idx = True
    network.config.save_pretrained(other)
    with pytest.raises(IclError, match="are not q·k"):
        dual_heads(models.load(other), x, mask)
