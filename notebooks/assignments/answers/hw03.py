"""Homework 3, on chapter 03: ridge, least squares, distances between predictors, noise."""

import torch
from iclutils.chapters.ridge_ols import algorithms
from torch import Tensor
from torch.nn.functional import pad

from checks import Mistake, Part, generator, normal


def _pairs(seed):
    draw = generator(seed)
    n, d, penalty = (4 + seed, 6, 0.3) if seed % 2 else (9 + seed, 4, 2.5 + seed)
    return normal(draw, n, d), normal(draw, n), penalty


FEW = (
    "With fewer pairs than dimensions many w fit and X^T X cannot be inverted. Take the "
    "shortest of them, w = pinv(X) y."
)


def _every_prefix(function, xs, ys):
    """The answers; that too few pairs have no inverse is said."""
    try:
        return function(xs, ys)
    except Mistake as mistake:
        if "LinAlgError" in str(mistake) or "singular" in str(mistake):
            raise Mistake(FEW) from mistake
        raise


def _few_pairs(found, truth):
    """The answers, unless they are wrong with few pairs alone; whatever entry 0 is."""
    if not isinstance(found, Tensor) or found.shape != truth.shape:
        return found
    d = truth.shape[1] // 2
    right = (found - truth).abs().amax(0) < 1e-3 * truth.abs().max().clamp(min=1)
    if right[d:].all() and not right[:d].all():
        raise Mistake("Before any pair the answer is 0." if right[1:].all() else FEW)
    return torch.cat([truth[:, :1].to(found), found[:, 1:]], 1)


def _prefixes(seed):
    draw, d = generator(seed), 3 + seed % 3
    return normal(draw, 3, 2 * d + 1, d), normal(draw, 3, 2 * d + 1)


def _predictions(seed):
    draw, d = generator(seed), 3 + seed % 4
    return normal(draw, 5 + seed, 2 * d + 1), normal(draw, 5 + seed, 2 * d + 1), d


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
    return normal(draw, n, 4), normal(draw, n), noise, prior


def _query(seed):
    X, _, noise, prior = _noisy(seed)
    return X, normal(generator(seed + 100), 4), noise, prior


def _made_up(seed):
    """Nearly ridge for n < d, and another ridge beyond, to mislead who looks there."""
    draw, d, grid = generator(seed), 3, [0.02, 0.1, 0.4, 1.5, 6.5]
    xs, ys = normal(draw, 40, 7, d), normal(draw, 40, 7)
    found = algorithms.ridge(xs, ys, grid[1 + seed % 3]) + 0.02 * normal(draw, 40, 7)
    found[:, d:] = algorithms.ridge(xs, ys, grid[-1])[:, d:]
    return found, xs, ys, grid


def _above_zero(value):
    if not value > 0:
        raise Mistake(f"A penalty is a number above 0; got {value!r}.")
    return value


q1 = (Part("ridge", inputs=_pairs),)
q2 = (
    Part(
        "least_squares", inputs=_prefixes, tolerance=0.001, outcome=_every_prefix, look=_few_pairs
    ),
)
q3 = (Part("spd", inputs=_predictions), Part("mspd", inputs=_predictions))
q4 = (
    Part("implicit_weights", inputs=_bent, tolerance=1e-06),
    Part("linearity", inputs=_bent, tolerance=1e-06),
)
q5 = (
    Part("bayes_weights", inputs=_noisy, tolerance=1e-06),
    Part("expected_error", inputs=_query, tolerance=1e-06),
)
q6 = (
    Part("nearest_penalty", inputs=_made_up, tolerance=1e-09),
    Part("kept", "number", tolerance=0.11, outcome=_above_zero),
    Part("control", "number", tolerance=0.014, outcome=_above_zero),
    Part("reason", "letter"),
)

# Students get what stands above this line, and nothing below it.


def ridge(X, y, penalty):
    """Weights of ridge regression."""
    eye = torch.eye(X.shape[1], dtype=X.dtype)
    return torch.linalg.solve(X.T @ X + penalty * eye, X.T @ y)


RIDGE = {
    "The penalty stands on the wrong side: it multiplies the identity, "
    "not the Gram matrix X^T X.": lambda X, y, c: ridge(X * c**0.5, y, 1.0) / c**0.5,
    "X^T X + penalty adds it to *every* entry: it belongs on the diagonal alone.": lambda X, y, c: (
        torch.linalg.pinv(X.T @ X + c) @ X.T @ y
    ),
    "The penalty has the wrong sign: it is added to X^T X.": lambda X, y, c: ridge(X, y, -c),
    "The loss sums over the examples. With a mean in its place, the penalty is n times too "
    "strong.": lambda X, y, c: ridge(X, y, len(X) * c),
    "The penalty is squared: it enters as it is.": lambda X, y, c: ridge(X, y, c**2),
    "That is least squares: where is the penalty?": lambda X, y, c: torch.linalg.pinv(X) @ y,
}


