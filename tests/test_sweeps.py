"""The fast sweeps against the straightforward loop of hooked forward passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import BOS, VOCAB, save_neox, tiny_gpt2

from iclutils import IclError, models
from iclutils.interp import patching
from iclutils.interp.hooks import run_with_hooks
from iclutils.interp.readout import log_prob
from iclutils.models import TransformerBridge, cached, get_act_name
from iclutils.tasks.repeated import RepeatedTokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    return tiny_gpt2(tmp_path_factory.mktemp("tiny"))


def one(length: int, seed: int) -> torch.Tensor:
    return RepeatedTokens.draw(1, length, VOCAB, BOS, torch.Generator().manual_seed(seed)).tokens


def note_sweep(model: TransformerBridge, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """The seed note's patch: positions L .. 2L-1 from those L before."""
    note = torch.arange(length, 2 * length)
    return patching.mlp_position_sweep(model, tokens, note, note - length, note)


def loop_positions(model: TransformerBridge, tokens: torch.Tensor, length: int) -> torch.Tensor:
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    clean = log_prob(run_with_hooks(model, tokens, [])[0], tokens)[0]
    rows = []
    for name in names:
        for p in range(length, 2 * length):

            def patch(out: torch.Tensor, hook: object, p: int = p, name: str = name):
                out = out.clone()
                out[0, p] = cache[name][0, p - length]
                return out

            rows.append(
                log_prob(run_with_hooks(model, tokens, [(name, patch)])[0], tokens)[0] - clean
            )
    return torch.stack(rows)[:, length : 2 * length].reshape(len(names), length, length)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(length=st.integers(2, 14), seed=st.integers(0, 3))
def test_the_position_sweep_equals_the_loop(
    model: TransformerBridge, length: int, seed: int
) -> None:
    tokens = one(length, seed)
    got = note_sweep(model, tokens, length)
    expected = loop_positions(model, tokens, length)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    assert expected.abs().max() > 1e-2, "the patches have no effect to compare"


def test_a_patch_reaches_no_earlier_prediction(model: TransformerBridge) -> None:
    change = note_sweep(model, one(10, 0), 10)
    entry, position = torch.arange(10)[None], torch.arange(10)[:, None]
    assert not change[:, entry.expand(10, 10) < position].any()
    assert not change[-1][entry != position].any(), "a last-layer patch touches one prediction"


@pytest.mark.parametrize("with_mean", [False, True])
def test_the_head_sweep_equals_the_loop(model: TransformerBridge, with_mean: bool) -> None:
    tokens, scored = one(12, 1), torch.arange(13, 24)
    fill = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)) if with_mean else None
    got = patching.head_ablation_sweep(model, tokens, scored, fill)
    clean = log_prob(run_with_hooks(model, tokens, [])[0], tokens)[0, scored]
    for layer in range(3):
        for head in range(4):

            def drop(z: torch.Tensor, hook: object, layer: int = layer, head: int = head):
                z = z.clone()
                z[:, :, head] = 0 if fill is None else fill[layer, head]
                return z

            after = log_prob(
                run_with_hooks(model, tokens, [(get_act_name("z", layer), drop)])[0], tokens
            )[0, scored]
            torch.testing.assert_close(got[layer, head], after - clean, atol=2e-5, rtol=1e-4)
    assert got.abs().max() > 1e-2


def test_gappy_entries_are_scored_too(model: TransformerBridge) -> None:
    tokens = one(12, 2)
    whole = patching.head_ablation_sweep(model, tokens, torch.arange(13, 24))
    some = patching.head_ablation_sweep(model, tokens, torch.tensor([14, 15, 20]))
    torch.testing.assert_close(some, whole[..., [1, 2, 7]], atol=1e-5, rtol=1e-4)


def test_other_architectures_take_the_slow_way_and_agree(tmp_path: Path) -> None:
    save_neox(tmp_path)
    rotary = models.load(tmp_path)
    tokens = one(8, 0)
    assert not patching._Clean(rotary, tokens, torch.arange(8, 16)).plain
    got = note_sweep(rotary, tokens, 8)
    torch.testing.assert_close(got, loop_positions(rotary, tokens, 8), atol=1e-5, rtol=1e-4)
    heads = patching.head_ablation_sweep(rotary, tokens, torch.arange(9, 16))
    assert heads.shape == (2, 4, 7)
    assert heads.abs().max() > 1e-3


def test_any_source_can_be_patched_anywhere(model: TransformerBridge) -> None:
    tokens, positions = one(8, 3), torch.tensor([9, 12, 3])
    sources, scored = torch.tensor([0, 5, 14]), torch.tensor([4, 9, 15])
    got = patching.mlp_position_sweep(model, tokens, positions, sources, scored)
    slow = patching._slow_mlp_sweep(model, tokens, positions, sources, scored)
    torch.testing.assert_close(got, slow, atol=2e-5, rtol=1e-4)
    assert not got[:, 1, :2].any(), "a patch at 12 cannot touch entries 4 and 9"


def test_wrong_shapes_are_refused(model: TransformerBridge) -> None:
    with pytest.raises(IclError, match="both inside the sequence"):
        patching.mlp_position_sweep(
            model, one(9, 0), torch.tensor([19]), torch.tensor([3]), torch.tensor([4])
        )
    with pytest.raises(IclError, match="entries that predict one of its tokens"):
        note_sweep(model, one(9, 0).repeat(2, 1), 9)
    with pytest.raises(IclError, match="entries that predict one of its tokens"):
        patching.head_ablation_sweep(model, one(9, 0), torch.tensor([18]))
