"""Dual models of real heads: against Hugging Face's modules in float64, and edits by hand there."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_prompts import prompts_strategy, random_prompts
from tiny import BOS, CONTEXT, VOCAB, save_gpt2, save_gptj, save_neox, tiny_gpt2, tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from iclutils import IclError, models, zoo
from iclutils.chapters.gradient_descent.ablation import (
    ablate,
    ablations,
    after,
    frozen_mlps,
    predict,
)
from iclutils.chapters.gradient_descent.heads import (
    demonstration_tokens,
    direct_logit_attribution,
    dual_heads,
    explicit_head_step,
    first_copy,
    head_trajectory,
)
from iclutils.models import TransformerBridge
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


def test_query_term_and_update_are_the_heads_output(both: Both) -> None:
    """z and attention from Hugging Face. Fails if q and k are read before their rotation."""
    x, mask = tokens(3, 12), some_mask(3, 12)
    _, z, pattern = both.run(x)
    found = dual_heads(both.model, x, mask)
    torch.testing.assert_close(
        found.query_term + found.demonstration_update, z[:, :, -1], atol=SINGLE, rtol=SINGLE
    )
    share = (pattern[:, :, :, -1] * mask[:, None, None]).sum(-1)
    torch.testing.assert_close(found.attention_share, share, atol=SINGLE, rtol=SINGLE)
    assert found.z.dtype == torch.float64


def test_the_update_is_the_demonstrations_part(gpt2: Both) -> None:
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
        torch.testing.assert_close(
            found.demonstration_update[:, layer], expected, atol=SINGLE, rtol=SINGLE
        )


def test_no_demonstrations_and_nothing_else(both: Both) -> None:
    x = tokens(2, 9)
    none, every = (torch.full((2, 9), fill) for fill in (False, True))
    found = dual_heads(both.model, x, none)
    assert not found.demonstration_update.any()
    assert not found.attention_share.any()
    found = dual_heads(both.model, x, every)
    assert not found.query_term.any()
    torch.testing.assert_close(found.attention_share, torch.ones_like(found.attention_share))
    torch.testing.assert_close(found.demonstration_update, found.z, atol=SINGLE, rtol=SINGLE)


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


def test_an_explicit_step_gives_the_heads_output(both: Both) -> None:
    x, mask = tokens(3, 12), some_mask(3, 12)
    _, z, _ = both.run(x)
    duals = dual_heads(both.model, x, mask)
    for layer, head in [(0, 1), (1, 3)]:
        before, stepped = explicit_head_step(both.model, x, mask, (layer, head), rate=0.5)
        torch.testing.assert_close(stepped, z[:, layer, -1, head], atol=SINGLE, rtol=SINGLE)
        query_term = duals.query_term[:, layer, head]
        torch.testing.assert_close(before, query_term, atol=1e-10, rtol=1e-10)


# --- one demonstration at a time ----------------------------------------------------------------


def test_the_trajectory_learns_one_demonstration_at_a_time(gpt2: Both) -> None:
    """Entry n is attention over the query's side and the demonstrations before n, under all D."""
    x, mask, head = tokens(2, 12), some_mask(2, 12), (2, 1)
    found = head_trajectory(gpt2.model, x, mask, head)
    assert found.shape == (2, 13, 8)
    query_term = dual_heads(gpt2.model, x, mask).query_term[:, 2, 1]
    for n in (0, 3, 7):
        part = dual_heads(gpt2.model, x, mask & (torch.arange(12) < n))
        expected = query_term + part.demonstration_update[:, 2, 1]
        torch.testing.assert_close(found[:, n], expected, atol=1e-10, rtol=1e-10)
    _, z, _ = gpt2.run(x)
    torch.testing.assert_close(found[:, -1], z[:, 2, -1, 1], atol=SINGLE, rtol=SINGLE)


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
    duals = dual_heads(both.model, x, mask)
    found = direct_logit_attribution(both.model, x, duals, answer, others)
    expected = logits.gather(1, answer[:, None])[:, 0]
    if others is not None:
        expected = expected - logits.gather(1, others.expand(3, -1)).mean(1)
    total = found.query_term.sum((1, 2)) + found.demonstration_update.sum((1, 2)) + found.mlp.sum(1)
    total = total + found.embedding + found.constant
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.logit, expected, atol=1e-4, rtol=1e-4)
    steps = found.demonstration_update.sum((1, 2)).mean() / expected.mean()
    assert found.update_share.item() == pytest.approx(steps.item(), rel=1e-3)