def least_squares(xs, ys, ahead=0, first=1):
    """Predictions of least squares after every prefix."""
    found = torch.zeros_like(ys)
    for i in range(first, ys.shape[1]):
        w = torch.linalg.pinv(xs[:, : i + ahead]) @ ys[:, : i + ahead, None]
        found[:, i] = (xs[:, i : i + 1] @ w)[:, 0, 0]
    return found


LEAST_SQUARES = {
    "Entry i has seen its own label: fit the pairs *before* i, xs[:, :i] and ys[:, :i].": {
        "ahead": 1
    },
    "Entry i leaves out the pair just before it: fit the pairs 0 .. i - 1.": {
        "ahead": -1,
        "first": 2,
    },
    "All entries use all the pairs: entry i may use the i pairs before it alone.": lambda xs, ys: (
        xs @ torch.linalg.pinv(xs) @ ys[..., None]
    )[..., 0],
    "Entry 0 is missing: with no pair the answer is 0.": lambda *a: least_squares(*a)[:, 1:],
}


def spd(f, g, d):
    """Squared prediction difference over d, after 0, 1, ... pairs."""
    return (f - g).square().mean(0) / d


def mspd(f, g, d):
    """Its mean over the numbers of pairs that leave w open."""
    return spd(f, g, d)[1:d].mean().item()


SPD = {
    "SPD is divided by d: the paper plots it per dimension.": lambda f, g, d: d * spd(f, g, d),
    "Take the square of the difference, not its absolute value.": lambda f, g, d: (
        (f - g).abs().mean(0) / d
    ),
    "Square each difference before the mean over contexts: errors of opposite sign must not "
    "cancel.": lambda f, g, d: (f - g).mean(0).square() / d,
    "One number for each n: the mean runs over contexts alone.": lambda *a: spd(*a).mean(),
    "One number for each n: the mean runs over the contexts, "
    "not over the positions.": lambda f, g, d: (f - g).square().mean(1) / d,
    "That is the square root of it: squared prediction *difference*.": lambda *a: spd(*a).sqrt(),
    "That is a sum over the contexts: take the mean.": lambda f, g, d: len(f) * spd(f, g, d),
}


MSPD = {
    "n = 0 has seen no pair: every algorithm answers 0 there. Start at n = 1.": lambda f, g, d: spd(
        f, g, d
    )[:d].mean(),
    "At n = d the pairs decide w: stop at n = d - 1.": lambda *a: spd(*a)[1 : a[2] + 1].mean(),
    "The mean over n runs over 1 .. d - 1, not over all n.": lambda *a: spd(*a).mean(),
    "That is a sum over n: take the mean.": lambda f, g, d: spd(f, g, d)[1:d].sum(),
    "Divide by d once.": lambda f, g, d: d * mspd(f, g, d),
}


def implicit_weights(predict, xs, ys, queries, offset=False):
    """Weights of the linear function nearest to what a network predicts."""
    return _fit(queries, _asked(predict, xs, ys, queries), offset)[0]


def linearity(predict, xs, ys, queries, offset=False, centred=True):
    """R² of that function."""
    wanted = _asked(predict, xs, ys, queries)
    missed = (wanted - _fit(queries, wanted, offset)[1]).square().sum()
    return (1 - missed / (wanted - centred * wanted.mean()).square().sum()).item()


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
    "That is a fit with an intercept, as the released code does: the paper's linear function has "
    "none.": {"offset": True},
    "Too few queries: d of them can be fitted by anything. Use all.": lambda f, xs, ys, queries: (
        implicit_weights(f, xs, ys, queries[: xs.shape[1]])
    ),
    "Too few queries: use all of them, not as many as "
    "there are pairs.": lambda f, xs, ys, queries: implicit_weights(f, xs, ys, queries[: len(xs)]),
    "Fit what the learner *predicts* for the queries, "
    "not the labels of the pairs.": lambda f, xs, ys, queries: torch.linalg.pinv(xs) @ ys,
    "Every query comes right after the n pairs: in one row, later queries see earlier ones as "
    "pairs.": _in_one_row,
    "The context is cut: all n pairs stand before the query.": lambda f, xs, ys, queries: (
        implicit_weights(f, xs[:-1], ys[:-1], queries)
    ),
    "That is the mean of y x over the pairs: ask the learner.": lambda f, xs, ys, queries: (
        xs.T @ ys / len(xs)
    ),
}


