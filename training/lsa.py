"""Recipes ``lsa-...`` and ``contrastive-...``: linear self-attention (chapter 04).

As {cite}`vonoswald2023` trains it: fresh contexts at every step, half the squared error of the
query's answer, Adam, small gradients, d = N = 10, x in U(-1/2, 1/2). Those that ship have fewer
steps, smaller batches, and a rate that falls along a cosine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from iclutils.chapters.gradient_step import descent
from iclutils.chapters.gradient_step.alignment import alignment, half_mse, responses
from iclutils.models.lsa import LinearSelfAttention, Shape, load
from iclutils.tasks import generator
from iclutils.tasks.functions import LINKS, Problem, Waves
from iclutils.tasks.regression import Contexts, Task

from .ensemble import FRESH, EnsembleRecipe
from .loop import Rows

Data = Problem | Waves
_TASK = Task(10, inputs="uniform*1+-0.5")
ISOTROPIC = Problem(_TASK)
STRETCHED = Problem(_TASK, scales=(2.0, 2.0, 1.4, 1.4, 1.0, 1.0, 0.7, 0.7, 0.5, 0.5))


@dataclass(frozen=True, kw_only=True)
class LsaRecipe(EnsembleRecipe):
    """Networks of one shape, each on its own data."""

    batch: int = 512
    scale: float = 0.045  # of the initial weights
    peak_rate: float = 1e-2
    warmup: int = 50
    floor: float = 0.01
    clip: float = 1e-3

    def network(self) -> LinearSelfAttention:
        """Draw networks from their seeds."""
        network = LinearSelfAttention(self.shape, self.seeds, self.scale)
        network.tasks = [{"kind": type(d).__name__, **asdict(d)} for d in self.tasks]
        return network

    def sample(self, task: Data, contexts: int, source: Generator) -> Contexts:
        """Draw N pairs and a query."""
        return task.sample(contexts, self.shape.pairs + 1, source)

    def loss(self, network: nn.Module, step: int) -> Tensor:
        """Return half the mean squared error of the answers, summed over the networks."""
        xs, ys = self.batch_of(step)
        return half_mse(network(xs, ys), ys).sum()

    def optimizers(self, network: nn.Module) -> list[Optimizer]:
        """Use Adam."""
        return [torch.optim.Adam(network.parameters(), lr=self.peak_rate, betas=(0.9, 0.98))]

    def held_out(self, network: nn.Module) -> dict[str, float]:
        """Return the loss of each network on contexts that are always the same."""
        losses = half_mse(self.predict_held_out(network), self.held_out_data[1])
        return {f"loss_{i}": value for i, value in enumerate(losses.tolist())}


def distances(folder: Path, steps: Sequence[int]) -> Rows:
    """Measure networks of K layers along training: loss, and ``alignment`` with K tuned steps.

    The steps are of GD and GD++, with one rate (and γ) for all of them. A measure is a list with a
    number for each network, on 4000 contexts.
    """
    shape = load(folder / f"step-{steps[0]:05d}").shape
    learnt_on, (xs, ys, _) = (
        ISOTROPIC.sample(4000, shape.pairs + 1, generator(use)) for use in ("tuning", "history")
    )
    algorithms = {}
    for kind in ("GD", "GD++"):
        best = descent.tune(shape.layers, learnt_on.xs, learnt_on.ys, plus=kind == "GD++")[-1]
        algorithms[kind] = responses(descent.predictor(best.rates, best.gammas), xs, ys)
    rows: Rows = []
    for step in steps:
        network = responses(load(folder / f"step-{step:05d}"), xs, ys)
        measures: dict[str, Tensor] = {}
        for kind, reference in algorithms.items():
            measured = alignment(network, reference, xs, ys)._asdict()
            measures |= {"loss": measured.pop("loss")} | {
                f"{n}_{kind}": v for n, v in measured.items()
            }
        listed = {name: [round(v, 5) for v in values.tolist()] for name, values in measures.items()}
        rows.append({"step": step} | listed)
    return rows


def recipe(name: str, device: str = "cpu") -> LsaRecipe:
    """Make the recipe of a name in ``SHIPPED``."""
    return LsaRecipe.of(name, device, **SHIPPED[name])


def _mini(
    steps: int,
    seeds: int = 5,
    data: Sequence[Data] = (ISOTROPIC,),
    settings: Mapping[str, Any] = MappingProxyType({}),
    **shape: Any,
) -> dict[str, Any]:
    """Return seeds of each kind of data; on the paper's, or on others of its size."""
    sizes = Shape(**{"dim": data[0].dim, "pairs": 10} | shape)
    members = [(seed, each) for each in data for seed in range(FRESH, FRESH + seeds)]
    return {"shape": sizes, "members": members, "steps": steps, **settings}


