"""Recipes ``lsa-...`` and ``contrastive-...``: solvers of regressions in context (chapter 04).

As {cite}`vonoswald2023` trains them: fresh contexts at every step, half the squared error of the
query's answer, Adam with the gradient's norm held low. Sizes of the data are theirs, d = N = 10
and x in U(-1/2, 1/2); steps and batch are fewer at the mini tier. Our rate falls along a cosine.

Example:
    >>> from iclutils.models.lsa import Shape
    >>> from iclutils.training import solvers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from ..models.lsa import Shape, Solvers
from ..tasks.functions import LINKS, Problem, Waves
from ..tasks.regression import Task
from .loop import Recipe
from .members import clip_each, draw_each

HELD_OUT = 4000  # contexts behind a line of the log
Data = Problem | Waves
_TASK = Task(10, inputs="uniform*1+-0.5")
ISOTROPIC = Problem(_TASK)
STRETCHED = Problem(_TASK, scales=(2.0, 2.0, 1.4, 1.4, 1.0, 1.0, 0.7, 0.7, 0.5, 0.5))
ALONG = (0, 10, 30, 100, 200, 300, 500, 1000, 2000)  # checkpoints on the way


@dataclass(frozen=True, kw_only=True)
class SolverRecipe(Recipe):
    """Members of one shape: ``seeds`` and ``data`` have an entry for each."""

    shape: Shape
    seeds: tuple[int, ...]
    data: tuple[Data, ...]
    batch: int = 512
    scale: float = 0.045

    def network(self) -> Solvers:
        """Solvers drawn from their seeds."""
        network = Solvers(self.shape, self.seeds, self.scale)
        network.tasks = [{"kind": type(d).__name__, **asdict(d)} for d in self.data]
        return network

    def loss(self, network: nn.Module, step: int) -> Tensor:
        """Half the mean squared error of the answers, summed over the members."""
        starts = [seed * 1_000_003 + step for seed in self.seeds]
        source = Generator(self.device)
        xs, ys = _draw(self.data, starts, self.batch, self.shape.pairs, source)
        return _errors(network(xs, ys), ys).sum()

    def optimizers(self, network: nn.Module) -> list[Optimizer]:
        """Adam."""
        return [torch.optim.Adam(network.parameters(), lr=self.peak_rate, betas=(0.9, 0.98))]

    def clip_gradients(self, network: nn.Module) -> None:
        """Each member by itself."""
        clip_each(network, self.clip)

    def save(self, network: nn.Module, folder: Path) -> None:
        """A folder of ``solvers.load``."""
        assert isinstance(network, Solvers)
        network.save(folder)


@dataclass(frozen=True)
class HeldOut:
    """For the log: the loss of each member on contexts that are always the same."""

    data: tuple[Data, ...]
    pairs: int
    device: str

    def __call__(self, network: Solvers) -> dict[str, float]:
        """One number for each member."""
        xs, ys = self._contexts
        with torch.no_grad():
            found = _errors(network(xs.to(self.device), ys.to(self.device)).cpu(), ys)
        return {f"loss_{i}": value for i, value in enumerate(found.tolist())}

    @cached_property
    def _contexts(self) -> tuple[Tensor, Tensor]:
        starts = [77_777] * len(self.data)
        return _draw(self.data, starts, HELD_OUT, self.pairs, Generator())


def _errors(answers: Tensor, ys: Tensor) -> Tensor:
    return 0.5 * (answers - ys[..., -1]).square().mean(-1)


def _draw(
    data: Sequence[Data], starts: Sequence[int], contexts: int, pairs: int, source: Generator
) -> tuple[Tensor, Tensor]:
    """N pairs and a query."""
    samplers = [partial(one.sample, contexts, pairs + 1) for one in data]
    return draw_each(samplers, starts, source)


def recipe(name: str, device: str = "cpu") -> SolverRecipe:
    """The recipe of a name in ``SHIPPED`` or ``PAPER``.

    Example:
        >>> solvers.recipe("lsa-1").shape.layers
        1
    """
    return (SHIPPED | PAPER)[name](name, device)


def group(
    name: str,
    device: str,
    shape: Shape,
    members: Sequence[tuple[int, Data]],
    *,
    steps: int,
    extra: tuple[int, ...] = (),
    **changes: Any,
) -> SolverRecipe:
    """A recipe for (seed, data) members of one shape; ``extra`` are checkpoints on the way.

    Example:
        >>> made = solvers.group("small", "cpu", Shape(10, 10), [(7, solvers.ISOTROPIC)], steps=3)
        >>> made.seeds
        (7,)
    """
    seeds, data = zip(*members, strict=True)
    plan = SolverRecipe(
        name=name,
        seed=seeds[0],
        device=device,
        shape=shape,
        seeds=seeds,
        data=data,
        steps=steps,
        checkpoints=(*extra, steps),
        held_out=HeldOut(data, shape.pairs, device),
        card="",
        **{"peak_rate": 1e-2, "warmup": 50, "floor": 0.01, "clip": 1e-3} | changes,
    )
    return replace(plan, card=_card(plan))


def _linear(
    steps: int, seeds: int = 3, data: Data = ISOTROPIC, extra: tuple[int, ...] = (), **shape: Any
) -> Callable[[str, str], SolverRecipe]:
    """On the paper's data, or on others of its size."""
    known = {"dim": data.dim, "pairs": 10} | shape
    members = [(seed, data) for seed in range(seeds)]
    return lambda name, device: group(
        name, device, Shape(**known), members, steps=steps, extra=extra
    )


