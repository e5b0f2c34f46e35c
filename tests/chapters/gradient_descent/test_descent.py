"""Descent in context: autograd, token loops, exact expectations over discrete laws, searches."""

from __future__ import annotations

from itertools import product
from math import inf, nan, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from iclutils import IclError
from iclutils.chapters.gradient_descent.descent import (
    best_step,
    descend,
    predictor,
    spectrum,
    tune,
)
from iclutils.tasks.regression import Contexts, Task, sample

PAPER = Task(10, inputs="uniform*1+-0.5")
shapes = given(
    seed=st.integers(0, 10_000),
    dim=st.integers(1, 6),
    pairs=st.integers(1, 9),
    outputs=st.integers(1, 3),
    steps=st.integers(0, 5),
    started=st.booleans(),
)


def some(seed: int, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=source, dtype=torch.float64) for size in sizes]


def contexts(count: int, seed: int = 0, pairs: int = 10) -> Contexts:
    drawn = sample(PAPER, count, pairs + 1, torch.Generator().manual_seed(seed))
    return Contexts(*(part.double() for part in drawn))


def loss(found: torch.Tensor, ys: torch.Tensor) -> float:
    return float(0.5 * (found - ys[..., -1]).square().mean())


@settings(max_examples=25, deadline=None)
@shapes
def test_gradient_descent_is_autograds(
    seed: int, dim: int, pairs: int, outputs: int, steps: int, started: bool
) -> None:
    """The loss as it is defined, and its gradient; a wrong sign, N or W_0 would show."""
    xs, ys, start = some(seed, (4, pairs + 1, dim), (4, pairs + 1, outputs), (outputs, dim))
    rates = torch.linspace(0.1, 0.4, steps).double()
    found = descend(xs, ys, rates, start=start if started else None)
    weights = (start * started).expand(4, outputs, dim).clone().requires_grad_()
    for k in range(steps + 1):
        answer = torch.einsum("bod,bd->bo", weights, xs[:, -1])
        torch.testing.assert_close(found.weights[k], weights.detach(), atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(found.predictions[k], answer, atol=1e-10, rtol=1e-10)
        if k < steps:
            errors = torch.einsum("bod,bnd->bno", weights, xs[:, :-1]) - ys[:, :-1]
            gradient = torch.autograd.grad(errors.square().sum() / (2 * pairs), weights)[0]
            weights = (weights - rates[k] * gradient).detach().requires_grad_()


def by_tokens(
    xs: np.ndarray, ys: np.ndarray, rates: list[float], gammas: list[float], start: np.ndarray
) -> np.ndarray:
    """GD++ of one context, token by token: all of a step reads the tokens before it."""
    x = [row.copy() for row in xs]
    y = [row.copy() for row in ys]
    count = len(x) - 1
    y[-1] = -start @ x[-1]
    answers = [-y[-1]]
    for rate, gamma in zip(rates, gammas, strict=True):
        new_x, new_y = [], []
        for j in range(count + 1):
            shift, squeeze = np.zeros_like(y[0]), np.zeros_like(x[0])
            for i in range(count):
                near = x[i] @ x[j]
                shift += rate / count * (start @ x[i] - y[i]) * near
                squeeze += gamma * x[i] * near
            new_x.append(x[j] - squeeze)
            new_y.append(y[j] + shift)
        x, y = new_x, new_y
        answers.append(-y[-1])
    return np.array(answers)


@settings(max_examples=25, deadline=None)
@shapes
def test_plus_is_a_loop_over_tokens(
    seed: int, dim: int, pairs: int, outputs: int, steps: int, started: bool
) -> None:
    xs, ys, start = some(seed, (2, pairs + 1, dim), (2, pairs + 1, outputs), (outputs, dim))
    rates, gammas = [0.3, 0.2, 0.1, 0.4, 0.2][:steps], [0.02, 0.05, 0.01, -0.02, 0.03][:steps]
    start = start * started
    found = descend(xs, ys, rates, gammas, start).predictions
    for b in range(2):
        expected = by_tokens(xs[b].numpy(), ys[b].numpy(), rates, gammas, start.numpy())
        np.testing.assert_allclose(found[:, b], expected, rtol=1e-10, atol=1e-10)


def test_plus_gives_weights_and_gd_where_gamma_is_zero() -> None:
    xs, ys = some(0, (3, 5, 7, 4), (3, 5, 7))
    rates, gammas = [0.3, 0.2, 0.4], [0.02, 0.03, 0.01]
    plain, plus = descend(xs, ys, rates), descend(xs, ys, rates, gammas)
    assert plain.predictions.shape == (4, 3, 5)
    assert plain.weights.shape == (4, 3, 5, 1, 4)
    torch.testing.assert_close(plain, descend(xs, ys, rates, [0.0] * 3))
    torch.testing.assert_close(plain.predictions[:2], plus.predictions[:2])  # γ acts a step later
    assert (plain.predictions[2] - plus.predictions[2]).abs().max() > 1e-2
    query = xs[..., -1, :].clone().requires_grad_()
    moved = torch.cat([xs[..., :-1, :], query[..., None, :]], -2)
    slope = torch.autograd.grad(descend(moved, ys, rates, gammas).predictions[-1].sum(), query)[0]
    torch.testing.assert_close(slope, plus.weights[-1, ..., 0, :], atol=1e-12, rtol=1e-12)
    several = descend(xs, ys[..., None].expand(-1, -1, -1, 2), rates, gammas).predictions
    torch.testing.assert_close(several, plus.predictions[..., None].expand(-1, -1, -1, 2))
    torch.testing.assert_close(predictor(rates, gammas)(xs, ys), plus.predictions[-1])


def test_a_start_that_fits_survives_gd_but_not_plus() -> None:
    """What is said of W_0 and GD++: later errors are W_0 x_i - y_i with x_i as it is by then."""
    xs, start = some(1, (5, 9, 3), (1, 3))
    ys = (xs @ start.T)[..., 0]
    rates, gammas = [0.2, 0.2], [0.03, 0.03]
    kept = descend(xs, ys, rates, start=start).predictions
    torch.testing.assert_close(kept, ys[:, -1].expand(3, -1))
    spoilt = descend(xs, ys, rates, gammas, start).predictions
    torch.testing.assert_close(spoilt[1], ys[:, -1])
    assert (spoilt[2] - ys[:, -1]).abs().max() > 0.01
    left = descend(xs, ys - (xs @ start.T)[..., 0], rates, gammas).predictions
    assert not left.any()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), dim=st.integers(1, 5), pairs=st.integers(1, 8))
