"""Typical wrong answers to homework 3, and what must be said about each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def right_ridge(X: Tensor, y: Tensor, penalty: float) -> Tensor:
    return torch.linalg.solve(X.T @ X + penalty * torch.eye(X.shape[1]).double(), X.T @ y)


def wrong_side(X: Tensor, y: Tensor, penalty: float) -> Tensor:
    return torch.linalg.solve(penalty * X.T @ X + torch.eye(X.shape[1]).double(), X.T @ y)


def everywhere(X: Tensor, y: Tensor, penalty: float) -> Tensor:
    return torch.linalg.pinv(X.T @ X + penalty) @ X.T @ y


def of_the_mean(X: Tensor, y: Tensor, penalty: float) -> Tensor:
    return right_ridge(X, y, penalty * len(X))


def in_every_prefix(
    xs: Tensor, ys: Tensor, ahead: int = 0, normal: bool = False, first: int = 1
) -> Tensor:
    found = torch.zeros_like(ys)
    for i in range(first, ys.shape[1]):
        X, y = xs[:, : i + ahead], ys[:, : i + ahead, None]
        w = torch.linalg.solve(X.mT @ X, X.mT @ y) if normal else torch.linalg.pinv(X) @ y
        found[:, i] = (xs[:, i : i + 1] @ w)[:, 0, 0]
    return found


def basic(xs: Tensor, ys: Tensor) -> Tensor:
    """For n < d, a w of the first n coordinates alone: it fits, and is not the shortest."""
    found = torch.zeros_like(ys)
    for i in range(1, ys.shape[1]):
        X, y = xs[:, :i], ys[:, :i, None]
        used = min(i, X.shape[2])
        w = torch.linalg.pinv(X[..., :used]) @ y
        found[:, i] = (xs[:, i : i + 1, :used] @ w)[:, 0, 0]
    return found


def squares(f: Tensor, g: Tensor, d: int) -> Tensor:
    return (f - g).square().mean(0) / d


def mean_below(f: Tensor, g: Tensor, d: int) -> float:
    return squares(f, g, d)[1:d].mean().item()


def asked(predict: Any, xs: Tensor, ys: Tensor, queries: Tensor) -> Tensor:
    many = len(queries)
    seen = torch.cat([xs.expand(many, -1, -1), queries[:, None]], 1)
    return predict(seen, torch.nn.functional.pad(ys.expand(many, -1), (0, 1)))[:, -1]


def fitted(
    predict: Any, xs: Tensor, ys: Tensor, queries: Tensor, offset: bool = False, few: int = 0
) -> Tensor:
    wanted = asked(predict, xs, ys, queries)
    design = torch.nn.functional.pad(queries, (0, 1), value=1.0) if offset else queries
    count = few or len(queries)
    w = torch.linalg.lstsq(design[:count], wanted[:count, None]).solution[:, 0]
    return w[: xs.shape[1]]


def in_one_row(predict: Any, xs: Tensor, ys: Tensor, queries: Tensor) -> Tensor:
    labels = torch.nn.functional.pad(ys, (0, len(queries)))
    wanted = predict(torch.cat([xs, queries])[None], labels[None])[0, len(xs) :]
    return torch.linalg.lstsq(queries, wanted[:, None]).solution[:, 0]


def r2(predict: Any, xs: Tensor, ys: Tensor, queries: Tensor, about_mean: bool = True) -> float:
    wanted = asked(predict, xs, ys, queries)
    rest = (wanted - queries @ fitted(predict, xs, ys, queries)).square().sum()
    middle = wanted.mean() if about_mean else 0.0
    return (1 - rest / (wanted - middle).square().sum()).item()


def bayes(X: Tensor, y: Tensor, noise: float, prior: float) -> Tensor:
    return right_ridge(X, y, (noise / prior) ** 2)


def error(X: Tensor, x: Tensor, noise: float, prior: float, own: float = 1.0) -> float:
    inner = X.T @ X + (noise / prior) ** 2 * torch.eye(len(x)).double()
    return (noise**2 * (x @ torch.linalg.solve(inner, x)) + own * noise**2).item()


def nearest(
    found: Tensor, xs: Tensor, ys: Tensor, penalties: list[float], stop: int = 0, far: bool = False
) -> float:
    stop = stop or xs.shape[-1]

    def distance(penalty: float) -> float:
        total = 0.0
        for i in range(1, stop):
            X, y = xs[:, :i], ys[:, :i, None]
            inner = X.mT @ X + penalty * torch.eye(xs.shape[-1]).double()
            w = torch.linalg.solve(inner, X.mT @ y)
            total += float((found[:, i] - (xs[:, i : i + 1] @ w)[:, 0, 0]).square().sum())
        return -total if far else total

    return min(penalties, key=distance)


WRONG: dict[str, list[tuple[str, Any]]] = {
    "q1": [
        ("wrong side", wrong_side),
        ("every* entry", everywhere),
        ("n times", of_the_mean),
        ("wrong sign", lambda X, y, penalty: right_ridge(X, y, -penalty)),
        ("where is the penalty", lambda X, y, penalty: torch.linalg.pinv(X) @ y),
    ],
    "q2": [
        ("own label", lambda xs, ys: in_every_prefix(xs, ys, ahead=1, first=0)),
        ("own label", lambda xs, ys: in_every_prefix(xs, ys, ahead=1)),
        ("shortest", lambda xs, ys: in_every_prefix(xs, ys, normal=True)),
        ("shortest", basic),
        ("just before", lambda xs, ys: in_every_prefix(xs, ys, ahead=-1, first=2)),
        ("Entry 0 is missing", lambda xs, ys: in_every_prefix(xs, ys)[:, 1:]),
        ("all the pairs", lambda xs, ys: (xs @ torch.linalg.pinv(xs) @ ys[..., None])[..., 0]),
    ],
    "q3": [
        ("divided by d", (lambda f, g, d: d * squares(f, g, d), mean_below)),
        ("absolute value", (lambda f, g, d: (f - g).abs().mean(0) / d, mean_below)),
        ("cancel", (lambda f, g, d: (f - g).mean(0) ** 2 / d, mean_below)),
        ("Start at n = 1", (squares, lambda f, g, d: squares(f, g, d)[:d].mean())),
        ("stop at n = d - 1", (squares, lambda f, g, d: squares(f, g, d)[1 : d + 1].mean())),
        ("not over all n", (squares, lambda f, g, d: squares(f, g, d).mean())),
    ],
    "q4": [
        ("intercept", (lambda *given: fitted(*given, offset=True), r2)),
        ("Too few", (lambda *given: fitted(*given, few=given[1].shape[1]), r2)),
        ("not the labels", (lambda p, xs, ys, queries: torch.linalg.pinv(xs) @ ys, r2)),
        ("in one row", (in_one_row, r2)),
        ("about the mean", (fitted, lambda *given: r2(*given, about_mean=False))),
        ("1 minus", (fitted, lambda *given: 1 - r2(*given))),
    ],
    "q5": [
        ("noise / prior?", (lambda X, y, s, t: right_ridge(X, y, s / t), error)),
        ("upside down", (lambda X, y, s, t: right_ridge(X, y, (t / s) ** 2), error)),
        ("prior is missing", (lambda X, y, s, t: right_ridge(X, y, s**2), error)),
        ("noisy too", (bayes, lambda *given: error(*given, own=0.0))),
        ("before any pair", (bayes, lambda X, x, s, t: (s**2 + t**2 * x @ x).item())),
    ],
    "q6": [
        ("farthest", (lambda *given: nearest(*given, far=True), 0.25, 1 / 32, "b")),
        ("1 .. d - 1", (lambda *given: nearest(*given, stop=given[1].shape[1]), 0.25, 1 / 32, "b")),
        ("not its place", (lambda *given: given[3].index(nearest(*given)), 0.25, 1 / 32, "b")),
        ("member 2", (nearest, 0.5, 1 / 32, "b")),
        ("regression-d8", (nearest, 0.25, 0.25, "b")),
        ("would be near 0", (nearest, 0.25, 1 / 32, "a")),
        ("several times smaller", (nearest, 0.25, 1 / 32, "c")),
        ("Which number did you measure", (nearest, 0.25, 1 / 32, "d")),
    ],
}
