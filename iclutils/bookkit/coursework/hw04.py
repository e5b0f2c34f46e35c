"""Homework 4, on chapter 04: attention as a gradient step, and softmax attention as another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .answers import Mistake, compare, generator, letter, normal


def q1(one_step: Callable[..., Tensor], seed: int) -> None:
    """A step by autograd."""
    draw = generator(seed)
    pairs, d, outputs, rate = 5 + seed, 3 + seed % 3, 2, 0.4 + 0.1 * seed
    xs, ys = normal(draw, pairs, d), normal(draw, pairs, outputs)
    start, query = normal(draw, outputs, d), normal(draw, d)
    step = _stepped(start, xs, ys, rate) - start
    from_zero = _stepped(start * 0, xs, ys, rate)
    before = start @ query
    compare(
        one_step(start, xs, ys, query, rate),
        before + step @ query,
        {
            "The mean over the pairs is missing: divide by N.": before + pairs * step @ query,
            "The sign is turned around: descent goes against the gradient.": before - step @ query,
            "The loss has a factor 1/2, which cancels the 2 of the square.": before
            + 2 * step @ query,
            "That is the change alone: add what W_0 says to the query.": step @ query,
            "The errors are W_0 x_i - y_i: did you leave W_0 out of them?": before
            + from_zero @ query,
            "That is a step from zero: where is W_0?": from_zero @ query,
            "That is W_0 alone: no step was taken.": before,
        },
    )


def _stepped(start: Tensor, xs: Tensor, ys: Tensor, rate: float) -> Tensor:
    """Weights after a step on the mean of half the squared errors."""
    weights = start.clone().requires_grad_()
    loss = 0.5 * (xs @ weights.T - ys).square().sum() / len(xs)
    return start - rate * torch.autograd.grad(loss, weights)[0]


def q2(
    attend: Callable[..., Tensor],
    gradient_layer: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    seed: int,
) -> None:
    """Attention by loops; the layer run here, against steps by autograd."""
    draw = generator(seed)
    pairs, d, outputs, rate = 6 + seed, 2 + seed % 2, 2, 0.3
    width = d + outputs
    tokens = normal(draw, pairs + 1, width)
    key, query, value, out = (normal(draw, width, width) for _ in range(4))
    matrices = key, query, value, out
    scores = (tokens @ query.T) @ (tokens[:-1] @ key.T).T
    moved = tokens + scores.softmax(-1) @ (tokens[:-1] @ value.T) @ out.T
    truth = _attended(tokens, *matrices)
    last = tokens.clone()
    last[-1] = truth[-1]
    compare(
        attend(tokens, *matrices),
        truth,
        {
            "The query is no key: sum over the N context tokens alone.": _attended(
                tokens, *matrices, keys=pairs + 1
            ),
            "This attention is linear: no softmax.": moved,
            "The scores are plain inner products: no square root.": tokens
            + (truth - tokens) / math.sqrt(width),
            "Every token moves, not the query alone: layers must stack.": last,
            "That is what is added: add it to the tokens.": truth - tokens,
            "No mean here: the factor 1/N is part of P.": tokens + (truth - tokens) / pairs,
            "Keys and queries are exchanged.": _attended(tokens, query, key, value, out),
        },
    )
    start, xs, ys = normal(draw, outputs, d), tokens[:, :d], tokens[:, d:].clone()
    ys[-1] = -start @ xs[-1]
    given = torch.cat([xs, ys], -1)
    layer = gradient_layer(start, rate, pairs)
    if not isinstance(layer, tuple | list) or len(layer) != 4:
        raise Mistake("`gradient_layer` returns four matrices: W_K, W_Q, W_V, P.")
    for name, each in zip(("W_K", "W_Q", "W_V", "P"), layer, strict=True):
        if not isinstance(each, Tensor) or each.shape != (width, width):
            size = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            more = " It multiplies values, one for each channel, not pairs." if name == "P" else ""
            raise Mistake(f"{name} should be {(width, width)}; it is {size}.{more}")
    once = _attended(given, *(each.double() for each in layer))
    if (once[:, :d] - xs).abs().max() > 1e-9:
        raise Mistake(
            "The x of a token moves: the upper half of W_V is empty (a value is W_V e, of a column "
            "e), and P keeps it so."
        )
    step = _stepped(start, xs[:-1], ys[:-1], rate) - start
    from_zero = _stepped(start * 0, xs[:-1], ys[:-1], rate)
    compare(
        once[:, d:],
        ys - xs @ step.T,
        {
            "The labels move the wrong way: to y_i + ΔW x_i, so that a second layer cannot go "
            "on. Is the sign of P, or of the label channel of W_V, turned around?": ys
            + xs @ step.T,
            "The factor 1/N is missing from P.": ys - pairs * xs @ step.T,
            "W_V does not know W_0: the error is W_0 x_i - y_i.": ys - xs @ from_zero.T,
            "The label channel of W_V is missing: the error is W_0 x_i - y_i.": ys
            - xs @ (step - from_zero).T,
            "In W_V the label has the sign of W_0 x_i: the error is their difference.": ys
            - xs @ (step - 2 * from_zero).T,
        },
    )
    twice = _attended(once, *(each.double() for each in layer))
    steps = _stepped(_stepped(start, xs[:-1], ys[:-1], rate), xs[:-1], ys[:-1], rate)
    compare(-twice[-1, d:], steps @ xs[-1])


def _attended(
    tokens: Tensor, key: Tensor, query: Tensor, value: Tensor, out: Tensor, *, keys: int = 0
) -> Tensor:
    """One linear layer, token by token."""
    after = tokens.clone()
    for j in range(len(tokens)):
        for i in range(keys or len(tokens) - 1):
            score = (key @ tokens[i]) @ (query @ tokens[j])
            after[j] += out @ (value @ tokens[i]) * score
    return after


def q3(best_rates: Callable[..., Tensor], seed: int) -> None:
    """Least squares over every context that inputs of three values can give."""
    edges = (0.5, 0.7), (1.0, 0.2), (1.5, 0.4), (2.0, 0.9)
    laws = [edges[(seed + i) % 4] for i in range(3 if seed == 0 else 2)]  # edge, P(not 0)
    pairs = 2 + seed % 2
    variances = torch.tensor([a**2 * p for a, p in laws], dtype=torch.float64)
    fourths = torch.tensor([a**4 * p for a, p in laws], dtype=torch.float64)
    inputs, chance = _every([((-a, p / 2), (0.0, 1 - p), (a, p / 2)) for a, p in laws])
    second = torch.zeros(len(laws), len(laws), dtype=torch.float64)
    for chosen in product(range(len(inputs)), repeat=pairs):
        picked = inputs[list(chosen)]
        covariance = picked.T @ picked / pairs
        second += chance[list(chosen)].prod() * covariance @ covariance
    truth = (variances * torch.linalg.inv(second)).diagonal()

    def rates(fourth: Tensor, own: float = 1.0, others: float = 1.0) -> Tensor:
        rest = variances.sum() - variances
        moment = (fourth + others * variances * rest) / pairs
        return variances / (moment + own * (1 - 1 / pairs) * variances.square())

    compare(
        best_rates(variances, fourths, pairs),
        truth,
        {
            "That holds for normal inputs, whose fourth moment is 3 s²: use the one given.": rates(
                3 * variances.square()
            ),
            "The N (N - 1) products of two different pairs are missing from the mean of Ŝ².": rates(
                fourths, own=0.0
            ),
            "The other coordinates are missing: (Ŝ²)_ii is a sum over all columns of Ŝ.": rates(
                fourths, others=0.0
            ),
            "That is the inverse of the variance: right for endless contexts alone.": 1 / variances,
            "That is one over it.": 1 / truth,
            "That is the best single rate: each coordinate has its own.": torch.full_like(
                truth, (variances.square().sum() / (variances.square() / truth).sum()).item()
            ),
            "A second moment of a product of pairs is divided by N twice; N of the terms are "
            "alike, so 1/N is left.": variances
            / (
                (fourths + variances * (variances.sum() - variances)) / pairs**2
                + (1 - 1 / pairs) * variances.square()
            ),
        },
    )


def _every(laws: Sequence[Sequence[tuple[float, float]]]) -> tuple[Tensor, Tensor]:
    """All values of independent coordinates, and their chances."""
    rows, chances = [], []
    for chosen in product(*laws):
        rows.append([value for value, _ in chosen])
        chances.append(math.prod(p for _, p in chosen))
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(chances, dtype=torch.float64)


def q4(dual_parts: Callable[..., Tensor], seed: int) -> None:
    """Attention of PyTorch, with the values of one side set to zero."""
    draw = generator(seed)
    keys, d, width = 6 + seed, 4 + seed % 3, 3
    query, key = normal(draw, d), normal(draw, keys, d)
    value = normal(draw, keys, width) + 1
    demos = torch.arange(keys) < keys - 2
    demos[0] = seed % 2 == 0

    def attention(values: Tensor, some: Tensor, scale: float | None = None) -> Tensor:
        found = scaled_dot_product_attention(
            query[None, None], key[None, some], values[None, some], scale=scale
        )
        return found[0, 0]

    every = torch.ones(keys, dtype=torch.bool)

    def parts(scale: float | None = None) -> Tensor:
        sides = [value * side[:, None] for side in (~demos, demos)]
        return torch.stack([attention(each, every, scale) for each in sides])

    alone = torch.stack([attention(value, ~demos), attention(value, demos)])
    raw = (key @ query / math.sqrt(d)).exp()
    kept = torch.stack([raw[~demos] @ value[~demos], raw[demos] @ value[demos]])
    compare(
        dual_parts(query, key, value, demos),
        parts(),
        {
            "The normaliser is that of *all* keys, for both parts: demonstrations and the rest "
            "share one softmax.": alone,
            "The normaliser runs over the demonstrations only: take all keys.": kept
            / raw[demos].sum(),
            "The step's normaliser runs over the demonstrations only: take all keys.": torch.stack(
                [parts()[0], alone[1]]
            ),
            "The two are exchanged: the start is what the other tokens say, the step what the "
            "demonstrations say.": parts().flip(0),
            "The scores are divided by the square root of d.": parts(scale=1.0),
            "The scores are divided by the square root of d, not by d.": parts(scale=1 / d),
            "Divide by the normaliser D_q.": kept,
            "D_q takes the place of a mean: do not divide by the number of keys.": kept / keys,
            "That is the whole of attention: split it.": attention(value, every),
        },
        tolerance=1e-6,
    )


def q5(features: Callable[..., Tensor], contrastive_loss: Callable[..., Tensor], seed: int) -> None:
    """Features one by one; the loss by the step that it gives."""
    draw = generator(seed)
    count, d, many = 3 + seed, 2 + seed % 2, 5 + seed
    z = normal(draw, count, d)
    omega = normal(draw, many, d)
    rows = [[math.exp((w @ p - 0.5 * p @ p).item()) / math.sqrt(many) for w in omega] for p in z]
    truth = torch.tensor(rows, dtype=torch.float64)
    norms = z.square().sum(-1, keepdim=True)
    compare(
        features(z, omega),
        truth,
        {
            "The factor exp(-|z|²/2) is missing: without it the mean of the product is "
            "exp(|k + q|²/2).": truth * (norms / 2).exp(),
            "The factor is exp(-|z|²/2), half the square.": truth * (-norms / 2).exp(),
            "The factor is exp(-|z|²/2): a minus.": truth * norms.exp(),
            "The factor is exp(-|z|²/2), with |z|² the sum of squares: did you take the "
            "length?": truth * (norms / 2 - norms.sqrt() / 2).exp(),
            "Divide by the square root of the number of directions: the product of two features "
            "is then a mean.": truth * math.sqrt(many),
            "Divide by the *square root* of the number of directions: a product has two "
            "features.": truth / math.sqrt(many),
        },
    )
    width, rate = 2, 0.5 + 0.25 * seed
    values = normal(draw, count, width)
    query = truth[-1]
    total = (truth @ query).sum()
    start = normal(draw, width, many)
    weights = start.clone().requires_grad_()
    loss = contrastive_loss(weights, values, truth, total, rate)
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise Mistake(
            "`contrastive_loss` returns one number as a tensor that depends on W, so that "
            "autograd can take its gradient: no .item(), no detach."
        )
    after = (start - rate * torch.autograd.grad(loss, weights)[0]) @ query
    attended = (values.T @ truth @ query) / total
    before = start @ query
    compare(
        after,
        before + attended,
        {
            "The gradient has the wrong sign: the loss is *minus* the similarity, since descent "
            "must raise it.": before - attended,
            "D_q is missing: without it the step is not softmax attention.": before
            + attended * total,
            "Softmax has no 1/N: D_q stands in its place.": before + attended * total / count,
            "D_q and 1/N: one of them is enough.": before + attended / count,
            "The rate is missing: a step of the rate η must not depend on it, so the loss is "
            "divided by η.": before + rate * attended,
            "The loss is divided by η, not multiplied.": before + rate**2 * attended,
        },
    )
    value = -sum((v @ start @ f).item() for v, f in zip(values, truth, strict=True))
    compare(loss.item(), value / (rate * total.item()))


def q6(
    learnt_rates: Callable[..., Tensor], rates: Tensor, ratio: float, reason: str, seed: int
) -> None:
    """Made-up solvers with known rates; numbers and a letter about a shipped one.

    The three members were measured with six draws of 2000 contexts each. The rate of coordinate 0
    was 2.20 (standard deviation .02), that of coordinate 9 6.60 (.10), the ratio of the largest
    and the smallest 3.04 (.06). The tolerances are three standard deviations.
    """
    draw = generator(seed)
    contexts, pairs, d = 60, 5 + seed, 3 + seed % 2
    xs, ys = normal(draw, contexts, pairs + 1, d), normal(draw, contexts, pairs + 1)
    own = 1.0 + 3 * torch.rand(d, generator=draw, dtype=torch.float64)
    moment = (xs[:, :-1] * ys[:, :-1, None]).mean(1)
    found = (moment * own * xs[:, -1]).sum(-1)
    with_query = (xs * ys[..., None]).mean(1) * xs[:, -1]
    rest = 0.3 * normal(draw, contexts)
    design = moment * xs[:, -1]
    exact = torch.linalg.pinv(design) @ (found + rest)
    single = (design * (found + rest)[:, None]).sum(0) / design.square().sum(0)
    compare(
        learnt_rates(found + rest, xs, ys),
        exact,
        {
            "Those are the rates over N: take the mean over the pairs, not their sum.": exact
            / pairs,
            "The query's own label must not be read: leave the last pair out of the mean.": (
                torch.linalg.pinv(with_query) @ (found + rest)
            ),
            "Fit all coordinates together: one at a time, each takes what is the others'.": single,
            "One rate for each coordinate, not one for all.": torch.full_like(
                exact,
                ((design.sum(-1) * (found + rest)).sum() / design.sum(-1).square().sum()).item(),
            ),
        },
        tolerance=1e-6,
    )
    if not isinstance(rates, Tensor) or rates.shape != (10,):
        raise Mistake("`rates` are the ten rates of `lsa-stretched`, a tensor.")
    if not torch.is_tensor(ratio) and not isinstance(ratio, int | float):
        raise Mistake(f"`ratio` is a number; got {ratio!r}.")
    answered = letter("reason", reason)
    if not seed:  # the public check does not tell
        return
    ends = rates.double()[[0, 9]]
    if bool(ends[0] > ends[1]):
        raise Mistake("`rates` are in the wrong order: coordinate 0 is the one stretched most.")
    compare(
        ends,
        torch.tensor([2.2, 6.6], dtype=torch.float64),
        {
            "`rates` are ten times too small: sum and mean over the ten pairs differ by N.": (
                torch.tensor([0.22, 0.659], dtype=torch.float64)
            ),
            "Those are the rates of `lsa-1`, which was trained on even inputs.": torch.full(
                (2,), 6.07, dtype=torch.float64
            ),
        },
        tolerance=0.31 / 6.6,
    )
    compare(
        ratio,
        3.04,
        {
            "`ratio` is the smallest over the largest: turn it around.": 0.33,
            "`ratio` is that of the variances. It is asked for the rates.": 16.0,
        },
        tolerance=0.18 / 3.04,
    )
    compare(
        answered,
        "c",
        {
            "Reason (a): five trainings of `lsa-1` differ by one part in a hundred. What would "
            "give every seed the same order of the ten?": "a",
            "Reason (b): then the rates would be as 1 to 16, one over the variances. Ten pairs "
            "are few: a step also pays for its noise.": "b",
            "Reason (d): the layer reads x as it is. `xs` of both networks go through the same "
            "operations.": "d",
        },
    )


__all__ = ["q1", "q2", "q3", "q4", "q5", "q6"]