def test_a_direct_contribution_is_what_its_ablation_costs(both: Both) -> None:
    """In the last block nothing else reads a head but its MLP, which is held: with the norm's
    scale held too, ablating an update lowers the logit by its direct contribution."""
    x, mask = tokens(2, 11), some_mask(2, 11)
    layer, head, answer = both.model.cfg.n_layers - 1, 2, torch.tensor([4, 5])
    duals = dual_heads(both.model, x, mask)
    found = direct_logit_attribution(both.model, x, duals, answer)
    _, cache = models.cached(both.model, x, ["ln_final.hook_scale"])
    hooks = [*ablate(both.model, x, mask, heads=[(layer, head)]), *frozen_mlps(both.model, x)]
    hooks.append(("ln_final.hook_scale", lambda value, hook: cache["ln_final.hook_scale"]))
    with torch.no_grad():
        logits = both.model.run_with_hooks(x, fwd_hooks=hooks)[:, -1]
    change = found.logit - logits.gather(1, answer[:, None])[:, 0]
    torch.testing.assert_close(
        change, found.demonstration_update[:, layer, head], atol=1e-4, rtol=1e-3
    )
    assert duals.demonstration_update[:, layer, head].norm() > 0.1


# --- causal -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["update", "query term"])
def test_ablation_is_z_replaced_by_hand(both: Both, part: str) -> None:
    """Hugging Face with one head's z set to what is left. Fails if other heads change too."""
    x, mask = tokens(3, 12), some_mask(3, 12)
    duals = dual_heads(both.model, x, mask)
    layer, head = 0, 3
    left = (duals.query_term if part == "update" else duals.demonstration_update)[:, layer, head]
    expected = both.run_with_z(x, layer, head, left)
    hooks = ablate(both.model, x, mask, part, [(layer, head)])
    with torch.no_grad():
        logits = both.model.run_with_hooks(x, fwd_hooks=hooks)
    torch.testing.assert_close(logits.double(), expected, atol=1e-3, rtol=1e-3)
    assert (both.run(x)[0][:, -1] - expected[:, -1]).abs().max() > 1e-2