def _contrastive(**shape: Any) -> dict[str, Any]:
    problems = [Problem(Task(4), link) for link in LINKS]
    settings = {"scale": 1.0, "peak_rate": 5e-3, "clip": 1.0, "batch": 256}
    return _mini(3000, data=problems, settings=settings, pairs=8, **shape)


def _paper(layers: int = 1, shared: bool = False) -> dict[str, Any]:
    """Return the released code's batch, steps, rates and clipping; checkpoints all the way."""
    deep, steps = layers > 3, 5000 if shared or layers == 1 else 50_000
    settings: dict[str, Any] = {
        **{"batch": 2048, "peak_rate": 5e-4 if deep else 1e-3, "floor": 1.0, "warmup": 1},
        **{"clip": 10.0 if deep else 1e-3, "log_every": steps // 100},
        "extra": tuple(at for at in sorted((*_ALONG["extra"], *_LATER)) if at < steps),
    }
    settings |= {"curve": distances}
    if layers > 1:  # the distances are small, the checkpoints are not
        settings |= {"kept": (steps,)}
    clip = 10.0 if deep else 0.0  # of channels; the other one is of gradients
    return _mini(steps, settings=settings, layers=layers, shared=shared, clip=clip)


# Checkpoints on the way; and, where small weights do not move, larger ones to start from and a
# lower rate.
_ALONG: dict[str, Any] = {"extra": (0, 10, 30, 100, 200, 300, 500, 1000, 2000)}
_RISING = (40, 45, 50, 55, 60, 80)  # while the rate of one layer grows
_LATER = (700, 1500, 3000, 4000, 5000, 7000, 10_000, 15_000, 20_000, 30_000, 40_000)
_ROUGH: dict[str, Any] = {"peak_rate": 3e-3, "clip": 1.0}
_SOFT: dict[str, Any] = {"attention": ("softmax",)}
_APART: dict[str, Any] = {"layers": 2, "attention": ("softmax", "linear"), "separate": True}
_WAVES: dict[str, Any] = {"data": (Waves(),), "settings": {"scale": 0.3} | _ROUGH, "width": 20}
_OURS = _SOFT | {"sees_query": True}
SHIPPED = {
    "lsa-1": _mini(3000, settings={"extra": tuple(sorted((*_ALONG["extra"], *_RISING)))}),
    "lsa-2": _mini(8000, settings=_ALONG, layers=2),
    "lsa-5": _mini(8000, 3, settings=_ALONG, layers=5, clip=10.0),
    "lsa-2-shared": _mini(8000, 3, settings=_ALONG, layers=2, shared=True),
    "lsa-5-shared": _mini(8000, 3, settings=_ALONG, layers=5, shared=True, clip=10.0),
    "lsa-softmax": _mini(4000, **_SOFT),
    "lsa-softmax-2-heads": _mini(4000, heads=2, **_SOFT),
    "lsa-norm": _mini(4000, norm=True),
    "lsa-stretched": _mini(4000, data=(STRETCHED,)),
    "lsa-separate": _mini(6000, settings={"scale": 1.0} | _ALONG | _ROUGH, **_APART),
    "lsa-waves": _mini(6000, hidden=64, **_WAVES),
    "lsa-waves-no-mlp": _mini(2000, **_WAVES),
    "contrastive-linear": _contrastive(),
    "contrastive-softmax": _contrastive(**_OURS),
    "contrastive-regularised": _contrastive(variant="regularised", strength=0.5, **_OURS),
    "contrastive-values": _contrastive(variant="values", **_OURS),
    "contrastive-both": _contrastive(variant="both", **_OURS),
    "contrastive-negatives": _contrastive(variant="negatives", strength=0.5, **_OURS),
    "lsa-paper-1": _paper(),
    "lsa-paper-2": _paper(2),
    "lsa-paper-5": _paper(5),
    "lsa-paper-2-shared": _paper(2, shared=True),
    "lsa-paper-5-shared": _paper(5, shared=True),
}
