"""Descent in context: autograd, token loops, exact expectations over discrete laws, searches."""

from itertools import product
from math import nan, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded, some
from scipy.optimize import minimize
from torch.testing import assert_close

from iclutils.chapters.gradient_step.descent import (
    best_rates,
    best_step,
    descend,
    predictor,
    tune,
    tune_each,
)
from iclutils.tasks.regression import Contexts, Task, sample

seeds = st.integers(0, 10_000)
shapes = given(seed=seeds, dim=st.integers(1, 6), pairs=st.integers(1, 9), steps=st.integers(0, 5))


def contexts(count):
    task = Task(10, inputs="uniform*1+-0.5")
    drawn = sample(task, count, 11, seeded(0))
    return Contexts(*(part.double() for part in drawn))


def loss(found, ys):
    return float(0.5 * (found - ys[..., -1]).square().mean())


@settings(max_examples=25)
@shapes
def test_gradient_descent_is_autograds(seed, dim, pairs, steps):
    """The loss as it is defined, and its gradient; a wrong sign or N would show."""
    xs, ys = some(seed, (4, pairs + 1, dim), (4, pairs + 1))
    rates = torch.linspace(0.1, 0.4, steps).double()
    found = descend(xs, ys, rates)
    weights = torch.zeros(4, dim).double().requires_grad_()
    for k in range(steps + 1):
        assert_close(found.weights[k], weights.detach(), atol=1e-10, rtol=1e-10)
        answer = (weights * xs[:, -1]).sum(-1)
        assert_close(found.predictions[k], answer, atol=1e-10, rtol=1e-10)
        if k < steps:
            errors = torch.einsum("bd,bnd->bn", weights, xs[:, :-1]) - ys[:, :-1]
            gradient = torch.autograd.grad(errors.square().sum() / (2 * pairs), weights)[0]
            weights = (weights - rates[k] * gradient).detach().requires_grad_()


def by_tokens(xs, ys, rates, gammas):
    """GD++ of one context, token by token: all of a step reads the tokens before it."""
    x, y = list(xs), [*ys[:-1], 0.0]
    count, answers = len(x) - 1, [0.0]
    for rate, gamma in zip(rates, gammas, strict=True):
        near = np.array([[x[i] @ x[j] for i in range(count)] for j in range(count + 1)])
        y = [y[j] - rate / count * near[j] @ np.array(y[:count]) for j in range(count + 1)]
        x = [x[j] - gamma * near[j] @ np.array(x[:count]) for j in range(count + 1)]
        answers.append(-y[-1])
    return np.array(answers)


@settings(max_examples=25)
@shapes
def test_plus_is_a_loop_over_tokens(seed, dim, pairs, steps):
    xs, ys = some(seed, (2, pairs + 1, dim), (2, pairs + 1))
    rates, gammas = [0.3, 0.2, 0.1, 0.4, 0.2][:steps], [0.02, 0.05, 0.01, -0.02, 0.03][:steps]
    ys[:, -1] = nan  # not read
    found = descend(xs, ys, rates, gammas)
    for b in range(2):
        expected = by_tokens(xs[b].numpy(), ys[b].numpy(), rates, gammas)
        np.testing.assert_allclose(found.predictions[:, b], expected, rtol=1e-10, atol=1e-10)
    assert_close(found.predictions, (found.weights * xs[:, -1]).sum(-1))
    assert_close(predictor(rates, gammas)(xs, ys), found.predictions[-1])


def test_one_step_as_published():
    """U(-1/2, 1/2), d = N = 10, as the released code has it; and normal inputs: ((1 + 1/N) S +
    tr(S)/N I)⁻¹ (Ahn et al. 2023, theorem 1; Zhang et al. 2024)."""
    assert best_step(10, 10, 1 / 12, 1 / 80)[1:] == pytest.approx((6.0606, 0.2062), abs=1e-4)
    assert best_step(1, 1, 1.0, 1.0)[1:] == (1.0, 0.0)  # x = ±1: one pair tells all
    s = torch.tensor([0.3, 1.0, 2.5]).double()
    theorem = torch.linalg.inv(9 / 8 * s.diag() + s.sum() / 8 * torch.eye(3))
    assert_close(best_step(3, 8, s, 3 * s.square()).matrix, theorem)


def expected_loss(matrix, fourths, scales, pairs=2):
    """Of one step, summed over all inputs: laws of variance 1 on (-a, 0, a), times the scales."""
    laws = [[(-sqrt(m), 0.5 / m), (0.0, 1 - 1 / m), (sqrt(m), 0.5 / m)] for m in fourths]
    points = np.array(list(product(*laws)))
    x, chance = torch.from_numpy(points[..., 0]) * scales, points[..., 1].prod(-1)
    total = torch.zeros(()).double()
    for chosen in product(range(len(points)), repeat=pairs):
        rows = x[list(chosen)]
        miss = matrix @ rows.T @ rows / pairs - torch.eye(len(scales)).double()
        total += chance[list(chosen)].prod() * (scales.square().diag() @ miss @ miss.T).trace()
    return total / 2


