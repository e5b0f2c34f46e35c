"""Vital signs: a few numbers of every head and MLP layer, and how far they are from usual.

Four for a head, three for an MLP layer, at the scored positions: length of what it writes, its
direct effect on the answer, the distance of its mean write from the usual one (Mahalanobis, with
the shrinkage of Ledoit and Wolf 2004, because there are fewer cases than dimensions), and for
heads the entropy of attention.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import vitals
    >>> from iclutils.interp import clean_corrupt
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> fitted, task = (clean_corrupt.copying(net, 8, 6, generator) for _ in range(2))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from sklearn.covariance import ledoit_wolf_shrinkage
from torch import Tensor

from ...errors import IclError
from ...interp import graph
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Node
from ...interp.hooks import Hook
from ...models import TransformerBridge, get_act_name
from .edits import observe
from .symptoms import SCALE, entropy, through, towards

MEASURES = ("length", "direct", "distance", "entropy")  # the last of heads only
Item = tuple[Node, str]


@dataclass(frozen=True)
class Cloud:
    """Mean and shrunken covariance of what one component writes, by its few free directions."""

    mean: Float[Tensor, "d_model"]
    axes: Float[Tensor, "axis d_model"]
    along: Float[Tensor, "axis"]
    across: float

    @classmethod
    def fit(cls, writes: Float[Tensor, "case d_model"]) -> Cloud:
        """Covariance (1 - s) S + s tr(S) / d I, with the s of Ledoit and Wolf."""
        if len(writes) < 8:
            raise IclError(f"What is usual takes at least eight cases; got {len(writes)}.")
        x = writes.double().cpu()
        mean = x.mean(0)
        share = float(ledoit_wolf_shrinkage(x.numpy()))
        _, singular, axes = torch.linalg.svd(x - mean, full_matrices=False)
        variance = singular.square() / len(x)
        across = share * float(variance.sum()) / x.shape[1]
        return cls(mean, axes, (1 - share) * variance + across, across)

    def distance(self, writes: Float[Tensor, "case d_model"]) -> Float[Tensor, "case"]:
        """Mahalanobis distance from the mean; 0 for a component that always writes the same."""
        moved = writes.double().cpu() - self.mean
        inside = moved @ self.axes.T
        rest = (moved.square().sum(1) - inside.square().sum(1)).clamp(min=0)
        tiny = 1e-12
        parts = (inside.square() / self.along.clamp(min=tiny)).sum(1)
        return (parts + rest / max(self.across, tiny)).sqrt()


def components(model: TransformerBridge) -> list[Node]:
    """Every head and MLP layer, in order of depth.

    Example:
        >>> [str(node) for node in vitals.components(net)][:5]
        ['0.0', '0.1', '0.2', '0.3', 'mlp 0']
    """
    return [n for n in graph.of(model).writers if n.kind != "embed"]


def items(model: TransformerBridge) -> list[Item]:
    """What each column of ``vitals`` is.

    Example:
        >>> len(vitals.items(net)) > len(vitals.components(net))
        True
    """
    return [
        (node, measure)
        for node in components(model)
        for measure in MEASURES
        if node.kind == "head" or measure != "entropy"
    ]


def usual(model: TransformerBridge, behaviour: CleanCorrupt) -> dict[Node, Cloud]:
    """What every component writes when healthy; on cases that are not used again.

    Distances of the very cases a cloud was fitted on are too small to compare others with.

    Example:
        >>> clouds = vitals.usual(net, fitted)
        >>> list(clouds) == vitals.components(net)
        True
    """
    writes, _, _ = _run(model, behaviour, ())
    return {node: Cloud.fit(write.mean(1)) for node, write in writes.items()}


def vitals(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    clouds: dict[Node, Cloud],
    hooks: Sequence[Hook] = (),
) -> Float[Tensor, "case item"]:
    """The vital signs of every case under ``hooks``, in float64; columns as in ``items``.

    Example:
        >>> signs = vitals.vitals(net, task, vitals.usual(net, fitted))
        >>> signs.shape == (8, len(vitals.items(net)))
        True
    """
    writes, rows, scale = _run(model, behaviour, hooks)
    toward = towards(model, behaviour)
    columns = []
    for node, measure in items(model):
        write = writes[node]
        if measure == "length":
            column = write.norm(dim=-1).mean(-1)
        elif measure == "direct":
            column = ((through(model, write) / scale) * toward).sum(-1).mean(-1).abs()
        elif measure == "distance":
            column = clouds[node].distance(write.mean(1))
        else:
            column = entropy(rows[node], behaviour.at).mean(-1)
        columns.append(column.double().cpu())
    return torch.stack(columns, 1)


def _run(
    model: TransformerBridge, behaviour: CleanCorrupt, hooks: Sequence[Hook]
) -> tuple[dict[Node, Tensor], dict[Node, Tensor], Tensor]:
    """Writes and rows of attention at the scored positions, and the last LayerNorm's scale."""
    layers = range(model.cfg.n_layers)
    watch = [get_act_name(part, la) for la in layers for part in ("pattern", "z", "mlp_out")]
    _, seen = observe(model, behaviour, hooks, [*watch, SCALE])
    batch = torch.arange(len(behaviour), device=behaviour.at.device)[:, None]
    writes: dict[Node, Tensor] = {}
    rows: dict[Node, Tensor] = {}
    for node in components(model):
        if node.kind == "mlp":
            writes[node] = seen[get_act_name("mlp_out", node.layer)][batch, behaviour.at]
            continue
        z = seen[get_act_name("z", node.layer)][batch, behaviour.at, node.head]
        writes[node] = z @ model.W_O[node.layer, node.head]
        rows[node] = seen[get_act_name("pattern", node.layer)][batch, node.head, behaviour.at]
    return writes, rows, seen[SCALE][batch, behaviour.at]