def _rougher(
    steps: int, data: Data, scale: float, extra: tuple[int, ...] = (), **shape: Any
) -> Callable[[str, str], SolverRecipe]:
    """Where small weights do not move: larger ones to start from, and a lower rate."""
    known = Shape(**{"dim": data.dim, "pairs": 10} | shape)
    members = [(seed, data) for seed in range(3)]
    changes: dict[str, Any] = {"scale": scale, "peak_rate": 3e-3, "clip": 1.0}
    return lambda name, device: group(
        name, device, known, members, steps=steps, extra=extra, **changes
    )


def _contrastive(**shape: Any) -> Callable[[str, str], SolverRecipe]:
    """Five seeds on each of three tasks."""
    problems = [Problem(Task(4), link) for link in LINKS]
    members = [(seed, problem) for problem in problems for seed in range(5)]
    known = Shape(**{"dim": 4, "pairs": 8} | shape)
    changes: dict[str, Any] = {"scale": 1.0, "peak_rate": 5e-3, "clip": 1.0, "batch": 256}
    return lambda name, device: group(name, device, known, members, steps=3000, **changes)


def _paper(**shape: Any) -> Callable[[str, str], SolverRecipe]:
    """The released code's batch, steps and rates."""
    known = Shape(**{"dim": 10, "pairs": 10} | shape)
    steps, deep = 5000 if known.shared else 50_000, known.layers > 3
    changes: dict[str, Any] = {
        "batch": 2048,
        "peak_rate": 5e-4 if deep else 1e-3,
        "floor": 1.0,
        "warmup": 1,
    }
    members = [(seed, ISOTROPIC) for seed in range(5)]
    return lambda name, device: group(
        name, device, known, members, steps=steps, extra=ALONG, log_every=1000, **changes
    )


_SOFT: dict[str, Any] = {"attention": ("softmax",)}
_APART: dict[str, Any] = {"layers": 2, "attention": ("softmax", "linear"), "separate": True}
_OURS = _SOFT | {"sees_query": True}
SHIPPED = {
    "lsa-1": _linear(3000, seeds=5, extra=ALONG),
    "lsa-2": _linear(8000, extra=ALONG, layers=2),
    "lsa-5": _linear(8000, extra=ALONG, layers=5, clip=10.0),
    "lsa-2-shared": _linear(8000, extra=ALONG, layers=2, shared=True),
    "lsa-5-shared": _linear(8000, extra=ALONG, layers=5, shared=True, clip=10.0),
    "lsa-softmax": _linear(4000, **_SOFT),
    "lsa-softmax-2-heads": _linear(4000, heads=2, **_SOFT),
    "lsa-norm": _linear(4000, norm=True),
    "lsa-stretched": _linear(4000, data=STRETCHED),
    "lsa-separate": _rougher(6000, ISOTROPIC, 1.0, ALONG, **_APART),
    "lsa-waves": _rougher(6000, Waves(), 0.3, hidden=64, width=20),
    "lsa-waves-no-mlp": _rougher(2000, Waves(), 0.3, width=20),
    "contrastive-linear": _contrastive(),
    "contrastive-softmax": _contrastive(**_OURS),
    "contrastive-regularised": _contrastive(variant="regularised", strength=0.5, **_OURS),
    "contrastive-values": _contrastive(variant="values", **_OURS),
    "contrastive-both": _contrastive(variant="both", **_OURS),
    "contrastive-negatives": _contrastive(variant="negatives", strength=0.5, **_OURS),
}
PAPER = {
    "lsa-paper-1": _paper(),
    "lsa-paper-2": _paper(layers=2),
    "lsa-paper-5": _paper(layers=5, clip=10.0),
    "lsa-paper-2-shared": _paper(layers=2, shared=True),
    "lsa-paper-5-shared": _paper(layers=5, shared=True, clip=10.0),
}


def _card(plan: SolverRecipe) -> str:
    shape = plan.shape
    kinds = " then ".join(shape.attention)
    seeds = ", ".join(map(str, sorted(set(plan.seeds))))
    return _CARD.format(
        name=plan.name,
        count=f"{len(plan.seeds)} networks",
        layers=f"{shape.layers} layer{'s' * (shape.layers > 1)}",
        kinds=kinds,
        shape=_told(shape),
        data="; ".join(dict.fromkeys(map(_told, plan.data))),
        plan=plan,
        seeds=seeds,
    )


def _told(given: Any) -> str:
    """The fields that are not at their defaults, in words."""
    if isinstance(given, tuple):
        return (" then " if isinstance(given[0], str) else " / ").join(map(str, given))
    if not is_dataclass(given):
        return str(given)
    known = [(f.name, getattr(given, f.name)) for f in fields(given) if f.init]
    defaults = {f.name: f.default for f in fields(given)}
    told = ", ".join(f"{n} {_told(v)}" for n, v in known if v != defaults[n])
    return f"{type(given).__name__} ({told})" if told else type(given).__name__


_CARD = """\
# {name}

{count} of {layers} of {kinds} attention, trained from scratch by the recipe
`iclutils.training.solvers` to answer one query of a regression from the pairs in its context.

- **Shape**: {shape}.
- **Data**: synthetic, a new function for every context. {data}. No text, no personal data.
- **Training**: {plan.steps} steps of {plan.batch} contexts, Adam, peak rate {plan.peak_rate:g},
  {plan.warmup} warm-up steps, cosine to {plan.floor:.0%}, clipping at {plan.clip:g}, initial
  scale {plan.scale:g}; seeds {seeds}. `training.jsonl` is the log.
- **Storage**: safetensors, single precision.
- **Rebuild**: `python -m iclutils train {name}`. The same machine and versions give the same
  weights bit for bit, also after an interruption; others give different ones of the same kind.
- **Limits**: it does nothing but this regression, at this number of pairs.
- **Licence**: MIT, as the package.
"""
