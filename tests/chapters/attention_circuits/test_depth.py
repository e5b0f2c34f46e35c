"""Depth: lenses against the model's own modules, centres of gravity in closed form, tuned maps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from scipy.special import log_softmax, rel_entr
from tiny import tokens

from iclutils.chapters.attention_circuits.depth import (
    RIDGE,
    by_layer,
    fit_tuned_lens,
    gravity,
    least_squares,
    lens_by_depth,
    probe,
    residual_stream,
)
from iclutils.interp.clean_corrupt import CleanCorrupt
from iclutils.interp.graph import Node, head


def some_task(choices=False):
    rows = tokens(3, 9)
    at = torch.tensor([[2, 5], [3, 8], [0, 5]])
    answer = torch.tensor([[4, 9], [9, 2], [7, 2]])
    among = torch.tensor([[4, 9, 30], [2, 9, 31], [7, 2, 32]]) if choices else None
    return CleanCorrupt(rows, rows.flip(0), at, answer, choices=among)


@pytest.mark.parametrize("choices", [False, True])
def test_the_lens_is_the_models_own_readout_of_each_depth(model, choices):
    """Catches: entries of other rows, KL the wrong way round."""
    task = some_task(choices)
    kl, score = lens_by_depth(model, task)
    with torch.no_grad():
        whole = model(task.clean).double().numpy()
    norm, table = model.ln_final, model.original_model.get_output_embeddings()
    for depth, resid in enumerate(residual_stream(model, task.clean)[1]):
        with torch.no_grad():
            seen = table(norm(resid)).double().numpy()
        for b in range(3):
            divergence, right = [], []
            for t, a in zip(task.at[b], task.answer[b], strict=True):
                final, here = (log_softmax(x[b, t]) for x in (whole, seen))
                divergence.append(rel_entr(np.exp(final), np.exp(here)).sum())
                if task.choices is not None:
                    pick = task.choices[b].numpy()
                    here = np.full_like(here, -np.inf)
                    here[pick] = log_softmax(seen[b, t, pick])
                right.append(here[a])
            assert kl[depth, b].item() == pytest.approx(np.mean(divergence), abs=1e-4, rel=1e-4)
            assert score[depth, b].item() == pytest.approx(np.mean(right), abs=1e-4)
    assert kl[-1].max() < 1e-5
    assert kl[0].min() > 1e-3


def test_effects_by_layer():
    nodes = [head(0, 0), head(0, 1), Node("mlp", 0), head(2, 0), Node("mlp", 2)]
    effects = torch.tensor([[1.0, 3.0], [-4.0, 0.0], [0.0, 0.0], [1.0, -1.0], [-1.0, -2.0]])
    got = by_layer(effects, nodes, 3)
    torch.testing.assert_close(got, torch.tensor([4.0, 0.0, 1.5]))
    assert gravity(got) == pytest.approx(2 * 1.5 / 5.5)
    assert math.isnan(gravity(torch.zeros(4)))


@settings(max_examples=25)
@given(st.lists(st.floats(0, 100, width=32), min_size=1, max_size=6), st.floats(0.5, 8, width=32))
def test_gravity_stays_among_the_layers(sizes, scale):
    values = torch.tensor(sizes, dtype=torch.float64)
    if not values.sum() > 1e-6:
        return
    assert 0 <= gravity(values) <= len(sizes) - 1 + 1e-9
    assert gravity(scale * values) == pytest.approx(gravity(values))
    assert gravity(values.flip(0)) == pytest.approx(len(sizes) - 1 - gravity(values))


def test_probes_find_what_was_put_there(gpt2):
    """Catches: positions mixed up, the training half scored, or a depth left out."""
    rows, at = tokens(300, 6), torch.arange(300) % 6
    start = residual_stream(gpt2, rows)[1][0][torch.arange(300), at]
    side = (start - start.mean(0)) @ torch.randn(start.shape[1], generator=seeded()) > 0
    by_chance = torch.randint(0, 2, (300,), generator=seeded())
    here, chance = probe(gpt2, rows, at, [side, by_chance])
    assert here.shape == (gpt2.cfg.n_layers + 1,)
    assert here[0] > 0.85
    assert 0.3 < chance[0] < 0.7


def test_least_squares_solves_the_normal_equations():
    """Catches: the penalty on the intercept or on the map itself instead of on its change."""
    x = torch.randn(2, 40, 5, generator=seeded()) * torch.tensor([1.0, 2.0, 0.1, 3.0, 1.0]) + 1
    y = torch.randn(40, 5, generator=seeded(1)) + x[1] @ torch.randn(5, 5, generator=seeded(2))
    weight, bias = least_squares(x, y)
    for depth in range(2):
        u, v = (z.double() - z.double().mean(0) for z in (x[depth], y - x[depth]))
        penalty = RIDGE * u.square().sum(0).mean() * torch.eye(5)
        truth = torch.linalg.solve(u.T @ u + penalty, u.T @ v).float()
        torch.testing.assert_close(weight[depth] - torch.eye(5), truth, atol=1e-5, rtol=1e-4)
        centre = y.mean(0) - x[depth].mean(0) @ weight[depth]
        torch.testing.assert_close(bias[depth], centre, atol=1e-5, rtol=1e-4)


def kl_of(model, rows, at, found):
    """Mean KL of a lens on the positions that it was fitted to."""
    task = CleanCorrupt(rows, rows, at, torch.zeros_like(at))
    return lens_by_depth(model, task, found and found.translate)[0].mean(1)


def test_a_tuned_lens_reads_more(model):
    """Catches: maps of another depth or row, steps that raise the KL, a last depth that moves."""
    rows = tokens(40, 20)
    at = torch.stack([torch.randperm(20, generator=seeded(i))[:15] for i in range(40)])
    plain = kl_of(model, rows, at, None)
    start = fit_tuned_lens(model, rows, at, seeded(), steps=0)
    found = fit_tuned_lens(model, rows, at, seeded(), steps=20, batch_size=256)
    levels = [kl_of(model, rows, at, each) for each in (found, start)]
    assert (levels[0][:-1] < levels[1][:-1]).all()
    assert (levels[1][:-1] < plain[:-1]).all()
    assert levels[0][-1] < 1e-5
    again = fit_tuned_lens(model, rows, at, seeded(), steps=20, batch_size=256)
    assert torch.equal(again.weight, found.weight)
