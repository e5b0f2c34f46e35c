"""Homework 4, on chapter 04: attention as a step of gradient descent."""

import torch
from iclutils.models import lsa
from iclutils.tasks.functions import Problem
from iclutils.tasks.regression import Task
from torch import Tensor

from checks import Mistake, Part, generator, normal, shaped


def _regression(seed):
    draw, pairs, d = generator(seed), 5 + seed, 3 + seed % 3
    xs, ys = normal(draw, pairs, d), normal(draw, pairs, 2)
    return normal(draw, 2, d), xs, ys, normal(draw, d), 0.5 * normal(draw, d, d)


def _tokens(seed):
    draw, width = generator(seed), 4 + seed % 2
    return normal(draw, 7 + seed, width), *(normal(draw, width, width) for _ in range(4))


def _layer(tokens, W_K, W_Q, W_V, P):
    """Linear attention whose last token is no key, as sums over pairs of tokens."""
    keys = tokens[:-1]
    moved = torch.einsum("ni,ji,jk,mk,mc,dc->nd", tokens, W_Q, W_K, keys, keys, W_V)
    return tokens + moved @ P.T


def _two_layers(layer, W0, A, pairs):
    """Labels of random tokens after one such layer, and after two; x must stay."""
    o, d = W0.shape
    xs = normal(generator(pairs), pairs + 1, d)
    ys = normal(generator(pairs + 1), pairs + 1, o)
    ys[-1] = -W0 @ xs[-1]
    found = layer(W0, A, pairs)
    if not isinstance(found, tuple | list | Tensor) or len(found) != 4:
        raise Mistake("`gradient_layer` returns four matrices: W_K, W_Q, W_V, P.")
    for name, each in zip(("W_K", "W_Q", "W_V", "P"), found, strict=True):
        if not isinstance(each, Tensor) or each.shape != (d + o, d + o):
            size = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            more = " It multiplies values, one for each channel, not pairs." if name == "P" else ""
            raise Mistake(f"{name} should be {(d + o, d + o)}; it is {size}.{more}")
    matrices = [each.double() for each in found]
    once = _layer(torch.cat([ys, xs], -1), *matrices)
    if (once[:, o:] - xs).abs().max() > 1e-9:
        raise Mistake("The x of a token moves: values, W_V e, live in the label's channels alone.")
    return torch.cat([once[:, :o], _layer(once, *matrices)[:, :o]])


def _start(seed):
    draw, d = generator(seed), 2 + seed % 2
    return normal(draw, 2, d), 0.3 * normal(draw, d, d), 6 + seed


def _moments(seed):
    """Of inputs that are 0, or one number up to its sign, with a probability."""
    edges = (0.5, 0.7), (1.0, 0.2), (1.5, 0.4), (2.0, 0.9)
    laws = [edges[(seed + i) % 4] for i in range(3)]  # edge, P(not 0)
    moments = [torch.tensor([a**k * p for a, p in laws], dtype=torch.float64) for k in (2, 4)]
    prior = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    return moments[0], moments[1], prior, 0.1 + 0.1 * seed, 2 + seed % 2


def _contexts(seed):
    draw, pairs, d = generator(seed), 4 + seed, 3 + seed % 2
    return normal(draw, 800, pairs, d) + 0.5, normal(draw, 800, pairs), generator(seed + 50)


def _is_control(drawn, xs, ys):
    """Whether the steps are as long as they should be, in directions that say nothing."""
    b = (ys[..., None] * xs).mean(1)
    found, lengths = shaped(drawn[0], *b.shape).double(), b.norm(dim=1)
    if not found.isfinite().all() or (found.norm(dim=1) / lengths - 1).abs().max() > 1e-4:
        raise Mistake("The steps are not as long as the gradient steps of their contexts.")
    unit = found / lengths[:, None]
    if (unit[1:] - unit[:-1]).norm(dim=1).min() < 1e-6:
        raise Mistake("Contexts share a direction: draw one for each.")
    if unit.mean(0).norm() > 0.12:
        raise Mistake("Not all directions are equally likely: use normal numbers, which are round.")
    along = (unit * b).sum(1) / lengths
    if abs(along.mean()) > 0.12 or abs(along.square().mean() * b.shape[1] - 1) > 0.3:
        raise Mistake("The directions know the gradient: chance has another cosine with b.")


