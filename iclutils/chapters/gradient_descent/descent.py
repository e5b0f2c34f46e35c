"""Gradient descent on the least-squares loss of a context, explicit, and its best settings.

A context is N pairs and, last, the query, whose y is never read. The loss of W is
1/(2N) Σ_i |W x_i - y_i|² over the pairs; a step of GD at the rate η is W -= (η/N) Σ_i (W x_i - y_i)
x_iᵀ. GD++ ({cite}`vonoswald2023`) also maps every x, the query's too, by I - γ Σ_i x_i x_iᵀ. What a
setting costs is half the mean squared error of the query's answer.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import descent
    >>> xs = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    >>> ys = torch.tensor([2.0, 4.0, 0.0], dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError

Labels = Float[Tensor, "..."]  # (*batch, n), or (*batch, n, o) for o outputs
Settings = Sequence[float] | Float[Tensor, "_"]


class Descent(NamedTuple):
    """The answers after 0 .. K steps, and the weights W behind them: an answer is W x_q."""

    predictions: Float[Tensor, "step *batch"]  # (step, *batch, o) for several outputs
    weights: Float[Tensor, "step *batch o d"]


def descend(
    xs: Float[Tensor, "*batch n d"],
    ys: Labels,
    rates: Settings,
    gammas: Settings | None = None,
    start: Float[Tensor, "o dim"] | None = None,
) -> Descent:
    """GD, or GD++ if there are gammas: a step for each rate.

    All that happens in a step reads what was there before it, as in a layer of attention. The
    errors of a later step of GD++ are ``start`` x_i - y_i too, with x_i and y_i as they are by
    then: what stacked layers do. A start that fits the pairs is spoilt by that, as x changes; to
    keep it, take ``start`` x from ys beforehand. With GD there is no difference.

    Args:
        xs: inputs, the query's last.
        ys: labels; the last is not read.
        rates: η of each step.
        gammas: γ of each step.
        start: W_0; zero if omitted.

    Example:
        >>> descent.descend(xs, ys, rates=[0.4]).predictions
        tensor([0., 6.], dtype=torch.float64)
    """
    pairs, query, y = checked(xs, ys)
    etas, squeezes = settings(rates, gammas)
    first = initial(start, y.shape[-1], xs)
    count = pairs.shape[-2]
    weights = first.expand(*xs.shape[:-2], *first.shape)
    turned = torch.eye(xs.shape[-1], dtype=xs.dtype, device=xs.device)  # what is done to x so far
    found = [weights]
    for rate, gamma in zip(etas, squeezes, strict=True):
        errors = pairs @ first.mT - y
        change = -(rate / count) * errors.mT @ pairs
        y = y - pairs @ change.mT
        weights = weights + change @ turned
        found.append(weights)
        if gamma:
            moment = pairs.mT @ pairs
            turned = turned - gamma * moment @ turned
            pairs = pairs - gamma * pairs @ moment
    path = torch.stack(found)
    answers = (path @ query[..., None])[..., 0]
    return Descent(answers if ys.ndim == xs.ndim else answers[..., 0], path)


def predictor(
    rates: Settings, gammas: Settings | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The answers of the last step from 0, as a function of (xs, ys).

    Example:
        >>> descent.predictor([0.4])(xs, ys)
        tensor(6., dtype=torch.float64)
    """
    return lambda xs, ys: descend(xs, ys, rates, gammas).predictions[-1]


def spectrum(xs: Float[Tensor, "*batch n d"], gammas: Settings) -> Float[Tensor, "step *batch dim"]:
    """Eigenvalues, rising, of (1/N) Σ x_i x_iᵀ over the pairs: before and after each step of GD++.

    A step makes λ (1 - γ N λ)² of an eigenvalue λ: up to γ N λ = 1, the larger shrink the more.

    Example:
        >>> descent.spectrum(xs, gammas=[0.1])[:, 0]
        tensor([2.5000, 0.6250], dtype=torch.float64)
    """
    pairs, _, _ = checked(xs, torch.zeros_like(xs[..., 0]))
    count = pairs.shape[-2]
    values = [torch.linalg.eigvalsh(pairs.mT @ pairs / count)]
    for gamma in settings(gammas, None)[0]:
        values.append(values[-1] * (1 - gamma * count * values[-1]).square())
    return torch.stack(values).sort(-1).values


# Checks ------------------------------------------------------------------------------------------


def checked(xs: Float[Tensor, "*batch n d"], ys: Labels) -> tuple[Tensor, Tensor, Tensor]:
    """The x of the pairs, that of the query, and the labels of the pairs (*batch, N, o).

    Example:
        >>> pairs, query, labels = descent.checked(xs, ys)
        >>> query
        tensor([3.], dtype=torch.float64)
    """
    if xs.ndim < 2 or ys.shape[: xs.ndim - 1] != xs.shape[:-1] or ys.ndim > xs.ndim:
        raise IclError(
            f"Need xs of (*batch, N + 1, d) and ys of (*batch, N + 1) or (*batch, N + 1, o); got "
            f"{tuple(xs.shape)} and {tuple(ys.shape)}."
        )
    if xs.shape[-2] < 2 or xs.shape[-1] < 1:
        raise IclError("A context needs at least one pair, and a query, of at least 1 dimension.")
    labels = (ys if ys.ndim == xs.ndim else ys[..., None])[..., :-1, :].to(xs)
    if not (bool(xs.isfinite().all()) and bool(labels.isfinite().all())):
        raise IclError("Pairs must be finite; these hold NaN or infinity. Leave such contexts out.")
    return xs[..., :-1, :], xs[..., -1, :], labels


def settings(rates: Settings, gammas: Settings | None) -> tuple[list[float], list[float]]:
    """A rate and a gamma for each step; gammas are 0 if there are none.

    Example:
        >>> descent.settings([0.1, 0.2], None)
        ([0.1, 0.2], [0.0, 0.0])
    """
    etas = [float(rate) for rate in rates]
    squeezes = [0.0] * len(etas) if gammas is None else [float(gamma) for gamma in gammas]
    if len(etas) != len(squeezes):
        raise IclError(f"Need a gamma for each of {len(etas)} rates; got {len(squeezes)}.")
    if not all(map(math.isfinite, etas + squeezes)):
        raise IclError(f"Rates and gammas must be finite; got {etas} and {squeezes}.")
    return etas, squeezes


def initial(start: Tensor | None, outputs: int, xs: Tensor) -> Tensor:
    """W_0, zero if there is none.

    Example:
        >>> descent.initial(None, 1, xs)
        tensor([[0.]], dtype=torch.float64)
    """
    shape = (outputs, xs.shape[-1])
    if start is None:
        return xs.new_zeros(shape)
    if start.shape != shape:
        raise IclError(f"W_0 must be {shape[0]} x {shape[1]}; got {tuple(start.shape)}.")
    return start.to(xs)