def test_order_axes_and_the_querys_label_do_not_matter(seed: int, dim: int, pairs: int) -> None:
    xs, ys, normal = some(seed, (3, pairs + 1, dim), (3, pairs + 1), (dim, dim))
    rates, gammas = [0.2, 0.3], [0.02, 0.01]
    expected = descend(xs, ys, rates, gammas).predictions
    order = [*torch.randperm(pairs, generator=torch.Generator().manual_seed(seed)), pairs]
    turn = torch.linalg.qr(normal).Q
    torch.testing.assert_close(
        descend(xs[:, order], ys[:, order], rates, gammas).predictions, expected
    )
    torch.testing.assert_close(descend(xs @ turn, ys, rates, gammas).predictions, expected)
    ys[:, -1] = nan
    assert torch.equal(descend(xs, ys, rates, gammas).predictions, expected)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), dim=st.integers(1, 6), pairs=st.integers(1, 9))
def test_spectrum_is_that_of_the_tokens(seed: int, dim: int, pairs: int) -> None:
    xs, gammas = some(seed, (3, pairs + 1, dim))[0], [0.02, 0.1, -0.01]
    found = spectrum(xs, gammas)
    for b in range(3):
        x = xs[b, :-1].numpy()
        for k in range(4):
            values = np.linalg.eigvalsh(x.T @ x / pairs)
            np.testing.assert_allclose(found[k, b], values, rtol=1e-8, atol=1e-10)
            if k < 3:
                x = x - gammas[k] * x @ (x.T @ x)


# One step ----------------------------------------------------------------------------------------


