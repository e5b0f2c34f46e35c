"""Recipes ``regression-...``: learners of linear regression, several members in one program.

Data are drawn anew at every step: x and w standard normal (w times its prior), y with noise where
the member has some; the loss is the squared error of every y of the context, the first included,
as in the released code of Akyurek et al. 2023. Three choices matter, each found by measurement:

- Muon on the matrices of the blocks (AdamW on the rest) needs half the steps of AdamW alone;
- positions start as sinusoids, which makes "one token back" easy to find. With them the format
  that gives x and y tokens of their own trains as fast as the one with a token for each pair;
- two heads, wide ones. No curriculum: at these sizes it only costs time.

The rate falls to nearly nothing, so that the end of every log is flat; whether longer training
would still gain is another question, which the checkpoints and the log are there to answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from ..learners import Format, Learners, Shape
from ..lenses.regression.algorithms import ridge
from ..tasks.regression import Task, sample
from .language import sinusoids
from .loop import Recipe
from .muon import Muon

HELD_OUT = 512  # contexts behind a line of the log
NOISES = ((0.25, 1.0), (0.5, 1.5), (0.5, 1.0), (0.5, 0.75))  # (noise, prior), as in the paper


@dataclass(frozen=True, kw_only=True)
class RegressionRecipe(Recipe):
    """Members of one shape: ``seeds`` and ``tasks`` have an entry for each."""

    shape: Shape
    seeds: tuple[int, ...]
    tasks: tuple[Task, ...]
    batch: int = 64
    scale: float = 5 / 3  # rate of Muon, over that of AdamW

    def network(self) -> Learners:
        """Learners drawn from their seeds, positions as sinusoids."""
        network = Learners(self.shape, self.seeds)
        network.positions.data[:] = 0.3 * sinusoids(*network.positions.shape[1:])
        return network

    def loss(self, network: nn.Module, step: int) -> Tensor:
        """Mean squared error of every prediction, summed over the members."""
        drawn = []
        for seed, task in zip(self.seeds, self.tasks, strict=True):
            source = Generator().manual_seed(seed * 1_000_003 + step)
            drawn.append(sample(task, self.batch, self.shape.pairs, source))
        xs, ys = (torch.stack([getattr(d, part) for d in drawn]) for part in ("xs", "ys"))
        return (network(xs, ys) - ys).square().mean((1, 2)).sum()

    def optimizers(self, network: nn.Module) -> list[Optimizer]:
        """Muon on the matrices of the blocks, AdamW without decay on the rest."""
        named = dict(network.named_parameters())
        inside = {n for n, p in named.items() if n.startswith("blocks.") and p.shape[1] > 1}
        matrices = {"params": [named[n] for n in named if n in inside], "scale": self.scale}
        rest = [p for n, p in named.items() if n not in inside]
        adam = torch.optim.AdamW(
            rest, lr=self.peak_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        return [Muon([matrices], lr=self.peak_rate), adam]

    def clip_gradients(self, network: nn.Module) -> None:
        """Each member by itself, so that it trains as it would alone."""
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        share = self.clip / norms.clamp(min=self.clip)
        for gradient in gradients:
            gradient.mul_(share.view(-1, *[1] * (gradient.ndim - 1)))

    def save(self, network: nn.Module, folder: Path) -> None:
        """A folder of ``learners.load``."""
        assert isinstance(network, Learners)
        network.save(folder, [vars(task) for task in self.tasks])


def held_out(tasks: tuple[Task, ...], pairs: int) -> Callable[[Learners], dict[str, float]]:
    """Squared distance to the best predictor over d, mean over prefixes, for each member."""
    drawn = [sample(t, HELD_OUT, pairs, Generator().manual_seed(77_777)) for t in tasks]
    best = torch.stack([ridge(d.xs, d.ys, t.ridge) for d, t in zip(drawn, tasks, strict=True)])
    xs, ys = torch.stack([d.xs for d in drawn]), torch.stack([d.ys for d in drawn])

    def measure(network: Learners) -> dict[str, float]:
        with torch.no_grad():
            apart = (network(xs, ys) - best).square()[:, :, 1:].mean((1, 2)) / tasks[0].dim
        return {f"spd_best_{i}": value for i, value in enumerate(apart.tolist())}

    return measure


def headline(name: str) -> RegressionRecipe:
    """``regression-d8``: no noise, eight layers, three seeds."""
    return _recipe(name, 8, "one", 8, 64, range(3), steps=8000)


def noise(name: str) -> RegressionRecipe:
    """``regression-noise``: the paper's four ratios of noise and prior."""
    tasks = tuple(Task(8, noise=noise, prior=prior) for noise, prior in NOISES)
    return _recipe(name, 8, "one", 8, 64, range(4), steps=7000, tasks=tasks)


def depth(name: str) -> RegressionRecipe:
    """``regression-one-L4`` and the like: depth and format, d = 4, three seeds."""
    _, form, layers = name.split("-")
    count = int(layers[1:])
    form_: Literal["one", "two"] = "one" if form == "one" else "two"
    extra = (500, 1000, 2000) if count == 8 and form == "two" else ()
    return _recipe(name, 4, form_, count, 32, range(3), steps=6000, extra=extra)


def width(name: str) -> RegressionRecipe:
    """``regression-w16`` and the like: width, d = 8, four layers."""
    return _recipe(name, 8, "one", 4, int(name.split("-w")[1]), range(1), steps=6000)


def plane(name: str) -> RegressionRecipe:
    """``regression-d2``: two dimensions, four layers, three seeds."""
    return _recipe(name, 2, "one", 4, 32, range(3), steps=4000)


def _recipe(
    name: str,
    dim: int,
    form: Format,
    layers: int,
    wide: int,
    seeds: range,
    *,
    steps: int,
    tasks: tuple[Task, ...] = (),
    extra: tuple[int, ...] = (),
) -> RegressionRecipe:
    tasks = tasks or (Task(dim),) * len(seeds)
    pairs = 2 * dim + 1
    return RegressionRecipe(
        name=name,
        seed=0,
        shape=Shape(dim, pairs, form, layers, wide, 2),
        seeds=tuple(seeds),
        tasks=tasks,
        steps=steps,
        checkpoints=(*extra, steps),
        held_out=held_out(tasks, pairs),
        card="",
        peak_rate=6e-3,
        warmup=steps // 20,
        floor=0.02,
        log_every=250,
    )
