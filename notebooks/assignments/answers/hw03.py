"""Homework 3, on chapter 03: weighted ridge, least squares, a control, noise."""

import torch
from iclutils.chapters.ridge_ols import algorithms
from iclutils.models import regressors
from iclutils.tasks import regression
from iclutils.tasks.regression import Task
from torch.nn.functional import pad

from checks import SINGLE, Mistake, Part, generator, normal, shaped


def _pairs(seed):
    draw = generator(seed)
    n, d, penalty = (4 + seed, 6, 0.3) if seed % 2 else (9 + seed, 4, 2.5 + seed)
    weights = 0.2 + torch.rand(n, generator=draw, dtype=torch.float64)
    return normal(draw, n, d), normal(draw, n), weights, penalty, normal(draw, d)


def _prefixes(seed):
    draw, d = generator(seed), 3 + seed % 3
    return normal(draw, 3, 2 * d + 1, d), normal(draw, 3, 2 * d + 1)


def _labels(seed):
    return normal(generator(seed), 40, 5 + seed), generator(seed + 50)


def _is_control(drawn, ys):
    """Whether labels change places, all of them, at random; the query's stays."""
    count, n = len(ys), ys.shape[1] - 1

    def order(each):
        """Where each label was before, (context, place); single precision is enough."""
        found = shaped(each, count, n + 1).double()
        away = (found[:, :, None] - ys[:, None]).abs()
        if away[:, -1, -1].max() > SINGLE:
            raise Mistake("The last label is the query's: it stays.")
        was = away.argmin(-1)
        if away.amin(-1).max() > SINGLE or (was.sort(1).values != torch.arange(n + 1)).any():
            raise Mistake("Each context keeps its own labels, each of them once.")
        return was[:, :n]

    orders = [order(each) for each in drawn]
    if any((each == torch.arange(n)).any() for each in orders):
        raise Mistake("A label has stayed at its x.")
    if all((each == each[:1]).all() for each in orders):
        raise Mistake("All contexts have one order: draw it anew for each.")
    if any(len(each.unique()) < n - 1 for each in torch.cat(orders).T):
        raise Mistake("Some labels never come to some x: the order is not drawn at random.")


def _bent(seed):
    """A network that averages y x over the pairs; bent, and with an offset."""
    draw, d, n, bend = generator(seed), 3 + seed % 3, 4 + seed, 0.5 + 0.1 * seed

    def predict(seen, labels):
        pairs = torch.cumsum(labels[..., None] * seen, -2)
        before = torch.cat([torch.zeros_like(pairs[..., :1, :]), pairs[..., :-1, :]], -2)
        count = torch.arange(seen.shape[-2], dtype=torch.float64).clamp(min=1)
        straight = (before * seen).sum(-1) / count
        return straight + bend * straight.abs() + 0.4

    queries = normal(draw, 24 + seed, d) + 0.3
    return predict, normal(draw, n, d), 2 * normal(draw, n), queries


def _noisy(seed):
    draw, n = generator(seed), 3 + 2 * seed
    noise, prior = 0.4 + 0.2 * seed, (1.7, 0.6, 2.2)[seed % 3]
    noises = noise * (0.5 + torch.rand(n, generator=draw, dtype=torch.float64))
    return normal(draw, n, 4), normal(draw, n), noises, prior


def _query(seed):
    X, _, noise, prior = _noisy(seed)
    return X, normal(generator(seed + 100), 4), noise, prior, 0.7 + 0.1 * seed


def _made_up(seed):
    """Two learners that are nearly ridge for n < d, and another ridge beyond, to mislead who looks
    there."""
    draw, d, grid = generator(seed), 3, [6.5, 0.02, 25.0, 1.5, 0.4, 0.1, 100.0]
    xs, ys = normal(draw, 40, 7, d), normal(draw, 40, 7)
    learners = []
    for penalty in (grid[3 + seed % 3], grid[3 + (seed + 1) % 3]):
        found = algorithms.ridge(xs, ys, penalty) + 0.02 * normal(draw, 40, 7)
        found[:, d:] = algorithms.ridge(xs, ys, grid[2])[:, d:]
        learners.append(found)
    return *learners, xs, ys, grid


def _of_both(function, one, two, *given):
    return [function(one, *given), function(two, *given)]


