"""Distances: closed forms, scikit-learn's fits, learners by hand, and what must be refused."""

from functools import partial
from statistics import fmean, stdev

import pytest
import torch
from jaxtyping import TypeCheckError
from random_layers import normal, seeded
from sklearn.linear_model import LinearRegression
from torch.testing import assert_close

from iclutils.chapters.ridge_ols import distances
from iclutils.chapters.ridge_ols.algorithms import gd, knn, ols, ridge
from iclutils.errors import IclError
from iclutils.tasks.regression import Contexts, Task, sample


def some(dim=4, pairs=7, count=30, noise=0.0):
    return sample(Task(dim, noise), count, pairs, seeded())


def test_spd_by_hand_and_with_ensemble():
    first, second = normal(3, 20, 5, seed=1), normal(20, 5, seed=2)
    found = distances.spd(first, second, 4)
    for m in range(3):
        for n in range(5):
            values = [float(first[m, b, n] - second[b, n]) ** 2 / 4 for b in range(20)]
            assert float(found.mean[m, n]) == pytest.approx(fmean(values))
            assert float(found.error[m, n]) == pytest.approx(stdev(values) / 20**0.5)
    assert distances.spd(first[:, :1], second[:1], 4).error.isnan().all()
    assert_close(distances.spd(first[1], second, 4).error, found.error[1])


def test_mspd_is_the_mean_of_spd_below_d():
    first, second = normal(2, 25, 9, seed=1), normal(25, 9, seed=2)
    curve = distances.spd(first, second, 5).mean
    found = distances.squared_distance(first, second, 5)
    assert_close(found.mean(-1), curve[:, 1:5].mean(-1))
    assert_close(found[1], ((first - second)[1, :, 1:5] ** 2 / 5).mean(-1))
    assert_close(distances.squared_distance(first, second, 5, slice(0, 9)).mean(-1), curve.mean(-1))


@pytest.mark.parametrize("pairs", [0, 2, 4, 7])
def test_implicit_weights_of_a_linear_algorithm_are_its_own(pairs):
    task, queries = some(pairs=8), normal(30, 12, 4, seed=3).float()
    cut = Contexts(task.xs[:, :pairs], task.ys[:, :pairs], task.weights)
    known = [(ols, {}), (ridge, {"penalty": 0.3}), (gd, {"rate": 0.02})]
    for algorithm, settings in known:
        fit = distances.implicit_weights(partial(algorithm, **settings), cut, queries)
        expected = algorithm.weights(task.xs, task.ys, **settings)[:, pairs]
        assert_close(fit.weights, expected, atol=1e-6, rtol=1e-6)
        assert float(fit.r2) == pytest.approx(1) if pairs else bool(fit.r2.isnan())


def test_implicit_weights_are_scikit_learns_fit():
    task, queries = some(count=6), normal(6, 20, 4, seed=3).float()
    neighbours = partial(knn, k=2)
    fit = distances.implicit_weights(neighbours, task, queries)
    missed = 0.0
    wanted = torch.zeros(6, 20).double()
    for b in range(6):
        for q in range(20):
            xs = torch.cat([task.xs[b], queries[b, q, None]])
            wanted[b, q] = neighbours(xs, torch.cat([task.ys[b], torch.zeros(1)]))[-1]
        x, y = queries[b].double().numpy(), wanted[b].numpy()
        line = LinearRegression(fit_intercept=False).fit(x, y)
        assert_close(fit.weights[b], torch.from_numpy(line.coef_))
        missed += float(((y - line.predict(x)) ** 2).sum())
    total = float((wanted - wanted.mean(1, keepdim=True)).square().sum())
    assert float(fit.r2) == pytest.approx(1 - missed / total)
    assert fit.r2 < 0.9  # k-NN is not linear in the query


def test_the_nearest_baseline():
    task = some(dim=5, pairs=8, count=100)
    known = {str(p): ridge(task.xs, task.ys, p) for p in (0.0, 0.25, 1.0, 4.0)}
    networks = torch.stack([known["0.25"] + 0.01, ridge(task.xs, task.ys, 1.1)])
    found = distances.nearest(networks, known, 5)
    assert found.winners == ["0.25", "1.0"]
    for i, row in enumerate(known.values()):
        assert_close(found.distances[:, i], distances.squared_distance(networks, row, 5).mean(-1))
    in_groups = found.in_groups(4)  # of 25 contexts
    assert in_groups.shape == (2, 4)
    assert int(in_groups[1, 3]) == int(found.by_context[1, :, 75:].mean(-1).argmin())
    alone = distances.nearest(networks[1], known, 5, slice(3, 8))
    assert alone.winners == ["1.0"]
    expected = distances.squared_distance(networks[1], known["4.0"], 5, slice(3, 8)).mean(-1)
    assert_close(alone.distances[3], expected)


def test_predictions_for_other_contexts_or_without_a_value_are_refused():
    first = normal(2, 25, 9, seed=1)
    for other in (first[0, :1], first[0, :, :1]):  # tensors that broadcast
        # At night the check of shapes, which speaks of the batch, comes first.
        with pytest.raises((IclError, TypeCheckError), match=r"the same contexts|batch"):
            distances.spd(first, other, 5)
    with pytest.raises(IclError, match="NaN or infinite"):
        distances.squared_distance(first, first[0] / 0, 5)
