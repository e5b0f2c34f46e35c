"""Functions to learn in context, beyond a linear one of isotropic inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import IclError
from .regression import Contexts, Task, relabel, sample

LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda z: z,
    "sine": lambda z: z.sin(),
    "exponential": lambda z: (z / 2).exp(),
}


@dataclass(frozen=True)
class Problem:
    """Contexts of a regression ``task``, inputs times ``scales``, labels through ``link``: y = w·x
    (``linear``), or sin(z) or exp(z/2) of z = w·x / sqrt(d), our choice of tasks of
    {cite}`ren2024`. The task's noise is added after the link."""

    task: Task
    link: str = "linear"
    scales: tuple[float, ...] = ()

    @property
    def dim(self) -> int:
        """Return d, of the inputs."""
        return self.task.dim

    def sample(self, contexts: int, pairs: int, generator: torch.Generator) -> Contexts:
        """Draw contexts, on the device of the generator."""
        drawn = sample(self.task, contexts, pairs, generator)
        if self.scales:
            drawn = relabel(drawn, drawn.xs * torch.tensor(self.scales, device=drawn.xs.device))
        if self.link == "linear":
            return drawn
        straight = (drawn.xs * drawn.weights[:, None]).sum(-1)
        bent = LINKS[self.link](straight / math.sqrt(self.dim))
        return drawn._replace(ys=bent + drawn.ys - straight)


def linear_problem(tasks: Sequence[Mapping[str, Any]]) -> Problem:
    """Return the linear problem that networks of linear self-attention were trained on, by their
    ``tasks``; others cannot be compared with gradient descent on a linear model."""
    known = tasks[-1] if tasks else {}
    if known.get("kind") != "Problem" or known.get("link") != "linear":
        raise IclError("Networks trained on linear functions are needed, such as 'lsa-1'.")
    return Problem(Task(**known["task"]), known["link"], tuple(known["scales"]))


@dataclass(frozen=True)
class Waves:
    """y = a sin(x + φ), x ~ U(-5, 5), a ~ U(.1, .5), φ ~ U(0, π) ({cite}`vonoswald2023`), a and φ
    independent (in the released code φ follows from a). The contexts' ``weights`` hold a."""

    dim: int = field(default=1, init=False)

    def sample(self, contexts: int, pairs: int, generator: torch.Generator) -> Contexts:
        """Draw contexts, on the device of the generator."""
        place: dict[str, Any] = {"generator": generator, "device": generator.device}
        place["dtype"] = torch.float32
        xs = torch.rand(contexts, pairs, 1, **place) * 10 - 5
        first, second = torch.rand(2, contexts, 1, **place)
        amplitude, phase = 0.1 + 0.4 * first, math.pi * second
        return Contexts(xs, amplitude * (xs[..., 0] + phase).sin(), amplitude)
