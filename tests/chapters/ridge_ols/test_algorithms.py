"""Algorithms at every prefix: scikit-learn, closed forms, loops by hand, symmetries, edge cases."""

from functools import partial
from math import inf

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.neighbors import KNeighborsRegressor
from torch.testing import assert_close

from iclutils.chapters.ridge_ols import algorithms
from iclutils.tasks.regression import Task, relabel, sample


def data(seed, pairs, dim, count=3, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    place = {"generator": generator, "dtype": torch.float64}
    xs = torch.randn(count, pairs, dim, **place)
    ys = (xs @ torch.randn(count, dim, 1, **place))[..., 0]
    return xs, ys + noise * torch.randn(count, pairs, **place)


def by_fits(make, xs, ys):
    """One estimator of scikit-learn for each context and prefix."""
    found = torch.zeros_like(ys)
    for b in range(len(xs)):
        for n in range(1, xs.shape[1]):
            fitted = make(n).fit(xs[b, :n].numpy(), ys[b, :n].numpy())
            found[b, n] = fitted.predict(xs[b, n : n + 1].numpy())[0]
    return found


@pytest.mark.parametrize(("pairs", "dim"), [(40, 20), (17, 8), (5, 8), (1, 3), (12, 1)])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_least_squares_are_scikit_learns(pairs, dim, noise):
    xs, ys = data(pairs, pairs, dim, noise=noise)
    expected = by_fits(lambda n: LinearRegression(fit_intercept=False), xs, ys)
    assert_close(algorithms.ols(xs, ys), expected, atol=1e-8, rtol=1e-8)
    for penalty in (1e-6, 1 / 64, 0.5, 16.0):
        model = partial(Ridge, penalty, fit_intercept=False, solver="svd")
        expected = by_fits(lambda n, model=model: model(), xs, ys)
        assert_close(algorithms.ridge(xs, ys, penalty), expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda xs: xs.index_copy(1, torch.tensor([2, 5]), xs[:, [0, 0]]),  # repeated inputs
        lambda xs: xs.index_fill(1, torch.tensor([0, 3]), 0.0),  # inputs of zero
        lambda xs: xs.index_fill(2, torch.tensor([1, 4]), 0.0),  # coordinates of zero
        lambda xs: torch.cat([xs[:1], xs[1:] * 0], 0),  # one context is well
    ],
    ids=["repeated", "zero", "coordinates", "mixed"],
)
@pytest.mark.parametrize("pairs", [4, 10])
def test_singular_systems_have_the_min_norm_solution(spoil, pairs):
    xs, ys = data(3, max(pairs, 6), 6)
    xs, ys = spoil(xs)[:, :pairs], ys[:, :pairs]
    found = algorithms.ols_weights(xs, ys)
    for n in range(1, pairs):
        for b in range(3):
            expected = torch.from_numpy(
                np.linalg.lstsq(xs[b, :n].numpy(), ys[b, :n].numpy(), rcond=1e-12)[0]
            )
            assert_close(found[b, n], expected, atol=1e-8, rtol=1e-8)
    assert torch.equal(algorithms.ridge(xs, ys, 0.0), algorithms.ols(xs, ys))
    assert bool(torch.isfinite(algorithms.ridge(xs, ys, 1e-3)).all())


def test_rank_is_decided_at_the_precision_of_the_data():
    """Inputs of a subspace in float32 stick out of it by rounding, which must not be fitted."""
    plain = sample(Task(8, noise=0.5), 20, 16, torch.Generator().manual_seed(0))
    turn = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1))).Q
    half = relabel(plain, plain.xs @ turn[:, :4] @ turn[:, :4].T)
    found = algorithms.ols_weights(half.xs, half.ys)
    expected = (
        torch.linalg.pinv(half.xs[:, :15].double(), rtol=1e-4) @ half.ys[:, :15, None].double()
    )
    assert_close(found[:, 15], expected[..., 0], atol=1e-4, rtol=1e-4)
    assert found.dtype == torch.float64


def test_gradient_descent_by_autograd():
    xs, ys = data(0, 8, 3)
    rate = torch.linspace(0.01, 0.03, 8).double()
    for steps in (1, 2, 5):
        found = algorithms.gd_weights(xs, ys, rate, steps)
        for n in range(8):
            w = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
            for _ in range(steps):
                error = (xs[:, :n] @ w[..., None])[..., 0] - ys[:, :n]
                (slope,) = torch.autograd.grad(error.square().sum(), w)
                w = (w - rate[n] * slope).detach().requires_grad_()
            assert_close(found[:, n], w.detach())
    assert_close(
        algorithms.averaging_weights(xs, ys)[:, 7], algorithms.gd_weights(xs, ys, 1 / 14)[:, 7]
    )