def test_the_papers_one_step() -> None:
    """U(-1/2, 1/2), d = N = 10: the numbers that the released code holds or that follow by hand."""
    found = best_step(10, 10, 1 / 12, 1 / 80)
    assert found.rate == pytest.approx(6.0606, abs=1e-4)
    assert (found.rate_loss, found.loss) == pytest.approx((0.2062, 0.2062), abs=1e-4)
    assert found.zero_loss == pytest.approx(10 / 24)
    assert best_step(1, 1, 1.0, 1.0)[1:] == (0.0, 1.0, 0.0, 0.5)  # x = ±1: one pair tells all
    assert best_step(7, 5, 1.0, 3.0).rate == pytest.approx(5 / (5 + 7 + 1))


def test_normal_inputs_have_the_matrix_of_the_theorem() -> None:
    """((1 + 1/N) S + tr(S)/N I)⁻¹ (Ahn et al. 2023, theorem 1; Zhang et al. 2024)."""
    s = torch.tensor([0.3, 1.0, 2.5]).double()
    theorem = torch.linalg.inv(9 / 8 * s.diag() + s.sum() / 8 * torch.eye(3))
    torch.testing.assert_close(best_step(3, 8, s, 3 * s.square()).matrix, theorem)


def three_points(fourths: list[float]) -> list[list[tuple[float, float]]]:
    """Laws of variance 1 on (-a, 0, a) with these fourth moments, as (value, probability)."""
    return [[(-sqrt(m), 0.5 / m), (0.0, 1 - 1 / m), (sqrt(m), 0.5 / m)] for m in fourths]


def expected_loss(
    matrix: torch.Tensor, fourths: list[float], scales: torch.Tensor, noise: float, pairs: int = 2
) -> torch.Tensor:
    """Of one step with this matrix, summed over every set of inputs scales * z."""
    points = list(product(*three_points(fourths)))
    values = np.array([[value for value, _ in point] for point in points])
    x = torch.from_numpy(values) * scales
    chance = torch.from_numpy(np.array([np.prod([p for _, p in point]) for point in points]))
    covariance, total = scales.square().diag(), torch.zeros(()).double()
    for chosen in product(range(len(points)), repeat=pairs):
        rows = x[list(chosen)]
        moment = rows.T @ rows / pairs
        miss = matrix @ moment - torch.eye(len(scales)).double()
        spread = miss @ miss.T + noise**2 / pairs * matrix @ moment @ matrix.T
        total = total + chance[list(chosen)].prod() * (covariance @ spread).trace()
    return (total + noise**2) / 2


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_best_matrix_has_the_least_loss(noise: float) -> None:
    """Exactly, for laws on few points. The loss is a parabola: its gradient is 0 at the minimum."""
    fourths, scales = [1.2, 4.0], torch.tensor([0.7, 1.4]).double()
    moments = torch.tensor(fourths).double() * scales**4
    found = best_step(2, 2, scales.square(), moments, noise)
    matrix = found.matrix.clone().requires_grad_()
    value = expected_loss(matrix, fourths, scales, noise)
    assert value.item() == pytest.approx(found.loss, rel=1e-6)
    assert torch.autograd.grad(value, matrix)[0].abs().max() < 1e-6
    rate = torch.tensor(found.rate, dtype=torch.float64).requires_grad_()
    value = expected_loss(rate * torch.eye(2).double(), fourths, scales, noise)
    assert value.item() == pytest.approx(found.rate_loss, rel=1e-6)
    assert abs(float(torch.autograd.grad(value, rate)[0])) < 1e-6
    zero = expected_loss(torch.zeros(2, 2).double(), fourths, scales, noise)
    assert float(zero) == pytest.approx(found.zero_loss, rel=1e-6)
    assert found.loss < found.rate_loss - 1e-3 < found.zero_loss


