"""Diagnosis: which components are anomalous, and which of them are the cause.

What reads from a broken component is anomalous too. So a cause is anomalous *on healthy inputs*,
and its healthy output brings the score back; the healthy model is needed for both."""

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
from ...interp.graph import Node, component_output, output_hook
from ...interp.hooks import Hook, set_activation
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
    """Component and measure of each column of ``component_statistics``."""
    pairs = [(node, measure) for node in components(model) for measure in MEASURES]
    return [(node, m) for node, m in pairs if node.kind == "head" or m != "entropy"]


def fit_covariances(model: TransformerBridge, healthy: CleanCorrupt) -> dict[Node, LedoitWolf]:
    """Mean and shrunken covariance of what every component writes (Ledoit and Wolf 2004), on cases
    that are not used again: distances of the very cases of a fit are too small."""
    writes, _ = _scored_writes(model, healthy)
    return {node: LedoitWolf().fit(_mean(write)) for node, write in writes.items()}


def component_statistics(
    model: TransformerBridge,
    task: CleanCorrupt,
    covariances: dict[Node, LedoitWolf],
    hooks: Sequence[Hook] = (),
) -> Statistics:
    """Statistics of every component in every case under ``hooks``, means over scored positions:
    ``length`` of what it writes; size of its ``direct`` effect on the answer's logit; ``distance``
    of its mean write from the usual one (Mahalanobis); ``entropy`` of attention."""
    writes, seen = _scored_writes(model, task, hooks)
    toward = answer_direction(model, task) / seen[SCALE]

    def column(node: Node, measure: str) -> Float[Tensor, "case"]:
        if measure == "length":
            return writes[node].norm(dim=-1).mean(-1)
        if measure == "direct":
            return (writes[node] * toward).sum(-1).mean(-1).abs()
        if measure == "distance":
            squared = covariances[node].mahalanobis(_mean(writes[node]))
            return torch.as_tensor(squared).clamp(min=0).sqrt()
        rows = seen[get_act_name("pattern", node.layer)][:, :, node.head]
        return relative_entropy(rows, task.at).mean(-1)

    return torch.stack([column(*name).double().cpu() for name in statistic_names(model)], 1)


def anomalies(
    cases: Statistics, healthy: Float[Tensor, "healthy item"]
) -> tuple[Float[Tensor, "item"], Bool[Tensor, "item"]]:
    """p of every statistic (Mann-Whitney, two-sided; 1 where nothing varies), and which are found
    at a false-discovery rate of 5 % over all of them (Benjamini and Hochberg 1995)."""
    test = mannwhitneyu(cases.cpu().numpy(), healthy.cpu().numpy(), axis=0)
    p = torch.as_tensor(np.nan_to_num(test.pvalue, nan=1.0))
    return p, benjamini_hochberg(p, 0.05)


@dataclass(frozen=True)
class Finding:
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
    covariances: dict[Node, LedoitWolf],
    healthy: Float[Tensor, "healthy item"],
) -> list[Finding]:
    """Every component that is anomalous in failing cases, against ``healthy`` ones not used before;
    ``hooks`` are what is wrong (``failures.plant``). Components of one role stand in for each
    other, so one alone may bring back everything or nothing: the larger share counts, of alone and
    on top of all other local ones."""
    lost = (score(model, task) - score(model, task, hooks)).mean()
    if abs(float(lost)) < CONSTANT:
        raise IclError("These cases lose nothing: there is no failure to explain.")
    names = statistic_names(model)

    def anomalous(hooks: Sequence[Hook], usual: Statistics) -> list[Node]:
        _, flagged = anomalies(component_statistics(model, task, covariances, hooks), usual)
        return list(dict.fromkeys(names[i][0] for i in flagged.nonzero()[:, 0].tolist()))

    suspects = anomalous(hooks, healthy)
    own = component_statistics(model, task, covariances)
    on_healthy_inputs = anomalous([*hooks, *healthy_inputs(model, task)], own)
    local = [node for node in suspects if node in on_healthy_inputs]
    sets = [[node] for node in local] + [[n for n in local if n != node] for node in local]
    everything, *parts = restored(model, task, hooks, [local, *sets]) / lost
    alone, others = parts[: len(local)], parts[len(local) :]
    shares = {
        node: max(mean_se(by_itself), mean_se(everything - rest))
        for node, by_itself, rest in zip(local, alone, others, strict=True)
    }
    undefined = torch.nan, torch.nan
    return [Finding(node, node in local, *shares.get(node, undefined)) for node in suspects]


def restored(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook], sets: Sequence[list[Node]]
) -> Float[Tensor, "set batch"]:
    """Nats that come back when the output of each set of components is that of the healthy run."""
    _, own = observe(model, task, (), {output_hook(node) for nodes in sets for node in nodes})

    def restore(node: Node) -> Hook:
        name = output_hook(node)
        return set_activation(name, own[name], [node.head] if node.kind == "head" else [])

    broken = score(model, task, hooks)
    scores = [score(model, task, [*hooks, *map(restore, s)]) for s in bar(sets, "components")]
    return torch.stack(scores) - broken


def healthy_inputs(model: TransformerBridge, task: CleanCorrupt) -> list[Hook]:
    """Hooks that let every component, and the last LayerNorm, read what it reads when healthy: a
    fault then shows where it sits alone, and the score means nothing."""
    layers = range(model.cfg.n_layers)
    parts = ("resid_pre",) if graph.of(model).parallel else ("resid_pre", "resid_mid")
    names = [get_act_name(part, la) for part in parts for la in layers]
    names.append(get_act_name("resid_post", layers[-1]))
    _, seen = observe(model, task, (), names)
    return [set_activation(name, own) for name, own in seen.items()]


def _scored_writes(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook] = ()
) -> tuple[dict[Node, Float[Tensor, "case entry d_model"]], dict[str, Tensor]]:
    """Writes of every component at the scored positions, and activations there by name."""
    layers = range(model.cfg.n_layers)
    watch = [get_act_name(part, la) for la in layers for part in ("pattern", "z", "mlp_out")]
    _, whole = observe(model, task, hooks, [*watch, SCALE])
    batch = torch.arange(len(task), device=task.at.device)[:, None]
    seen = {
        name: (value.transpose(1, 2) if "pattern" in name else value)[batch, task.at]
        for name, value in whole.items()
    }
    return {node: component_output(model, seen, node) for node in components(model)}, seen


def _mean(write: Float[Tensor, "case entry d_model"]) -> np.ndarray:
    return write.mean(1).double().cpu().numpy()
