"""Diagnosis: from what is anomalous, over what is its cause, to what could be done.

An anomaly is no problem yet: whatever reads from a broken component is anomalous too. Here a
component is a problem if it is anomalous *on healthy inputs* and if giving it back its healthy
output brings the score back. The healthy model on the same sequences is needed for both.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import diagnosis, faults, vitals
    >>> from iclutils.interp import clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task, other = (clean_corrupt.copying(net, 8, 6, generator) for _ in range(2))
    >>> broken = faults.Fault("sink", (graph.head(1, 0),))
    >>> hooks = faults.plant(net, task, [broken])
    >>> clouds = vitals.usual(net, other)
    >>> healthy = vitals.vitals(net, task, clouds)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.stats import mannwhitneyu
from torch import Tensor

from ...errors import IclError
from ...interp.clean_corrupt import CONSTANT, CleanCorrupt
from ...interp.graph import Node
from ...interp.hooks import Hook
from ...interp.statistics import benjamini_hochberg, mean_se, robust_z
from ...models import TransformerBridge, get_act_name
from ...progress import bar
from .edits import healthy_inputs, observe, score
from .vitals import Cloud, Item, components, items, vitals

ENOUGH = 0.2  # share of the lost score that a problem must bring back


@dataclass(frozen=True)
class Anomalies:
    """Robust z of every case, p of all cases together, and what is found among all items."""

    z: Float[Tensor, "case item"]
    p: Float[Tensor, "item"]
    found: Bool[Tensor, "item"]

    def by_component(self, what: Sequence[Item]) -> dict[Node, tuple[float, float, bool]]:
        """For every component its farthest median z, its smallest p, and whether it is found."""
        middle = self.z.median(0).values
        out = {}
        for node in dict.fromkeys(node for node, _ in what):
            own = torch.tensor([k for k, item in enumerate(what) if item[0] == node])
            far = own[middle[own].abs().argmax()]
            out[node] = (
                float(middle[far]), float(self.p[own].min()), bool(self.found[own].any())
            )  # fmt: skip
        return out


def anomalies(
    cases: Float[Tensor, "case item"],
    reference: Float[Tensor, "healthy item"],
    rate: float = 0.05,
) -> Anomalies:
    """Compare failing cases with healthy ones, item by item.

    p: Mann-Whitney, two-sided (1 where nothing varies); found: at this false-discovery rate
    (Benjamini-Hochberg) over all items at once.

    Example:
        >>> seen = vitals.vitals(net, task, clouds, hooks)
        >>> found = diagnosis.anomalies(seen, healthy)
        >>> found.found.shape[-1] == len(vitals.items(net))
        True
    """
    if not len(cases):
        raise IclError("There is no case to diagnose.")
    z = robust_z(cases, reference)
    test = mannwhitneyu(cases.cpu().numpy(), reference.cpu().numpy(), axis=0)
    p = torch.as_tensor(np.nan_to_num(test.pvalue, nan=1.0))
    return Anomalies(z, p, benjamini_hochberg(p, rate))


def confirm(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    hooks: Sequence[Hook],
    sets: Sequence[Iterable[Node]],
) -> Float[Tensor, "set batch"]:
    """Nats that come back when the output of each set of components is that of the healthy run."""
    sets = [list(nodes) for nodes in sets]
    if any(node not in components(model) for nodes in sets for node in nodes):
        raise IclError("Only the model's heads and MLP layers can be restored.")
    names = {_output(node) for nodes in sets for node in nodes}
    _, own = observe(model, behaviour, (), names)
    sick = score(model, behaviour, hooks)
    out = []
    for nodes in bar(sets, "components"):
        restored = [_restore(node, own[_output(node)]) for node in nodes]
        out.append(score(model, behaviour, [*hooks, *restored]) - sick)
    return torch.stack(out) if out else sick.new_zeros(0, len(sick))


def _output(node: Node) -> str:
    return (
        get_act_name("z", node.layer)
        if node.kind == "head"
        else get_act_name("mlp_out", node.layer)
    )


def _restore(node: Node, own: Tensor) -> Hook:
    def put(value: Tensor, hook: object) -> Tensor:
        if node.kind == "mlp":
            return own
        value = value.clone()
        value[:, :, node.head] = own[:, :, node.head]
        return value

    return _output(node), put


@dataclass(frozen=True)
class Problem:
    """An anomalous component.

    Attributes:
        component: the head or MLP layer.
        z, p: its farthest median robust z and smallest p.
        restored, se: share of the lost score that its healthy output brings back, and its
            standard error: alone, or on top of all other local components, whichever is more.
            NaN for a consequence.
        local: whether it is anomalous on healthy inputs too.
        confirmed: local, and brings back at least ``ENOUGH`` beyond two standard errors.
        suggestion: kind of failure to repair (``repair.SUGGESTED``), where one was named.
    """

    component: Node
    z: float
    p: float
    restored: float
    se: float
    local: bool
    confirmed: bool
    suggestion: str | None = None


def explain(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    hooks: Sequence[Hook],
    clouds: dict[Node, Cloud],
    reference: Float[Tensor, "healthy item"],
    kinds: Mapping[Node, str] | None = None,
    rate: float = 0.05,
) -> list[Problem]:
    """Every anomalous component in order of depth: problem, consequence or neither.

    Components of one role stand in for each other, so that one alone may bring back everything
    (its partner was enough) or nothing (both are needed): the larger of the two shares counts,
    alone and last. *Healthy inputs* are compared with the healthy model on the same sequences.

    Args:
        model: the healthy model.
        behaviour: the failing cases.
        hooks: what is wrong with it (``faults.plant``).
        clouds: of ``vitals.usual``.
        reference: ``vitals.vitals`` of healthy cases that the clouds were not fitted on.
        kinds: the failure that local evidence names for a component (``failures.suspect``).
        rate: of false discoveries.

    Example:
        >>> named = diagnosis.explain(net, task, hooks, clouds, healthy)
        >>> [p.component for p in named if p.confirmed][:1]
        [Node(kind='head', layer=1, head=0)]
    """
    lost = score(model, behaviour) - score(model, behaviour, hooks)
    if abs(float(lost.mean())) < CONSTANT:
        raise IclError("These cases lose nothing: there is no failure to explain.")
    what = items(model)
    seen = vitals(model, behaviour, clouds, hooks)
    own = vitals(model, behaviour, clouds, [*hooks, *healthy_inputs(model, behaviour)])
    found = anomalies(seen, reference, rate).by_component(what)
    local = anomalies(own, vitals(model, behaviour, clouds), rate).by_component(what)
    suspects = [node for node, (*_, hit) in found.items() if hit]
    causes = [node for node in suspects if local[node][2]]
    rest = [[n for n in causes if n != node] for node in causes if len(causes) > 1]
    back = confirm(model, behaviour, hooks, [causes, *([n] for n in causes), *rest])
    alone, last = back[1 : 1 + len(causes)], back[:1] - back[1 + len(causes) :]
    out = []
    for node in suspects:
        share, se = torch.nan, torch.nan
        if node in causes:
            k = causes.index(node)
            ways = [alone[k], *(last[k : k + 1])]
            share, se = max(mean_se(way / lost.mean()) for way in ways)
        out.append(
            Problem(
                component=node,
                z=found[node][0],
                p=found[node][1],
                restored=share,
                se=se,
                local=node in causes,
                confirmed=share - 2 * se >= ENOUGH,
                suggestion=(kinds or {}).get(node) if node in causes else None,
            )
        )
    return out
