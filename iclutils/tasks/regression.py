"""Linear regression in context: y = w·x + noise, a new w for every context.

A *law* is a string that says how one coordinate is drawn.

- ``normal``, ``uniform``, ``laplace``: rescaled to mean 0 and variance 1, so that laws differ in
  shape alone.
- ``sparse:k``: k coordinates, at random, are normal and the others 0; rescaled by sqrt(d / k), so
  that the variance of a coordinate is 1 as well ({cite}`garg2022` does not rescale).
- ``normal*a+b``, ``uniform*a+b``: the strings of the code released with {cite}`akyurek2023`, a z
  + b for z ~ N(0, 1) or z ~ U(0, 1). Not rescaled: ``uniform*1+0`` has mean 1/2.
- laws parted by commas: every single number picks one of them, all equally likely.

The shifts, for evaluation, follow {cite}`garg2022`. Those that change the whole context give
``Contexts``. Those that set a query apart from its context give ``Queried``, because the query of
one prefix would be a pair of the next.

Example:
    >>> import torch
    >>> from iclutils.tasks import regression
    >>> generator = torch.Generator().manual_seed(0)
    >>> drawn = regression.sample(regression.Task(4), 500, 3, generator)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import IclError, unknown

RELEASED = re.compile(r"(normal|uniform)\*([^*+]+)\+([^*+]+)")


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
        for law in (self.inputs, self.weights):
            draw(law, (1, self.dim), torch.Generator())

    @property
    def ridge(self) -> float:
        """The ridge parameter that is optimal for normal weights: noise² / prior²."""
        return (self.noise / self.prior) ** 2


class Contexts(NamedTuple):
    """Contexts of n pairs each, and the weights behind them."""

    xs: Float[Tensor, "*batch n d"]
    ys: Float[Tensor, "*batch n"]
    weights: Float[Tensor, "*batch d"]


def sample(
    task: Task, contexts: int, pairs: int, generator: torch.Generator, dims: int | None = None
) -> Contexts:
    """Draw contexts, on the device of the generator.

    Args:
        task: where they come from.
        contexts: how many.
        pairs: n, pairs in each.
        generator: source of randomness.
        dims: coordinates of x (and w) beyond the first ``dims`` are set to 0, as in the
            curriculum of {cite}`garg2022`; the draws stay the same. None keeps all.

    Example:
        >>> torch.allclose(drawn.ys, (drawn.xs * drawn.weights[:, None]).sum(-1), atol=1e-5)
        True
    """
    if contexts < 1 or pairs < 1:
        raise IclError(f"Need at least 1 context and 1 pair; got {contexts} and {pairs}.")
    if dims is not None and not 1 <= dims <= task.dim:
        raise IclError(f"dims must be within 1 .. {task.dim}, the task's dimension; got {dims}.")
    xs = draw(task.inputs, (contexts, pairs, task.dim), generator)
    weights = draw(task.weights, (contexts, task.dim), generator) * task.prior
    if dims is not None:
        xs[..., dims:], weights[..., dims:] = 0, 0
    ys = (xs * weights[:, None]).sum(-1)
    noise = torch.randn(contexts, pairs, generator=generator, device=generator.device)
    return Contexts(xs, ys + noise * task.noise, weights)


def draw(law: str, shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Numbers from ``law`` (see above), float32, on the device of the generator.

    Example:
        >>> bool(regression.draw("uniform", (100,), generator).abs().max() <= 1.8)
        True
    """
    place: dict[str, Any] = {"generator": generator, "device": generator.device}
    if "," in law:
        parts = torch.stack([draw(part.strip(), shape, generator) for part in law.split(",")])
        choice = torch.randint(len(parts), shape, **place)
        return parts.gather(0, choice[None])[0]
    if law == "normal":
        return torch.randn(shape, **place)
    if law == "uniform":
        return (torch.rand(shape, **place) - 0.5) * math.sqrt(12)
    if law == "laplace":  # the difference of two exponentials, of variance 2
        ends = torch.empty(2, *shape, device=generator.device).exponential_(generator=generator)
        return (ends[0] - ends[1]) / math.sqrt(2)
    if re.fullmatch(r"sparse:\d+", law):
        few = int(law.split(":")[1])
        if not 1 <= few <= shape[-1]:
            raise IclError(f"The law {law!r} needs between 1 and {shape[-1]} coordinates.")
        ranks = torch.rand(shape, **place).argsort(-1).argsort(-1)
        return torch.randn(shape, **place) * (ranks < few) * math.sqrt(shape[-1] / few)
    if found := RELEASED.fullmatch(law):
        try:
            scale, shift = float(found[2]), float(found[3])
        except ValueError:
            scale = math.nan
        if math.isfinite(scale) and math.isfinite(shift):
            base = torch.randn if found[1] == "normal" else torch.rand
            return base(shape, **place) * scale + shift
    raise IclError(
        f"Unknown law {law!r}. Known: normal, uniform, laplace, sparse:k, normal*a+b, uniform*a+b "
        "(a and b numbers), and several of them parted by commas."
    )


