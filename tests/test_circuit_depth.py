"""Depth: lenses against the model's own modules, centres of gravity in closed form, tuned maps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, rel_entr
from sklearn.linear_model import Ridge
from tiny import tokens
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.circuits import tuned
from iclutils.chapters.circuits.depth import (
    by_layer,
    depths,
    gravity,
    gravity_difference,
    lens,
    upper_share,
)
from iclutils.chapters.circuits.tuned import RIDGE, fit, least_squares
from iclutils.interp.clean_corrupt import CleanCorrupt, copying
from iclutils.interp.graph import Node, head
from iclutils.interp.patching import ablate
from iclutils.models import TransformerBridge, load


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    """The pair in layers 0 and 1; layer 2 writes nothing."""
    folder: Path = tmp_path_factory.mktemp("wired")
    save_wired(folder, layers=3)
    return load(folder)


@pytest.fixture(params=["gpt2", "neox"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    return request.getfixturevalue(request.param)


def behaviour_of(choices: bool = False) -> CleanCorrupt:
    rows = tokens(3, 9)
    at = torch.tensor([[2, 5], [3, 8], [0, 5]])
    answer = torch.tensor([[4, 9], [9, 2], [7, 2]])
    among = torch.tensor([[4, 9, 30], [2, 9, 31], [7, 2, 32]]) if choices else None
    return CleanCorrupt(rows, rows.flip(0), at, answer, choices=among)


@pytest.mark.parametrize("choices", [False, True])
def test_the_lens_is_the_model_s_own_readout_of_each_depth(
    model: TransformerBridge, choices: bool
) -> None:
    """Catches: entries of other rows, KL the wrong way round, ranks from the wrong end."""
    behaviour = behaviour_of(choices)
    got = lens(model, behaviour)
    with torch.no_grad():
        whole = model(behaviour.clean).double().numpy()
    norm, table = model.original_model.get_output_embeddings(), model.ln_final
    stream = depths(model, behaviour.clean)
    assert got.kl.shape == (model.cfg.n_layers + 1, 3)
    for depth, resid in enumerate(stream):
        with torch.no_grad():
            seen = norm(table(resid)).double().numpy()
        for b in range(3):
            kl, right, rank = [], [], []
            for t, a in zip(behaviour.at[b], behaviour.answer[b], strict=True):
                final, here = (log_softmax(x[b, t]) for x in (whole, seen))
                kl.append(rel_entr(np.exp(final), np.exp(here)).sum())
                if behaviour.choices is not None:
                    pick = behaviour.choices[b].numpy()
                    here = np.full_like(here, -np.inf)
                    here[pick] = log_softmax(seen[b, t, pick])
                right.append(here[a])
                rank.append(1 + (here > here[a]).sum())
            assert got.kl[depth, b].item() == pytest.approx(np.mean(kl), abs=1e-4, rel=1e-4)
            assert got.log_p[depth, b].item() == pytest.approx(np.mean(right), abs=1e-4)
            assert got.rank[depth, b].item() == pytest.approx(np.mean(rank))
    assert got.kl[-1].max() < 1e-5
    assert got.kl[0].min() > 1e-3


def test_the_lens_translates_first(gpt2: TransformerBridge) -> None:
    behaviour = behaviour_of()
    final = depths(gpt2, behaviour.clean)[-1]
    asked = behaviour.at.unique()
    got = lens(gpt2, behaviour, lambda entry, depth: final[:, asked])
    assert got.kl.max() < 1e-5
    seen: list[int] = []
    lens(gpt2, behaviour, lambda entry, depth: seen.append(depth) or entry)
    assert seen == [0, 1, 2, 3]


NODES = [head(0, 0), head(0, 1), Node("mlp", 0), head(2, 0), Node("mlp", 2)]


def test_effects_by_layer() -> None:
    effects = torch.tensor([[1.0, 3.0], [-4.0, 0.0], [0.0, 0.0], [1.0, -1.0], [-1.0, -2.0]])
    got = by_layer(effects, NODES, 3)
    torch.testing.assert_close(got, torch.tensor([4.0, 0.0, 1.5]))
    assert gravity(got) == pytest.approx(2 * 1.5 / 5.5)
    assert upper_share(got) == pytest.approx(1.5 / 5.5)
    assert upper_share(torch.tensor([1.0, 1.0, 2.0, 4.0])) == pytest.approx(6 / 8)
    assert upper_share(torch.ones(5)) == pytest.approx(0.5)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.floats(0, 100, width=32), min_size=1, max_size=6),
    scale=st.floats(0.5, 8, width=32),
)
def test_gravity_stays_among_the_layers(sizes: list[float], scale: float) -> None:
    values = torch.tensor(sizes, dtype=torch.float64)
    if not values.sum() > 1e-6:
        return
    assert 0 <= gravity(values) <= len(sizes) - 1 + 1e-9
    assert gravity(scale * values) == pytest.approx(gravity(values))
    assert gravity(values.flip(0)) == pytest.approx(len(sizes) - 1 - gravity(values))
    assert upper_share(values.flip(0)) == pytest.approx(1 - upper_share(values))


def test_nothing_has_no_depth() -> None:
    assert math.isnan(gravity(torch.zeros(4)))
    assert math.isnan(upper_share(torch.zeros(3)))


def test_the_difference_of_two_tasks() -> None:
    """Catches: sequences of one task drawn for the other, or a standard error of one sequence."""
    generator = seeded(1)
    nodes = [head(0, 0), head(1, 0)]
    low = torch.tensor([[3.0], [1.0]]) + 0.1 * torch.randn(2, 60, generator=generator)
    high = torch.tensor([[1.0], [3.0]]) + 0.1 * torch.randn(2, 40, generator=generator)
    value, error = gravity_difference(high, low, nodes, 2, seeded())
    assert value == pytest.approx(0.5, abs=0.05)
    # d gravity = (3 noise_1 - noise_0) / 16 or its mirror: SD .1 sqrt(10) / 16 per sequence
    assert error == pytest.approx(0.1 * 10**0.5 / 16 * (1 / 60 + 1 / 40) ** 0.5, rel=0.35)
    exact, none = gravity_difference(high[:, :1], low[:, :1], nodes, 2, seeded())
    assert none == 0
    assert 0 < exact < 1


def test_gravity_of_a_known_circuit(wired: TransformerBridge) -> None:
    """Catches: layers counted from 1, idle nodes that weigh something."""
    behaviour = copying(wired, 8, 11, seeded())
    nodes = [head(layer, h) for layer in range(3) for h in range(2)]
    nodes += [Node("mlp", layer) for layer in range(3)]
    clean = ablate(wired, behaviour, [[]])
    effects = clean - ablate(wired, behaviour, [[n] for n in nodes])
    first, second = effects.mean(1)[[0, 2]].tolist()
    got = by_layer(effects, nodes, 3)
    assert gravity(got) == pytest.approx(second / (first + second), abs=1e-3)
    assert upper_share(got) == pytest.approx(second / (first + second) / 2, abs=1e-3)


def test_effects_without_a_layer_are_refused() -> None:
    with pytest.raises(IclError, match="head or an MLP layer"):
        by_layer(torch.zeros(1, 2), [Node("embed")], 2)
    with pytest.raises(IclError, match="3 effects for 1 nodes"):
        by_layer(torch.zeros(3, 2), [head(0, 0)], 2)


def test_least_squares_is_scikit_learn_s() -> None:
    """Catches: the penalty on the intercept or on the map itself instead of on its change."""
    x = torch.randn(2, 40, 5, generator=seeded()) * torch.tensor([1.0, 2.0, 0.1, 3.0, 1.0]) + 1
    y = torch.randn(40, 5, generator=seeded(1)) + x[1] @ torch.randn(5, 5, generator=seeded(2))
    weight, bias = least_squares(x, y)
    for depth in range(2):
        inputs, change = x[depth].double().numpy(), (y - x[depth]).double().numpy()
        penalty = RIDGE * (inputs.var(0) * len(inputs)).mean()
        truth = Ridge(alpha=penalty).fit(inputs, change)
        torch.testing.assert_close(
            weight[depth] - torch.eye(5), torch.tensor(truth.coef_.T).float(), atol=1e-5, rtol=1e-4
        )
        torch.testing.assert_close(
            bias[depth], torch.tensor(truth.intercept_).float(), atol=1e-5, rtol=1e-4
        )


def test_a_tuned_lens_reads_more(model: TransformerBridge) -> None:
    """Catches: maps of another depth, steps that raise the KL, a last depth that moves."""
    rows = tokens(40, 20)
    got = fit(model, rows, seeded(), steps=20, together=256)
    assert (got.kl <= got.kl_start).all()
    assert (got.kl[:-1] < got.kl_start[:-1]).all()
    width = model.cfg.d_model
    assert torch.equal(got.weight[-1], torch.eye(width))
    assert not got.bias[-1].any()
    at = torch.arange(1, 20).expand(40, -1)
    behaviour = CleanCorrupt(rows, rows, at, torch.zeros_like(at))
    plain, after = lens(model, behaviour), lens(model, behaviour, got.translate)
    torch.testing.assert_close(after.kl.mean(1), got.kl, atol=1e-4, rtol=1e-3)
    assert (after.kl.mean(1)[:-1] < plain.kl.mean(1)[:-1]).all()
    again = fit(model, rows, seeded(), steps=20, together=256)
    assert torch.equal(again.weight, got.weight)


def test_each_depth_starts_where_it_reads_better(
    gpt2: TransformerBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a lens that reads less than the logit lens on the rows it was fitted to."""
    rows = tokens(20, 12)
    at = torch.arange(1, 12).expand(20, -1)
    plain = lens(gpt2, CleanCorrupt(rows, rows, at, torch.zeros_like(at))).kl.mean(1)
    near = fit(gpt2, rows, seeded(), steps=0)
    assert (near.kl[:-1] < plain[:-1]).all()

    def wild_at_one(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = least_squares(x, y)
        weight[1] *= -1
        return weight, bias

    monkeypatch.setattr(tuned, "least_squares", wild_at_one)
    got = fit(gpt2, rows, seeded(), steps=0)
    assert torch.equal(got.weight[1], torch.eye(32))
    assert torch.equal(got.weight[[0, 2]], near.weight[[0, 2]])
    torch.testing.assert_close(got.kl_start[1], plain[1], atol=1e-4, rtol=1e-4)


def test_some_positions_can_be_fitted_alone(gpt2: TransformerBridge) -> None:
    """Catches: positions of other rows. What is fitted is what the lens reads there."""
    rows = tokens(30, 12)
    at = torch.stack([torch.randperm(12, generator=seeded(i))[:4] for i in range(30)])
    got = fit(gpt2, rows, seeded(), steps=3, at=at)
    behaviour = CleanCorrupt(rows, rows, at, torch.zeros_like(at))
    read = lens(gpt2, behaviour, got.translate).kl.mean(1)
    torch.testing.assert_close(read, got.kl, atol=1e-4, rtol=1e-3)


def test_steps_that_hurt_are_not_taken(gpt2: TransformerBridge) -> None:
    rows = tokens(20, 12)
    start = fit(gpt2, rows, seeded(), steps=0)
    wild = fit(gpt2, rows, seeded(), steps=1, rate=10.0)
    assert torch.equal(wild.weight, start.weight)
    assert torch.equal(wild.kl, start.kl_start)


def test_layers_that_write_nothing_have_nothing_to_translate(wired: TransformerBridge) -> None:
    rows = copying(wired, 16, 11, seeded()).clean
    got = fit(wired, rows, seeded(), steps=2)
    width = wired.cfg.d_model
    torch.testing.assert_close(got.weight[2], torch.eye(width), atol=1e-5, rtol=0)
    assert got.kl[2] < 1e-6
    behaviour = copying(wired, 4, 11, seeded(1))
    assert lens(wired, behaviour).kl[2].max() < 1e-5
    assert lens(wired, behaviour, got.translate).kl[2].max() < 1e-5


def test_too_few_rows_for_a_tuned_lens(gpt2: TransformerBridge) -> None:
    with pytest.raises(IclError, match="at least 32 positions"):
        fit(gpt2, tokens(2, 9), seeded())
    with pytest.raises(IclError, match="together"):
        fit(gpt2, tokens(9, 9), seeded(), together=0)