q1 = (Part("weighted_ridge", inputs=_pairs),)
q2 = (Part("least_squares", inputs=_prefixes, tolerance=0.001),)
q3 = (Part("mispaired", _labels, draws=7, verdict=_is_control),)
q4 = (
    Part("implicit_weights", inputs=_bent, tolerance=1e-06),
    Part("linearity", inputs=_bent, tolerance=1e-06),
    Part("own_weights", tolerance=1e-3),
)
q5 = (
    Part("bayes_weights", inputs=_noisy, tolerance=1e-06),
    Part("expected_error", inputs=_query, tolerance=1e-06),
)
q6 = (
    Part("nearest_penalty", inputs=_made_up, tolerance=1e-09, outcome=_of_both),
    Part("kept", tolerance=0.11),
    Part("control", tolerance=0.014),
    Part(
        "reason",
        choices=(
            "The learner that was trained with noise reads the noise off the pairs in front of it, "
            "and uses the penalty that fits them.",
            "It keeps the penalty of its training, whatever the noise of the pairs at hand.",
            "Its penalty comes from too short a training; noise has nothing to do with it.",
            "Both learners have the same penalty, and differ in how well they apply it.",
        ),
    ),
)

# Students get what stands above this line, and nothing below it.


def weighted_ridge(X, y, weights, penalty, start):
    gram = X.T @ (weights[:, None] * X) + penalty * torch.eye(X.shape[1], dtype=X.dtype)
    return torch.linalg.solve(gram, X.T @ (weights * y) + penalty * start)


WEIGHTED_RIDGE = {
    "The guess w_0 is missing on the right.": " + penalty * start -> ",
    "Do not add w_0 to a fit of y: fit what w_0 leaves.": " + penalty * start) -> ) + start",
    "Where are the weights of the pairs?": "gram = -> weights = weights**0; gram =",
    "The weights enter as they are, not squared.": "gram = -> weights = weights**2; gram =",
    "The loss sums over the examples: with a mean the penalty is n times too strong.": (
        lambda X, y, a, c, w: weighted_ridge(X, y, a, len(X) * c, w)
    ),
}


def least_squares(xs, ys):
    found = torch.zeros_like(ys)
    for i in range(1, ys.shape[1]):
        w = torch.linalg.pinv(xs[:, :i]) @ ys[:, :i, None]
        found[:, i] = (xs[:, i : i + 1] @ w)[:, 0, 0]
    return found


LEAST_SQUARES = {
    "Entry i has seen its own label: fit the pairs *before* i.": (
        "(xs[:, :i]) @ ys[:, :i, None] -> (xs[:, : i + 1]) @ ys[:, : i + 1, None]"
    ),
    "Entry i leaves out the pair just before it: fit the pairs 0 .. i - 1.": (
        "(xs[:, :i]) @ ys[:, :i, None] -> (xs[:, : i - 1]) @ ys[:, : i - 1, None]"
    ),
    "Entry i may use the i pairs before it alone.": (
        "(xs[:, :i]) @ ys[:, :i, None] -> (xs) @ ys[..., None]"
    ),
    "With fewer pairs than dimensions many w fit: take the shortest, w = pinv(X) y.": (
        "range(1, ys.shape[1]) -> range(xs.shape[2], ys.shape[1])"
    ),
    "Entry 0 is missing: with no pair the answer is 0.": "return found -> return found[:, 1:]",
}


def mispaired(ys, generator):
    n, rows = ys.shape[1] - 1, []
    for y in ys:
        order = torch.randperm(n, generator=generator)
        while (order == torch.arange(n)).any():
            order = torch.randperm(n, generator=generator)
        rows.append(torch.cat([y[order], y[-1:]]))
    return torch.stack(rows)


MISPAIRED = {
    "A label has stayed at its x.": "(order == torch.arange(n)).any() -> False",
    "The last label is the query's": lambda ys, generator: ys.roll(1, 1),
    "Each context keeps its own labels": "[y[order], y[-1:]] -> [ys[0, order], y[-1:]]",
    "All contexts have one order": lambda ys, _: torch.cat([ys[:, :-1].roll(1, 1), ys[:, -1:]], 1),
    "Some labels never come to some x": ".any(): -> .any() or order[0] != 1:",
    "Take random numbers from": "generator=generator -> generator=None",
}


def implicit_weights(predict, xs, ys, queries, offset=False):
    return _fit(queries, _asked(predict, xs, ys, queries), offset)[0]


def linearity(predict, xs, ys, queries):
    wanted = _asked(predict, xs, ys, queries)
    missed = (wanted - _fit(queries, wanted)[1]).square().sum()
    return (1 - missed / (wanted - wanted.mean()).square().sum()).item()


def _asked(predict, xs, ys, queries):
    """The prediction for each query, after the same pairs."""
    many = len(queries)
    seen = torch.cat([xs.expand(many, -1, -1), queries[:, None]], 1)
    return predict(seen, pad(ys.expand(many, -1), (0, 1)))[:, -1]


