"""Recipes ``regression-...``: transformers that learn linear regression in context (chapter 03).

Data are drawn anew at every step; the loss is the squared error of every y of the context, the
first included, as in the code of {cite}`akyurek2023`. What was tried, the model
cards tell.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from iclutils import zoo
from iclutils.chapters.ridge_ols.algorithms import baselines, ridge
from iclutils.chapters.ridge_ols.distances import nearest, predict
from iclutils.files import write_text
from iclutils.models.regressors import Format, InContextRegressors, Shape, load
from iclutils.tasks import generator
from iclutils.tasks.regression import Contexts, Task, sample

from .ensemble import FRESH, EnsembleRecipe
from .loop import sinusoids
from .muon import Muon

STORED = zoo.ROOT / "depth_width.jsonl"
NOISES = ((0.25, 1.0), (0.5, 1.5), (0.5, 1.0), (0.5, 0.75))  # (noise, prior), as in the paper


@dataclass(frozen=True, kw_only=True)
class RegressionRecipe(EnsembleRecipe):
    """Networks of one shape, each on its own task."""

    batch: int = 64
    peak_rate: float = 6e-3
    floor: float = 0.02
    scale: float = 5 / 3  # rate of Muon, over that of AdamW; 0 for AdamW alone
    mixed: bool = False  # the blocks' products in bfloat16

    held_out_contexts = 512

    def network(self) -> InContextRegressors:
        """Draw networks from their seeds, positions as sinusoids."""
        network = InContextRegressors(self.shape, self.seeds)
        network.tasks = [asdict(task) for task in self.tasks]
        network.positions.data[:] = 0.3 * sinusoids(*network.positions.shape[1:])
        return network

    def sample(self, task: Task, contexts: int, source: Generator) -> Contexts:
        """Draw contexts as long as the network can read."""
        return sample(task, contexts, self.shape.pairs, source)

    def loss(self, network: nn.Module, step: int) -> Tensor:
        """Return the mean squared error of every prediction, summed over the networks."""
        xs, ys = self.batch_of(step)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed):
            predicted = network(xs, ys)
        return (predicted.float() - ys).square().mean((1, 2)).sum()

    def optimizers(self, network: nn.Module) -> list[Optimizer]:
        """Use Muon on the matrices of the blocks, AdamW without decay on the rest."""
        named = dict(network.named_parameters())
        inside = {n for n, p in named.items() if n.startswith("blocks.") and p.shape[1] > 1}
        inside = inside if self.scale else set()
        matrices = {"params": [named[n] for n in named if n in inside], "scale": self.scale}
        rest = [p for n, p in named.items() if n not in inside]
        adam = torch.optim.AdamW(
            rest, lr=self.peak_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        return [Muon([matrices], lr=self.peak_rate), adam] if inside else [adam]

    def held_out(self, network: nn.Module) -> dict[str, float]:
        """Return squared distances to the best predictor over d, mean over prefixes."""
        apart = (self.predict_held_out(network) - self.best).square()[:, :, 1:].mean((1, 2))
        return {f"spd_best_{i}": v for i, v in enumerate((apart / self.shape.dim).tolist())}

    @cached_property
    def best(self) -> Tensor:
        """Return answers of ridge with the task's own penalty to the held-out contexts."""
        parts = zip(*self.held_out_data, self.tasks, strict=True)
        return torch.stack([ridge(x, y, task.ridge) for x, y, task in parts])


def recipe(name: str, device: str = "cpu") -> RegressionRecipe:
    """Make the recipe of a name in ``SHIPPED``, ``MAP`` or ``PAPER``."""
    settings = (SHIPPED | MAP | PAPER)[name]
    mixed = name in PAPER and device == "cuda"
    return RegressionRecipe.of(name, device, mixed=mixed, **settings)


