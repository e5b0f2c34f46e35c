"""Typical wrong answers to homework 4, and what must be said about each."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def step(
    W0: Tensor, xs: Tensor, ys: Tensor, query: Tensor, rate: float, known: float = 1.0
) -> Tensor:
    errors = known * xs @ W0.T - ys
    return W0 @ query - rate / len(xs) * (xs @ query) @ errors


def attended(
    tokens: Tensor, *weights: Tensor, keys: int = -1, soft: bool = False, scale: bool = False
) -> Tensor:
    W_K, W_Q, W_V, P = weights
    context = tokens[:keys] if keys else tokens
    scores = (tokens @ W_Q.T) @ (context @ W_K.T).T
    scores = scores / math.sqrt(tokens.shape[1]) if scale else scores
    return tokens + (scores.softmax(-1) if soft else scores) @ (context @ W_V.T) @ P.T


def query_alone(tokens: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat([tokens[:-1], attended(tokens, *weights)[-1:]])


def layer(
    W0: Tensor, rate: float, pairs: int, known: float = 1.0, label: float = -1.0, sign: int = 1
) -> tuple[Tensor, ...]:
    o, d = W0.shape
    W_K = torch.block_diag(torch.eye(d), torch.zeros(o, o)).double()
    lower = torch.cat([known * W0, label * torch.eye(o)], 1)
    W_V = torch.cat([torch.zeros(d, d + o).double(), lower])
    return W_K, W_K, W_V, sign * rate / pairs * torch.eye(d + o).double()


def sized_by_pairs(W0: Tensor, rate: float, pairs: int) -> tuple[Tensor, ...]:
    return *layer(W0, rate, pairs)[:3], rate / pairs * torch.eye(pairs).double()


def in_rows(W0: Tensor, rate: float, pairs: int) -> tuple[Tensor, ...]:
    return tuple(each.T for each in layer(W0, rate, pairs))


def rates(s: Tensor, m: Tensor, pairs: int, own: float = 1.0, others: float = 1.0) -> Tensor:
    moment = (m + others * s * (s.sum() - s)) / pairs
    return s / (moment + own * (1 - 1 / pairs) * s**2)


def parts(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    demos: Tensor,
    root: float = 0.5,
    over: str = "all",
) -> Tensor:
    raw = (keys @ query / len(query) ** root).exp()
    start, step = raw[~demos] @ values[~demos], raw[demos] @ values[demos]
    if over == "own":
        return torch.stack([start / raw[~demos].sum(), step / raw[demos].sum()])
    return torch.stack([start, step]) / (raw[demos] if over == "demos" else raw).sum()


def features(z: Tensor, omega: Tensor, half: float = 0.5, power: float = 0.5) -> Tensor:
    norms = z.square().sum(-1, keepdim=True)
    return torch.exp(z @ omega.T - half * norms) / len(omega) ** power


def loss(
    W: Tensor, v: Tensor, phi: Tensor, normaliser: float, rate: float, sign: float = -1.0
) -> Tensor:
    return sign * (v * (phi @ W.T)).sum() / (rate * normaliser)


def fitted(found: Tensor, xs: Tensor, ys: Tensor, pairs: int = -1, total: bool = False) -> Tensor:
    moment = ys[:, :pairs, None] * xs[:, :pairs] if pairs else ys[..., None] * xs
    design = (moment.sum(1) if total else moment.mean(1)) * xs[:, -1]
    return torch.linalg.lstsq(design, found[:, None]).solution[:, 0]


def one_by_one(found: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    design = (ys[:, :-1, None] * xs[:, :-1]).mean(1) * xs[:, -1]
    return (design * found[:, None]).sum(0) / design.square().sum(0)


RATES = torch.tensor([2.2, 2.2, 3.5, 3.5, 4.8, 4.8, 5.9, 5.8, 6.7, 6.6])

WRONG: dict[str, list[tuple[str, Any]]] = {
    "q1": [
        ("divide by N", lambda W, x, y, q, r: step(W, x, y, q, r * len(x))),
        ("sign", lambda W, x, y, q, r: step(W, x, y, q, -r)),
        ("factor 1/2", lambda W, x, y, q, r: step(W, x, y, q, 2 * r)),
        ("change alone", lambda W, x, y, q, r: step(W, x, y, q, r) - W @ q),
        ("leave W_0 out", lambda W, x, y, q, r: step(W, x, y, q, r, known=0.0)),
        ("where is W_0", lambda W, x, y, q, r: step(0 * W, x, y, q, r)),
    ],
    "q2": [
        ("query is no key", (lambda *given: attended(*given, keys=0), layer)),
        ("no softmax", (lambda *given: attended(*given, soft=True), layer)),
        ("no square root", (lambda *given: attended(*given, scale=True), layer)),
        ("Every token moves", (query_alone, layer)),
        ("add it to the tokens", (lambda t, *given: attended(t, *given) - t, layer)),
        ("wrong way", (attended, lambda *given: layer(*given, sign=-1))),
        ("wrong way", (attended, lambda *given: layer(*given, known=-1.0, label=1.0))),
        ("1/N is missing", (attended, lambda W0, rate, pairs: layer(W0, rate, 1))),
        ("does not know W_0", (attended, lambda *given: layer(*given, known=0.0))),
        ("their difference", (attended, lambda *given: layer(*given, label=1.0))),
        ("label channel of W_V is missing", (attended, lambda *given: layer(*given, label=0.0))),
        ("not pairs", (attended, sized_by_pairs)),
        ("x of a token moves", (attended, in_rows)),
    ],
    "q3": [
        ("normal inputs", lambda s, m, pairs: rates(s, 3 * s**2, pairs)),
        ("two different pairs", lambda *given: rates(*given, own=0.0)),
        ("other coordinates", lambda *given: rates(*given, others=0.0)),
        ("endless contexts", lambda s, m, pairs: 1 / s),
        ("one over it", lambda *given: 1 / rates(*given)),
        (
            "best single rate",
            lambda s, m, pairs: (s**2).sum() / (s**2 / rates(s, m, pairs)).sum() * (s / s),
        ),
    ],
    "q4": [
        ("one softmax", lambda *given: parts(*given, over="own")),
        ("demonstrations only", lambda *given: parts(*given, over="demos")),
        ("square root of d", lambda *given: parts(*given, root=0.0)),
        ("not by d", lambda *given: parts(*given, root=1.0)),
        ("exchanged", lambda *given: parts(*given).flip(0)),
        ("split it", lambda *given: parts(*given).sum(0)),
    ],
    "q5": [
        ("is missing", (lambda *given: features(*given, half=0.0), loss)),
        ("half the square", (lambda *given: features(*given, half=1.0), loss)),
        ("is then a mean", (lambda *given: features(*given, power=0.0), loss)),
        ("two features", (lambda *given: features(*given, power=1.0), loss)),
        ("wrong sign", (features, lambda *given: loss(*given, sign=1.0))),
        ("D_q is missing", (features, lambda W, v, phi, n, rate: loss(W, v, phi, 1.0, rate))),
        ("no 1/N", (features, lambda W, v, phi, n, rate: loss(W, v, phi, len(v), rate))),
        ("must not depend on it", (features, lambda W, v, phi, n, rate: loss(W, v, phi, n, 1.0))),
        ("no .item()", (features, lambda *given: loss(*given).item())),
    ],
    "q6": [
        ("not their sum", (lambda *given: fitted(*given, total=True), RATES, 3.0, "c")),
        ("leave the last pair out", (lambda *given: fitted(*given, pairs=0), RATES, 3.0, "c")),
        ("all coordinates together", (one_by_one, RATES, 3.0, "c")),
        ("ten times too small", (fitted, RATES / 10, 3.0, "c")),
        ("wrong order", (fitted, RATES.flip(0), 3.0, "c")),
        ("turn it around", (fitted, RATES, 0.33, "c")),
        ("differ by one part", (fitted, RATES, 3.0, "a")),
        ("as 1 to 16", (fitted, RATES, 3.0, "b")),
        ("reads x as it is", (fitted, RATES, 3.0, "d")),
    ],
}
