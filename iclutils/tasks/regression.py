"""Linear regression in context: y = w·x + noise, a new w for every context.

Coordinates follow a law: ``normal`` or ``uniform``, of mean 0 and variance 1, or ``uniform*a+b``:
a z + b, z ~ U(0, 1) (code of {cite}`akyurek2023`). Shifts: {cite}`garg2022`.
"""

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
    noise = draw("normal", (contexts, pairs), generator)
    return Contexts(xs, ys + noise * task.noise, weights)


def draw(law: str, shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Draw numbers from the law of a ``Task``, float32, on the device of the generator."""
    place: dict[str, Any] = {"generator": generator, "device": generator.device}
    place["dtype"] = torch.float32
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
