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
from iclutils.chapters.gradient_descent.descent import descend, predictor, spectrum
from iclutils.chapters.gradient_descent.one_step import (
    gaussian_preconditioner,
    one_step_optimum,
    preconditioner,
)
from iclutils.chapters.gradient_descent.tuning import tune
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


def test_plus_lowers_the_condition() -> None:
    xs = contexts(500, pairs=30).xs
    values = spectrum(xs, [0.1, 0.2])
    condition = (values[..., -1] / values[..., 0]).median(-1).values
    assert condition[1] < 0.5 * condition[0]
    assert condition[2] < 0.7 * condition[1]


# One step ----------------------------------------------------------------------------------------


def test_the_papers_one_step() -> None:
    """U(-1/2, 1/2), d = N = 10: the numbers that the released code holds or that follow by hand."""
    found = one_step_optimum(10, 10, 1 / 12, 1 / 80)
    assert found.rate == pytest.approx(6.0606, abs=1e-4)
    assert found.loss == pytest.approx(0.2062, abs=1e-4)
    assert found.zero == pytest.approx(10 / 24)
    assert one_step_optimum(1, 1, 1.0, 1.0) == (1.0, 0.0, 0.5)  # x = ±1: one pair tells all
    assert one_step_optimum(7, 5, 1.0, 3.0).rate == pytest.approx(5 / (5 + 7 + 1))


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_the_best_rate_by_sampling(noise: float) -> None:
    task = Task(4, noise, inputs="laplace")
    xs, ys, _ = sample(task, 200_000, 7, torch.Generator().manual_seed(0))
    unit = predictor([1.0])(xs, ys)
    rate = float((unit * ys[:, -1]).mean() / unit.square().mean())
    found = one_step_optimum(4, 6, 1.0, 6.0, noise)
    assert found.rate == pytest.approx(rate, rel=0.02)
    assert found.loss == pytest.approx(loss(found.rate * unit, ys), rel=0.02)
    assert found.zero == pytest.approx(loss(0 * unit, ys), rel=0.02)


def three_points(fourths: list[float]) -> list[list[tuple[float, float]]]:
    """Laws of variance 1 on (-a, 0, a) with these fourth moments, as (value, probability)."""
    return [[(-sqrt(m), 0.5 / m), (0.0, 1 - 1 / m), (sqrt(m), 0.5 / m)] for m in fourths]


def expected_loss(
    matrix: torch.Tensor,
    fourths: list[float],
    root: torch.Tensor,
    prior: torch.Tensor,
    noise: float,
    pairs: int = 2,
) -> torch.Tensor:
    """Of one step with this matrix, summed over every set of inputs root @ z, z on three points."""
    covariance = root @ root.T
    points = list(product(*three_points(fourths)))
    values = np.array([[value for value, _ in point] for point in points])
    x = torch.from_numpy(values) @ root.T
    chance = torch.from_numpy(np.array([np.prod([p for _, p in point]) for point in points]))
    total = torch.zeros(()).double()
    for chosen in product(range(len(points)), repeat=pairs):
        rows = x[list(chosen)]
        moment = rows.T @ rows / pairs
        miss = matrix @ moment - torch.eye(len(root)).double()
        spread = miss @ prior @ miss.T + noise**2 / pairs * matrix @ moment @ matrix.T
        total = total + chance[list(chosen)].prod() * (covariance @ spread).trace()
    return (total + noise**2) / 2


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("case", ["independent", "prior", "gaussian", "gaussian, prior"])
def test_the_best_matrix_has_the_least_loss(case: str, noise: float) -> None:
    """Exactly, for laws on few points; normal inputs share all moments up to 5 with three points.

    At the optimum the gradient is 0, and the loss is a parabola, so this is the minimum.
    """
    prior = torch.eye(2).double()
    if "prior" in case:
        prior = torch.tensor([[1.5, 0.4], [0.4, 0.7]], dtype=torch.float64)
    given = prior if "prior" in case else None
    if "gaussian" in case:
        fourths, root = [3.0, 3.0], torch.tensor([[0.8, 0.0], [0.5, 1.3]], dtype=torch.float64)
        found = gaussian_preconditioner(root @ root.T, 2, given, noise)
    else:
        fourths, scales = [1.2, 4.0], torch.tensor([0.7, 1.4]).double()
        root = scales.diag()
        found = preconditioner(
            scales.square(), torch.tensor(fourths, dtype=torch.float64) * scales**4, 2, given, noise
        )
    law = (fourths, root, prior, noise)
    matrix = found.matrix.clone().requires_grad_()
    value = expected_loss(matrix, *law)
    assert value.item() == pytest.approx(found.loss, abs=1e-12)
    assert torch.autograd.grad(value, matrix)[0].abs().max() < 1e-10
    rate = torch.tensor(found.rate, dtype=torch.float64).requires_grad_()
    value = expected_loss(rate * torch.eye(2).double(), *law)
    assert value.item() == pytest.approx(found.rate_loss, abs=1e-12)
    assert abs(float(torch.autograd.grad(value, rate)[0])) < 1e-10
    zero = expected_loss(torch.zeros(2, 2).double(), *law)
    assert float(zero) == pytest.approx(found.zero, abs=1e-12)
    assert found.loss < found.rate_loss - 1e-3 < found.zero


