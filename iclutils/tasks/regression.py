"""Linear regression in context: y = w·x + noise, a new w for every context.

Coordinates follow a law: ``normal``, ``uniform``, ``laplace``, ``sparse:k`` (k are normal, others
0), of mean 0 and variance 1; ``normal*a+b``, ``uniform*a+b``: a z + b, z ~ N(0, 1) or U(0, 1) (code
of {cite}`akyurek2023`); of laws parted by commas each number picks one. Shifts: {cite}`garg2022`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import IclError

LAWS = re.compile(r"(normal|uniform|laplace)|sparse:(\d+)|(normal|uniform)\*([^*+]+)\+([^*+]+)")


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
            raise IclError(
                "A task needs a noise of at least 0 and a prior above 0, both finite; got "
                f"noise={self.noise}, prior={self.prior}."
            )
        for law in (*self.inputs.split(","), *self.weights.split(",")):
            _check_law(law.strip(), self.dim)

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
    """Draw so many contexts of so many pairs, on the device of the generator."""
    if contexts < 1 or pairs < 1:
        raise IclError(f"Need at least 1 context and 1 pair; got {contexts} and {pairs}.")
    xs = draw(task.inputs, (contexts, pairs, task.dim), generator)
    weights = draw(task.weights, (contexts, task.dim), generator) * task.prior
    ys = (xs * weights[:, None]).sum(-1)
    noise = torch.randn(contexts, pairs, generator=generator, device=generator.device)
    return Contexts(xs, ys + noise * task.noise, weights)


def draw(law: str, shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Numbers from the law of a ``Task``, float32, on the device of the generator."""
    place: dict[str, Any] = {"generator": generator, "device": generator.device}
    if "," in law:
        parts = torch.stack([draw(part.strip(), shape, generator) for part in law.split(",")])
        choice = torch.randint(len(parts), shape, **place)
        return parts.gather(0, choice[None])[0]
    _check_law(law, shape[-1])
    if law == "normal":
        return torch.randn(shape, **place)
    if law == "uniform":
        return (torch.rand(shape, **place) - 0.5) * math.sqrt(12)
    if law == "laplace":  # the difference of two exponentials, of variance 2
        ends = torch.empty(2, *shape, device=generator.device).exponential_(generator=generator)
        return (ends[0] - ends[1]) / math.sqrt(2)
    kind, numbers = re.split(r"[:*]", law, maxsplit=1)
    if kind == "sparse":
        kept = torch.rand(shape, **place).argsort(-1).argsort(-1) < int(numbers)
        return torch.randn(shape, **place) * kept * math.sqrt(shape[-1] / int(numbers))
    scale, shift = map(float, numbers.split("+"))
    return (torch.randn if kind == "normal" else torch.rand)(shape, **place) * scale + shift


def _check_law(law: str, dim: int) -> None:
    parsed = LAWS.fullmatch(law)
    if parsed and parsed[2] and not 1 <= int(parsed[2]) <= dim:
        raise IclError(f"The law {law!r} needs between 1 and {dim} coordinates.")
    try:
        numbers = map(float, filter(None, parsed.groups()[3:] if parsed else ["nan"]))
        known = all(map(math.isfinite, numbers))
    except ValueError:
        known = False
    if not known:
        raise IclError(
            f"Unknown law {law!r}. Known: normal, uniform, laplace, sparse:k, normal*a+b, "
            "uniform*a+b (a and b numbers), and several of them parted by commas."
        )


def relabelled(contexts: Contexts, xs: Float[Tensor, "*batch n d"]) -> Contexts:
    """The same weights and the same noise at other inputs."""
    weights = contexts.weights[..., None, :]
    noise = contexts.ys - (contexts.xs * weights).sum(-1)
    return Contexts(xs, (xs * weights).sum(-1) + noise, contexts.weights)


def scaled_inputs(contexts: Contexts, factor: float) -> Contexts:
    """Inputs times ``factor``; w and noise stay, so w·x grows with x."""
    return relabelled(contexts, contexts.xs * factor)


def scaled_outputs(contexts: Contexts, factor: float) -> Contexts:
    """Labels times ``factor``, and with them the weights and the noise."""
    return Contexts(contexts.xs, contexts.ys * factor, contexts.weights * factor)


def skewed(contexts: Contexts, generator: torch.Generator) -> Contexts:
    """Inputs stretched along random axes of each context by factors ~ 1 / (i + 1), E|x|² kept.

    {cite}`garg2022` draws the axes once for all contexts.
    """
    return _stretched(contexts, 1 / (torch.arange(contexts.xs.shape[-1]) + 1.0), generator)


def half_subspace(contexts: Contexts, generator: torch.Generator) -> Contexts:
    """Inputs projected on a random subspace of d // 2 dimensions for each context, E|x|² kept."""
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
        """n pairs, and the query asked after them in the place of the next, with its noise."""
        longest = self.queries.shape[-2] - 1
        if not 0 <= n <= longest:
            raise IclError(f"There are queries after 0 .. {longest} pairs; asked for {n}.")
        answers = relabelled(self.contexts, self.queries).ys
        xs = torch.cat([self.contexts.xs[..., :n, :], self.queries[..., n : n + 1, :]], -2)
        ys = torch.cat([self.contexts.ys[..., :n], answers[..., n : n + 1]], -1)
        return Contexts(xs, ys, self.contexts.weights)


def opposite_quadrants(contexts: Contexts, generator: torch.Generator) -> Queried:
    """Pairs from one orthant, another for each context, and queries from the opposite one."""
    shape = (*contexts.weights.shape[:-1], 1, contexts.xs.shape[-1])
    coin = torch.randint(2, shape, generator=generator, device=generator.device)
    inside = contexts.xs.abs() * (2 * coin - 1).to(contexts.xs)
    return Queried(relabelled(contexts, inside), -inside)


def orthogonal(contexts: Contexts) -> Queried:
    """Queries orthogonal to all pairs before them, as long as the x whose place they take.

    There are such directions for n < d alone: longer contexts are cut to their first d pairs.
    """
    most = min(contexts.xs.shape[-2:])
    cut = Contexts(contexts.xs[..., :most, :], contexts.ys[..., :most], contexts.weights)
    q, r = torch.linalg.qr(cut.xs.double().mT)
    length = cut.xs.double().norm(dim=-1)
    along = r.diagonal(dim1=-2, dim2=-1)
    if bool((along.abs() <= 1e-6 * length).any()):
        raise IclError("An x lies in the span of those before it; draw contexts of full rank.")
    return Queried(cut, (q.mT * (along.sign() * length)[..., None]).to(cut.xs))


def seen(contexts: Contexts, generator: torch.Generator) -> Queried:
    """Queries equal to one of the xs before them, at random; the first keeps its own x."""
    count = contexts.ys.shape[-1]
    place = torch.rand(contexts.ys.shape, generator=generator, device=generator.device)
    before = torch.arange(count, device=place.device)
    index = (place * before).long().clamp(max=(before - 1).clamp(min=0))
    return Queried(contexts, contexts.xs.gather(-2, index[..., None].expand_as(contexts.xs)))
