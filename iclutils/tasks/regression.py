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

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise IclError(f"A task needs a dimension of at least 1; got {self.dim}.")
        if not (0 <= self.noise < math.inf and 0 < self.prior < math.inf):
            raise IclError(f"Need finite noise >= 0 and prior > 0; got {self.noise}, {self.prior}.")
        for law in (self.inputs, self.weights):
            _ends(law)

    @property
    def ridge(self) -> float:
        """The ridge penalty that is optimal for normal weights: noise² / prior²."""
        return (self.noise / self.prior) ** 2


class Contexts(NamedTuple):
    """Contexts of n pairs each, and the weights behind them."""

    xs: Float[Tensor, "*batch n d"]
    ys: Float[Tensor, "*batch n"]
    weights: Float[Tensor, "*batch d"]


def sample(task: Task, contexts: int, pairs: int, generator: torch.Generator) -> Contexts:
    """Draw so many contexts of so many pairs, on the device of the generator; none raise."""
    if contexts < 1 or pairs < 1:
        raise IclError(f"Need at least 1 context and 1 pair; got {contexts} and {pairs}.")
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
    scale, shift = _ends(law)
    return torch.rand(shape, **place) * scale + shift


def _ends(law: str) -> tuple[float, float]:
    """Read a and b of ``uniform*a+b``; refuse what is no law."""
    if law in ("normal", "uniform"):
        return 1.0, 0.0
    try:
        scale, shift = map(float, law.removeprefix("uniform*").split("+"))
    except ValueError:
        laws = "normal, uniform, uniform*a+b (a and b numbers)"
        raise IclError(f"Unknown law {law!r}. Known: {laws}.") from None
    return scale, shift


def relabelled(contexts: Contexts, xs: Float[Tensor, "*batch n d"]) -> Contexts:
    """Keep weights and noise, at other inputs."""
    weights = contexts.weights[..., None, :]
    noise = contexts.ys - (contexts.xs * weights).sum(-1)
    return Contexts(xs, (xs * weights).sum(-1) + noise, contexts.weights)


def scaled_inputs(contexts: Contexts, factor: float) -> Contexts:
    """Multiply inputs by ``factor``; w and noise stay, so w·x grows with x."""
    return relabelled(contexts, contexts.xs * factor)


def scaled_outputs(contexts: Contexts, factor: float) -> Contexts:
    """Multiply labels by ``factor``, and with them the weights and the noise."""
    return Contexts(contexts.xs, contexts.ys * factor, contexts.weights * factor)


def skewed(contexts: Contexts, generator: torch.Generator) -> Contexts:
    """Stretch inputs along random axes of each context by factors ~ 1 / (i + 1), E|x|² unchanged.

    {cite}`garg2022` draws the axes once for all contexts.
    """
    return _stretched(contexts, 1 / (torch.arange(contexts.xs.shape[-1]) + 1.0), generator)


def half_subspace(contexts: Contexts, generator: torch.Generator) -> Contexts:
    """Project inputs on a random subspace of d // 2 dimensions of each context, E|x|² unchanged."""
    dim = contexts.xs.shape[-1]
    if dim < 2:
        raise IclError("There is no half of a space of one dimension; take d >= 2.")
    return _stretched(contexts, (torch.arange(dim) < dim // 2).float(), generator)


def _stretched(contexts: Contexts, factors: Tensor, generator: torch.Generator) -> Contexts:
    dim = contexts.xs.shape[-1]
    factors = (factors * math.sqrt(dim) / factors.norm()).double().to(contexts.xs.device)
    shape = (*contexts.weights.shape, dim)
    normal = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
    axes = torch.linalg.qr(normal).Q  # the sign of an axis does not matter here
    stretch = ((axes * factors) @ axes.mT).to(contexts.xs)
    return relabelled(contexts, contexts.xs @ stretch)


class Queried(NamedTuple):
    """Contexts and queries of their own: row n of ``queries`` is asked after the pairs 0 .. n-1."""

    contexts: Contexts
    queries: Float[Tensor, "*batch n d"]

    def at(self, n: int) -> Contexts:
        """Take n pairs, and the query asked after them in the place of the next, with its noise."""
        longest = self.queries.shape[-2] - 1
        if not 0 <= n <= longest:
            raise IclError(f"There are queries after 0 .. {longest} pairs; asked for {n}.")
        answers = relabelled(self.contexts, self.queries).ys
        xs = torch.cat([self.contexts.xs[..., :n, :], self.queries[..., n : n + 1, :]], -2)
        ys = torch.cat([self.contexts.ys[..., :n], answers[..., n : n + 1]], -1)
        return Contexts(xs, ys, self.contexts.weights)


def opposite_quadrants(contexts: Contexts, generator: torch.Generator) -> Queried:
    """Move pairs to one orthant, another for each context, and query in the opposite one."""
    shape = (*contexts.weights.shape[:-1], 1, contexts.xs.shape[-1])
    coin = torch.randint(2, shape, generator=generator, device=generator.device)
    inside = contexts.xs.abs() * (2 * coin - 1).to(contexts.xs)
    return Queried(relabelled(contexts, inside), -inside)


def seen(contexts: Contexts, generator: torch.Generator) -> Queried:
    """Ask again for one of the xs before, at random; the first query is its own x."""
    count = contexts.ys.shape[-1]
    place = torch.rand(contexts.ys.shape, generator=generator, device=generator.device)
    before = torch.arange(count, device=place.device)
    index = (place * before).long().clamp(max=(before - 1).clamp(min=0))
    return Queried(contexts, contexts.xs.gather(-2, index[..., None].expand_as(contexts.xs)))