def _made_up(seed):
    """Answers with known rates, and noise."""
    draw, pairs, d = generator(seed), 5 + seed, 3 + seed % 2
    xs, ys = normal(draw, 60, pairs + 1, d), normal(draw, 60, pairs + 1)
    own = 1.0 + 3 * torch.rand(d, generator=draw, dtype=torch.float64)
    design = (ys[:, :-1, None] * xs[:, :-1]).mean(1) * xs[:, -1]
    return design @ own + 0.3 * normal(draw, 60), xs, ys


q1 = (Part("one_step", inputs=_regression),)
q2 = (Part("attend", inputs=_tokens), Part("gradient_layer", inputs=_start, outcome=_two_layers))
q3 = (Part("best_rates", inputs=_moments),)
q4 = (Part("random_step", _contexts, draws=1, verdict=_is_control),)
q5 = (
    Part("learnt_rates", inputs=_made_up, tolerance=1e-06),
    Part("rates", tolerance=1e-3),
    Part("ratio", tolerance=1e-3),
    Part(
        "reason",
        choices=(
            "By chance: another seed would put the ten rates in another order.",
            "It is the best step for ten pairs: small coordinates get longer steps, but not by as "
            "much as their variance asks, since each step also pays for the noise of the others.",
            "The network has found the inverse covariance: each rate is one over the variance, up "
            "to a factor.",
            "The layer rescales x before it compares, so that one rate would do as well.",
        ),
    ),
)

# Students get what stands above this line, and nothing below it.


def one_step(W0, xs, ys, query, A):
    errors = xs @ W0.T - ys
    return W0 @ query - (xs @ A @ query) @ errors / len(xs)


ONE_STEP = {
    "The mean over the pairs is missing: divide by N.": " / len(xs) -> ",
    "The sign is turned around: descent goes against the gradient.": "query - ( -> query + (",
    "A stands to the right of the gradient, and acts on the query: A x_q.": "@ A @ -> @ A.T @",
    "Where is A? That is a step at the rate 1.": " @ A @ ->  @",
    "The errors are W_0 x_i - y_i: did you leave W_0 out of them?": "xs @ W0.T - ys -> -ys",
}


def attend(tokens, W_K, W_Q, W_V, P):
    context = tokens[:-1]
    scores = (tokens @ W_Q.T) @ (context @ W_K.T).T
    return tokens + scores @ (context @ W_V.T) @ P.T


ATTEND = {
    "The query is no key: sum over the N context tokens alone.": "tokens[:-1] -> tokens",
    "This attention is linear: no softmax.": "+ scores -> + scores.softmax(-1)",
    "Scores are plain inner products: no root.": "+ scores -> + scores / tokens.shape[1] ** 0.5",
    "Every token moves, not the query alone: layers must stack.": (
        "scores = -> scores = (torch.arange(len(tokens)) == len(context))[:, None] *"
    ),
    "No mean here: the factor 1/N is part of P.": "+ scores -> + scores / len(context)",
}


def gradient_layer(W0, A, pairs):
    o, d = W0.shape
    eye, none = torch.eye(o + d, dtype=W0.dtype), torch.zeros(o, o, dtype=W0.dtype)
    values = torch.cat([torch.cat([-eye[:o, :o], W0], 1), 0 * eye[o:]])
    return torch.block_diag(none, eye[o:, o:]), torch.block_diag(none, A), values, eye / pairs


GRADIENT_LAYER = {
    "The labels move the wrong way. Is the sign of P, or of W_V, turned around?": (
        "eye / pairs -> -eye / pairs"
    ),
    "The factor 1/N is missing from P.": " / pairs -> ",
    "A acts on the query: put it into W_Q, or its transpose into W_K.": "none, A) -> none, A.T)",
    "Where is A? That layer has the rate 1.": "none, A) -> none, eye[o:, o:])",
    "W_V does not know W_0: the error is W_0 x_i - y_i.": ", W0], 1) -> , 0 * W0], 1)",
}


