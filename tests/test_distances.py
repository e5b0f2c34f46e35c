"""Distances: closed forms, scikit-learn's fits, learners by hand, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import nan

import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from iclutils import IclError
from iclutils.chapters.regression import distances
from iclutils.chapters.regression.algorithms import (
    Linear,
    gd_weights,
    knn,
    ols,
    ols_weights,
    predictions,
    ridge,
    ridge_weights,
)
from iclutils.chapters.regression.distances import (
    ask,
    ask_queries,
    ilwd,
    implicit_weights,
    mspd,
    nearest,
    released_r2,
    spd,
    spread,
    under_determined,
)
from iclutils.models.regressors import Learners, Shape
from iclutils.tasks.regression import Contexts, Task, orthogonal, quadrants, sample, seen


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=source(seed), dtype=torch.float64)


def some(dim: int = 4, pairs: int = 7, count: int = 30, noise: float = 0.0) -> Contexts:
    return sample(Task(dim, noise), count, pairs, source())


def members(dim: int = 4, pairs: int = 7) -> Learners:
    return Learners(Shape(dim, pairs, "one", layers=1, width=16, heads=2), [0, 1])


def test_spread_by_hand() -> None:
    found = spread(torch.tensor([[1.0, 2.0, 6.0, 7.0]]).double())
    assert found.mean.tolist() == [4]
    assert found.error.tolist() == [pytest.approx((26 / 3) ** 0.5 / 2)]
    assert found.median.tolist() == [4]
    assert spread(torch.ones(1, 1)).error.isnan().all()


def test_spd_by_hand_and_with_members() -> None:
    first, second = normal(3, 20, 5, seed=1), normal(20, 5, seed=2)
    found = spd(first, second, 4)
    assert found.mean.shape == (3, 5)
    for m in range(3):
        for n in range(5):
            values = [float(first[m, b, n] - second[b, n]) ** 2 / 4 for b in range(20)]
            assert float(found.mean[m, n]) == pytest.approx(sum(values) / 20)
            assert float(found.median[m, n]) == pytest.approx(sum(sorted(values)[9:11]) / 2)
    torch.testing.assert_close(spd(second, first, 4).mean, found.mean)  # a distance: symmetric
    torch.testing.assert_close(spd(first[1], second, 4).error, found.error[1])
    assert not bool(spd(first, first, 4).mean.any())


def test_mspd_is_the_mean_of_spd_below_d() -> None:
    first, second = normal(2, 25, 9, seed=1), normal(25, 9, seed=2)
    curve, found = spd(first, second, 5).mean, mspd(first, second, 5)
    torch.testing.assert_close(found.mean, curve[:, 1:5].mean(-1))
    each = ((first - second)[1, :, 1:5] ** 2 / 5).mean(-1)
    assert float(found.error[1]) == pytest.approx(float(each.std()) / 5)
    whole = mspd(first, second, 5, slice(0, 9))
    torch.testing.assert_close(whole.mean, curve.mean(-1))
    assert under_determined(5) == slice(1, 5)


def test_ols_and_the_truth_are_a_known_distance_apart() -> None:
    """E(OLS - y)² / d = 1 - n/d without noise; and OLS to ridge by the spectrum of X."""
    task = some(dim=6, pairs=8, count=20_000)
    found = spd(ols(task.xs, task.ys), task.ys.double(), 6)
    expected = (1 - torch.arange(8).double() / 6).clamp(min=0)
    assert bool(((found.mean - expected).abs() <= 5 * found.error + 1e-9).all())
    gap = mspd(ols(task.xs, task.ys), ridge(task.xs, task.ys, 0.5), 6, slice(3, 4))
    # for X = U diag(s) Vᵀ the weights differ by V diag(λ / (s² + λ)) Vᵀ w, and w ~ N(0, I)
    spectrum = torch.linalg.svdvals(task.xs[:, :3].double()).square()
    expected = (0.5 / (spectrum + 0.5)).square().sum(-1).mean() / 6
    assert abs(float(gap.mean - expected)) < 5 * float(gap.error)


def test_noise_makes_the_mean_useless_and_not_the_median() -> None:
    """At n = d the mean over half of the contexts need not be near that over the others."""
    task = some(dim=4, pairs=6, count=40_000, noise=0.5)
    gap = spd(ols(task.xs, task.ys), ridge(task.xs, task.ys, 0.25), 4)
    assert float(gap.mean[4]) > 20 * float(gap.median[4])
    halves = [
        spd(ols(task.xs[rows], task.ys[rows]), ridge(task.xs[rows], task.ys[rows], 0.25), 4).median
        for rows in (slice(0, 20_000), slice(20_000, None))
    ]
    torch.testing.assert_close(halves[0], halves[1], rtol=0.12, atol=1e-9)


@pytest.mark.parametrize("pairs", [0, 2, 4, 7])
def test_implicit_weights_of_a_linear_algorithm_are_its_own(pairs: int) -> None:
    task = some(pairs=8)
    for weights in (
        ols_weights,
        partial(ridge_weights, penalty=0.3),
        partial(gd_weights, rate=0.02),
    ):
        queries = normal(30, 12, 4, seed=3).float()
        cut = Contexts(task.xs[:, :pairs], task.ys[:, :pairs], task.weights)
        fit = implicit_weights(Linear(weights), cut, queries, at_once=7)
        torch.testing.assert_close(
            fit.weights, weights(task.xs, task.ys)[:, pairs], atol=1e-6, rtol=1e-6
        )
        assert fit.residual.max() < 1e-10
        assert float(fit.r2) == pytest.approx(1) if pairs else bool(fit.r2.isnan())


@pytest.mark.parametrize("intercept", [False, True])
def test_implicit_weights_are_scikit_learns_fit(intercept: bool) -> None:
    task, queries = some(count=6), normal(6, 20, 4, seed=3).float()
    neighbours = partial(knn, k=2)
    fit = implicit_weights(neighbours, task, queries, intercept, at_once=4)
    residual, total = 0.0, 0.0
    for b in range(6):
        wanted = []
        for query in queries[b]:
            xs = torch.cat([task.xs[b], query[None]])
            wanted.append(float(neighbours(xs, torch.cat([task.ys[b], torch.zeros(1)]))[-1]))
        x, y = queries[b].double().numpy(), torch.tensor(wanted).double().numpy()
        line = LinearRegression(fit_intercept=intercept).fit(x, y)
        torch.testing.assert_close(fit.weights[b], torch.from_numpy(line.coef_))
        score = r2_score(y, line.predict(x))
        assert float(1 - fit.residual[b] / fit.total[b]) == pytest.approx(score)
        residual += float(((y - line.predict(x)) ** 2).sum())
        total += float(((y - y.mean()) ** 2).sum())
    assert float(fit.r2) == pytest.approx(1 - residual / total)
    assert fit.r2 < 0.9  # k-NN is not linear in the query


def test_implicit_weights_of_learners() -> None:
    """Members side by side are what they are one by one; predictions asked for one by one."""
    model, task, queries = members(), some(pairs=5, count=3), normal(3, 9, 4, seed=3).float()
    fit = implicit_weights(model, task, queries, at_once=2)
    assert fit.weights.shape == (2, 3, 4)
    assert fit.r2.shape == (2,)
    wanted = torch.zeros(2, 3, 9).double()
    for b in range(3):
        for q in range(9):
            xs = torch.cat([task.xs[b], queries[b, q, None]])[None, None]
            ys = torch.cat([task.ys[b], torch.full((1,), 99.0)])[None, None]  # not to be read
            wanted[:, b, q] = model(xs, ys)[:, 0, -1].double().detach()
    expected = torch.linalg.lstsq(queries.double().expand(2, 3, 9, 4), wanted[..., None]).solution
    torch.testing.assert_close(fit.weights, expected[..., 0], atol=1e-5, rtol=1e-4)


def test_released_r2_is_about_the_labels() -> None:
    labels, found = normal(5, 9, seed=1), normal(5, 9, seed=2)
    expected = r2_score(labels.flatten().numpy(), found.flatten().numpy())
    assert released_r2(found, labels) == pytest.approx(expected)
    # A learner that is linear, and wrong: perfect by our R², bad by the released one.
    task, queries = some(dim=4, pairs=2, count=200), normal(200, 16, 4, seed=5).float()
    fit = implicit_weights(Linear(ols_weights), task, queries)
    assert float(fit.r2) == pytest.approx(1)
    truth = torch.einsum("bqd,bd->bq", queries, task.weights).double()
    learnt = torch.einsum("bqd,bd->bq", queries.double(), fit.weights)
    assert released_r2(learnt, truth) == pytest.approx(0.5, abs=0.1)  # n/d of the variance


def test_ilwd_by_hand_and_its_scale() -> None:
    first, second = normal(3, 20, 4, seed=1), normal(20, 4, seed=2)
    found = ilwd(first, second)
    each = (first - second).square().sum(-1) / 4
    torch.testing.assert_close(found.mean, each.mean(-1))
    torch.testing.assert_close(found.median, each.quantile(0.5, -1))
    # With x ~ N(0, I), ILWD is the expected SPD
    task = some(dim=4, pairs=4, count=20_000)
    one, two = ols_weights(task.xs, task.ys), ridge_weights(task.xs, task.ys, 0.5)
    gap = spd(predictions(one, task.xs), predictions(two, task.xs), 4)
    assert abs(float(ilwd(one[:, 3], two[:, 3]).mean - gap.mean[3])) < 5 * float(gap.error[3])


@pytest.mark.parametrize("make", [orthogonal, lambda c: seen(c, source(1)),
                                  lambda c: quadrants(c, source(1), "opposite")])  # fmt: skip
def test_queries_of_their_own(make: Callable) -> None:
    """The shortcut for weights and the long way, prefix by prefix, agree; so do learners."""
    queried = make(some())
    for penalty in (0.0, 0.5):
        plain = Linear(partial(ridge_weights, penalty=penalty))
        slow = ask_queries(lambda xs, ys, plain=plain: plain(xs, ys), queried)
        torch.testing.assert_close(ask_queries(plain, queried), slow, atol=1e-5, rtol=1e-5)
    model = members()
    found = ask_queries(model, queried)
    for n in range(found.shape[-1]):
        xs, ys, _ = queried.at(n)
        expected = model(xs[None], ys[None])[..., -1].double().detach()
        torch.testing.assert_close(found[..., n], expected, atol=1e-6, rtol=1e-5)


def test_what_ols_says_to_shifted_queries() -> None:
    """Nothing to an orthogonal query; to one that it has seen, the label."""
    task = some(dim=4, pairs=4)
    assert ask_queries(Linear(ols_weights), orthogonal(task)).abs().max() < 1e-4
    again = seen(task, source(2))
    found = ask_queries(Linear(ols_weights), again)[:, 1:]
    torch.testing.assert_close(found, again.answers[:, 1:].double(), atol=1e-3, rtol=1e-3)


def test_the_nearest_of_a_bank() -> None:
    task = some(dim=5, pairs=8, count=100)
    bank = {str(p): ridge(task.xs, task.ys, p) for p in (0.0, 0.25, 1.0, 4.0)}
    learners = torch.stack([bank["0.25"] + 0.01, ridge(task.xs, task.ys, 1.1)])
    for statistic in ("mean", "median"):
        found = nearest(learners, bank, 5, source(), statistic=statistic, resamples=50)
        assert found.winners == ["0.25", "1.0"]
        assert found.share.sum(-1).tolist() == [1, 1]
        assert found.share[0].tolist() == [0, 1, 0, 0]
    found = nearest(learners, bank, 5, source(), resamples=5)
    for i, row in enumerate(bank.values()):
        torch.testing.assert_close(found.distances[:, i], mspd(learners, row, 5).mean)
    alone = nearest(learners[1], bank, 5, source(), region=slice(3, 8), resamples=5)
    assert alone.winners == ["1.0"]
    expected = mspd(learners[1], bank["4.0"], 5, slice(3, 8)).mean
    torch.testing.assert_close(alone.distances[3], expected)


def test_the_share_tells_how_sure_the_winner_is() -> None:
    """Two algorithms at the same distance: the better in sample wins about as often as the odds."""
    truth = torch.zeros(400, 6).double()
    bank = {"a": normal(400, 6, seed=1), "b": normal(400, 6, seed=2)}
    found = nearest(truth, bank, 4, source(), resamples=2000)
    each = [row[:, 1:4].square().mean(-1) / 4 for row in bank.values()]
    gap = each[1] - each[0]
    odds = torch.special.ndtr(gap.mean() / (gap.std() / 20))
    assert float(found.share[0]) == pytest.approx(float(odds), abs=0.04)


def test_wrong_tables_are_refused() -> None:
    table = normal(10, 6)
    for other in (normal(9, 6), normal(10, 5)):
        with pytest.raises(IclError, match="same contexts"):
            spd(table, other, 4)
    spoilt = table.clone()
    spoilt[3, 2] = nan
    for one, two in ((table, spoilt), (spoilt, table)):
        with pytest.raises(IclError, match="NaN"):
            spd(one, two, 4)
        with pytest.raises(IclError, match="NaN"):
            ilwd(one, two)
    for region in (slice(1, 7), slice(3, 3), slice(-2, 4)):
        with pytest.raises(IclError, match="not covered"):
            mspd(table, table, 4, region)
    with pytest.raises(IclError, match="not covered"):
        mspd(table, table, 8)
    with pytest.raises(IclError, match="single pair"):
        mspd(table, table, 1)
    with pytest.raises(IclError, match="at least one algorithm"):
        nearest(table, {}, 4, source())
    with pytest.raises(IclError, match="statistic"):
        nearest(table, {"a": table}, 4, source(), statistic="mode")
    with pytest.raises(IclError, match="one resample"):
        nearest(table, {"a": table}, 4, source(), resamples=0)


def test_wrong_contexts_are_refused() -> None:
    task, queries = some(), normal(30, 9, 4).float()
    model = members(pairs=7)
    with pytest.raises(IclError, match="7 pairs"):  # seven pairs and the query are eight
        implicit_weights(model, task, queries)
    with pytest.raises(IclError, match="dimension"):
        ask(model, task.xs[..., :3], task.ys)
    with pytest.raises(IclError, match="needs more queries"):
        implicit_weights(Linear(ols_weights), task, queries[:, :4])
    with pytest.raises(IclError, match="needs more queries"):
        implicit_weights(Linear(ols_weights), task, queries[:, :5], intercept=True)
    with pytest.raises(IclError, match="Need contexts"):
        implicit_weights(Linear(ols_weights), task, queries[:20])
    with pytest.raises(IclError, match="at least one at once"):
        implicit_weights(Linear(ols_weights), task, queries, at_once=-1)
    with pytest.raises(IclError, match="one prediction for each"):
        ask(lambda xs, ys: ys[..., :-1], task.xs, task.ys)
    with pytest.raises(IclError, match="NaN"):
        ask(lambda xs, ys: ys * nan, task.xs, task.ys)


def test_together_has_the_members_of_all() -> None:
    nets = [Learners(Shape(2, 4, "one", 1, 8, 2), seeds) for seeds in ([0, 1], [2])]
    drawn = sample(Task(2), 5, 4, torch.Generator().manual_seed(0))
    found = distances.ask(distances.together([*nets, ols]), drawn.xs, drawn.ys)
    assert found.shape == (4, 5, 4)
    torch.testing.assert_close(found[2], distances.ask(nets[1], drawn.xs, drawn.ys)[0])
    torch.testing.assert_close(found[3], ols(drawn.xs, drawn.ys))


def test_a_margin_is_the_difference_of_two_distances_context_by_context() -> None:
    source = torch.Generator().manual_seed(3)
    learner, near, far = torch.randn(3, 50, 6, generator=source, dtype=torch.float64)
    found = distances.margin(learner, near, far, 4, slice(1, 4))
    gap = ((learner - far) ** 2 - (learner - near) ** 2)[:, 1:4].mean(1) / 4
    assert found.mean.item() == pytest.approx(gap.mean().item())
    assert found.error.item() == pytest.approx((gap.std() / 50**0.5).item())
    both = [distances.mspd(learner, g, 4, slice(1, 4)).mean for g in (far, near)]
    assert found.mean.item() == pytest.approx((both[0] - both[1]).item())
