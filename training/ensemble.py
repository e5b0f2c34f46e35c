"""Several networks trained as one program, each as it would be trained alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, nn

from iclutils.tasks.regression import Contexts

from .loop import Recipe

FRESH = 10  # seeds of the shipped networks start here: the recipes were found with 0 to 4
HELD_OUT_SEED = 77_777
Plan = TypeVar("Plan", bound="EnsembleRecipe")


@dataclass(frozen=True, kw_only=True)
class EnsembleRecipe(Recipe):
    """Networks of one shape: ``seeds`` and ``tasks`` have an entry for each.

    The first axis of every parameter counts the networks.
    """

    shape: Any
    seeds: tuple[int, ...]
    tasks: tuple[Any, ...]
    batch: int
    scale: float

    held_out_contexts = 4000

    @classmethod
    def of(
        cls: type[Plan],
        name: str,
        device: str,
        shape: Any,
        members: Sequence[tuple[int, Any]],
        steps: int,
        extra: tuple[int, ...] = (),
        **settings: Any,
    ) -> Plan:
        """Make a recipe for (seed, task) pairs of one shape; ``extra`` are more checkpoints."""
        seeds, tasks = zip(*members, strict=True)
        settings |= {"seed": seeds[0], "seeds": seeds, "tasks": tasks, "steps": steps}
        checkpoints = (*extra, steps)
        return cls(name=name, device=device, shape=shape, checkpoints=checkpoints, **settings)

    @abstractmethod
    def sample(self, task: Any, contexts: int, source: Generator) -> Contexts:
        """Draw contexts of one task."""

    def draw(self, contexts: int, starts: list[int], source: Generator) -> tuple[Tensor, Tensor]:
        """Draw xs (network, context, n, d) and ys, each network's from a start of its own."""
        drawn = [
            self.sample(task, contexts, source.manual_seed(start))
            for task, start in zip(self.tasks, starts, strict=True)
        ]
        return torch.stack([d.xs for d in drawn]), torch.stack([d.ys for d in drawn])

    def batch_of(self, step: int) -> tuple[Tensor, Tensor]:
        """Draw the data of a step."""
        starts = [seed * 1_000_003 + step for seed in self.seeds]
        return self.draw(self.batch, starts, Generator(self.device))

    @cached_property
    def held_out_data(self) -> tuple[Tensor, Tensor]:
        """Draw the contexts behind every line of the log, on the CPU."""
        return self.draw(self.held_out_contexts, [HELD_OUT_SEED] * len(self.tasks), Generator())

    def predict_held_out(self, network: nn.Module) -> Tensor:
        """Return answers of the networks to the held-out contexts, on the CPU."""
        xs, ys = (each.to(self.device) for each in self.held_out_data)
        with torch.no_grad():
            return network(xs, ys).cpu()

    def clip_gradients(self, network: nn.Module) -> None:
        """Clip each network by itself."""
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        share = self.clip / norms.clamp(min=self.clip)
        for gradient in gradients:
            gradient.mul_(share.view(-1, *[1] * (gradient.ndim - 1)))

    def save(self, network: nn.Module, folder: Path) -> None:
        """Write a folder that ``load`` of the network's module reads."""
        network.save(folder)  # type: ignore[operator]
