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
from iclutils.chapters.gradient_descent.ablation import ablate, ablations, frozen_mlps, predict
from iclutils.chapters.gradient_descent.dual import initial_model
from iclutils.chapters.gradient_descent.heads import (
    demonstration_tokens,
    direct_logit_attribution,
    dual_heads,
    explicit_head_step,
    feature_errors,
    first_copy,
    head_trajectory,
    read_heads,
    rising_similarities,
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
        modules = network.named_modules()
        self.out = [m for n, m in modules if n.split(".")[-1] == name and "mlp" not in n]

    def run(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, z (batch, layer, pos, head, d_head) and attention (batch, layer, head, ...)."""
        seen: list[Tensor] = []
        handles = [m.register_forward_pre_hook(lambda _, a: seen.append(a[0])) for m in self.out]
        with torch.no_grad():
            out = self.network(x, output_attentions=True)
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


def some_mask(count: int, size: int) -> Tensor:
    """Random demonstrations among the tokens before the last two."""
    mask = torch.rand(count, size, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, -2:] = False
    mask[:, 1] = True
    return mask


# --- the identity -------------------------------------------------------------------------------


def close(found: Tensor, expected: Tensor, gap: float = SINGLE) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=gap, rtol=gap)


def test_query_term_and_update_are_the_heads_output(both: Both) -> None:
    """z and attention from Hugging Face. Fails if q and k are read before their rotation."""
    x, mask = tokens(3, 12), some_mask(3, 12)
    _, z, pattern = both.run(x)
    found = dual_heads(both.model, x, mask)
    close(found.query_term + found.demonstration_update, z[:, :, -1])
    close(found.attention_share, (pattern[:, :, :, -1] * mask[:, None, None]).sum(-1))
    assert found.z.dtype == torch.float64
    every = dual_heads(both.model, x, mask | True)
    assert not every.query_term.any()
    close(every.demonstration_update, found.z)


@settings(max_examples=5, **QUIET)
@given(prompts=prompts_strategy())
def test_padding_does_not_matter(wide: TransformerBridge, prompts) -> None:
    """Nor demonstrations after the query."""
    mask = demonstration_tokens(wide, prompts)
    later = torch.arange(mask.shape[1]) > prompts.target[:, None]
    together = dual_heads(wide, prompts.tokens, mask | later, prompts.target)
    for row, q in enumerate(prompts.target.tolist()):
        alone = dual_heads(wide, prompts.tokens[row : row + 1, : q + 1], mask[row, None, : q + 1])
        for a, b in zip(together[:4], alone[:4], strict=True):
            close(a[row : row + 1], b)


def test_one_heads_steps(both: Both) -> None:
    """A gradient step by autograd; entry n of the trajectory, on the demonstrations before n."""
    x, mask = tokens(3, 12), some_mask(3, 12)
    duals = dual_heads(both.model, x, mask)
    for layer, head in [(0, 1), (1, 3)]:
        before, stepped = explicit_head_step(both.model, x, mask, (layer, head))
        path = head_trajectory(both.model, x, mask, (layer, head))
        close(stepped, duals.z[:, layer, head])
        close(path[:, -1], duals.z[:, layer, head])
        close(before, duals.query_term[:, layer, head], 1e-10)
        for n in (0, 3, 7):
            part = dual_heads(both.model, x, mask & (torch.arange(12) < n)).demonstration_update
            close(path[:, n], before + part[:, layer, head], 1e-10)


def test_which_demonstrations_become_more_similar(both: Both) -> None:
    """By the dual model itself, before and after its step."""
    x, mask = tokens(3, 12), some_mask(3, 12)
    found = rising_similarities(both.model, x, mask)
    for layer, (query, key, value, _) in enumerate(
        read_heads(both.model, x, torch.tensor([11] * 3))
    ):
        first = initial_model(query, key, value, mask[:, None])
        rise = first.updated(mask[:, None]).similarities() - first.similarities()
        close(found[:, layer], ((rise > 0) & mask[:, None]).sum(-1) / mask.sum(-1)[:, None])


def test_random_features_at_a_heads_own_norms(wide: TransformerBridge) -> None:
    """The mean over directions of exp(ω·(q + k) - (|q|² + |k|²)/2), summed by hand."""
    x, at = tokens(2, 9), torch.tensor([8, 5])
    found = feature_errors(wide, x, 64, at, generator=torch.Generator().manual_seed(1))
    source, expected = torch.Generator().manual_seed(1), []
    for row, last in zip(x, at, strict=True):
        errors = []
        for parts in read_heads(wide, row[None, : last + 1], last[None]):
            for q, k, v, z in zip(*(part[0] for part in parts), strict=True):
                omega = torch.randn(64, len(q), generator=source, dtype=torch.float64)
                q, k = q / len(q) ** 0.25, k / len(q) ** 0.25
                size = (q.square().sum() + k.square().sum(-1)) / 2
                weights = ((q + k) @ omega.T - size[:, None]).exp().mean(-1)
                errors.append((weights @ v / weights.sum() - z).norm() / z.norm())
        expected.append(torch.stack(errors).median())
    close(found, torch.stack(expected), 1e-3)


# --- direct -------------------------------------------------------------------------------------


@pytest.mark.parametrize("against", [None, "one", "each"])
def test_direct_contributions_sum_to_the_logit(both: Both, against: str | None) -> None:
    x, mask = tokens(3, 12), some_mask(3, 12)
    logits, answer = both.run(x)[0][:, -1], torch.tensor([4, 5, 6])
    each = torch.tensor([[1, 2], [3, 4], [5, 9]])
    others = {None: None, "one": torch.arange(VOCAB)[None], "each": each}[against]
    duals = dual_heads(both.model, x, mask)
    found = direct_logit_attribution(both.model, x, duals, answer, others)
    expected = logits.gather(1, answer[:, None])[:, 0]
    if others is not None:
        expected = expected - logits.gather(1, others.expand(3, -1)).mean(1)
    updates = found.demonstration_update.sum((1, 2))
    rest = found.query_term.sum((1, 2)) + found.mlp.sum(1) + found.embedding + found.constant
    close(updates + rest, expected, 1e-4)
    close(found.logit, expected, 1e-4)
    assert float(found.update_share) == pytest.approx(float(updates.mean() / expected.mean()), 1e-3)


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
    close(change, found.demonstration_update[:, layer, head], 5e-4)
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
    close(logits, expected, 1e-3)
    assert (both.run(x)[0][:, -1] - expected[:, -1]).abs().max() > 1e-2


def test_mlps_are_held(gpt2: Both) -> None:
    """By hand in Hugging Face: z replaced in layer 0, its MLP returning its clean outputs.

    Later heads still see the change, so the first block alone is compared.
    """
    x, mask = tokens(2, 10), some_mask(2, 10)
    network = copy.deepcopy(gpt2.network).transformer
    block, seen = network.h[0], []
    block.mlp.register_forward_hook(lambda m, a, out: seen.append(out) or seen[0])  # the first
    block.register_forward_hook(lambda m, a, out: seen.append(out))
    left = dual_heads(gpt2.model, x, mask).query_term[:, 0].flatten(1)

    def replace(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return (torch.cat([given[0][:, :-1], left[:, None]], 1),)

    with torch.no_grad():
        network(x)
        block.attn.c_proj.register_forward_pre_hook(replace)
        network(x)
        hooks = [*ablate(gpt2.model, x, mask), *frozen_mlps(gpt2.model, x)]
        held: list[Tensor] = []
        keep = ("blocks.0.hook_resid_post", lambda value, hook: held.append(value))
        gpt2.model.run_with_hooks(x, fwd_hooks=[*hooks, keep])
    out = seen[-1]
    close(held[0], out[0] if isinstance(out, tuple) else out, 1e-4)


def test_ablations(gpt2: Both) -> None:
    x, mask = tokens(3, 12), some_mask(3, 12)
    answer, choices = torch.tensor([4, 5, 6]), torch.tensor([[4, 1], [2, 5], [6, 7]])
    logits = gpt2.run(x)[0][:, -1]
    found = ablations(gpt2.model, x, mask, answer)
    assert set(found) == {
        "whole",
        "no update",
        "no update, MLPs held",
        "no query term",
        "no query term, MLPs held",
    }
    close(found["whole"].log_prob, logits.log_softmax(-1).gather(1, answer[:, None])[:, 0], 1e-4)
    assert torch.equal(found["whole"].is_correct, logits.argmax(-1) == answer)
    among = predict(gpt2.model, x, answer, choices)
    chosen = logits.gather(1, choices).log_softmax(-1)[torch.arange(3), torch.tensor([0, 1, 0])]
    close(among.log_prob, chosen, 1e-4)
    assert torch.equal(among.is_correct, chosen > np.log(0.5))
    hooks = ablate(gpt2.model, x, mask, "query term", [(1, 0)])
    one = predict(gpt2.model, x, answer, hooks=hooks).log_prob
    again = ablations(gpt2.model, x, mask, answer, heads=[(1, 0)])["no query term"].log_prob
    assert torch.equal(one, again)
    none = ablations(gpt2.model, x, mask & False, answer)
    assert torch.equal(none["no update"].log_prob, none["whole"].log_prob)


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
            close(together[name].log_prob[row], alone[name].log_prob[0], 1e-4)


# --- masks and bad input ------------------------------------------------------------------------


def test_masks(wide: TransformerBridge) -> None:
    batch = RepeatedTokens.draw(2, 4, VOCAB, BOS, torch.Generator().manual_seed(0))
    assert first_copy(batch).tolist() == [[False] + 4 * [True] + 4 * [False]] * 2
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
        (lambda m: ablate(m, X, SHOWN, heads=[(3, 0)]), r"no head 3\.0"),
        (lambda m: head_trajectory(m, X, SHOWN, (0, 4)), r"no head 0\.4"),
        (lambda m: predict(m, X, ANSWER[:1]), "one answer for each"),
        (lambda m: predict(m, X, ANSWER + 58), r"in the vocabulary, 0\.\.59"),
        (lambda m: predict(m, X, ANSWER, torch.tensor([[1, 3]])), "among its choices"),
        (lambda m: predict(m, X, ANSWER, torch.zeros(3, 2).long()), "one row for all"),
        (lambda m: ablations(m, X, SHOWN, ANSWER, ways=["no updates"]), "Did you mean 'update'"),
    ],
)
def test_bad_input(gpt2: Both, call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IclError, match=message):
        call(gpt2.model)


def test_models_that_cannot_be_taken_apart(tmp_path: Path) -> None:
    save_gptj(tmp_path / "gptj")
    gptj = models.load(tmp_path / "gptj")
    for call in (dual_heads, ablate):
        with pytest.raises(IclError, match="only after using it"):
            call(gptj, X, SHOWN)
    network: GPT2LMHeadModel = save_gpt2(tmp_path / "scaled")
    network.config.scale_attn_by_inverse_layer_idx = True
    network.config.save_pretrained(tmp_path / "scaled")
    with pytest.raises(IclError, match="are not q·k"):
        dual_heads(models.load(tmp_path / "scaled"), X, SHOWN)
