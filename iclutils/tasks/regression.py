"""Linear regression in context: y = w·x + noise, a new w for every context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """Where contexts come from: w ~ N(0, prior²), y = w·x + N(0, noise²)."""

    dim: int
    noise: float = 0.0
    prior: float = 1.0

    @property
    def ridge(self) -> float:
        """The ridge parameter that is optimal: noise² / prior²."""
        return (self.noise / self.prior) ** 2


class Contexts(NamedTuple):
    """Contexts of n pairs each, and the weights behind them."""

    xs: Float[Tensor, "*batch n d"]
    ys: Float[Tensor, "*batch n"]
    weights: Float[Tensor, "*batch d"]


def sample(task: Task, contexts: int, pairs: int, generator: torch.Generator) -> Contexts:
    """Draw contexts, on the device of the generator."""
    place = {"generator": generator, "device": generator.device}
    xs = torch.randn(contexts, pairs, task.dim, **place)
    weights = torch.randn(contexts, task.dim, **place) * task.prior
    ys = (xs * weights[:, None]).sum(-1)
    ys = ys + torch.randn(contexts, pairs, **place) * task.noise
    return Contexts(xs, ys, weights)
