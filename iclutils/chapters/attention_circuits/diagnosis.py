"""Diagnosis: which components are anomalous, and which of them are the cause.

What reads from a broken component is anomalous too. So a cause is anomalous *on healthy inputs*,
and its healthy output brings the score back; the healthy model is needed for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import mannwhitneyu
from sklearn.covariance import LedoitWolf
from torch import Tensor

from ...errors import IclError
from ...interp import graph
from ...interp.clean_corrupt import CONSTANT, CleanCorrupt
from ...interp.graph import Node, component_output, output_hook
from ...interp.hooks import Hook, set_activation
from ...interp.statistics import benjamini_hochberg, mean_se
from ...models import TransformerBridge, get_act_name
from .failures import observe, relative_entropy, score
from .interactions import SCALE, answer_direction

ENOUGH = 0.2  # share of the lost score that a cause must bring back

Statistics = Mapping[Node, Float[Tensor, "_ _"]]  # (case, measure)


def fit_covariances(model: TransformerBridge, healthy: CleanCorrupt) -> dict[Node, LedoitWolf]:
    """Fit mean and shrunken covariance of every head's and MLP layer's write (Ledoit, Wolf 2004),
    on cases that are not used again: distances of the very cases of a fit are too small."""
    writes, _ = _scored_writes(model, healthy)
    return {node: LedoitWolf().fit(_mean(write)) for node, write in writes.items()}


def component_statistics(
    model: TransformerBridge,
    task: CleanCorrupt,
    covariances: Mapping[Node, LedoitWolf],
    hooks: Sequence[Hook] = (),
) -> Statistics:
    """Return, for every component and case under ``hooks``, means over scored positions: length of
    its write; size of its direct effect on the answer's logit; Mahalanobis distance of its mean
    write from the usual one; of heads, entropy of attention."""
    writes, seen = _scored_writes(model, task, hooks)
    toward = answer_direction(model, task) / seen[SCALE]  # (case, entry, d_model)

    def measure(node: Node, write: Float[Tensor, "case entry d_model"]) -> Tensor:
        distance = torch.as_tensor(covariances[node].mahalanobis(_mean(write))).clamp(min=0).sqrt()
        columns = [write.norm(dim=-1).mean(-1), (write * toward).sum(-1).mean(-1).abs(), distance]
        if node.kind == "head":
            rows = seen[get_act_name("pattern", node.layer)][:, :, node.head]
            columns.append(relative_entropy(rows, task.at).mean(-1))
        return torch.stack([column.double().cpu() for column in columns], 1)

    return {node: measure(node, write) for node, write in writes.items()}


def anomalous(cases: Statistics, healthy: Statistics) -> list[Node]:
    """Return the components of which a statistic differs from healthy cases (Mann-Whitney, false
    discoveries over all statistics held at 5 %; Benjamini and Hochberg 1995)."""
    pair = (torch.cat([*side.values()], 1).numpy() for side in (cases, healthy))
    p = torch.as_tensor(np.nan_to_num(mannwhitneyu(*pair, axis=0).pvalue, nan=1.0))
    owners = [node for node, values in cases.items() for _ in range(values.shape[1])]
    flagged = zip(owners, benjamini_hochberg(p, 0.05).tolist(), strict=True)
    return list(dict.fromkeys(node for node, odd in flagged if odd))


class Suspect(NamedTuple):
    """An anomalous component: whether it is so on healthy inputs too (``local``), and the share of
    the lost score that its healthy output restores, with standard error; NaN if not local."""

    component: Node
    local: bool
    restored: float
    se: float

    @property
    def confirmed(self) -> bool:
        """Whether it is a cause: at least ``ENOUGH`` beyond two standard errors."""
        return self.restored - 2 * self.se >= ENOUGH


def explain(
    model: TransformerBridge,
    task: CleanCorrupt,
    hooks: Sequence[Hook],
    covariances: Mapping[Node, LedoitWolf],
    healthy: Statistics,
) -> list[Suspect]:
    """Return every component that is anomalous in cases under ``hooks`` (``failures.plant``),
    against ``healthy`` ones not used before; refuses cases that lose nothing. Components of one
    role stand in for each other: the larger share counts, of alone and on top of the others."""
    lost = (score(model, task) - score(model, task, hooks)).mean()
    if abs(float(lost)) < CONSTANT:
        raise IclError("These cases lose nothing: there is no failure to explain.")
    with_healthy_inputs = [*hooks, *healthy_inputs(model, task)]
    broken, own, alone_broken = (
        component_statistics(model, task, covariances, some)
        for some in (hooks, (), with_healthy_inputs)
    )
    suspects, odd_alone = anomalous(broken, healthy), anomalous(alone_broken, own)
    local = [node for node in suspects if node in odd_alone]
    sets = [local, *([node] for node in local)]
    sets += [[other for other in local if other != node] for node in local]
    everything, *parts = restored(model, task, hooks, sets) / lost  # shares, (set, case)
    shares = {
        node: max(mean_se(by_itself), mean_se(everything - rest))
        for node, by_itself, rest in zip(
            local, parts[: len(local)], parts[len(local) :], strict=True
        )
    }
    undefined = torch.nan, torch.nan
    return [Suspect(node, node in local, *shares.get(node, undefined)) for node in suspects]


def restored(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook], sets: Sequence[list[Node]]
) -> Float[Tensor, "set batch"]:
    """Return the nats that come back when each set of components writes as in the healthy run."""
    _, own = observe(model, task, (), {output_hook(node) for nodes in sets for node in nodes})

    def restore(node: Node) -> Hook:
        name = output_hook(node)
        return set_activation(name, own[name], [node.head] if node.kind == "head" else [])

    scores = [score(model, task, [*hooks, *map(restore, nodes)]) for nodes in sets]
    return torch.stack(scores) - score(model, task, hooks)


def healthy_inputs(model: TransformerBridge, task: CleanCorrupt) -> list[Hook]:
    """Return hooks that let every component, and the last LayerNorm, read what it reads when
    healthy: a fault then shows where it sits alone, and the score means nothing."""
    layers = range(model.cfg.n_layers)
    parts = ("resid_pre",) if graph.of(model).parallel else ("resid_pre", "resid_mid")
    names = [get_act_name(part, la) for part in parts for la in layers]
    _, seen = observe(model, task, (), [*names, get_act_name("resid_post", layers[-1])])
    return [set_activation(name, own) for name, own in seen.items()]


def _scored_writes(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook] = ()
) -> tuple[dict[Node, Float[Tensor, "case entry d_model"]], dict[str, Tensor]]:
    """Return writes of every component at the scored positions, and activations there by name."""
    layers = range(model.cfg.n_layers)
    watch = [get_act_name(part, la) for la in layers for part in ("pattern", "z", "mlp_out")]
    _, whole = observe(model, task, hooks, [*watch, SCALE])
    batch = torch.arange(len(task), device=task.at.device)[:, None]
    seen = {
        name: (value.transpose(1, 2) if "pattern" in name else value)[batch, task.at]
        for name, value in whole.items()
    }
    components = [node for node in graph.of(model).writers if node.kind != "embed"]
    return {node: component_output(model, seen, node) for node in components}, seen


def _mean(write: Float[Tensor, "case entry d_model"]) -> np.ndarray:
    return write.mean(1).double().cpu().numpy()