def collect(trained: Path) -> None:
    """Write how far the networks of ``MAP``, of ``PAPER`` and those of four layers, and untrained
    twins of all, are from every algorithm into the file that ships."""
    drawn = sample(Task(8), 2000, 17, generator("map"))
    known = baselines() | {f"ridge 1/{2**i}": partial(ridge, penalty=2.0**-i) for i in range(7, 15)}
    answers = {name: f(drawn.xs, drawn.ys) for name, f in known.items()}
    lines = []
    for name in (*MAP, *(n for n in SHIPPED if n.startswith("regression-w")), *PAPER):
        network = load(zoo.find(name) if zoo.has(name) else next((trained / name).glob("step-*")))
        row = {"layers": network.shape.layers, "width": network.shape.width}
        for which, net in (("trained", network), ("untrained", recipe(name).network())):
            near = nearest(predict(net, drawn.xs, drawn.ys)[0], answers, 8, slice(1, 17))
            groups = [part.mean(-1) for part in near.by_context.tensor_split(10, -1)]
            by_name = zip(near.names, torch.stack(groups, -1).tolist(), strict=True)
            row[which] = {k: [float(f"{v:.3g}") for v in values] for k, values in by_name}
        lines.append(json.dumps(row, separators=(",", ":")) + "\n")
    write_text(STORED, "".join(lines))


def depth_width(which: str = "trained") -> dict[tuple[int, int], dict[str, list[float]]]:
    """Read by layers and width, then by algorithm, the distance over d (mean over n = 1 to 16,
    d = 8) in ten groups of 200 contexts; ``which`` is trained or untrained."""
    rows = map(json.loads, STORED.read_text(encoding="utf-8").splitlines())
    return {(row["layers"], row["width"]): row[which] for row in rows}


def _mini(
    dim: int,
    form: Format,
    layers: int,
    width: int,
    tasks: Sequence[Task],
    steps: int,
    extra: tuple[int, ...] = (),
    heads: int = 2,
) -> dict[str, Any]:
    shape = Shape(dim, 2 * dim + 1, form, layers, width, heads)
    settings = {"steps": steps, "extra": extra, "warmup": steps // 20}
    return {"shape": shape, "members": list(enumerate(tasks, FRESH)), **settings}


def _paper(layers: int) -> dict[str, Any]:
    """Return the sizes of Akyurek et al. 2023, table 1: width 512, four heads, 40 pairs of two
    tokens, batches of 64. Block, optimiser and steps are ours: theirs are AdamW's 500 000. In one
    trial the released block, 16 layers of width 64, had learned nothing after 600 steps."""
    shape = Shape(8, 41, "two", layers, 512, 4)
    rates = {"peak_rate": 1.5e-3, "scale": 20 / 3, "cosine": "after warm-up", "floor": 0.0}
    long = {"steps": 17_500, "warmup": 1750, "log_every": 350, "save_every": 2500}
    return {"shape": shape, "members": [(FRESH, Task(8))], **rates, **long}


_NOISY = tuple(Task(8, noise=noise, prior=prior) for noise, prior in NOISES)
_DEPTHS = (1, 2, 4, 8)
SHIPPED = {
    "regression-d8": _mini(8, "one", 8, 64, [Task(8)] * 3, 7000),
    "regression-d8-long": _mini(8, "one", 8, 64, [Task(8)], 14000),
    "regression-noise": _mini(8, "one", 8, 64, _NOISY, 7000),
    "regression-d2": _mini(2, "one", 4, 32, [Task(2)] * 3, 4000),
    "regression-d2-one-head": _mini(2, "one", 4, 32, [Task(2)] * 3, 4000, heads=1),
    "regression-one-L8": _mini(4, "one", 8, 32, [Task(4)] * 3, 4000),
    **{f"regression-two-L{n}": _mini(4, "two", n, 32, [Task(4)] * 3, 4000) for n in _DEPTHS},
    "regression-two-L8": _mini(4, "two", 8, 32, [Task(4)] * 3, 4000, extra=(250, 500, 1000)),
    **{f"regression-w{n}": _mini(8, "one", 4, n, [Task(8)], 4000) for n in (8, 16, 32, 64)},
    **{f"regression-d16-w{n}": _mini(16, "one", 4, n, [Task(16)], 4000) for n in (16, 32)},
}
MAP = {
    f"regression-map-L{layers}-w{width}": _mini(8, "one", layers, width, [Task(8)], 4000)
    for layers in (1, 2, 8)
    for width in (8, 16, 32, 64)
}
PAPER = {f"regression-paper-L{layers}": _paper(layers) for layers in (1, 2, 4, 16)}