def test_known_special_cases() -> None:
    variances = torch.tensor([0.3, 1.0, 2.5])
    normal = preconditioner(variances, 3 * variances.square(), 8)
    same = gaussian_preconditioner(variances.diag(), 8)
    torch.testing.assert_close(normal, same)
    theorem = torch.linalg.inv(9 / 8 * variances.diag() + variances.sum() / 8 * torch.eye(3))
    torch.testing.assert_close(same.matrix, theorem.double(), atol=1e-6, rtol=1e-6)
    even = preconditioner(torch.full((5,), 1 / 12), torch.full((5,), 1 / 80), 7, noise=0.2)
    one = one_step_optimum(5, 7, 1 / 12, 1 / 80, noise=0.2)
    torch.testing.assert_close(even.matrix, one.rate * torch.eye(5).double(), rtol=1e-6, atol=1e-6)
    assert (even.rate, even.loss, even.zero) == pytest.approx(one, rel=1e-6)


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
    found = tune(steps, drawn.xs, drawn.ys, plus)
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
    found = tune(2, drawn.xs, drawn.ys, plus, shared)
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
    found = tune(2, xs, (xs @ weights)[..., 0], shared=False)
    assert found.loss < 1e-12
    torch.testing.assert_close(
        found.rates.sort().values, torch.tensor([0.5, 1.0]).double(), atol=1e-6, rtol=0
    )


def test_more_freedom_is_no_worse() -> None:
    drawn = contexts(500)
    table = {
        (steps, plus, shared): tune(steps, drawn.xs, drawn.ys, plus, shared).loss
        for steps, plus, shared in product((1, 3), (False, True), (False, True))
    }
    assert table[1, True, True] == pytest.approx(table[1, False, False], rel=1e-9)
    assert table[3, True, False] < table[3, True, True] < table[3, False, True] < table[1, True, 1]
    assert table[3, True, False] < table[3, False, False] < table[3, False, True]


def test_bad_input_of_descent() -> None:
    xs, ys = some(0, (3, 6, 4), (3, 6))
    cases = [
        (lambda: descend(xs, ys[:, :5], [0.1]), "Need xs of"),
        (lambda: descend(xs, ys[:2], [0.1]), "Need xs of"),
        (lambda: descend(xs, ys[..., None, None], [0.1]), "Need xs of"),
        (lambda: descend(xs[:, :1], ys[:, :1], [0.1]), "at least one pair"),
        (lambda: descend(xs[..., :0], ys, [0.1]), "at least one pair"),
        (lambda: descend(xs, ys, [0.1, 0.2], [0.1]), "a gamma for each"),
        (lambda: descend(xs, ys, [inf]), "finite"),
        (lambda: descend(xs, ys, [0.1], start=xs[0]), "W_0 must be 1 x 4"),
        (lambda: spectrum(xs, [nan]), "finite"),
    ]
    for value in (nan, inf):
        spoilt = xs.clone()
        spoilt[0, 2, 1] = value
        cases.append((lambda spoilt=spoilt: descend(spoilt, ys, [0.1]), "must be finite"))
        cases.append((lambda spoilt=spoilt: descend(xs, spoilt[..., 1], [0.1]), "must be finite"))
    for call, message in cases:
        with pytest.raises(IclError, match=message):
            call()


def test_bad_input_of_one_step() -> None:
    ones, eye = torch.ones(3), torch.eye(3)
    cases = [
        (lambda: one_step_optimum(0, 3, 1.0, 1.0), "dimension"),
        (lambda: one_step_optimum(3, 0, 1.0, 1.0), "pair"),
        (lambda: one_step_optimum(3, 3, 1.0, 0.5), "fourth moments"),
        (lambda: one_step_optimum(3, 3, -1.0, 1.0), "above 0"),
        (lambda: one_step_optimum(3, 3, 1.0, nan), "finite"),
        (lambda: one_step_optimum(3, 3, 1.0, 1.0, -1.0), "noise"),
        (lambda: preconditioner(ones, ones[:2], 3), "fourth moment for each"),
        (lambda: preconditioner(ones, ones, 3, eye[:2, :2]), "must be 3 x 3"),
        (lambda: preconditioner(ones, ones, 3, -eye), "positive definite"),
        (lambda: gaussian_preconditioner(eye + 2 * eye[[1, 0, 2]], 3), "positive definite"),
        (lambda: gaussian_preconditioner(eye.triu() + eye[[1, 2, 0]], 3), "symmetric"),
    ]
    for call, message in cases:
        with pytest.raises(IclError, match=message):
            call()


def test_bad_input_of_tuning() -> None:
    xs, ys = some(0, (30, 6, 4), (30, 6))
    unlabelled = ys.clone()
    unlabelled[3, -1] = nan
    against = torch.cat([ys[:, :-1], -predictor([1.0])(xs, ys)[:, None]], -1)
    cases = [
        (lambda: tune(0, xs, ys), "at least one step"),
        (lambda: tune(6, xs, ys, True, False), "at most 5 steps"),
        (lambda: tune(1, xs, unlabelled), "labels of the queries"),
        (lambda: tune(1, xs * 0, ys), "All inputs are zero"),
        (lambda: tune(1, xs, against), "does harm"),
        (lambda: tune(1, xs, ys[:, :3]), "Need xs of"),
    ]
    for call, message in cases:
        with pytest.raises(IclError, match=message):
            call()
