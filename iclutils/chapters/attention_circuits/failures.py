"""Failures: five kinds planted on purpose, the symptoms that they show, and the part to blame.

Rows of attention become even (``even``: rank collapse; Dong et al. 2021), go to the first token
(``sink``; Xiao et al. 2024) or land one source too early (``misrouted``); edges carry their
writer's mean (``cut``); heads write four times as much (``overactive``). What reads from a broken
part looks unusual, too. So a part is blamed only if it is unusual *on healthy inputs*, and if its
healthy output brings the score back: both need the healthy model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import mannwhitneyu
from sklearn.covariance import LedoitWolf
from torch import Tensor

from ...errors import IclError
from ...interp import graph
from ...interp.attribution import answer_direction
from ...interp.clean_corrupt import CONSTANT, CleanCorrupt, scored_logits
from ...interp.graph import Edge, Node, component_output, output_hook
from ...interp.head_scores import uniform_pattern
from ...interp.hooks import Hook, at_positions, run_with_hooks, set_activation
from ...interp.invariants import check_editable
from ...interp.statistics import benjamini_hochberg, mean_se
from ...models import TransformerBridge, get_act_name

KINDS = ("even", "sink", "cut", "misrouted", "overactive")
EXCESS = 4.0  # times what an overactive head should write
COMPARED = ("length", "direct_effect", "distance", "entropy")  # symptoms of an anomaly
ENOUGH = 0.2  # share of the lost score that a part to blame brings back

Symptoms = dict[Node, dict[str, Float[Tensor, "_"]]]  # by component and name, (case)
Covariances = Mapping[Node, LedoitWolf]


@dataclass(frozen=True)
class Fault:
    """A fault of some heads; of ``cut``, of all edges from these heads to ``readers``."""

    kind: str
    heads: tuple[Node, ...]
    readers: tuple[Node, ...] = ()

    @property
    def parts(self) -> frozenset[Node]:
        """Return the components that work wrongly: the heads, or those whose inputs are cut off."""
        reading = [v for v in self.readers if v.kind != "logits"]
        cut_off = [v._replace(kind="mlp" if v.kind == "mlp_in" else "head") for v in reading]
        return frozenset(cut_off if self.kind == "cut" else self.heads)


def plant(model: TransformerBridge, task: CleanCorrupt, fault: Fault) -> list[Hook]:
    """Return hooks that plant a fault in runs of this task."""
    if fault.kind == "cut":
        return carry_mean(model, task, [(u, v) for u in fault.heads for v in fault.readers])
    check_editable(model)
    part = "z" if fault.kind == "overactive" else "pattern"

    def hook_of(node: Node) -> Hook:
        def edit(value: Tensor, hook: object) -> Tensor:
            value = value.clone()
            if part == "z":
                value[:, :, node.head] *= EXCESS  # (batch, pos, d_head)
            else:
                value[:, node.head] = _break_rows(value[:, node.head], fault.kind)
            return value

        return get_act_name(part, node.layer), edit

    return [hook_of(node) for node in fault.heads]


def _break_rows(
    rows: Float[Tensor, "batch dest src"], kind: str
) -> Float[Tensor, "batch dest src"]:
    if kind == "even":
        return uniform_pattern(rows.shape[-1]).to(rows).expand_as(rows)
    broken = torch.zeros_like(rows)
    if kind == "sink":
        broken[..., 0] = 1
    else:  # misrouted
        broken[..., :-1] = rows[..., 1:]
        broken[..., 0] += rows[..., 0]
    return broken


def carry_mean(model: TransformerBridge, task: CleanCorrupt, edges: Sequence[Edge]) -> list[Hook]:
    """Return hooks by which edges carry their writer's mean on the healthy task, in place of what
    it writes in the run, whatever else is changed there."""
    graph.model_graph(model).mask(edges)  # refuses edges that there are not
    healthy = graph.component_outputs(model, task.clean, {u for u, _ in edges})

    def hooks_of(writer: Node, reader: Node) -> list[Hook]:
        mean, written = healthy[writer].mean((0, 1)), list[Tensor]()

        def watch(value: Tensor, hook: object) -> Tensor:
            written[:] = [component_output(model, {output_hook(writer): value}, writer)]
            return value

        swap = graph.add_to_inputs(model, {reader: lambda: mean - written[0]})
        return [(output_hook(writer), watch), *swap]

    return [hook for edge in edges for hook in hooks_of(*edge)]


def score(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook] = ()
) -> Float[Tensor, "batch"]:
    """Return the score under ``hooks``, in nats."""
    return task.score(scored_logits(model, task, hooks))


def fit_covariances(model: TransformerBridge, healthy: CleanCorrupt) -> Covariances:
    """Fit mean and shrunken covariance of every component's write (Ledoit, Wolf 2004), on cases
    that are not used again: distances of the very cases of a fit are too small."""
    writes, _ = _writes(model, healthy, ())
    return {node: LedoitWolf().fit(_mean(write)) for node, write in writes.items()}


def symptoms(
    model: TransformerBridge,
    task: CleanCorrupt,
    hooks: Sequence[Hook] = (),
    covariances: Covariances | None = None,
) -> Symptoms:
    """Return what every head and MLP layer shows in every case under ``hooks``.

    Means over scored positions: ``length`` of its write; of heads ``entropy`` of attention over
    that of even attention, attention to the ``first`` token and, if the task has one, to the
    answer's ``source``. ``direct_effect``: on the answer's logit (nats), without sign; with
    ``covariances``, ``distance`` of the mean write from the usual (Mahalanobis)."""
    writes, seen = _writes(model, task, hooks)
    end = get_act_name("resid_post", model.cfg.n_layers - 1)
    toward = answer_direction(model, task, seen[end])  # (case, entry, d_model)
    out: Symptoms = {}
    for node, write in writes.items():  # (case, entry, d_model)
        own = {"length": write.norm(dim=-1).mean(-1)}
        own["direct_effect"] = (write * toward).sum(-1).mean(-1).abs()
        if covariances is not None:
            distance = torch.as_tensor(covariances[node].mahalanobis(_mean(write)))
            own["distance"] = distance.clamp(min=0).sqrt()
        if node.kind == "head":
            rows = seen[get_act_name("pattern", node.layer)][:, :, node.head]  # (case, entry, src)
            entropy = torch.special.entr(rows).sum(-1)
            own["entropy"] = (entropy / torch.log(task.at + 1.0).clamp(min=1e-9)).mean(-1)
            own["first"] = rows[..., 0].mean(-1)
            if task.source is not None:
                own["source"] = rows.gather(-1, task.source[..., None]).mean((1, 2))
        out[node] = {name: value.double().cpu() for name, value in own.items()}
    return out


def anomalous_nodes(cases: Symptoms, healthy: Symptoms) -> list[Node]:
    """Return the components of which a symptom of ``COMPARED`` differs from healthy cases
    (Mann-Whitney; Benjamini and Hochberg at 5 %). Both need the same ``covariances``, or none."""
    columns = [(node, name) for node, own in cases.items() for name in COMPARED if name in own]
    pair = [np.stack([side[node][name] for node, name in columns], 1) for side in (cases, healthy)]
    p = torch.as_tensor(np.nan_to_num(mannwhitneyu(*pair, axis=0).pvalue, nan=1.0))
    odd = benjamini_hochberg(p, 0.05).tolist()
    return list(dict.fromkeys(node for (node, _), yes in zip(columns, odd, strict=True) if yes))


class Diagnosis(NamedTuple):
    """Components that look unusual, and those of them that are to blame."""

    anomalous: list[Node]
    blamed: list[Node]


def diagnose(
    model: TransformerBridge,
    task: CleanCorrupt,
    hooks: Sequence[Hook],
    covariances: Covariances,
    healthy: Symptoms,
) -> Diagnosis:
    """Find what is unusual in cases under ``hooks`` against ``healthy`` ones, and what is to blame;
    refuse cases that lose nothing.

    Components of one role stand in for each other: what one restores counts alone, or on top of the
    others, whichever is more; ``ENOUGH`` beyond two standard errors is blamed."""
    lost = (score(model, task) - score(model, task, hooks)).mean()
    if abs(float(lost)) < CONSTANT:
        raise IclError("These cases lose nothing: there is no failure to explain.")
    broken, own, broken_alone = (
        symptoms(model, task, some, covariances)
        for some in (hooks, (), [*hooks, *healthy_inputs(model, task)])
    )
    odd, odd_alone = anomalous_nodes(broken, healthy), anomalous_nodes(broken_alone, own)
    local = [node for node in odd if node in odd_alone]

    def is_to_blame(node: Node) -> bool:
        sets = [node], local, [other for other in local if other != node]
        alone, everything, others = score_gains(model, task, hooks, sets) / lost
        mean, error = max(mean_se(alone), mean_se(everything - others))
        return mean - 2 * error >= ENOUGH

    return Diagnosis(odd, [*filter(is_to_blame, local)])


def score_gains(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook], sets: Sequence[list[Node]]
) -> Float[Tensor, "set batch"]:
    """Return the nats that come back when each set of components writes as in the healthy run."""
    names = {output_hook(node) for nodes in sets for node in nodes}
    _, own = run_with_hooks(model, task.clean, (), names)

    def restore(node: Node) -> Hook:
        name = output_hook(node)
        return set_activation(name, own[name], [node.head] if node.kind == "head" else [])

    scores = [score(model, task, [*hooks, *map(restore, nodes)]) for nodes in sets]
    return torch.stack(scores) - score(model, task, hooks)


def healthy_inputs(model: TransformerBridge, task: CleanCorrupt) -> list[Hook]:
    """Return hooks by which every component, and the last LayerNorm, reads what it reads when
    healthy: a fault then shows where it sits alone."""
    layers = range(model.cfg.n_layers)
    parts = ("resid_pre",) if graph.model_graph(model).parallel else ("resid_pre", "resid_mid")
    names = [get_act_name(part, la) for part in parts for la in layers]
    names.append(get_act_name("resid_post", layers[-1]))
    return [
        set_activation(*item) for item in run_with_hooks(model, task.clean, (), names)[1].items()
    ]


def _writes(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook]
) -> tuple[dict[Node, Float[Tensor, "case entry d_model"]], dict[str, Tensor]]:
    """Return writes of every head and MLP layer, and activations, at the scored positions."""
    layers = range(model.cfg.n_layers)
    names = [get_act_name(part, la) for la in layers for part in ("pattern", "z", "mlp_out")]
    names.append(get_act_name("resid_post", layers[-1]))
    _, seen = run_with_hooks(model, task.clean, [*hooks, at_positions(task.at)], names)
    batch = torch.arange(len(task), device=task.at.device)[:, None]
    for name, value in seen.items():  # (case, head, pos, src) of patterns
        by_position = value.transpose(1, 2) if "pattern" in name else value
        seen[name] = by_position[batch, task.at]
    components = [node for node in graph.model_graph(model).writers if node.kind != "embed"]
    return {node: component_output(model, seen, node) for node in components}, seen


def _mean(write: Float[Tensor, "case entry d_model"]) -> np.ndarray:
    return write.mean(1).double().cpu().numpy()
