"""Ablations and path patches against direct computation with the Hugging Face modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_gpt2, save_gptj, tiny_gpt2, tokens
from transformers import GPT2LMHeadModel

from iclutils import IclError, models
from iclutils.interp.hooks import ablate_heads, ablate_mlps, run_with_hooks
from iclutils.interp.patching import patch_key_input
from iclutils.models import get_act_name


def logits_without_head(network: GPT2LMHeadModel, x: torch.Tensor, layer: int, head: int):
    """Zeroing a head's z is zeroing its rows of the output projection."""
    weight = network.transformer.h[layer].attn.c_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[head * 8 : head * 8 + 8] = 0
        out = network(x).logits
        weight.copy_(kept)
    return out


def test_zero_ablation_equals_zeroed_weights(tmp_path: Path) -> None:
    network, x = save_gpt2(tmp_path), tokens(2, 10)
    model = models.load(tmp_path)
    for layer, head in [(0, 3), (2, 1)]:
        got, _ = run_with_hooks(model, x, ablate_heads(model, x, [(layer, head)], "zero", x))
        expected = logits_without_head(network, x, layer, head)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_zero_mlp_ablation_equals_zeroed_weights(tmp_path: Path) -> None:
    network, x = save_gpt2(tmp_path), tokens(2, 10)
    model = models.load(tmp_path)
    got, _ = run_with_hooks(model, x, ablate_mlps(model, x, [1], "zero", x))
    with torch.no_grad():
        network.transformer.h[1].mlp.c_proj.weight.zero_()
        network.transformer.h[1].mlp.c_proj.bias.zero_()
        expected = network(x).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_mean_ablation_writes_one_vector_everywhere(tmp_path: Path) -> None:
    model, x = tiny_gpt2(tmp_path), tokens(3, 10)
    name = get_act_name("z", 1)
    _, cache = models.cached(model, x, [name])
    _, seen = run_with_hooks(model, x, ablate_heads(model, x, [(1, 2)], "mean", x), [name])
    expected = cache[name][:, :, 2].mean((0, 1))
    torch.testing.assert_close(seen[name][:, :, 2], expected.expand(3, 10, -1))
    untouched = [0, 1, 3]
    torch.testing.assert_close(seen[name][:, :, untouched], cache[name][:, :, untouched])


def test_resampling_from_the_same_sequences_changes_nothing(tmp_path: Path) -> None:
    model, x = tiny_gpt2(tmp_path), tokens(3, 10)
    plain = models.logits(model, x)
    heads = ablate_heads(model, x, [(0, 1), (2, 2)], "resample", x)
    mlps = ablate_mlps(model, x, [0, 2], "resample", x)
    same, _ = run_with_hooks(model, x, [*heads, *mlps])
    torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-5)
    changed, _ = run_with_hooks(
        model, x, ablate_heads(model, x, [(0, 1)], "resample", tokens(3, 10, 1))
    )
    assert (changed - plain).abs().max() > 1e-3


def test_the_path_into_keys_equals_a_recomputed_pattern(tmp_path: Path) -> None:
    """Write the other run's head output into the key input of one head, by hand, in float64."""
    network = save_gpt2(tmp_path).double()
    model, x, other = models.load(tmp_path), tokens(2, 9), tokens(2, 9, seed=5)
    (l1, h1), (l2, h2) = (0, 2), (2, 1)

    def parts(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's write, and the residual stream before the target layer."""
        seen = {}
        hooks = [
            network.transformer.h[l1].attn.c_proj.register_forward_pre_hook(
                lambda module, inputs: seen.__setitem__("z", inputs[0])
            ),
            network.transformer.h[l2].register_forward_pre_hook(
                lambda module, inputs: seen.__setitem__("resid", inputs[0])
            ),
        ]
        with torch.no_grad():
            network(ids)
        for hook in hooks:
            hook.remove()
        part = slice(8 * h1, 8 * h1 + 8)
        weight = network.transformer.h[l1].attn.c_proj.weight[part]
        return seen["z"][..., part] @ weight, seen["resid"]

    (clean, resid), (foreign, _) = parts(x), parts(other)
    block = network.transformer.h[l2]
    with torch.no_grad():
        q = block.attn.c_attn(block.ln_1(resid))[..., 8 * h2 : 8 * h2 + 8]
        keys = block.attn.c_attn(block.ln_1(resid + foreign - clean))
        k = keys[..., 32 + 8 * h2 : 32 + 8 * h2 + 8]
    scores = q @ k.transpose(1, 2) / 8**0.5
    hidden = torch.ones(9, 9).triu(1).bool()
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1)

    got = patch_key_input(model, x, [(l1, h1)], (l2, h2), other)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-3)
    before = models.cached(model, x, [get_act_name("pattern", l2)])[1][get_act_name("pattern", l2)][
        :, h2
    ]
    assert (got - before).abs().max() > 1e-2, "the test's patch has no effect to compare"
    again = models.logits(model, x)
    torch.testing.assert_close(again, models.logits(models.load(tmp_path), x))


def test_patching_a_path_with_itself_changes_nothing(tmp_path: Path) -> None:
    model, x = tiny_gpt2(tmp_path), tokens(2, 9)
    _, cache = models.cached(model, x, [get_act_name("pattern", 1)])
    same = patch_key_input(model, x, [(0, 0), (0, 2)], (1, 3), x)
    torch.testing.assert_close(same, cache[get_act_name("pattern", 1)][:, 3], atol=1e-6, rtol=1e-5)


def test_a_model_that_cannot_fork_its_inputs_is_refused(tmp_path: Path) -> None:
    save_gptj(tmp_path)
    model, x = models.load(tmp_path), tokens(2, 9)
    with pytest.raises(IclError, match=r"cannot fork the inputs.*use one like GPT-2"):
        patch_key_input(model, x, [(0, 0)], (1, 3), x)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda m, x: ablate_heads(m, x, [(3, 0)], "zero", x), "There is no head 3.0"),
        (lambda m, x: ablate_mlps(m, x, [7], "zero", x), "There is no layer 7"),
        (
            lambda m, x: ablate_heads(m, x, [(0, 0)], "resample", x[:1]),
            "sequences of the same shape",
        ),
        (lambda m, x: patch_key_input(m, x, [(1, 0)], (1, 1), x), "must be in a later layer"),
        (lambda m, x: run_with_hooks(m, tokens(1, 49), []), "reads at most 48"),
    ],
)
def test_impossible_interventions_are_refused(tmp_path: Path, act: object, message: str) -> None:
    with pytest.raises(IclError, match=message):
        act(tiny_gpt2(tmp_path), tokens(2, 10))  # type: ignore[operator]
