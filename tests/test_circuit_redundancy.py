"""Redundancy and rank: against finite differences, known spectra and hand-wired back-up heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_gptj, tiny_gpt2
from wired import save_wired

from iclutils import IclError, models
from iclutils.chapters.circuits import redundancy
from iclutils.interp.clean_corrupt import (
    CleanCorrupt,
    baselines,
    copying,
    scored_logits,
)
from iclutils.interp.graph import Node, all_heads, head
from iclutils.models import TransformerBridge, get_act_name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    return tiny_gpt2(tmp_path_factory.mktemp("tiny"))


def behave(model: TransformerBridge, count: int = 3, length: int = 7) -> CleanCorrupt:
    return copying(model, count, length, torch.Generator().manual_seed(0))


# Would catch a mask on the wrong axis, a sum over sequences, or a gradient of the loss of one.
def test_importance_is_the_slope_of_a_mask(model: TransformerBridge) -> None:
    behaviour, step = behave(model), 1e-2
    got = redundancy.importance(model, behaviour)
    assert got.shape == (3, 4, 3)
    for layer, h in ((0, 1), (1, 3), (2, 0)):

        def scaled(by: float, layer: int = layer, h: int = h) -> torch.Tensor:
            def scale(z: torch.Tensor, hook: object) -> torch.Tensor:
                z = z.clone()
                z[:, :, h] *= by
                return z

            return behaviour.score(
                scored_logits(model, behaviour, [(get_act_name("z", layer), scale)])
            ).double()

        slope = (scaled(1 + step) - scaled(1 - step)) / (2 * step)
        torch.testing.assert_close(got[layer, h].double(), slope.abs(), atol=2e-4, rtol=1e-2)
    assert got.max() > 1e-2, "no head matters, so nothing is compared"
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def test_importance_needs_gradients(tmp_path: Path) -> None:
    save_gptj(tmp_path)
    other = models.load(tmp_path)
    with pytest.raises(IclError, match="silently come to nothing"):
        redundancy.importance(other, behave(other))


# Heads of one role share the work: each alone can be spared, both together cannot; and a single
# head of a pipeline costs as much as both ends. Would catch a sum taken for the whole.
def test_backups_are_seen_only_together(tmp_path: Path) -> None:
    save_wired(tmp_path, ((0, 0), (0, 1)), ((1, 0), (1, 2)), heads=3)
    wired = models.load(tmp_path)
    behaviour = copying(wired, 8, 11, torch.Generator().manual_seed(0))
    clean, corrupt = baselines(wired, behaviour)
    gap = (clean - corrupt).mean()
    together, summed = redundancy.joint(wired, behaviour, [head(1, 0), head(1, 2)], "resample")
    assert together.mean() / gap > 0.9
    assert summed.mean() / gap < 0.2
    save_wired(tmp_path / "one")
    pipe = models.load(tmp_path / "one")
    behaviour = copying(pipe, 8, 11, torch.Generator().manual_seed(0))
    together, summed = redundancy.joint(pipe, behaviour, [head(0, 0), head(1, 0)], "resample")
    clean, corrupt = baselines(pipe, behaviour)
    assert (together - summed).mean() / (clean - corrupt).mean() == pytest.approx(-1, abs=0.1)
    nothing, none = redundancy.joint(pipe, behaviour, [])
    assert not nothing.any()
    assert not none.any()
    with pytest.raises(IclError, match="Only heads and MLP layers"):
        redundancy.joint(pipe, behaviour, [Node("embed")])


# Would catch a bar that noise passes: the same mean, known well or badly.
def test_redundant_means_known_to_be_small() -> None:
    known = torch.tensor([0.004, 0.006]).repeat(8)
    noisy = torch.tensor([-0.1, 0.11]).repeat(8)
    losses = torch.stack([known, noisy, known + 1, known - 1])
    assert redundancy.redundant(losses).tolist() == [True, False, False, True]
    assert redundancy.fraction(losses) == 0.5
    by_numpy = losses.double().numpy()
    upper = by_numpy.mean(1) + 2 * by_numpy.std(1, ddof=1) / 4
    assert redundancy.redundant(losses, 0.06).tolist() == (upper < 0.06).tolist()
    with pytest.raises(IclError, match="at least two sequences"):
        redundancy.redundant(losses[:, :1])


# An orthogonal basis with known variances has a known entropy. Would catch singular values that
# are not squared, outputs that are not centred, a logarithm to another base.
@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 6), seed=st.integers(0, 99), offset=st.floats(-5, 5), scale=st.floats(1, 9)
)
def test_the_rank_of_a_known_spectrum(size: int, seed: int, offset: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    power = torch.rand(size, generator=generator, dtype=torch.float64) + 0.05
    draw = torch.randn(40, size + 1, generator=generator, dtype=torch.float64)
    draw[:, 0] = 1  # what is orthogonal to it has mean zero
    columns = torch.linalg.qr(draw).Q[:, 1:]
    turn = torch.linalg.qr(torch.randn(9, 9, generator=generator, dtype=torch.float64)).Q[:size]
    outputs = scale * columns * power.sqrt() @ turn + offset
    share = power / power.sum()
    expected = float((-(share * share.log()).sum()).exp())
    assert float(redundancy.ranks(outputs[None])[0]) == pytest.approx(expected, rel=1e-6)
    assert expected <= size + 1e-9


def test_a_silent_head_has_no_rank() -> None:
    outputs = torch.zeros(2, 5, 4)
    outputs[1] = torch.eye(5)[:, :4]
    got = redundancy.ranks(outputs)
    assert got[0].isnan()
    assert got[1] > 1
    with pytest.raises(IclError, match="two samples"):
        redundancy.ranks(outputs[:, :1])


# Would catch a product taken in the wrong order, and the rank of the whole matrix of d_model.
def test_weight_ranks_are_those_of_the_product(model: TransformerBridge) -> None:
    got = redundancy.weight_ranks(model)
    for layer, h in ((0, 0), (2, 3)):
        product = (model.W_V[layer, h] @ model.W_O[layer, h]).double()
        power = torch.linalg.svdvals(product) ** 2
        share = power[:8] / power.sum()
        expected = (-(share * share.log()).sum()).exp()
        torch.testing.assert_close(got[layer, h], expected, atol=1e-5, rtol=1e-5)
    assert (got <= model.cfg.d_head + 1e-6).all()


# Would catch a trigger that is compared the wrong way round, and an advice without a test.
def test_advice_is_a_hypothesis_with_a_test(model: TransformerBridge) -> None:
    none = torch.zeros(2, 4, dtype=torch.bool)
    most = none.clone()
    most[:, 1:] = True
    low, high = torch.full((2, 4), 3.0), torch.full((2, 4), 7.9)
    assert redundancy.advice(none, low, 8) == []
    (prune,) = redundancy.advice(most, low, 8)
    assert prune.kind == "prune"
    assert prune.nodes == (*(head(0, h) for h in (1, 2, 3)), *(head(1, h) for h in (1, 2, 3)))
    few = none.clone()
    few[0, 0] = few[1, 1] = True
    assert redundancy.advice(few, low, 8) == [], "a quarter is not above three tenths"
    found = redundancy.advice(most, high, 8)
    assert [a.kind for a in found] == ["prune", "widen"]
    assert all(a.hypothesis and a.confirmed_by for a in found)
    silent = torch.full((2, 4), torch.nan)
    assert redundancy.advice(none, silent, 8) == [], "NaN is no rank"
    assert len(all_heads(model)) == 12
