"""Linear regression in context: y = w·x + noise, a new w for every context.

Coordinates follow a law: ``normal`` or ``uniform``, of mean 0 and variance 1, or ``uniform*a+b``:
a z + b, z ~ U(0, 1) (code of {cite}`akyurek2023`). Shifts: {cite}`garg2022`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import IclError


@dataclass(frozen=True)
class Task:
    """Where contexts come from: w ~ law(0, prior²), x ~ law, y = w·x + N(0, noise²)."""

    dim: int
    noise: float = 0.0
    prior: float = 1.0
    inputs: str = "normal"
    weights: str = "normal"

    @property
    def ridge(self) -> float:
        """Return the ridge penalty that is optimal for normal weights: noise² / prior²."""
        return (self.noise / self.prior) ** 2


class Contexts(NamedTuple):
    """Contexts of n pairs each, and the weights behind them."""

    xs: Float[Tensor, "*batch n d"]
    ys: Float[Tensor, "*batch n"]
    weights: Float[Tensor, "*batch d"]


def sample(task: Task, contexts: int, pairs: int, generator: torch.Generator) -> Contexts:
    """Draw so many contexts of so many pairs, on the device of the generator."""
    xs = draw(task.inputs, (contexts, pairs, task.dim), generator)
    weights = draw(task.weights, (contexts, task.dim), generator) * task.prior
    ys = (xs * weights[:, None]).sum(-1)
    noise = torch.randn(contexts, pairs, generator=generator, device=generator.device)
    return Contexts(xs, ys + noise * task.noise, weights)


def draw(law: str, shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Draw numbers from the law of a ``Task``, float32, on the device of the generator."""
    place: dict[str, Any] = {"generator": generator, "device": generator.device}
    if law == "normal":
        return torch.randn(shape, **place)
    if law == "uniform":
        return (torch.rand(shape, **place) - 0.5) * math.sqrt(12)
    try:
        scale, shift = map(float, law.removeprefix("uniform*").split("+"))
    except ValueError:
        laws = "normal, uniform, uniform*a+b (a and b numbers)"
        raise IclError(f"Unknown law {law!r}. Known: {laws}.") from None
    return torch.rand(shape, **place) * scale + shift


def relabel(contexts: Contexts, xs: Float[Tensor, "*batch n d"]) -> Contexts:
    """Keep weights and noise, at other inputs."""
    weights = contexts.weights[..., None, :]
    noise = contexts.ys - (contexts.xs * weights).sum(-1)
    return Contexts(xs, (xs * weights).sum(-1) + noise, contexts.weights)


def scale_inputs(contexts: Contexts, factor: float) -> Contexts:
    """Multiply inputs by ``factor``; w and noise stay, so w·x grows with x."""
    return relabel(contexts, contexts.xs * factor)


def scale_outputs(contexts: Contexts, factor: float) -> Contexts:
    """Multiply labels by ``factor``, and with them the weights and the noise."""
    return Contexts(contexts.xs, contexts.ys * factor, contexts.weights * factor)


def skew_inputs(contexts: Contexts, generator: torch.Generator) -> Contexts:
    """Stretch inputs along random axes of each context by factors ~ 1 / (i + 1), E|x|² unchanged.

    {cite}`garg2022` draws the axes once for all contexts.
    """
    return _stretch(contexts, 1 / (torch.arange(contexts.xs.shape[-1]) + 1.0), generator)


def project_inputs(contexts: Contexts, generator: torch.Generator) -> Contexts:
    """Project inputs on a random subspace of d // 2 dimensions of each context, E|x|² unchanged."""
    dim = contexts.xs.shape[-1]
    return _stretch(contexts, (torch.arange(dim) < dim // 2).float(), generator)


def _stretch(contexts: Contexts, factors: Tensor, generator: torch.Generator) -> Contexts:
    dim = contexts.xs.shape[-1]
    factors = (factors * math.sqrt(dim) / factors.norm()).double().to(contexts.xs.device)
    shape = (*contexts.weights.shape, dim)
    normal = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
    axes = torch.linalg.qr(normal).Q  # the sign of an axis does not matter here
    stretch = ((axes * factors) @ axes.mT).to(contexts.xs)
    return relabel(contexts, contexts.xs @ stretch)


class QueriedContexts(NamedTuple):
    """Contexts and queries of their own: row n of ``queries`` is asked after the pairs 0 .. n-1."""

    contexts: Contexts
    queries: Float[Tensor, "*batch n d"]

    def at(self, n: int) -> Contexts:
        """Take n pairs, and the query asked after them in the place of the next, with its noise."""
        answers = relabel(self.contexts, self.queries).ys
        xs = torch.cat([self.contexts.xs[..., :n, :], self.queries[..., n : n + 1, :]], -2)
        ys = torch.cat([self.contexts.ys[..., :n], answers[..., n : n + 1]], -1)
        return Contexts(xs, ys, self.contexts.weights)


def query_opposite(contexts: Contexts, generator: torch.Generator) -> QueriedContexts:
    """Move pairs to one orthant, another for each context, and query in the opposite one."""
    shape = (*contexts.weights.shape[:-1], 1, contexts.xs.shape[-1])
    coin = torch.randint(2, shape, generator=generator, device=generator.device)
    inside = contexts.xs.abs() * (2 * coin - 1).to(contexts.xs)
    return QueriedContexts(relabel(contexts, inside), -inside)


def repeat_inputs(contexts: Contexts, generator: torch.Generator) -> QueriedContexts:
    """Ask again for one of the xs before, at random; the first query is its own x."""
    count = contexts.ys.shape[-1]
    place = torch.rand(contexts.ys.shape, generator=generator, device=generator.device)
    before = torch.arange(count, device=place.device)
    index = (place * before).long().clamp(max=(before - 1).clamp(min=0))
    return QueriedContexts(
        contexts, contexts.xs.gather(-2, index[..., None].expand_as(contexts.xs))
    )