def test_the_best_matrix_has_the_least_loss():
    """Exactly, for laws on few points. The loss is a parabola: its gradient is 0 at the minimum."""
    fourths, scales = [1.2, 4.0], torch.tensor([0.7, 1.4]).double()
    found = best_step(2, 2, scales.square(), torch.tensor(fourths).double() * scales**4)
    matrix = found.matrix.clone().requires_grad_()
    least = expected_loss(matrix, fourths, scales)
    assert torch.autograd.grad(least, matrix)[0].abs().max() < 1e-6
    rate = torch.tensor(found.rate, dtype=torch.float64).requires_grad_()
    value = expected_loss(rate * torch.eye(2).double(), fourths, scales)
    assert value.item() == pytest.approx(found.rate_loss, rel=1e-6)
    assert abs(float(torch.autograd.grad(value, rate)[0])) < 1e-6
    assert least < found.rate_loss - 1e-3


@pytest.mark.parametrize("plus", [False, True])
def test_a_search_without_gradients_finds_nothing_better(plus):
    """Nelder-Mead on the explicit descent, from the settings found and from below them."""
    drawn = contexts(300)
    found = tune(2, drawn.xs, drawn.ys, plus)[-1]

    def value(point):
        gammas = [point[1]] * 2 if plus else None
        return loss(predictor([point[0]] * 2, gammas)(drawn.xs, drawn.ys), drawn.ys)

    best = found.rates[:1].tolist() + ([] if found.gammas is None else [float(found.gammas[0])])
    assert value(np.array(best)) == pytest.approx(found.loss, rel=1e-9)
    for share in (1.0, 0.8):
        searched = minimize(value, share * np.array(best), method="Nelder-Mead")
        assert searched.fun > found.loss * (1 - 1e-7)


def test_settings_of_each_step_lose_less_and_their_loss_is_that_of_the_explicit_descent():
    drawn = contexts(300)
    found, shared = tune_each(2, drawn.xs, drawn.ys), tune(2, drawn.xs, drawn.ys, plus=True)[-1]

    def value(point):
        gammas = [point[2], float(found.gammas[1])]  # the last one changes no answer
        return loss(predictor(point[:2], gammas)(drawn.xs, drawn.ys), drawn.ys)

    best = np.array([*found.rates.tolist(), float(found.gammas[0])])
    assert value(best) == pytest.approx(found.loss, rel=1e-9)
    assert found.loss < 0.99 * shared.loss
    assert minimize(value, 0.9 * best, method="Nelder-Mead").fun > found.loss * (1 - 1e-6)


def left_of_w(xs, rates):
    """The expected loss over w and the query: every axis in turn as w, by explicit descent."""
    axes = torch.eye(xs.shape[-1]).to(xs)[:, None]  # (d, 1, d)
    left = descend(xs.expand(len(axes), *xs.shape), xs.movedim(-1, 0), rates).weights[-1] - axes
    return float(left.square().sum((0, 2)).mean()) / 24  # half, and inputs of variance 1/12


def test_one_rate_is_that_of_the_closed_form():
    """Exactly, on all contexts of three pairs of signs; and nearly, on contexts that were drawn."""
    signs = torch.tensor(list(product([-1.0, 1.0], repeat=6))).double().unflatten(1, (3, 2))
    contexts_of_signs = torch.cat([signs, torch.ones(64, 1, 2)], 1)
    assert best_rates(1, contexts_of_signs).tolist() == pytest.approx([best_step(2, 3, 1, 1).rate])
    drawn = best_rates(1, contexts(20_000).xs)
    assert drawn.tolist() == pytest.approx([best_step(10, 10, 1 / 12, 1 / 80).rate], rel=0.01)


def test_as_many_steps_as_axes_leave_nothing():
    """Of one context: each step has the rate that ends the error along one axis."""
    xs = contexts(1).xs[..., :4]
    values = torch.linalg.eigvalsh(xs[0, :-1].mT @ xs[0, :-1] / 10)
    found = best_rates(4, xs)
    assert_close(found, (1 / values).flip(0), rtol=1e-6, atol=0)
    assert left_of_w(xs, found) < 1e-20


@pytest.mark.parametrize("steps", [2, 5])
def test_no_search_finds_better_rates(steps):
    """By explicit descent, from the rates found and from near the best single rate."""
    drawn = contexts(300)
    found, single = best_rates(steps, drawn.xs), tune(steps, drawn.xs, drawn.ys)[-1].rates
    least = left_of_w(drawn.xs, found)
    assert least < 0.95 * left_of_w(drawn.xs, single)
    assert left_of_w(drawn.xs, found.flip(0)) == pytest.approx(least)
    apart = single * torch.linspace(0.8, 1.2, steps).double()  # equal rates are a saddle
    for start in (found, apart):
        searched = minimize(lambda point: left_of_w(drawn.xs, np.exp(point)), start.log().numpy())
        assert searched.fun == pytest.approx(least, rel=1e-5)
        assert searched.fun > least * (1 - 1e-9)
