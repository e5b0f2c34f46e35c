"""Homework 4, on chapter 04: attention as a step of gradient descent."""

import math

import torch
from torch import Tensor

from checks import Mistake, Part, generator, normal


def _regression(seed):
    draw, pairs, d = generator(seed), 5 + seed, 3 + seed % 3
    xs, ys = normal(draw, pairs, d), normal(draw, pairs, 2)
    return normal(draw, 2, d), xs, ys, normal(draw, d), 0.4 + 0.1 * seed


def _tokens(seed):
    draw, width = generator(seed), 4 + seed % 2
    return normal(draw, 7 + seed, width), *(normal(draw, width, width) for _ in range(4))


def _layer(tokens, W_K, W_Q, W_V, P):
    """Linear attention whose last token is no key, as sums over pairs of tokens."""
    keys = tokens[:-1]
    moved = torch.einsum("ni,ji,jk,mk,mc,dc->nd", tokens, W_Q, W_K, keys, keys, W_V)
    return tokens + moved @ P.T


def _two_layers(layer, W0, rate, pairs):
    """Labels of random tokens after one such layer, and after two; x must stay."""
    o, d = W0.shape
    xs = normal(generator(pairs), pairs + 1, d)
    ys = normal(generator(pairs + 1), pairs + 1, o)
    ys[-1] = -W0 @ xs[-1]
    found = layer(W0, rate, pairs)
    if not isinstance(found, tuple | list | Tensor) or len(found) != 4:
        raise Mistake("`gradient_layer` returns four matrices: W_K, W_Q, W_V, P.")
    for name, each in zip(("W_K", "W_Q", "W_V", "P"), found, strict=True):
        if not isinstance(each, Tensor) or each.shape != (d + o, d + o):
            size = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            more = " It multiplies values, one for each channel, not pairs." if name == "P" else ""
            raise Mistake(f"{name} should be {(d + o, d + o)}; it is {size}.{more}")
    matrices = [each.double() for each in found]
    once = _layer(torch.cat([xs, ys], -1), *matrices)
    if (once[:, :d] - xs).abs().max() > 1e-9:
        raise Mistake(
            "The x of a token moves: the upper half of W_V is empty (a value is W_V e, of a column "
            "e), and P keeps it so."
        )
    return torch.cat([once[:, d:], _layer(once, *matrices)[:, d:]])


def _start(seed):
    return normal(generator(seed), 2, 2 + seed % 2), 0.3, 6 + seed


def _moments(seed):
    """Of inputs that are 0, or one number up to its sign, with a probability."""
    edges = (0.5, 0.7), (1.0, 0.2), (1.5, 0.4), (2.0, 0.9)
    laws = [edges[(seed + i) % 4] for i in range(3)]  # edge, P(not 0)
    moments = [torch.tensor([a**k * p for a, p in laws], dtype=torch.float64) for k in (2, 4)]
    return moments[0], moments[1], 2 + seed % 2


def _design(xs, ys, pairs=-1, total=False):
    products = ys[:, :pairs, None] * xs[:, :pairs] if pairs else ys[..., None] * xs
    return (products.sum(1) if total else products.mean(1)) * xs[:, -1]


def _made_up(seed):
    """Answers with known rates, and noise."""
    draw, pairs, d = generator(seed), 5 + seed, 3 + seed % 2
    xs, ys = normal(draw, 60, pairs + 1, d), normal(draw, 60, pairs + 1)
    own = 1.0 + 3 * torch.rand(d, generator=draw, dtype=torch.float64)
    return _design(xs, ys) @ own + 0.3 * normal(draw, 60), xs, ys


def _ends(rates):
    if not isinstance(rates, Tensor) or rates.squeeze().shape != (10,):
        raise Mistake("`rates` are the ten rates of `lsa-stretched`, a tensor.")
    return rates.double().squeeze()[[0, 9]]


