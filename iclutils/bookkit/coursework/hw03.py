"""Homework 3, on chapter 03: ridge, least squares, distances between learners, noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .answers import Mistake, compare, generator, letter


def q1(ridge: Callable[..., Tensor], seed: int) -> None:
    """Least squares on data to which sqrt(penalty) times the identity was appended."""
    draw = generator(seed)
    n, d, penalty = (4 + seed, 6, 0.3) if seed % 2 else (9 + seed, 4, 2.5 + seed)
    X = torch.randn(n, d, generator=draw, dtype=torch.float64)
    y = torch.randn(n, generator=draw, dtype=torch.float64)

    def appended(amount: float) -> Tensor:
        rows = np.vstack([X.numpy(), math.sqrt(amount) * np.eye(d)])
        return torch.from_numpy(np.linalg.lstsq(rows, np.pad(y.numpy(), (0, d)), rcond=None)[0])

    eye, gram, moment = torch.eye(d, dtype=torch.float64), X.T @ X, X.T @ y
    compare(
        ridge(X, y, penalty),
        appended(penalty),
        {
            "The penalty stands on the wrong side: it multiplies the identity, not the Gram "
            "matrix X^T X.": torch.linalg.solve(penalty * gram + eye, moment),
            "X^T X + penalty adds it to *every* entry: it belongs on the diagonal alone.": (
                torch.linalg.pinv(gram + penalty) @ moment
            ),
            "The penalty has the wrong sign: it is added to X^T X.": torch.linalg.pinv(
                gram - penalty * eye
            )
            @ moment,
            "The loss sums over the examples. With a mean in its place, the penalty is n times "
            "too strong.": appended(n * penalty),
            "The penalty is squared: it enters as it is.": appended(penalty**2),
            "That is least squares: where is the penalty?": appended(0.0),
        },
    )


def q2(least_squares: Callable[..., Tensor], seed: int) -> None:
    """One least-squares problem for each prefix, by the singular values."""
    draw = generator(seed)
    batch, d = 3, 3 + seed % 3
    n = 2 * d + 1
    xs = torch.randn(batch, n, d, generator=draw, dtype=torch.float64)
    ys = torch.randn(batch, n, generator=draw, dtype=torch.float64)

    def at_prefixes(shift: int = 0, penalty: float = 0.0) -> Tensor:
        """Entry i, from the pairs before i + shift."""
        out = torch.zeros(batch, n, dtype=torch.float64)
        for b in range(batch):
            for i in range(n):
                k = max(0, i + shift)
                rows = np.vstack([xs[b, :k].numpy(), math.sqrt(penalty) * np.eye(d)])
                labels = np.pad(ys[b, :k].numpy(), (0, d))
                w = np.linalg.lstsq(rows, labels, rcond=None)[0]
                out[b, i] = xs[b, i] @ torch.from_numpy(w)
        return out

    truth = at_prefixes()
    few = (
        "With fewer pairs than dimensions many w fit and X^T X cannot be inverted. Take the "
        "shortest of them, w = pinv(X) y."
    )
    try:
        found = least_squares(xs, ys)
    except Mistake as mistake:
        if "LinAlgError" in str(mistake) or "singular" in str(mistake):
            raise Mistake(few) from mistake
        raise
    if isinstance(found, Tensor) and found.shape == truth.shape:
        right = (found - truth).abs().amax(0) < 1e-6  # NaN is not right
        if right[d:].all() and not right[:d].all():
            raise Mistake("Before any pair the answer is 0." if right[1:].all() else few)
        mistakes = {
            "Entry i has seen its own label: fit the pairs *before* i, xs[:, :i] and "
            "ys[:, :i].": at_prefixes(shift=1),
            "Entry i leaves out the pair just before it: fit the pairs 0 .. i - 1.": at_prefixes(
                shift=-1
            ),
            "All entries use all the pairs: entry i may use the i pairs before it alone.": (
                xs @ torch.linalg.pinv(xs) @ ys[..., None]
            )[..., 0],
        }
        compare(  # whatever entry 0 is
            found[:, 1:],
            truth[:, 1:],
            {message: each[:, 1:] for message, each in mistakes.items()},
            tolerance=1e-6,
        )
    compare(
        found,
        truth,
        {"Entry 0 is missing: with no pair the answer is 0.": truth[:, 1:]},
        tolerance=1e-6,
    )


def q3(spd: Callable[..., Tensor], mspd: Callable[..., float], seed: int) -> None:
    """Sums by three loops."""
    draw = generator(seed)
    batch, d = 5 + seed, 3 + seed % 4
    n = 2 * d + 1
    f = torch.randn(batch, n, generator=draw, dtype=torch.float64)
    g = torch.randn(batch, n, generator=draw, dtype=torch.float64)
    truth = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        for b in range(batch):
            truth[i] += (f[b, i].item() - g[b, i].item()) ** 2 / (d * batch)
    compare(
        spd(f, g, d),
        truth,
        {
            "SPD is divided by d: the paper plots it per dimension.": truth * d,
            "Take the square of the difference, not its absolute value.": (f - g).abs().mean(0) / d,
            "Square each difference before the mean over contexts: errors of opposite sign must "
            "not cancel.": (f - g).mean(0).square() / d,
            "One number for each n: the mean runs over contexts alone.": truth.mean(),
            "One number for each n: the mean runs over the contexts, not over the positions.": (
                (f - g).square().mean(1) / d
            ),
            "That is the square root of it: squared prediction *difference*.": truth.sqrt(),
            "That is a sum over the contexts: take the mean.": truth * batch,
        },
    )
    compare(
        mspd(f, g, d),
        truth[1:d].mean().item(),
        {
            "n = 0 has seen no pair: every algorithm answers 0 there. Start at n = 1.": truth[:d]
            .mean()
            .item(),
            "At n = d the pairs decide w: stop at n = d - 1.": truth[1 : d + 1].mean().item(),
            "The mean over n runs over 1 .. d - 1, not over all n.": truth.mean().item(),
            "That is a sum over n: take the mean.": truth[1:d].sum().item(),
            "Divide by d once.": (truth[1:d].mean() * d).item(),
        },
    )


def q4(implicit_weights: Callable[..., Tensor], linearity: Callable[..., float], seed: int) -> None:
    """The normal equations of a learner that is not quite linear."""
    draw = generator(seed)
    d, n, queries = 3 + seed % 3, 4 + seed, 24 + seed
    xs = torch.randn(n, d, generator=draw, dtype=torch.float64)
    ys = torch.randn(n, generator=draw, dtype=torch.float64) * 2
    asked = torch.randn(queries, d, generator=draw, dtype=torch.float64) + 0.3
    bend = 0.5 + 0.1 * seed

    def predict(seen: Tensor, labels: Tensor) -> Tensor:
        """Averages y x over the pairs before each entry; bent, and with an offset."""
        pairs = torch.cumsum(labels[..., None] * seen, -2)
        before = torch.cat([torch.zeros_like(pairs[..., :1, :]), pairs[..., :-1, :]], -2)
        count = torch.arange(seen.shape[-2], dtype=torch.float64).clamp(min=1)
        straight = (before * seen).sum(-1) / count
        return straight + bend * straight.abs() + 0.4

    def answers(context: Tensor, labels: Tensor) -> Tensor:
        return torch.stack(
            [
                predict(torch.cat([context, q[None]]), torch.cat([labels, labels[:1] * 0]))[-1]
                for q in asked
            ]
        )

    def fit(to: Tensor, offset: bool = False, count: int = queries) -> tuple[Tensor, Tensor]:
        """Weights and predictions of a linear fit."""
        design = torch.cat([asked, torch.ones(queries, 1, dtype=torch.float64)], -1)
        design = design[:, : d + offset]
        some = design[:count]
        w = torch.linalg.solve(some.T @ some, some.T @ to[:count])
        return w[:d], design @ w

    wanted = answers(xs, ys)
    weights, fitted = fit(wanted)
    unlabelled = torch.zeros(queries, dtype=torch.float64)
    one_row = predict(torch.cat([xs, asked]), torch.cat([ys, unlabelled]))[n:]
    guess = xs.T @ ys / n
    compare(
        implicit_weights(predict, xs, ys, asked),
        weights,
        {
            "That is a fit with an intercept, as the released code does: the paper's linear "
            "function has none.": fit(wanted, offset=True)[0],
            "Too few queries: d of them can be fitted by anything. Use all.": fit(wanted, count=d)[
                0
            ],
            "Too few queries: use all of them, not as many as there are pairs.": fit(
                wanted, count=max(n, d)
            )[0],
            "Fit what the learner *predicts* for the queries, not the labels of the pairs.": (
                torch.linalg.pinv(xs) @ ys
            ),
            "Every query comes right after the n pairs: in one row, later queries see earlier ones "
            "as pairs.": fit(one_row)[0],
            "The context is cut: all n pairs stand before the query.": fit(
                answers(xs[:-1], ys[:-1])
            )[0],
            "That is the mean of y x over the pairs: ask the learner.": guess,
        },
        tolerance=1e-6,
    )
    rest = (wanted - fitted).square().sum()
    spread = (wanted - wanted.mean()).square().sum()
    offset_rest = (wanted - fit(wanted, offset=True)[1]).square().sum()
    compare(
        linearity(predict, xs, ys, asked),
        (1 - rest / spread).item(),
        {
            "That is the share that the fit misses: R² is 1 minus it.": (rest / spread).item(),
            "The variation to be explained is that about the mean of the predictions.": (
                1 - rest / wanted.square().sum()
            ).item(),
            "That is a fit with an intercept: leave it out.": (1 - offset_rest / spread).item(),
            "Compare the fit with the learner's predictions, with nothing else.": (
                1 - (fitted - asked @ guess).square().sum() / spread
            ).item(),
        },
        tolerance=1e-6,
    )


def q5(
    bayes_weights: Callable[..., Tensor], expected_error: Callable[..., float], seed: int
) -> None:
    """Conditioning of the joint normal distribution of w and y."""
    draw = generator(seed)
    d = 4
    n = 3 + 2 * seed
    noise, prior = 0.4 + 0.2 * seed, (1.7, 0.6, 2.2)[seed % 3]
    X = torch.randn(n, d, generator=draw, dtype=torch.float64)
    y = torch.randn(n, generator=draw, dtype=torch.float64)
    x = torch.randn(d, generator=draw, dtype=torch.float64)
    eye = torch.eye(n, dtype=torch.float64)
    together = prior**2 * X @ X.T + noise**2 * eye  # covariance of y
    gain = prior**2 * torch.linalg.solve(together, X).T
    left = prior**2 * (torch.eye(d, dtype=torch.float64) - gain @ X)

    def penalised(amount: float) -> Tensor:
        return X.T @ torch.linalg.solve(X @ X.T + amount * eye, y)

    compare(
        bayes_weights(X, y, noise, prior),
        gain @ y,
        {
            "The penalty is noise² / prior², a ratio of variances: did you take noise / "
            "prior?": penalised(noise / prior),
            "The penalty is upside down: more noise asks for more of it, noise² / prior².": (
                penalised(prior**2 / noise**2)
            ),
            "The prior is missing: the penalty is noise² / prior².": penalised(noise**2),
            "That is upside down, and not squared: the penalty is noise² / prior².": penalised(
                prior / noise
            ),
            "That is least squares: it trusts noisy labels fully.": torch.linalg.pinv(X) @ y,
        },
        tolerance=1e-6,
    )
    own = (x @ left @ x).item()
    compare(
        expected_error(X, x, noise, prior),
        own + noise**2,
        {
            "The label that is predicted is noisy too: add noise².": own,
            "Add the variance of the label's noise, noise², not noise.": own + noise,
            "That is the error before any pair, noise² + prior² |x|²: the pairs have taken some.": (
                noise**2 + prior**2 * x @ x
            ).item(),
            "The inverse of X^T X + penalty is the covariance of w only after it is multiplied "
            "by noise².": own / noise**2 + noise**2,
            "That multiplies the inverse by prior²: the covariance of w is noise² (X^T X + "
            "penalty)^-1.": own / noise**2 * prior**2 + noise**2,
        },
        tolerance=1e-6,
    )


def q6(
    nearest_penalty: Callable[..., float], kept: float, control: float, reason: str, seed: int
) -> None:
    """A function on made-up learners; numbers and a letter about shipped ones.

    ``kept`` and ``control`` were measured for ten draws of 512 contexts, on a grid of factors
    sqrt(2): 1/4 in all ten, and 1/32 in nine with 1/22.6 in one. So one step of the grid to
    either side is right.
    """
    draw = generator(seed)
    d, batch, n = 3, 40, 7
    xs = torch.randn(batch, n, d, generator=draw, dtype=torch.float64)
    ys = torch.randn(batch, n, generator=draw, dtype=torch.float64)
    grid = [0.02, 0.1, 0.4, 1.5, 6.5]
    own = grid[1 + seed % 3]

    def at_prefixes(amount: float, shift: int = 0) -> Tensor:
        rows = [torch.zeros(batch, dtype=torch.float64)]
        for i in range(1, n):
            seen, labels = xs[:, : i + shift], ys[:, : i + shift]
            inner = seen @ seen.mT + amount * torch.eye(i + shift, dtype=torch.float64)
            dual = torch.linalg.solve(inner, labels[..., None])
            rows.append((xs[:, i : i + 1] @ seen.mT @ dual)[:, 0, 0])
        return torch.stack(rows, 1)

    learner = at_prefixes(own)
    learner = learner + 0.02 * torch.randn(batch, n, generator=draw, dtype=torch.float64)
    learner[:, d:] = at_prefixes(grid[-1])[:, d:]  # misleads who looks beyond n = d - 1
    other = max(grid, key=lambda each: float((learner - at_prefixes(each))[:, 1:d].square().sum()))
    beyond = min(grid, key=lambda each: float((learner - at_prefixes(each))[:, 1:].square().sum()))
    compare(
        nearest_penalty(learner, xs, ys, grid),
        own,
        {
            "That is the penalty that is *farthest*.": other,
            "The mean runs over n = 1 .. d - 1 alone: at n >= d this learner does something "
            "else.": beyond,
            "Return the penalty, not its place in the list.": grid.index(own),
        },
        tolerance=1e-9,
    )
    for name, value in (("kept", kept), ("control", control)):
        if not isinstance(value, int | float) or not value > 0:
            raise Mistake(f"`{name}` is a penalty, a number above 0; got {value!r}.")
    answered = letter("reason", reason)
    if not seed:  # the public check does not tell
        return
    compare(
        kept,
        1 / 4,
        {
            "`kept` is too small, as that of member 0 or 1 or of the control: ask member 2 of "
            "regression-noise.": 0.07,
            "`kept` is too large, as that of member 3: ask member 2.": 0.5,
        },
        tolerance=0.11,
    )
    compare(
        control,
        1 / 32,
        {"`control` is that of regression-noise: ask regression-d8, member 0.": 0.25},
        tolerance=0.014,
    )
    compare(
        answered,
        "b",
        {
            "Reason (a): these contexts have no noise at all. A learner that reads the noise off "
            "its context would be near 0.": "a",
            "Reason (c): the control was trained without noise, and as long; its penalty is "
            "several times smaller.": "c",
            "Reason (d): noise / prior is 1/2. Which number did you measure?": "d",
        },
    )


__all__ = ["q1", "q2", "q3", "q4", "q5", "q6"]