# Tuning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "plus", "expected", "rate", "gamma"),
    [
        (1, False, 0.2061, 6.08, None),
        (2, False, 0.1567, 5.97, None),
        (5, False, 0.1079, 5.63, None),
        (2, True, 0.111, 13.4, 0.175),
        (5, True, 0.051, 31.5, 0.207),
    ],
)
def test_tuned_as_measured_before(
    steps: int, plus: bool, expected: float, rate: float, gamma: float | None
) -> None:
    """By another program on 20 000 contexts; here fewer, so to a few per cent."""
    drawn = contexts(3000)
    found = tune(steps, drawn.xs, drawn.ys, plus)[-1]
    assert found.loss == pytest.approx(expected, rel=0.06)
    assert found.rates.tolist() == pytest.approx([rate] * steps, rel=0.04)
    if gamma:
        assert found.gammas is not None
        assert found.gammas.tolist() == pytest.approx([gamma] * steps, rel=0.06)
    used = descend(drawn.xs, drawn.ys, found.rates, found.gammas).predictions[-1]
    assert loss(used, drawn.ys) == pytest.approx(found.loss, abs=1e-10)


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_search_without_gradients_finds_nothing_better(plus: bool, shared: bool) -> None:
    """Nelder-Mead on the explicit descent, from the settings found and from below them."""
    drawn = contexts(300)
    found = tune(2, drawn.xs, drawn.ys, plus, shared)[-1]
    free = 1 if shared else 2

    def value(point: np.ndarray) -> float:
        rates = [*point[:free].tolist()] * (2 // free)
        gammas = [*point[free:].tolist(), 0.0] if plus else None
        return loss(descend(drawn.xs, drawn.ys, rates, gammas).predictions[-1], drawn.ys)

    best = found.rates[:free].tolist() + ([] if found.gammas is None else [float(found.gammas[0])])
    assert value(np.array(best)) == pytest.approx(found.loss, rel=1e-9)
    for share in (1.0, 0.8):
        searched = minimize(value, share * np.array(best), method="Nelder-Mead")
        assert searched.fun > found.loss * (1 - 1e-7)


def test_rates_of_their_own_are_one_over_the_eigenvalues() -> None:
    """Two axes, of lengths that all contexts share: two steps can be exact."""
    turn = torch.linalg.qr(some(0, (200, 2, 2))[0]).Q
    pairs = turn @ torch.tensor([2.0, 4.0]).double().sqrt().diag() @ turn.mT
    query, weights = some(1, (200, 1, 2), (200, 2, 1))
    xs = torch.cat([pairs, query], 1)  # eigenvalues of the mean of xxᵀ: 1 and 2
    found = tune(2, xs, (xs @ weights)[..., 0], shared=False)[-1]
    assert found.loss < 1e-12
    torch.testing.assert_close(
        found.rates.sort().values, torch.tensor([0.5, 1.0]).double(), atol=1e-6, rtol=0
    )


def test_more_freedom_is_no_worse() -> None:
    drawn = contexts(500)
    table = {
        (found.rates.numel(), plus, shared): found.loss
        for plus, shared in product((False, True), (False, True))
        for found in tune(3, drawn.xs, drawn.ys, plus, shared)
    }
    assert table[1, True, True] == pytest.approx(table[1, False, False], rel=1e-9)
    assert table[3, True, False] < table[3, True, True] < table[3, False, True] < table[1, True, 1]
    assert table[3, True, False] < table[3, False, False] < table[3, False, True]


XS, YS = some(0, (30, 6, 4), (30, 6))
SPOILT = torch.full_like(YS, nan)
HARMED = torch.cat([YS[:, :-1], -predictor([1.0])(XS, YS)[:, None]], -1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: descend(XS, YS[:, :5], [0.1]), "Need xs of"),
        (lambda: descend(XS, YS[..., None, None], [0.1]), "Need xs of"),
        (lambda: descend(XS[:, :1], YS[:, :1], [0.1]), "at least one pair"),
        (lambda: descend(XS, YS, [0.1, 0.2], [0.1]), "a gamma for each"),
        (lambda: descend(XS, YS, [inf]), "finite"),
        (lambda: descend(XS, SPOILT, [0.1]), "must be finite"),
        (lambda: best_step(3, 0, 1.0, 1.0), "at least 1 pair"),
        (lambda: best_step(3, 3, 1.0, 0.5), "fourth moments"),
        (lambda: tune(6, XS, YS, True, False), "at most 5 steps"),
        (lambda: tune(1, XS, torch.cat([YS[:, :-1], SPOILT[:, -1:]], 1)), "labels of the queries"),
        (lambda: tune(1, XS, HARMED), "does harm"),
    ],
)
def test_bad_input(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IclError, match=message):
        call()