q1 = (Part("one_step", inputs=_regression),)
q2 = (Part("attend", inputs=_tokens), Part("gradient_layer", inputs=_start, outcome=_two_layers))
q3 = (Part("best_rates", inputs=_moments),)
q4 = (
    Part("learnt_rates", inputs=_made_up, tolerance=1e-06),
    Part("rates", "tensor", tolerance=0.31 / 6.6, outcome=_ends),
    Part("ratio", "number", tolerance=0.18 / 3.04),
    Part("reason", "letter"),
)

# Students get what stands above this line, and nothing below it.


def one_step(W0, xs, ys, query, rate):
    """What a linear model answers after one step of gradient descent."""
    return W0 @ query - rate / len(xs) * (xs @ query) @ (xs @ W0.T - ys)


ONE_STEP = {
    "The mean over the pairs is missing: divide by N.": lambda W, x, y, q, rate: one_step(
        W, x, y, q, rate * len(x)
    ),
    "The sign is turned around: descent goes against the gradient.": lambda W, x, y, q, rate: (
        one_step(W, x, y, q, -rate)
    ),
    "The loss has a factor 1/2, which cancels the 2 of the square.": lambda W, x, y, q, rate: (
        one_step(W, x, y, q, 2 * rate)
    ),
    "That is the change alone: add what W_0 says to the query.": lambda W, x, y, q, rate: (
        one_step(W, x, y, q, rate) - W @ q
    ),
    "The errors are W_0 x_i - y_i: did you leave W_0 out of them?": lambda W, x, y, q, rate: (
        one_step(0 * W, x, y, q, rate) + W @ q
    ),
    "That is a step from zero: where is W_0?": lambda W, *given: one_step(0 * W, *given),
    "That is W_0 alone: no step was taken.": lambda W, x, y, q, rate: W @ q,
}


def attend(tokens, *weights, keys=-1, soft=False, scale=1.0):
    """The tokens after one layer of linear attention; the last token is no key."""
    W_K, W_Q, W_V, P = weights
    context = tokens[:keys] if keys else tokens
    scores = (tokens @ W_Q.T) @ (context @ W_K.T).T / scale
    return tokens + (scores.softmax(-1) if soft else scores) @ (context @ W_V.T) @ P.T


def gradient_layer(W0, rate, pairs, label=-1.0):
    """W_K, W_Q, W_V and P of a layer that takes a step of gradient descent."""
    o, d = W0.shape
    eye = torch.eye(d + o, dtype=W0.dtype)
    W_K = torch.diag((torch.arange(d + o) < d).to(W0))
    W_V = torch.cat([0 * eye[:d], torch.cat([W0, label * eye[:o, :o]], 1)])
    return W_K, W_K, W_V, rate / pairs * eye


ATTEND = {
    "The query is no key: sum over the N context tokens alone.": {"keys": 0},
    "This attention is linear: no softmax.": {"soft": True},
    "The scores are plain inner products: no square root.": lambda tokens, *given: attend(
        tokens, *given, scale=math.sqrt(tokens.shape[1])
    ),
    "Every token moves, not the query alone: layers must stack.": lambda tokens, *given: torch.cat(
        [tokens[:-1], attend(tokens, *given)[-1:]]
    ),
    "That is what is added: add it to the tokens.": lambda *given: attend(*given) - given[0],
    "No mean here: the factor 1/N is part of P.": lambda tokens, *given: attend(
        tokens, *given, scale=len(tokens) - 1.0
    ),
    "Keys and queries are exchanged.": lambda x, W_K, W_Q, *given: attend(x, W_Q, W_K, *given),
}


GRADIENT_LAYER = {
    "The labels move the wrong way: to y_i + ΔW x_i, so that a second layer cannot go on. Is the "
    "sign of P, or of the label channel of W_V, "
    "turned around?": lambda W0, rate, pairs: gradient_layer(W0, -rate, pairs),
    "The factor 1/N is missing from P.": lambda W0, rate, pairs: gradient_layer(W0, rate, 1),
    "W_V does not know W_0: the error is W_0 x_i - y_i.": lambda W, *a: gradient_layer(0 * W, *a),
    "The label channel of W_V is missing: the error is W_0 x_i - y_i.": {"label": 0.0},
    "In W_V the label has the sign of W_0 x_i: the error is their difference.": {"label": 1.0},
}