LINEARITY = {
    "That is the share that the fit misses: R² is 1 minus it.": lambda *a: 1 - linearity(*a),
    "The variation to be explained is that about the mean of the predictions.": {"centred": False},
    "That is a fit with an intercept: leave it out.": {"offset": True},
}


def bayes_weights(X, y, noise, prior):
    """Mean of w given the pairs."""
    return ridge(X, y, noise**2 / prior**2)


def expected_error(X, x, noise, prior, own=1.0, times=1.0):
    """Expected squared error of predicting the label of x."""
    eye = torch.eye(len(x), dtype=X.dtype)
    inverse = torch.linalg.inv(X.T @ X + noise**2 / prior**2 * eye)
    return (times * noise**2 * (x @ inverse @ x) + own * noise**2).item()


BAYES_WEIGHTS = {
    "The penalty is noise² / prior², a ratio of variances: "
    "did you take noise / prior?": lambda X, y, noise, prior: ridge(X, y, noise / prior),
    "The penalty is upside down: more noise asks for more of it, "
    "noise² / prior².": lambda X, y, noise, prior: ridge(X, y, (prior / noise) ** 2),
    "The prior is missing: the penalty is noise² / prior².": lambda X, y, noise, prior: ridge(
        X, y, noise**2
    ),
    "That is upside down, and not squared: "
    "the penalty is noise² / prior².": lambda X, y, noise, prior: ridge(X, y, prior / noise),
    "That is least squares: it trusts noisy labels fully.": lambda X, y, *_: (
        torch.linalg.pinv(X) @ y
    ),
}


EXPECTED_ERROR = {
    "The label that is predicted is noisy too: add noise².": {"own": 0.0},
    "Add the variance of the label's noise, noise², not noise.": lambda X, x, noise, prior: (
        expected_error(X, x, noise, prior, own=1 / noise)
    ),
    "That is the error before any pair, noise² + prior² |x|²: "
    "the pairs have taken some.": lambda X, x, noise, prior: noise**2 + prior**2 * (x @ x).item(),
    "The inverse of X^T X + penalty is the covariance of w only after it is multiplied "
    "by noise².": lambda X, x, noise, prior: expected_error(X, x, noise, prior, times=1 / noise**2),
    "That multiplies the inverse by prior²: the covariance of w is noise² (X^T X + penalty)^-1.": (
        lambda X, x, noise, prior: expected_error(X, x, noise, prior, times=(prior / noise) ** 2)
    ),
}


def nearest_penalty(found, xs, ys, penalties, far=False, stop=0):
    """The penalty of the ridge regression nearest to some predictions, by MSPD."""
    last = stop or xs.shape[-1]
    away = {
        c: float((found - algorithms.ridge(xs, ys, c))[:, 1:last].square().sum()) for c in penalties
    }
    return (max if far else min)(penalties, key=away.__getitem__)


# ``kept`` and ``control`` were measured for ten draws of 512 contexts, on a grid of factors
# sqrt(2): 1/4 in all ten, and 1/32 in nine with 1/22.6 in one. One step of the grid is allowed.
NEAREST_PENALTY = {
    "That is the penalty that is *farthest*.": {"far": True},
    "The mean runs over n = 1 .. d - 1 alone: at n >= d this learner does something else.": {
        "stop": 99
    },
    "Return the penalty, not its place in the list.": lambda *given: given[3].index(
        nearest_penalty(*given)
    ),
}


KEPT = {
    "`kept` is too small, as that of member 0 or 1 or of the control: ask member 2 of "
    "regression-noise.": 0.07,
    "`kept` is too large, as that of member 3: ask member 2.": 0.5,
}


CONTROL = {"`control` is that of regression-noise: ask regression-d8, member 0.": 0.25}


REASON = {
    "Reason (a): these contexts have no noise at all. A learner that reads the noise off its "
    "context would be near 0.": "a",
    "Reason (c): the control was trained without noise, and as long; its penalty is several "
    "times smaller.": "c",
    "Reason (d): noise / prior is 1/2. Which number did you measure?": "d",
}


TRUTHS = {
    "ridge": (ridge, RIDGE),
    "least_squares": (least_squares, LEAST_SQUARES),
    "spd": (spd, SPD),
    "mspd": (mspd, MSPD),
    "implicit_weights": (implicit_weights, IMPLICIT_WEIGHTS),
    "linearity": (linearity, LINEARITY),
    "bayes_weights": (bayes_weights, BAYES_WEIGHTS),
    "expected_error": (expected_error, EXPECTED_ERROR),
    "nearest_penalty": (nearest_penalty, NEAREST_PENALTY),
    "kept": (1 / 4, KEPT),
    "control": (1 / 32, CONTROL),
    "reason": ("b", REASON),
}
