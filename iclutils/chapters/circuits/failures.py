"""Failures: for every case and kind a flag, never one label instead of the others.

Thresholds come from healthy cases, a wrong case without any flag stays *unknown*, and a flag is a
suspicion until undoing what it says brings the score back (``confirm``).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import failures, faults, symptoms
    >>> from iclutils.interp import clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> usual = clean_corrupt.copying(net, 40, 8, generator)
    >>> task = clean_corrupt.copying(net, 4, 8, generator)
    >>> heads = graph.all_heads(net)
    >>> reference = symptoms.Reference.from_healthy(symptoms.symptoms(net, usual, heads))
    >>> hooks = faults.plant(net, task, [faults.Fault("sink", (graph.head(1, 0),))])
    >>> seen = symptoms.symptoms(net, task, heads, hooks=hooks)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError, unknown
from ...interp.clean_corrupt import CONSTANT, CleanCorrupt
from ...interp.graph import Edge, Node, add_to_inputs
from ...interp.hooks import Hook
from ...models import TransformerBridge, get_act_name
from .edits import (
    Sources,
    carried,
    expected,
    force,
    healthy_inputs,
    observe,
    pattern_edit,
    score,
    set_length,
)
from .faults import KINDS
from .symptoms import Reference, Symptoms, symptoms

FAR = 3.5  # robust z from which on a value is an outlier (Iglewicz and Hoaglin 1993)
SPECIFIC = ("overactive", "misrouted", "sink", "even")  # after a cut; most specific first
NOTE = {
    "even": "attention_collapse",
    "sink": "attention_collapse",
    "cut": "path_interruption",
    "misrouted": "incorrect_routing",
    "overactive": "overactivation",
}


@dataclass(frozen=True)
class Flags:
    """What is flagged; kinds in the order of ``faults.KINDS``.

    Attributes:
        kinds: flags of every case.
        heads, wires: the evidence behind them; a head's column ``cut`` is empty.
        wrong: the score is below the healthy 1 %.
    """

    kinds: Bool[Tensor, "case kind"]
    heads: Bool[Tensor, "case head kind"]
    wires: Bool[Tensor, "case wire"]
    wrong: Bool[Tensor, "case"]

    @property
    def unknown(self) -> Bool[Tensor, "case"]:
        """Wrong, and nothing to say why."""
        return self.wrong & ~self.kinds.any(1)

    @property
    def healthy(self) -> Bool[Tensor, "case"]:
        """Right, and nothing flagged."""
        return ~self.wrong & ~self.kinds.any(1)


def flags(
    seen: Symptoms,
    reference: Reference,
    roles: Sequence[Sequence[Node]] | None = None,
    majority: float = 0.5,
) -> Flags:
    """Compare cases with the healthy ones.

    ``even``: entropy above the healthy 99 %, or token uniformity below 1 %. ``sink``: entropy
    below 1 % or first-token attention above 99 %, and the first token gets most. ``misrouted``:
    attention on the source below 1 %, by a head that looks at it when healthy, whose values there
    would serve as well as ever, and that is not mostly collapsed (first token first, or entropy
    half-way to even). ``overactive``: length of what is written, or its direct effect in the usual
    direction, 3.5 robust standard deviations up. Each in at least ``majority`` of the heads of one
    role. ``cut``: some required wire's effect is below 1 %.

    Args:
        seen: the cases.
        reference: of the same heads and wires.
        roles: heads that do the same; every head alone if None.
        majority: share of a role's heads that a flag needs, above 0.

    Example:
        >>> found = failures.flags(seen, reference)
        >>> found.heads[:, heads.index(graph.head(1, 0)), faults.KINDS.index("sink")]
        tensor([True, True, True, True])
    """
    if (seen.heads, seen.wires) != (reference.of.heads, reference.of.wires):
        raise IclError("Take the symptoms of cases and of the reference at the same places.")
    groups = [[node] for node in seen.heads] if roles is None else roles
    if not 0 < majority <= 1 or not all(groups):
        raise IclError("Every role needs a head, and the majority lies in (0, 1].")

    def low(name: str) -> Tensor:
        return getattr(seen, name) < reference.low[name]

    def high(name: str) -> Tensor:
        return getattr(seen, name) > reference.high[name]

    def z(name: str) -> Tensor:
        moved = getattr(seen, name) - reference.median[name]
        moved = moved * torch.where(reference.median[name] < 0, -1, 1)
        return torch.nan_to_num(moved / reference.spread[name], nan=0.0)

    even = high("entropy") | low("token_uniformity")
    sink = (low("entropy") | high("first")) & (seen.sunk > 0.5)
    routes = reference.median["routed"] > 0
    collapsed = (seen.sunk > 0.5) | (seen.entropy > (1 + reference.median["entropy"]) / 2)
    misrouted = low("routed") & routes & ~collapsed & ~low("arrives")
    overactive = (z("norm") > FAR) | (z("direct") > FAR)
    by = {"even": even, "sink": sink, "misrouted": misrouted, "overactive": overactive}
    heads = torch.stack([by.get(kind, torch.zeros_like(even)) for kind in KINDS], -1)
    shares = torch.stack(
        [heads[:, [seen.at(n) for n in group]].float().mean(1) for group in groups], 1
    )
    kinds, wires = (shares >= majority).any(1), low("effect")
    kinds[:, KINDS.index("cut")] = wires.any(1)
    return Flags(kinds, heads, wires, low("score"))


def confirm(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    hooks: Sequence[Hook],
    kind: str,
    heads: Iterable[Node] = (),
    wires: Iterable[Edge] = (),
    reference: Reference | None = None,
    sources: Sources | None = None,
) -> Float[Tensor, "case"]:
    """Share of the lost score that comes back when what the flag says is undone.

    ``even``, ``sink``: heads attend as in the healthy run. ``cut``: wires carry what they do there.
    ``misrouted``: rows are forced on the source. ``overactive``: writes get the reference's median
    length. NaN where nothing was lost.
    """
    undo = _undo(model, behaviour, hooks, kind, list(heads), list(wires), reference, sources)
    sick, healthy = score(model, behaviour, hooks), score(model, behaviour)
    back = score(model, behaviour, [*hooks, *undo]) - sick
    return torch.where((healthy - sick).abs() < CONSTANT, torch.nan, back / (healthy - sick))


def _undo(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    hooks: Sequence[Hook],
    kind: str,
    heads: list[Node],
    wires: list[Edge],
    reference: Reference | None,
    sources: Sources | None,
) -> list[Hook]:
    if kind not in KINDS:
        raise unknown("failure", kind, KINDS)
    if not (wires if kind == "cut" else heads):
        raise IclError(f"To confirm {kind!r}, say which {'wires' if kind == 'cut' else 'heads'}.")
    undo: list[Hook] = []
    if kind in ("even", "sink"):
        _, usual = observe(model, behaviour, (), {get_act_name("pattern", n.layer) for n in heads})
        for n in heads:
            undo.append(
                pattern_edit(n, partial(_as, usual[get_act_name("pattern", n.layer)][:, n.head]))
            )
    elif kind == "cut":
        undo = add_to_inputs(model, _missing(model, behaviour, hooks, wires))
    elif kind == "misrouted":
        for node in heads:
            known = expected(behaviour, node, sources)
            if known is None:
                raise IclError("This behaviour names no source to route to.")
            undo.append(force(node, *known))
    else:
        if reference is None:
            raise IclError("To confirm overactivity, give the reference.")
        undo = [
            set_length(model, behaviour, n, float(reference.median["norm"][reference.of.at(n)]))
            for n in heads
        ]
    return undo


def suspect(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    hooks: Sequence[Hook],
    seen: Symptoms,
    reference: Reference,
    sources: Sources | None = None,
) -> dict[Node, str]:
    """The failure that each head shows by itself, on healthy inputs; none is no entry.

    One fault can raise several flags (a head whose keys are cut off attends evenly). Of the kinds
    flagged in at least half of the cases, the one counts whose own confirmation brings back most;
    of equals (to a tenth) the most specific: wire, length, route, then the collapses. Heads with
    the same flags are confirmed together, because they may stand in for each other. ``seen``: the
    symptoms of these cases under these hooks.
    """
    heads, wires = seen.heads, seen.wires
    own = [*hooks, *healthy_inputs(model, behaviour)]
    local = symptoms(model, behaviour, heads, (), own, sources)
    flagged = flags(replace(local, wires=wires, effect=seen.effect), reference)
    often = flagged.heads.float().mean(0) >= 0.5
    into = flagged.wires.float().mean(0) >= 0.5
    alike: dict[tuple[str, ...], list[Node]] = {}
    for k, node in enumerate(heads):
        shown = [kind for kind in SPECIFIC if bool(often[k, KINDS.index(kind)])]
        if shown and any(into[i] and _reads(node, v) for i, (_, v) in enumerate(wires)):
            shown.insert(0, "cut")
        if shown:
            alike.setdefault(tuple(shown), []).append(node)
    out: dict[Node, str] = {}
    for kinds, nodes in alike.items():
        cuts = [(u, v) for u, v in wires if any(_reads(n, v) for n in nodes)]
        back = []
        for kind in kinds if len(kinds) > 1 else ():
            undo = _undo(model, behaviour, hooks, kind, nodes, cuts, reference, sources)
            back.append(float((score(model, behaviour, [*hooks, *undo]) - seen.score).mean()))
        most = max(back, default=0.0)
        best = [b >= most - 0.1 * abs(most) for b in back].index(True) if back else 0
        out |= dict.fromkeys(nodes, kinds[best])
    return out


def _reads(node: Node, reader: Node) -> bool:
    return (reader.layer, reader.head) == (node.layer, node.head)


def _as(usual: Tensor, pattern: Tensor) -> Tensor:
    return usual


def _missing(
    model: TransformerBridge, behaviour: CleanCorrupt, hooks: Sequence[Hook], wires: list[Edge]
) -> dict[Node, Tensor]:
    usual = carried(model, behaviour, (), wires)
    live = carried(model, behaviour, hooks, wires)
    out: dict[Node, Tensor] = {}
    for edge in wires:
        out[edge[1]] = out.get(edge[1], 0) + usual[edge] - live[edge]
    return out


@dataclass(frozen=True)
class Rates:
    """Share of the cases in which a kind is flagged.

    Attributes:
        detection: [planted, flagged], among cases with that kind planted; NaN without any.
        alarms: among cases with nothing planted; NaN without any.
    """

    detection: Float[Tensor, "planted flagged"]
    alarms: Float[Tensor, "flagged"]


def rates(flagged: Bool[Tensor, "case kind"], planted: Bool[Tensor, "row kind"]) -> Rates:
    """Detection and false alarms against what was planted.

    Example:
        >>> flagged = torch.tensor([[True, False], [False, False]])
        >>> failures.rates(flagged, torch.tensor([[True, False], [False, True]])).detection
        tensor([[1., 0.],
                [0., 0.]], dtype=torch.float64)
    """
    if flagged.shape != planted.shape:
        raise IclError("Say for every case and kind whether it was planted.")
    found, there = flagged.double(), planted.double()
    nothing = (~planted.any(1)).double()
    return Rates(there.T @ found / there.sum(0)[:, None], nothing @ found / nothing.sum())


def first_match(flagged: Bool[Tensor, "case kind"]) -> list[str]:
    """The note's answer: the first of its four questions with a yes, else ``unknown``.

    Example:
        >>> failures.first_match(torch.zeros(2, len(faults.KINDS), dtype=torch.bool))
        ['unknown', 'unknown']
    """
    hit = flagged.any(1).tolist()
    first = flagged.int().argmax(1).tolist()
    return [NOTE[KINDS[f]] if h else "unknown" for h, f in zip(hit, first, strict=True)]


def note_file(kinds: Iterable[str]) -> dict[str, list[int]]:
    """Number the cases under their kinds as the note does, in its dictionary of four keys.

    Example:
        >>> failures.note_file(["path_interruption", "overactivation"])["path_interruption"]
        [0]
    """
    failures: dict[str, list[int]] = {name: [] for name in dict.fromkeys(NOTE.values())}
    for case, kind in enumerate(kinds):
        failures[kind].append(case)
    return failures