# Curricula ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ramp:
    """A whole number that grows by ``increment`` every ``interval`` steps until ``end``."""

    start: int
    end: int
    increment: int
    interval: int

    def __post_init__(self) -> None:
        if min(self.start, self.increment, self.interval) < 1 or self.end < self.start:
            raise IclError(f"A ramp needs numbers of at least 1 and an end >= start; got {self}.")

    def at(self, step: int) -> int:
        """Its value in training step ``step``, counted from 0."""
        return min(self.start + max(step, 0) // self.interval * self.increment, self.end)


class Stage(NamedTuple):
    """What a training step asks of ``sample``."""

    dims: int
    pairs: int


@dataclass(frozen=True)
class Curriculum:
    """Dimensions and lengths that grow during training ({cite}`garg2022`)."""

    dims: Ramp
    pairs: Ramp

    def at(self, step: int) -> Stage:
        """Dimensions and pairs of training step ``step``, counted from 0."""
        return Stage(self.dims.at(step), self.pairs.at(step))


GARG = Curriculum(dims=Ramp(5, 20, 1, 2000), pairs=Ramp(11, 41, 2, 2000))  # linear functions, d=20

# Shifts ------------------------------------------------------------------------------------------


def relabelled(contexts: Contexts, xs: Float[Tensor, "*batch n d"]) -> Contexts:
    """The same weights and the same noise at other inputs."""
    weights = contexts.weights[..., None, :]
    noise = contexts.ys - (contexts.xs * weights).sum(-1)
    return Contexts(xs, (xs * weights).sum(-1) + noise, contexts.weights)


def scaled_inputs(contexts: Contexts, factor: float) -> Contexts:
    """Inputs times ``factor``; w and noise stay, so w·x grows with x.

    Example:
        >>> regression.scaled_inputs(drawn, 2.0).xs[0, 0, 0] / drawn.xs[0, 0, 0]
        tensor(2.)
    """
    return relabelled(contexts, contexts.xs * factor)


def scaled_outputs(contexts: Contexts, factor: float) -> Contexts:
    """Labels times ``factor``, and with them the weights and the noise.

    Example:
        >>> regression.scaled_outputs(drawn, 3.0).ys[0, 0] / drawn.ys[0, 0]
        tensor(3.)
    """
    return Contexts(contexts.xs, contexts.ys * factor, contexts.weights * factor)


def skewed(contexts: Contexts, generator: torch.Generator) -> Contexts:
    """Inputs stretched along random axes, a new set for each context, by factors ~ 1 / (i + 1).

    The squares of the factors sum to d, so E|x|² stays what it was. They are the eigenvalues of
    the map that is applied; those of the covariance are their squares. {cite}`garg2022` turns
    once for all contexts.

    Example:
        >>> turned = regression.skewed(drawn, generator)
        >>> turned.xs.square().sum(-1).mean().round()
        tensor(4.)
    """
    return _stretched(contexts, 1 / (torch.arange(contexts.xs.shape[-1]) + 1.0), generator)


def half_subspace(contexts: Contexts, generator: torch.Generator) -> Contexts:
    """Inputs projected on a random subspace of d // 2 dimensions, a new one for each context.

    What is left is stretched by sqrt(d / (d // 2)), so that E|x|² stays what it was.

    Example:
        >>> flat = regression.half_subspace(drawn, generator)
        >>> torch.linalg.matrix_rank(flat.xs[0])
        tensor(2)
    """
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

    @property
    def answers(self) -> Float[Tensor, "*batch n"]:
        """The label of each query, with the noise of the pair whose place it takes."""
        return relabelled(self.contexts, self.queries).ys

    def at(self, n: int) -> Contexts:
        """n pairs, and the query asked after them as the last pair: n + 1 in all."""
        longest = self.queries.shape[-2] - 1
        if not 0 <= n <= longest:
            raise IclError(f"There are queries after 0 .. {longest} pairs; asked for {n}.")
        xs = torch.cat([self.contexts.xs[..., :n, :], self.queries[..., n : n + 1, :]], -2)
        ys = torch.cat([self.contexts.ys[..., :n], self.answers[..., n : n + 1]], -1)
        return Contexts(xs, ys, self.contexts.weights)


def quadrants(contexts: Contexts, generator: torch.Generator, query: str) -> Queried:
    """Pairs from one orthant, another for each context; queries "opposite" or "random".

    Random queries are the inputs as they came, from any orthant.

    Example:
        >>> asked = regression.quadrants(drawn, generator, "opposite")
        >>> bool((asked.queries[0, 0].sign() == -asked.contexts.xs[0, 0].sign()).all())
        True
    """
    if query not in ("opposite", "random"):
        raise unknown("quadrant of a query", query, ["opposite", "random"])
    shape = (*contexts.weights.shape[:-1], 1, contexts.xs.shape[-1])
    coin = torch.randint(2, shape, generator=generator, device=generator.device)
    inside = contexts.xs.abs() * (2 * coin - 1).to(contexts.xs)
    queries = -inside if query == "opposite" else contexts.xs
    return Queried(relabelled(contexts, inside), queries)


def orthogonal(contexts: Contexts) -> Queried:
    """Queries orthogonal to all pairs before them, as long as the x whose place they take.

    There are such directions for n < d alone, so longer contexts are cut to their first d pairs.
    Whatever learns w from the pairs has learnt nothing about such a query: min-norm OLS says 0.

    Example:
        >>> asked = regression.orthogonal(drawn)
        >>> bool((asked.queries[:, 1] * asked.contexts.xs[:, 0]).sum(-1).abs().max() < 1e-4)
        True
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
    """Queries equal to one of the xs before them, at random; the first keeps its own x.

    Example:
        >>> asked = regression.seen(drawn, generator)
        >>> bool((asked.queries[:, 1] == drawn.xs[:, 0]).all())
        True
    """
    count = contexts.ys.shape[-1]
    place = torch.rand(contexts.ys.shape, generator=generator, device=generator.device)
    before = torch.arange(count, device=place.device)
    index = (place * before).long().clamp(max=(before - 1).clamp(min=0))
    return Queried(contexts, contexts.xs.gather(-2, index[..., None].expand_as(contexts.xs)))