def _fit(queries, wanted, offset=False):
    """Weights and fitted values."""
    design = pad(queries, (0, 1), value=1.0) if offset else queries
    w = torch.linalg.lstsq(design, wanted[:, None]).solution[:, 0]
    return w[: queries.shape[1]], design @ w


def _in_one_row(predict, xs, ys, queries):
    wanted = predict(torch.cat([xs, queries])[None], pad(ys, (0, len(queries)))[None])
    return _fit(queries, wanted[0, len(xs) :])[0]


IMPLICIT_WEIGHTS = {
    "That is a fit with an intercept: leave it out.": "offset)[0] -> True)[0]",
    "Fit what the learner *predicts* for the queries, not the labels of the pairs.": (
        lambda f, xs, ys, queries: torch.linalg.pinv(xs) @ ys
    ),
    "In one row, later queries see earlier ones as pairs: ask each alone.": _in_one_row,
}


LINEARITY = {
    "That is the share that the fit misses: R² is 1 minus it.": "(1 - missed / -> (missed /",
    "The variation is that about the mean of the predictions.": " - wanted.mean() -> ",
    "That fit has an intercept: leave it out.": "(queries, wanted) -> (queries, wanted, True)",
}


def own_weights(own):
    """The implicit weights of a student's learner, after this student's pairs."""
    learners, draw = regressors.load("regression-d8"), torch.Generator().manual_seed(own)
    seen = regression.sample(Task(8), 1, 5 + own % 3, draw)
    queries = torch.randn(200, 8, generator=draw, dtype=torch.float32).double()

    def predict(xs, ys):
        with torch.no_grad():
            return learners(xs.float(), ys.float())[own % 3].double()

    return implicit_weights(predict, seen.xs[0].double(), seen.ys[0].double(), queries)


OWN_WEIGHTS = {"`own_weights` have the wrong sign.": lambda w: -w}


def bayes_weights(X, y, noise, prior):
    return weighted_ridge(X, y, noise**-2, prior**-2, X.new_zeros(X.shape[1]))


def expected_error(X, x, noise, prior, new):
    precision = X.T @ (X / noise[:, None] ** 2) + torch.eye(len(x), dtype=X.dtype) / prior**2
    return (x @ torch.linalg.inv(precision) @ x + new**2).item()


BAYES_WEIGHTS = {
    "A weight is one over a variance, noise²: did you take noise?": "noise**-2 -> noise**-1",
    "A noisy pair counts less, not more.": "noise**-2 -> noise**2",
    "The prior is missing: the penalty is one over prior².": "prior**-2 -> 1.0",
    "Each pair has its own noise.": "noise**-2 -> noise.mean().expand_as(noise) ** -2",
}


EXPECTED_ERROR = {
    "The label that is predicted is noisy too: add new².": " + new**2 -> ",
    "That is the error before any pair.": "torch.linalg.inv(precision) @ x -> x * prior**2",
    "Each pair has its own noise.": "noise[:, None] -> noise.mean()",
    "The new label has a noise of its own, `new`.": "+ new**2 -> + noise.square().mean()",
}


def nearest_penalty(found, xs, ys, penalties):
    last = xs.shape[-1]
    away = [(found - algorithms.ridge(xs, ys, c))[:, 1:last].square().sum() for c in penalties]
    return penalties[int(torch.stack(away).argmin())]


# ``kept`` and ``control`` were measured for ten draws of 512 contexts, on a grid of factors
# sqrt(2): 1/4 in all ten, and 1/32 in nine with 1/22.6 in one. One step of the grid is allowed.
NEAREST_PENALTY = {
    "That is the penalty that is *farthest*.": "argmin -> argmax",
    "The mean runs over n = 1 .. d - 1 alone.": "xs.shape[-1] -> 99",
    "Return the penalty, not its place in the list.": "penalties[int( -> ([*range(99)])[int(",
}


kept = 1 / 4
KEPT = {
    "`kept` is too small: ask member 2 of regression-noise.": 0.07,
    "`kept` is too large, as that of member 3: ask member 2.": 0.5,
}


control = 1 / 32
CONTROL = {"`control` is that of regression-noise: ask regression-d8, member 0.": 0.25}


reason = "b"
REASON = {
    "These pairs have no noise: a learner that reads it off them would be like the control.": "a",
    "The control was trained as long, without noise; its penalty is several times smaller.": "c",
    "Look at where each of the two curves is lowest.": "d",
}
