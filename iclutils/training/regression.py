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

Example:
    >>> from iclutils.models.regressors import Shape
    >>> from iclutils.tasks.regression import Task
    >>> from iclutils.training import regression
    >>> small = Shape(dim=1, pairs=3, format="one", layers=1, width=4, heads=1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from ..chapters.regression.algorithms import ridge
from ..models.regressors import Format, Learners, Shape
from ..tasks.regression import Task, sample
from .language import sinusoids
from .loop import Recipe
from .members import clip_each, draw_each
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
    scale: float = 5 / 3  # rate of Muon, over that of AdamW; 0 for AdamW alone
    mixed: bool = False  # the blocks' products in bfloat16

    def network(self) -> Learners:
        """Learners drawn from their seeds, positions as sinusoids."""
        network = Learners(self.shape, self.seeds)
        network.tasks = [asdict(task) for task in self.tasks]
        if self.shape.block == "standard":
            network.positions.data[:] = 0.3 * sinusoids(*network.positions.shape[1:])
        return network

    def operations(self) -> float:
        """Six for each weight in a product and each token; products of attention besides."""
        shape, inner = self.shape, self.shape.head * self.shape.heads
        weights = shape.layers * shape.width * (4 * inner + 8 * shape.width)
        mixing = shape.layers * 2 * inner * shape.places
        return 6.0 * (weights + mixing) * shape.places * self.batch * len(self.seeds)

    def loss(self, network: nn.Module, step: int) -> Tensor:
        """Mean squared error of every prediction, summed over the members."""
        source = Generator(self.device)
        starts = [seed * 1_000_003 + step for seed in self.seeds]
        xs, ys = _draw(self.tasks, starts, self.batch, self.shape.pairs, source)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed):
            predicted = network(xs, ys)
        return (predicted.float() - ys).square().mean((1, 2)).sum()

    def optimizers(self, network: nn.Module) -> list[Optimizer]:
        """Muon on the matrices of the blocks, AdamW without decay on the rest."""
        named = dict(network.named_parameters())
        inside = {n for n, p in named.items() if n.startswith("blocks.") and p.shape[1] > 1}
        inside = inside if self.scale else set()
        matrices = {"params": [named[n] for n in named if n in inside], "scale": self.scale}
        rest = [p for n, p in named.items() if n not in inside]
        adam = torch.optim.AdamW(
            rest, lr=self.peak_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        return [Muon([matrices], lr=self.peak_rate), adam] if inside else [adam]

    def clip_gradients(self, network: nn.Module) -> None:
        """Each member by itself."""
        clip_each(network, self.clip)

    def save(self, network: nn.Module, folder: Path) -> None:
        """A folder of ``learners.load``."""
        assert isinstance(network, Learners)
        network.save(folder)


@dataclass(frozen=True)
class HeldOut:
    """For the log: squared distance to the best predictor over d, mean over prefixes."""

    tasks: tuple[Task, ...]
    pairs: int
    device: str

    def __call__(self, network: Learners) -> dict[str, float]:
        """One number for each member, on contexts that are always the same."""
        xs, ys, best = self._contexts
        with torch.no_grad():
            answers = network(xs.to(self.device), ys.to(self.device)).cpu()
        apart = (answers - best).square()[:, :, 1:].mean((1, 2)) / self.tasks[0].dim
        return {f"spd_best_{i}": value for i, value in enumerate(apart.tolist())}

    @cached_property
    def _contexts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, labels and the best predictions, for each member's task."""
        starts = [77_777] * len(self.tasks)
        xs, ys = _draw(self.tasks, starts, HELD_OUT, self.pairs, Generator())
        best = [ridge(x, y, t.ridge) for x, y, t in zip(xs, ys, self.tasks, strict=True)]
        return xs, ys, torch.stack(best)


def _draw(
    tasks: Sequence[Task], starts: Sequence[int], contexts: int, pairs: int, source: Generator
) -> tuple[Tensor, Tensor]:
    return draw_each([partial(sample, t, contexts, pairs) for t in tasks], starts, source)


def recipe(name: str, device: str = "cpu") -> RegressionRecipe:
    """The recipe of a name in ``SHIPPED`` or ``PAPER``.

    Example:
        >>> regression.recipe("regression-d8").shape.dim
        8
    """
    return (SHIPPED | PAPER)[name](name, device)


def group(
    name: str,
    device: str,
    shape: Shape,
    members: Sequence[tuple[int, Task]],
    *,
    steps: int,
    extra: tuple[int, ...] = (),
    **changes: Any,
) -> RegressionRecipe:
    """A recipe for (seed, task) members of one shape; ``extra`` are checkpoints on the way.

    Example:
        >>> made = regression.group("small", "cpu", small, [(0, Task(1)), (1, Task(1))], steps=3)
        >>> made.seeds
        (0, 1)
    """
    seeds, tasks = zip(*members, strict=True)
    plan = RegressionRecipe(
        name=name,
        seed=seeds[0],
        device=device,
        shape=shape,
        seeds=seeds,
        tasks=tasks,
        steps=steps,
        checkpoints=(*extra, steps),
        held_out=HeldOut(tasks, shape.pairs, device),
        card="",
        **{"peak_rate": 6e-3, "warmup": max(1, steps // 20), "floor": 0.02} | changes,
    )
    return replace(plan, card=_card(plan))


def _mini(
    dim: int,
    form: Format,
    layers: int,
    width: int,
    tasks: Sequence[Task],
    steps: int,
    extra: tuple[int, ...] = (),
) -> Callable[[str, str], RegressionRecipe]:
    shape = Shape(dim, 2 * dim + 1, form, layers, width, heads=2)
    return lambda name, device: group(
        name, device, shape, list(enumerate(tasks)), steps=steps, extra=extra
    )


def _paper(
    layers: int = 16, width: int = 512, tasks: Sequence[Task] = (Task(8),)
) -> Callable[[str, str], RegressionRecipe]:
    """Akyurek et al. 2023, table 1: their block, format, rate, and half a million steps."""
    shape = Shape(tasks[0].dim, 41, "two", layers, width, 4, "released")
    steps = 500_000
    return lambda name, device: group(
        name,
        device,
        shape,
        list(enumerate(tasks)),
        steps=steps,
        scale=0.0,
        mixed=device == "cuda",
        peak_rate=1e-4,
        warmup=steps // 5,
        floor=0.0,
        log_every=1000,
    )


_NOISY = tuple(Task(8, noise=noise, prior=prior) for noise, prior in NOISES)
SHIPPED = {
    "regression-d8": _mini(8, "one", 8, 64, [Task(8)] * 3, 8000),
    "regression-d8-long": _mini(8, "one", 8, 64, [Task(8)], 16000),
    "regression-noise": _mini(8, "one", 8, 64, _NOISY, 7000),
    "regression-noise-long": _mini(8, "one", 8, 64, _NOISY[:1], 14000),
    "regression-d2": _mini(2, "one", 4, 32, [Task(2)] * 3, 4000),
    **{
        f"regression-one-L{layers}": _mini(4, "one", layers, 32, [Task(4)] * 3, 4000)
        for layers in (1, 2, 4, 8)
    },
    **{
        f"regression-two-L{layers}": _mini(4, "two", layers, 32, [Task(4)] * 3, 4000)
        for layers in (1, 2, 4)
    },
    "regression-two-L8": _mini(4, "two", 8, 32, [Task(4)] * 3, 4000, extra=(250, 500, 1000)),
    **{
        f"regression-w{width}": _mini(8, "one", 4, width, [Task(8)], 4000)
        for width in (8, 16, 32, 64, 128)
    },
}
PAPER = {
    "regression-paper-d8": _paper(),
    "regression-paper-d20": _paper(tasks=[Task(20)]),
    "regression-paper-noise": _paper(tasks=_NOISY),
    **{f"regression-paper-L{layers}": _paper(layers) for layers in (1, 2, 4, 8, 12)},
    **{f"regression-paper-w{width}": _paper(width=width) for width in (16, 32, 64, 256)},
}


def _card(plan: RegressionRecipe) -> str:
    shape, tasks = plan.shape, plan.tasks
    noisy = "; ".join(f"noise {t.noise:g}, prior {t.prior:g}" for t in tasks if t.noise)
    return _CARD.format(
        name=plan.name,
        count="One network" if len(tasks) == 1 else f"{len(tasks)} networks",
        layers=f"{shape.layers} layer{'s' * (shape.layers > 1)}",
        shape=shape,
        tokens=_TOKENS[shape.format],
        noise=noisy or "no noise",
        plan=plan,
        optimiser="Muon on the matrices of the blocks, AdamW on the rest"
        if plan.scale
        else "AdamW",
        seeds=", ".join(map(str, plan.seeds)),
    )


_TOKENS = {"one": "one token for each pair", "two": "x and y as tokens of their own"}
_CARD = """\
# {name}

{count} of {layers} (width {shape.width}, {shape.heads} heads, block `{shape.block}`), trained from
scratch by the recipe `iclutils.training.regression` to predict y from x and the pairs before it:
linear regression in context, {shape.dim} dimensions, {tokens}.

- **Data**: synthetic. x and w normal, a new w for every context of {shape.pairs} pairs; {noise}.
  No text, no personal data.
- **Training**: {plan.steps} steps of {plan.batch} contexts, {optimiser}, peak rate
  {plan.peak_rate:g}, {plan.warmup} warm-up steps, cosine to {plan.floor:.0%}, clipping at
  {plan.clip:g}; seeds {seeds}. `training.jsonl` is the log.
- **Storage**: weights in half precision (safetensors), computed in single.
- **Rebuild**: `python -m iclutils train {name}`. The same machine and versions give the same
  weights bit for bit, also after an interruption; others give different ones of the same kind.
- **Limits**: it does nothing but this regression. Longer contexts are refused.
- **Licence**: MIT, as the package.
"""
