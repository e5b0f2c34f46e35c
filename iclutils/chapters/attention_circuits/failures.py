"""Failures: planted on purpose, and flagged by what they change.

Rows of attention are mixed with even attention (``even``: rank collapse; Dong et al. 2021), with
the first token (``sink``; Xiao et al. 2024) or with themselves one source earlier (``misrouted``);
edges carry their writer's mean (``cut``); heads write too much (``overactive``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import IclError
from ...interp import graph
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Edge, Node, component_output, output_hook
from ...interp.head_scores import uniform_pattern
from ...interp.hooks import Hook, at_positions, check_editable, check_head, run_with_hooks
from ...interp.statistics import MAD
from ...models import TransformerBridge, get_act_name

KINDS = ("even", "sink", "cut", "misrouted", "overactive")
EXCESS = 3.0  # an overactive head of full strength puts out 1 + EXCESS times as much
MIN_SOLVED = 30  # healthy cases behind a quantile
OUTLIER_Z = 3.5  # robust z of an outlier (Iglewicz and Hoaglin 1993)
SPLIT = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in")

Pattern = Float[Tensor, "batch dest src"]
Measures = Mapping[str, Float[Tensor, "_ _"]]  # (case, head), (case, edge) or (case, 1)


@dataclass(frozen=True)
class Fault:
    """A fault of some heads, of strength 0 (none) to 1; of ``cut``, of all edges to ``readers``."""

    kind: str
    heads: tuple[Node, ...]
    readers: tuple[Node, ...] = ()
    strength: float = 1.0

    @property
    def edges(self) -> list[Edge]:
        """The edges that are cut."""
        return [(u, v) for u in self.heads for v in self.readers]

    @property
    def parts(self) -> frozenset[Node]:
        """Components that work wrongly: the heads, or those whose inputs are cut off."""
        reading = [v for v in self.readers if v.kind != "logits"]
        cut_off = [v._replace(kind="mlp" if v.kind == "mlp_in" else "head") for v in reading]
        return frozenset(cut_off if self.kind == "cut" else self.heads)


def plant(model: TransformerBridge, task: CleanCorrupt, faults: Sequence[Fault]) -> list[Hook]:
    """Return hooks that plant faults in runs of this task; edges come last, and carry its mean."""
    hooks: list[Hook] = []
    for fault in sorted(faults, key=lambda fault: fault.kind == "cut"):
        for node in fault.heads:
            check_head(model, (node.layer, node.head))
        if not fault.strength:
            continue
        if fault.kind == "cut":
            hooks += mix_in_mean(model, task, fault.edges, fault.strength)
        elif fault.kind == "overactive":
            scale = partial(torch.mul, other=1 + EXCESS * fault.strength)
            hooks += [_edit("z", node, scale) for node in fault.heads]
        else:
            check_editable(model)
            mix = partial(_mix, kind=fault.kind, strength=fault.strength)
            hooks += [_edit("pattern", node, mix) for node in fault.heads]
    return hooks


def mix_in_mean(
    model: TransformerBridge, task: CleanCorrupt, edges: Sequence[Edge], share: float
) -> list[Hook]:
    """Return hooks by which edges carry ``share`` of their writer's mean on the task and 1 - share
    of what it writes in the run, whatever else is changed there."""
    graph.of(model).mask(edges)  # refuses edges that there are not
    own = graph.component_outputs(model, task.clean, {u for u, _ in edges})

    def hooks_of(writer: Node, reader: Node) -> list[Hook]:
        mean, written = own[writer].mean((0, 1)), list[Tensor]()

        def watch(value: Tensor, hook: object) -> Tensor:
            written[:] = [component_output(model, {output_hook(writer): value}, writer)]
            return value

        def mix(value: Tensor, hook: object) -> Tensor:
            value = value.clone()
            read = value[:, :, reader.head] if reader.kind in graph.CHANNELS else value
            read += share * (mean - written[0])
            return value

        return [(output_hook(writer), watch), (graph.input_hook(model, reader), mix)]

    return [hook for edge in edges for hook in hooks_of(*edge)]


def _edit(part: str, head: Node, change: Callable[[Tensor], Tensor]) -> Hook:
    """Change what one head attends to (batch, dest, src) or puts out, before W_O."""

    def edit(value: Tensor, hook: object) -> Tensor:
        value = value.clone()
        own = value.select(1 if part == "pattern" else 2, head.head)
        own.copy_(change(own))
        return value

    return get_act_name(part, head.layer), edit


def _mix(pattern: Pattern, kind: str, strength: float) -> Pattern:
    """Mix rows with even attention, with the first token, or with themselves one source back."""
    target = torch.zeros_like(pattern)
    if kind == "even":
        target = uniform_pattern(pattern.shape[-1]).to(pattern).expand_as(pattern)
    elif kind == "sink":
        target[..., 0] = 1
    else:
        target[..., :-1] = pattern[..., 1:]
        target[..., 0] += pattern[..., 0]
    return torch.lerp(pattern, target, strength)


def observe(
    model: TransformerBridge,
    task: CleanCorrupt,
    hooks: Sequence[Hook] = (),
    watch: Iterable[str] = (),
) -> tuple[Float[Tensor, "batch entry vocab"], dict[str, Tensor]]:
    """Return logits at the scored positions under ``hooks``, and activations after them."""
    split = any(name.endswith(SPLIT) for name, _ in hooks)
    with graph.split_qkv_input(model) if split else nullcontext():
        return run_with_hooks(model, task.clean, [*hooks, at_positions(task.at)], watch)


def score(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook] = ()
) -> Float[Tensor, "batch"]:
    """Return the score under ``hooks``, in nats."""
    return task.score(observe(model, task, hooks)[0])


def relative_entropy(
    rows: Float[Tensor, "case entry src"], at: Int[Tensor, "case entry"]
) -> Float[Tensor, "case entry"]:
    """Return the entropy of rows of attention over that of even attention; 0 at position 0."""
    return torch.special.entr(rows).sum(-1) / torch.log(at + 1.0).clamp(min=1e-9)


def measure_cases(
    model: TransformerBridge,
    task: CleanCorrupt,
    heads: Sequence[Node],
    edges: Sequence[Edge] = (),
    faults: Sequence[Fault] = (),
) -> Measures:
    """Return what ``flags`` compares, of every case under ``faults``, means over scored positions.

    Of heads, ``entropy`` of attention over that of even attention; ``first``, attention to the
    first token; ``sink``, share of rows that give it most; ``routed``, attention to the source less
    that to the best other position; ``norm`` of the write. Of edges, ``effect``: nats lost when the
    edge carries its writer's mean. Of a case, ``score`` (nats) and ``right``, its share of right
    answers."""
    hooks, at = plant(model, task, faults), task.at
    assert task.source is not None
    source, batch = task.source[..., None], torch.arange(len(task), device=at.device)[:, None]
    names = [get_act_name(part, node.layer) for node in heads for part in ("pattern", "z")]
    logits, seen = observe(model, task, hooks, names)
    measured = []
    for node in heads:
        rows = seen[get_act_name("pattern", node.layer)][batch, node.head, at]  # case, entry, src
        values = {
            "entropy": relative_entropy(rows, at),
            "first": rows[..., 0],
            "sink": (rows[..., 0] > rows[..., 1:].amax(-1)).to(rows),
            "routed": rows.gather(-1, source)[..., 0] - rows.scatter(-1, source, 0).amax(-1),
            "norm": component_output(model, seen, node)[batch, at].norm(dim=-1),
        }
        measured.append({name: value.mean(-1) for name, value in values.items()})
    cut = {edge: fault.strength for fault in faults for edge in fault.edges}
    rest = [mix_in_mean(model, task, [edge], 1 - cut.get(edge, 0.0)) for edge in edges]
    whole, left = task.score(logits), [score(model, task, [*hooks, *more]) for more in rest]
    right = task.is_correct(logits).double().mean(-1)
    by_head = {name: torch.stack([one[name] for one in measured], 1) for name in measured[0]}
    effect = {"effect": whole[:, None] - torch.stack(left, 1)} if edges else {}
    return {**by_head, **effect, "score": whole[:, None], "right": right[:, None]}


class Flags(NamedTuple):
    """Which kinds (in the order of ``KINDS``) are flagged; ``wrong``: score below healthy 1 %."""

    kinds: Bool[Tensor, "case kind"]
    wrong: Bool[Tensor, "case"]


def flags(seen: Measures, healthy: Measures, roles: Sequence[Sequence[int]]) -> Flags:
    """Flag every kind that cases show against healthy, solved ones, none instead of the others.

    ``roles``: columns of heads that do the same, of which half must be conspicuous; of a cut, the
    effect of some edge. A head is misrouted only if it looks at the source when healthy, and if its
    attention is not mostly collapsed. Refuses fewer than thirty solved cases."""
    solved = {name: value[healthy["right"][:, 0] >= 0.5] for name, value in healthy.items()}
    if len(solved["score"]) < MIN_SOLVED:
        raise IclError(f"Flags need {MIN_SOLVED} solved cases; got {len(solved['score'])}.")
    median = {name: value.median(0).values for name, value in solved.items()}
    below = {name: seen[name] < value.quantile(0.01, 0) for name, value in solved.items()}
    above = {name: seen[name] > value.quantile(0.99, 0) for name, value in solved.items()}
    spread = MAD * (solved["norm"] - median["norm"]).abs().median(0).values

    def in_a_role(heads: Bool[Tensor, "case head"]) -> Bool[Tensor, "case"]:
        shares = [heads[:, list(columns)].float().mean(1) for columns in roles]
        return (torch.stack(shares) >= 0.5).any(0)

    on_first = seen["sink"] > 0.5
    collapsed = on_first | (seen["entropy"] > (1 + median["entropy"]) / 2)
    kinds = {
        "even": in_a_role(above["entropy"]),
        "sink": in_a_role(above["first"] & on_first),
        "cut": below.get("effect", torch.zeros_like(on_first)).any(1),
        "misrouted": in_a_role(below["routed"] & (median["routed"] > 0) & ~collapsed),
        "overactive": in_a_role((seen["norm"] - median["norm"]) / spread > OUTLIER_Z),
    }
    return Flags(torch.stack([kinds[kind] for kind in KINDS], 1), below["score"][:, 0])