def best_rates(variances, fourths, prior, noise, pairs):
    shown = variances * prior
    others = variances * (shown.sum() - shown)
    moment = (prior * fourths + others + noise * variances) / pairs
    return shown / (moment + (1 - 1 / pairs) * prior * variances**2)


BEST_RATES = {
    "Only normal inputs have the fourth moment 3 s².": "* fourths -> * 3 * variances**2",
    "That is the chapter's rate: here w has variances tau, and labels have noise.": (
        "shown = variances * prior "
        "-> noise, prior = 0.0, torch.ones_like(prior); shown = variances * prior"
    ),
    "The noise of the labels is missing.": " + noise * variances -> ",
    "The noise is averaged over the pairs, too: sigma² s_k / N.": "noise * -> pairs * noise *",
    "Products of two different pairs are missing from the mean of b².": (
        " + (1 - 1 / pairs) * prior * variances**2 -> "
    ),
    "The other coordinates are missing: b_k sums over all coordinates of w.": " + others -> ",
}


def random_step(xs, ys, generator):
    b = (ys[..., None] * xs).mean(1)
    drawn = torch.randn(b.shape, generator=generator, dtype=b.dtype)
    return drawn / drawn.norm(dim=1, keepdim=True) * b.norm(dim=1, keepdim=True)


RANDOM_STEP = {
    "The steps are not as long": "* b.norm(dim=1, keepdim=True) -> * b.norm(dim=1).mean()",
    "Contexts share a direction: draw one for each.": "randn(b.shape -> randn((1, b.shape[1])",
    "The directions know the gradient": (
        "drawn = -> drawn = (ys.roll(1, 1)[..., None] * xs).mean(1) + 0 *"
    ),
    "Not all directions are equally likely": "torch.randn -> torch.rand",
    "Take random numbers from": "=generator, -> =None,",
}


def learnt_rates(found, xs, ys):
    design = (ys[:, :-1, None] * xs[:, :-1]).mean(1) * xs[:, -1]
    return torch.linalg.lstsq(design, found[:, None]).solution[:, 0]


LEARNT_RATES = {
    "Those are the rates over N: take the mean over the pairs, not their sum.": "mean( -> sum(",
    "The query's label must not be read.": "ys[:, :-1, None] * xs[:, :-1] -> ys[..., None] * xs",
    "Fit all coordinates together: one at a time, each takes what is the others'.": (
        "torch.linalg.lstsq(design, found[:, None]).solution[:, 0] "
        "-> (design * found[:, None]).sum(0) / design.square().sum(0)"
    ),
}


def rates(own):
    """The rates of a student's network, on this student's contexts."""
    stretch = (2.0, 2.0, 1.4, 1.4, 1.0, 1.0, 0.7, 0.7, 0.5, 0.5)
    problem = Problem(Task(10, inputs="uniform*1+-0.5"), scales=stretch)
    contexts = problem.sample(2000, 11, torch.Generator().manual_seed(own))
    with torch.no_grad():
        found = lsa.load("lsa-stretched")(contexts.xs, contexts.ys)[own % 5].double()
    return learnt_rates(found, contexts.xs.double(), contexts.ys.double())


RATES = {
    "`rates` are in the wrong order: coordinate 0 is the one stretched most.": lambda r: r.flip(0),
    "`rates` are ten times too small: take the mean over the ten pairs.": lambda r: r / 10,
    "`rates` are one over the rates: the fit gives them as they are.": lambda r: 1 / r,
}


def ratio(own):
    """Return the largest of these rates over the smallest."""
    return (rates(own).max() / rates(own).min()).item()


RATIO = {
    "`ratio` is the smallest over the largest: turn it around.": lambda ratio: 1 / ratio,
    "`ratio` is that of the variances. It is asked for the rates.": 16.0,
}


reason = "b"
REASON = {
    "Five trainings of `lsa-1` differ by one part in a hundred: seeds give no order.": "a",
    "Then the rates would lie on the broken line. A step also pays for its noise.": "c",
    "The layer reads x as it is. And the rates are not one.": "d",
}