@pytest.mark.parametrize("part", ["update", "query term"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_renormalised_ablation_is_a_mask(both: Both, part: str, everywhere: bool) -> None:
    """Hugging Face with the same edges in its own attention mask, in all heads."""
    x = tokens(2, 12)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, 2:7] = True
    rows = after(mask) if everywhere else None
    allowed = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12).clone()
    edited = slice(7, 12) if everywhere else slice(11, 12)
    cut = mask if part == "update" else ~mask
    allowed[:, 0, edited] &= ~cut[:, None]
    expected, _, _ = both.run(x, allowed)
    hooks = ablate(both.model, x, mask, part, rows=rows, renormalise=True)
    with torch.no_grad():
        logits = both.model.run_with_hooks(x, fwd_hooks=hooks)
    torch.testing.assert_close(logits.double(), expected, atol=2e-3, rtol=2e-3)


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
    start = dual_heads(gpt2.model, x, mask).query_term[:, 0].flatten(1)

    def replace(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        flat = given[0].clone()
        flat[:, -1] = start
        return (flat,)

    block = small.transformer.h[0]
    block.attn.c_proj.register_forward_pre_hook(replace)
    block.mlp.register_forward_hook(lambda m, a, out: clean[0])
    name = "blocks.0.hook_resid_post"
    held: list[Tensor] = []
    hooks = [*ablate(gpt2.model, x, mask), *frozen_mlps(gpt2.model, x)]
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


def test_without_demonstrations_ablation_changes_nothing(both: Both) -> None:
    x = tokens(2, 9)
    none = torch.zeros(2, 9, dtype=torch.bool)
    hooks = ablate(both.model, x, none, rows=after(none))
    with torch.no_grad():
        assert torch.equal(both.model.run_with_hooks(x, fwd_hooks=hooks), both.model(x))


def test_ablations(gpt2: Both) -> None:
    x, mask = tokens(3, 12), some_mask(3, 12)
    answer = torch.tensor([4, 5, 6])
    choices = torch.tensor([[4, 1], [2, 5], [6, 7]])
    logits = gpt2.run(x)[0][:, -1]
    found = ablations(gpt2.model, x, mask, answer)
    expected = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
    torch.testing.assert_close(found["whole"].log_prob.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found["whole"].is_correct, logits.argmax(-1) == answer)
    among = ablations(gpt2.model, x, mask, answer, choices)
    chosen = logits.gather(1, choices).log_softmax(-1)[torch.arange(3), torch.tensor([0, 1, 0])]
    torch.testing.assert_close(among["whole"].log_prob.double(), chosen, atol=1e-4, rtol=1e-4)
    assert torch.equal(among["whole"].is_correct, chosen > np.log(0.5))
    names = {"whole"} | {
        f"no {part}{how}"
        for part in ("update", "query term")
        for how in ("", ", renormalised", ", MLPs held")
    }
    assert set(found) == names
    hooks = ablate(gpt2.model, x, mask, "query term", [(1, 0)])
    one = predict(gpt2.model, x, answer, hooks=hooks).log_prob
    again = ablations(gpt2.model, x, mask, answer, heads=[(1, 0)])["no query term"].log_prob
    assert torch.equal(one, again)
    every = ablations(gpt2.model, x, torch.ones_like(mask), answer)
    assert "no update, renormalised" not in every
    assert torch.equal(every["no query term"].log_prob, every["whole"].log_prob)


def test_ablations_ask_at_the_target(wide: TransformerBridge) -> None:
    prompts = random_prompts(seed=3, count=3)
    mask = demonstration_tokens(wide, prompts)
    answer = prompts.label_words.gather(1, prompts.gold[:, None])[:, 0]
    given = (answer, prompts.label_words)
    together = ablations(wide, prompts.tokens, mask, *given, prompts.target)
    for row, q in enumerate(prompts.target.tolist()):
        cut = prompts.tokens[row, None, : q + 1], mask[row, None, : q + 1]
        alone = ablations(wide, *cut, *(part[row : row + 1] for part in given))
        for name in together:
            a, b = together[name].log_prob[row], alone[name].log_prob[0]
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# --- masks and bad input ------------------------------------------------------------------------


def test_masks(wide: TransformerBridge) -> None:
    batch = RepeatedTokens.draw(2, 4, VOCAB, BOS, torch.Generator().manual_seed(0))
    assert first_copy(batch).tolist() == [[False] + 4 * [True] + 4 * [False]] * 2
    assert after(first_copy(batch))[0].tolist() == 5 * [False] + 4 * [True]
    assert bool(after(torch.zeros(1, 3, dtype=torch.bool)).all())
    prompts = random_prompts()
    before = prompts.roles <= Role.LABEL
    assert torch.equal(demonstration_tokens(wide, prompts), before)
    prompts.tokens[:, 0] = BOS
    before[:, 0] = False
    assert torch.equal(demonstration_tokens(wide, prompts), before)


X, SHOWN, ANSWER = tokens(2, 9), some_mask(2, 9), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: dual_heads(m, X, SHOWN[:, :-1]), "bool mask of the tokens' shape"),
        (lambda m: ablate(m, X, SHOWN.float()), "bool mask of the tokens' shape"),
        (lambda m: dual_heads(m, X, SHOWN, torch.tensor([3, 9])), "one query position per prompt"),
        (lambda m: ablate(m, X, SHOWN | True, renormalise=True), "nothing is left once the update"),
        (lambda m: ablate(m, X, SHOWN, "updates"), "Did you mean 'update'"),
        (lambda m: ablate(m, X, SHOWN, heads=[(3, 0)]), r"no head 3\.0"),
        (lambda m: head_trajectory(m, X, SHOWN, (0, 4)), r"no head 0\.4"),
        (lambda m: predict(m, X, ANSWER[:1]), "one answer for each"),
        (lambda m: predict(m, X, ANSWER + 58), r"in the vocabulary, 0\.\.59"),
        (lambda m: predict(m, X, ANSWER, torch.tensor([[1, 3]])), "among its choices"),
        (lambda m: predict(m, X, ANSWER, torch.zeros(3, 2).long()), "one row for all"),
        (lambda m: ablations(m, X, SHOWN, ANSWER, ways=["no updates"]), "Did you mean 'no update'"),
    ],
)
def test_bad_input(gpt2: Both, call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IclError, match=message):
        call(gpt2.model)


def test_models_that_cannot_be_taken_apart(tmp_path: Path) -> None:
    x, mask = tokens(2, 9), some_mask(2, 9)
    save_gptj(tmp_path / "gptj")
    gptj = models.load(tmp_path / "gptj")
    for call in (dual_heads, ablate):
        with pytest.raises(IclError, match="only after using it"):
            call(gptj, x, mask)
    other = tmp_path / "scaled"
    network: GPT2LMHeadModel = save_gpt2(other)
    network.config.scale_attn_by_inverse_layer_idx = True
    network.config.save_pretrained(other)
    with pytest.raises(IclError, match="are not q·k"):
        dual_heads(models.load(other), x, mask)