def best_rates(variances, fourths, pairs, own=1.0, others=1.0, squared=1):
    """The best rate of one step, for each coordinate."""
    rest = variances.sum() - variances
    moment = (fourths + others * variances * rest) / pairs**squared
    return variances / (moment + own * (1 - 1 / pairs) * variances**2)


def _single(s, fourths, pairs):
    rates = best_rates(s, fourths, pairs)
    return torch.full_like(s, (s.square().sum() / (s.square() / rates).sum()).item())


BEST_RATES = {
    "That holds for normal inputs, whose fourth moment is 3 s²: "
    "use the one given.": lambda s, fourths, pairs: best_rates(s, 3 * s**2, pairs),
    "The N (N - 1) products of two different pairs are missing from the mean of Ŝ².": {"own": 0.0},
    "The other coordinates are missing: (Ŝ²)_ii is a sum over all columns of Ŝ.": {"others": 0.0},
    "That is the inverse of the variance: right for endless contexts alone.": lambda s, *_: 1 / s,
    "That is one over it.": lambda *given: 1 / best_rates(*given),
    "That is the best single rate: each coordinate has its own.": _single,
    "A second moment of a product of pairs is divided by N twice; N of the terms are alike, so "
    "1/N is left.": {"squared": 2},
}


def learnt_rates(found, xs, ys, pairs=-1, total=False):
    """The rate of each coordinate, as a network's answers show it."""
    design = _design(xs, ys, pairs, total)
    return torch.linalg.lstsq(design, found[:, None]).solution[:, 0]


def _one_by_one(design, found):
    return (design * found[:, None]).sum(0) / design.square().sum(0)


def _pair(first, last):
    return torch.tensor([first, last], dtype=torch.float64)


# The three networks were measured with six draws of 2000 contexts each. The rate of coordinate 0
# was 2.20 (standard deviation .02), that of coordinate 9 6.60 (.10), the ratio of the largest and
# the smallest 3.04 (.06). The tolerances are three standard deviations.
LEARNT_RATES = {
    "Those are the rates over N: take the mean over the pairs, not their sum.": {"total": True},
    "The query's own label must not be read: leave the last pair out of the mean.": {"pairs": 0},
    "Fit all coordinates together: one at a time, "
    "each takes what is the others'.": lambda found, xs, ys: _one_by_one(_design(xs, ys), found),
    "One rate for each coordinate, not one for all.": lambda found, xs, ys: _one_by_one(
        _design(xs, ys).sum(-1, keepdim=True), found
    ).expand(xs.shape[-1]),
}


RATES = {
    "`rates` are in the wrong order: coordinate 0 is the one stretched most.": _pair(6.6, 2.2),
    "`rates` are ten times too small: sum and mean over the ten pairs differ by N.": _pair(
        0.22, 0.659
    ),
    "Those are the rates of `lsa-1`, which was trained on even inputs.": _pair(6.07, 6.07),
}


RATIO = {
    "`ratio` is the smallest over the largest: turn it around.": 0.33,
    "`ratio` is that of the variances. It is asked for the rates.": 16.0,
}


REASON = {
    "Reason (a): five trainings of `lsa-1` differ by one part in a hundred. What would give "
    "every seed the same order of the ten?": "a",
    "Reason (b): then the rates would be as 1 to 16, one over the variances. Ten pairs are few: "
    "a step also pays for its noise.": "b",
    "Reason (d): the layer reads x as it is. `xs` of both networks go through the same "
    "operations.": "d",
}


TRUTHS = {
    "one_step": (one_step, ONE_STEP),
    "attend": (attend, ATTEND),
    "gradient_layer": (gradient_layer, GRADIENT_LAYER),
    "best_rates": (best_rates, BEST_RATES),
    "learnt_rates": (learnt_rates, LEARNT_RATES),
    "rates": (_pair(2.2, 6.6), RATES),
    "ratio": (3.04, RATIO),
    "reason": ("c", REASON),
}
