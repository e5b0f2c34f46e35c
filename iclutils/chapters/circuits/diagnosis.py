"""Diagnosis: which components are anomalous, and which of them are the cause.

Whatever reads from a broken component is anomalous too. So a component is the cause if it is
anomalous *on healthy inputs* and if giving it back its healthy output brings the score back. The
healthy model on the same sequences is needed for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.stats import mannwhitneyu
from sklearn.covariance import LedoitWolf
from torch import Tensor

from ...errors import IclError
from ...interp import graph
from ...interp.clean_corrupt import CONSTANT, CleanCorrupt
from ...interp.graph import Node, output_hook
from ...interp.hooks import Hook
from ...interp.statistics import benjamini_hochberg, mean_se
from ...models import TransformerBridge, get_act_name
from ...progress import bar
from .failures import SCALE, observe, relative_entropy, score
from .interactions import answer_direction

MEASURES = ("length", "direct", "distance", "entropy")  # the last of heads only
ENOUGH = 0.2  # share of the lost score that a cause must bring back

Statistics = Float[Tensor, "case item"]


def components(model: TransformerBridge) -> list[Node]:
    """Every head and MLP layer, in order of depth."""
    return [n for n in graph.of(model).writers if n.kind != "embed"]


def statistic_names(model: TransformerBridge) -> list[tuple[Node, str]]:
    """What each column of ``component_statistics`` is."""
    return [
        (node, measure)
        for node in components(model)
        for measure in MEASURES
        if node.kind == "head" or measure != "entropy"
    ]


def fit_covariances(model: TransformerBridge, healthy: CleanCorrupt) -> dict[Node, LedoitWolf]:
    """Mean and shrunken covariance of what every component writes (Ledoit and Wolf 2004).

    On cases that are not used again: distances of the very cases of a fit are too small.
    """
    writes, _, _ = _run(model, healthy, ())
    return {
        node: LedoitWolf().fit(write.mean(1).double().cpu().numpy())
        for node, write in writes.items()
    }


def component_statistics(
    model: TransformerBridge,
    task: CleanCorrupt,
    covariances: dict[Node, LedoitWolf],
    hooks: Sequence[Hook] = (),
) -> Statistics:
    """Statistics of every component in every case under ``hooks``, means over scored positions.

    ``length`` of what it writes; size of its ``direct`` effect on the answer's logit; ``distance``
    of its mean write from the usual one (Mahalanobis); ``entropy`` of attention.
    """
    writes, rows, scale = _run(model, task, hooks)
    toward = answer_direction(model, task) / scale
    columns = []
    for node, measure in statistic_names(model):
        if measure == "length":
            column = writes[node].norm(dim=-1).mean(-1)
        elif measure == "direct":
            column = (writes[node] * toward).sum(-1).mean(-1).abs()
        elif measure == "distance":
            mean = writes[node].mean(1).double().cpu().numpy()
            column = torch.as_tensor(covariances[node].mahalanobis(mean)).clamp(min=0).sqrt()
        else:
            column = relative_entropy(rows[node], task.at).mean(-1)
        columns.append(column.double().cpu())
    return torch.stack(columns, 1)


def anomalies(
    cases: Statistics, healthy: Float[Tensor, "healthy item"], rate: float = 0.05
) -> tuple[Float[Tensor, "item"], Bool[Tensor, "item"]]:
    """p (Mann-Whitney, two-sided; 1 where nothing varies) of every statistic, and what is found.

    At this false-discovery rate over all statistics at once (Benjamini and Hochberg 1995).
    """
    test = mannwhitneyu(cases.cpu().numpy(), healthy.cpu().numpy(), axis=0)
    p = torch.as_tensor(np.nan_to_num(test.pvalue, nan=1.0))
    return p, benjamini_hochberg(p, rate)


@dataclass(frozen=True)
class Finding:
    """An anomalous component.

    ``local``: anomalous on healthy inputs too. ``restored``, ``se``: share of the lost score that
    its healthy output brings back, alone or on top of all other local components, whichever is
    more; NaN if not local. ``confirmed``: at least ``ENOUGH`` beyond two standard errors.
    """

    component: Node
    local: bool
    restored: float
    se: float

    @property
    def confirmed(self) -> bool:
        """Whether it is a cause."""
        return self.restored - 2 * self.se >= ENOUGH


def explain(
    model: TransformerBridge,
    task: CleanCorrupt,
    hooks: Sequence[Hook],
    covariances: dict[Node, LedoitWolf],
    healthy: Float[Tensor, "healthy item"],
    rate: float = 0.05,
) -> list[Finding]:
    """Every anomalous component in order of depth: cause, consequence or neither.

    Components of one role stand in for each other, so that one alone may bring back everything
    (its partner was enough) or nothing (both are needed): the larger share counts, alone and last.

    Args:
        model: the healthy model.
        task: the failing cases.
        hooks: what is wrong with it (``failures.plant``).
        covariances: of ``fit_covariances``.
        healthy: ``component_statistics`` of healthy cases that were not used for these.
        rate: of false benjamini_hochberg.
    """
    lost = (score(model, task) - score(model, task, hooks)).mean()
    if abs(float(lost)) < CONSTANT:
        raise IclError("These cases lose nothing: there is no failure to explain.")
    names = statistic_names(model)

    def anomalous(hooks: Sequence[Hook], usual: Statistics) -> list[Node]:
        _, found = anomalies(component_statistics(model, task, covariances, hooks), usual, rate)
        return list(dict.fromkeys(names[i][0] for i in found.nonzero()[:, 0].tolist()))

    suspects = anomalous(hooks, healthy)
    own = component_statistics(model, task, covariances)
    on_healthy_inputs = anomalous([*hooks, *healthy_inputs(model, task)], own)
    local = [node for node in suspects if node in on_healthy_inputs]
    rest = [[n for n in local if n != node] for node in local if len(local) > 1]
    back = restored(model, task, hooks, [local, *([n] for n in local), *rest]) / lost
    alone, last = back[1 : 1 + len(local)], back[:1] - back[1 + len(local) :]
    out = []
    for node in suspects:
        share = torch.nan, torch.nan
        if node in local:
            k = local.index(node)
            share = max(mean_se(way) for way in (alone[k], *last[k : k + 1]))
        out.append(Finding(node, node in local, *share))
    return out


def restored(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook], sets: Sequence[list[Node]]
) -> Float[Tensor, "set batch"]:
    """Nats that come back when the output of each set of components is that of the healthy run."""
    _, own = observe(model, task, (), {output_hook(node) for nodes in sets for node in nodes})

    def restore(node: Node) -> Hook:
        def put(value: Tensor, hook: object) -> Tensor:
            where = slice(None) if node.kind == "mlp" else (slice(None), slice(None), node.head)
            value = value.clone()
            value[where] = own[output_hook(node)][where]
            return value

        return output_hook(node), put

    broken = score(model, task, hooks)
    scores = [score(model, task, [*hooks, *map(restore, s)]) for s in bar(sets, "components")]
    return torch.stack(scores) - broken


def healthy_inputs(model: TransformerBridge, task: CleanCorrupt) -> list[Hook]:
    """Hooks that let every component, and the last LayerNorm, read what it reads when healthy.

    Every fault then shows where it sits and nowhere else; the score means nothing.
    """
    layers = range(model.cfg.n_layers)
    parts = ("resid_pre",) if graph.of(model).parallel else ("resid_pre", "resid_mid")
    names = [get_act_name(part, la) for part in parts for la in layers]
    names.append(get_act_name("resid_post", layers[-1]))
    _, seen = observe(model, task, (), names)
    return [(name, lambda value, hook, own=own: own) for name, own in seen.items()]


def _run(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook]
) -> tuple[dict[Node, Tensor], dict[Node, Tensor], Tensor]:
    """Writes and rows of attention at the scored positions, and the last LayerNorm's scale."""
    layers = range(model.cfg.n_layers)
    watch = [get_act_name(part, la) for la in layers for part in ("pattern", "z", "mlp_out")]
    _, seen = observe(model, task, hooks, [*watch, SCALE])
    batch = torch.arange(len(task), device=task.at.device)[:, None]
    writes, rows = {}, {}
    for node in components(model):
        value = seen[output_hook(node)][batch, task.at]
        if node.kind == "mlp":
            writes[node] = value
            continue
        writes[node] = value[:, :, node.head] @ model.W_O[node.layer, node.head]
        rows[node] = seen[get_act_name("pattern", node.layer)][batch, node.head, task.at]
    return writes, rows, seen[SCALE][batch, task.at]