def sgd_by_hand(xs, ys, rate, clip, growing):
    """One context, number by number; ``clip`` and ``growing`` prefixes: the released code's."""
    w = [0.0] * xs.shape[1]
    rows = [list(w)]
    for n in range(len(xs) - 1):
        slope = [0.0] * len(w)
        for i in range(0 if growing else n, n + 1):
            error = sum(a * b for a, b in zip(w, xs[i].tolist(), strict=True)) - float(ys[i])
            slope = [s + 2 * error * a for s, a in zip(slope, xs[i].tolist(), strict=True)]
        w = [v - rate * min(max(s, -clip), clip) for v, s in zip(w, slope, strict=True)]
        rows.append(list(w))
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("rate", [0.03, 0.3])
def test_stochastic_descent_by_hand(rate):
    xs, ys = data(2, 9, 3)
    for b in range(3):
        by_hand = sgd_by_hand(xs[b], ys[b], rate, inf, False)
        assert_close(algorithms.sgd_weights(xs[b], ys[b], rate), by_hand)


def test_a_tuned_rate_has_the_least_risk():
    """|w - w*|² over many tasks against rates around it, with and without noise."""
    for noise in (0.0, 1.5):
        task = sample(Task(4, noise), 100_000, 9, torch.Generator().manual_seed(0))
        unit = algorithms.gd_weights(task.xs, task.ys, 0.5)  # XᵀY
        truth = task.weights.double()[:, None]
        best = (unit * truth).sum(-1).mean(0) / unit.square().sum(-1).mean(0).clamp(min=1e-9)
        expected = 2 * algorithms.tuned_rate(9, 4, noise**2)
        assert_close(best[1:], expected[1:], rtol=0.02, atol=0)


@pytest.mark.parametrize(("k", "power"), [(1, 0.0), (3, 1.0), (5, 2.0), (50, 2.0)])
def test_neighbours_are_scikit_learns(k, power):
    def weigh(distance):
        return distance**-power

    xs, ys = data(1, 12, 3)
    expected = by_fits(lambda n: KNeighborsRegressor(min(k, n), weights=weigh), xs, ys)
    assert_close(algorithms.knn(xs, ys, k, power), expected)


def test_a_neighbour_at_the_query_decides():
    xs = torch.tensor([[0.0], [1.0], [0.0], [0.0], [5.0]]).double()
    ys = torch.tensor([1.0, 10.0, 3.0, 0.0, 0.0]).double()
    assert algorithms.knn(xs, ys, 3, 2.0)[2] == 1  # the pair at 0 alone
    assert algorithms.knn(xs, ys, 3, 1.0)[3] == 2  # the two pairs at 0, evenly
    assert algorithms.knn(xs, ys, 3, 0.0)[3] == pytest.approx(14 / 3)


def noiseless(pairs):
    task = sample(Task(8), 100, pairs, torch.Generator().manual_seed(0))
    return task.xs, task.ys


def gap(one, other):
    """Mean squared difference of the last answers, over d."""
    return float((one - other)[:, -1].square().mean()) / 8


def released(xs, ys, rate, growing, clip=20.0):
    """Answers of the released code's descents to every x."""
    pairs = zip(xs.double(), ys.double(), strict=True)
    rows = [sgd_by_hand(x, y, rate, clip, growing) for x, y in pairs]
    return algorithms.predictions(torch.stack(rows), xs)


def test_one_step_on_the_batch_is_not_a_pass_of_single_steps():
    xs, ys = noiseless(9)
    assert gap(algorithms.gd(xs, ys, 0.02), algorithms.sgd(xs, ys, 0.02)) > 0.01


def test_the_released_descents_are_not_those_of_the_paper():
    xs, ys = noiseless(17)
    growing = released(xs[:, :9], ys[:, :9], 0.02, True)
    assert gap(growing, algorithms.gd(xs[:, :9], ys[:, :9], 0.02)) > 0.01
    assert gap(released(xs, ys, 0.03, False), algorithms.sgd(xs, ys, 0.03)) > 0  # cut at 20
    assert gap(released(xs, ys, 0.03, False, inf), algorithms.sgd(xs, ys, 0.03)) < 1e-20


def test_the_released_neighbours_are_not_those_of_the_paper():
    xs, ys = noiseless(9)
    five, three = (algorithms.knn(xs, ys, k, power) for k, power in ((5, 1.0), (3, 2.0)))
    assert gap(five, three) > 0.01


def test_ten_steps_of_newton_do_what_1024_plain_steps_do():
    """Newton's method for the inverse of a Gram matrix squares what is left of it with each step
    (chapter 03). It starts with the matrix of one plain step."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 4, generator=draw).double(), torch.randn(6, generator=draw).double()
    gram, wanted = x.mT @ x, x.mT @ y
    rate = 0.2 / torch.linalg.matrix_norm(gram, 2)
    w, inverse = torch.zeros(4).double(), rate * torch.eye(4).double()
    for _ in range(1024):
        w = w + rate * (wanted - gram @ w)
    for _ in range(10):
        inverse = 2 * inverse - inverse @ gram @ inverse
    assert (inverse @ wanted - w).norm() < 1e-10 * w.norm()
    assert (torch.linalg.solve(gram, wanted) - w).norm() > 1e-4 * w.norm(), "not there yet"
