"""Failures: planted on purpose, found again by their features, and repaired.

Five kinds. ``even``: rows of attention are mixed with even attention (rank collapse; Dong et al.
2021). ``sink``: with the first token (entropy collapse, sinks; Zhai et al. 2023, Xiao et al. 2024).
``cut``: edges carry the mean of what is written on them. ``misrouted``: every row is moved one
source earlier. ``overactive``: what a head puts out is up to four times as large. A strength of 1
is all of it, 0 is none. A case is one sequence; what is seen at its scored positions is averaged.

Example:
    >>> import torch
    >>> from iclutils.chapters.circuits import failures
    >>> from iclutils.interp import graph
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from transformers import PreTrainedModel

from ...errors import IclError, unknown
from ...interp import graph
from ...interp.clean_corrupt import CleanCorrupt, scored_logits
from ...interp.graph import (
    CHANNELS,
    Edge,
    Node,
    add_to_inputs,
    component_output,
    component_outputs,
    input_hook,
    output_hook,
    split_qkv_input,
)
from ...interp.head_scores import uniform_pattern
from ...interp.hooks import Hook, check_editable
from ...interp.statistics import MAD
from ...models import TransformerBridge, get_act_name
from ...progress import bar
from .interactions import answer_direction, token_directions

KINDS = ("even", "sink", "cut", "misrouted", "overactive")
NOTE = {  # what seed note 004, section 8.1, calls them
    "even": "attention_collapse",
    "sink": "attention_collapse",
    "cut": "path_interruption",
    "misrouted": "incorrect_routing",
    "overactive": "overactivation",
}
EXCESS = 3.0  # an overactive head of full strength puts out 1 + EXCESS times as much
LEAST = 30  # correctly solved cases behind a reference
FAR = 3.5  # robust z from which on a value is an outlier (Iglewicz and Hoaglin 1993)
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0)  # tried for ``even``
GAINS = (0.0, 0.25, 0.5, 0.75, 1.0)  # tried for ``cut``
SCALE = "ln_final.hook_scale"
PARTS = ("pattern", "z", "v")  # activations that features are made of

Pattern = Float[Tensor, "batch dest src"]


@dataclass(frozen=True)
class Fault:
    """A fault of some heads; of ``cut``, the edges from all of them to all ``readers``."""

    kind: str
    heads: tuple[Node, ...]
    readers: tuple[Node, ...] = ()
    strength: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("fault", self.kind, KINDS)
        if bool(self.readers) != (self.kind == "cut"):
            raise IclError("Name readers for a cut, and only for a cut: edges run to them.")
        if not 0 <= self.strength <= 1:
            raise IclError(f"The strength of a fault lies in 0..1; got {self.strength}.")

    @property
    def edges(self) -> list[Edge]:
        """The edges that are cut."""
        return [(u, v) for u in self.heads for v in self.readers]

    @property
    def parts(self) -> frozenset[Node]:
        """Components that work wrongly: the heads, or those whose inputs are cut off."""
        if self.kind != "cut":
            return frozenset(self.heads)
        return frozenset(
            Node("mlp", v.layer) if v.kind == "mlp_in" else graph.head(v.layer, v.head)
            for v in self.readers
            if v.kind != "logits"
        )


class EdgeEdit:
    """One edge carries ``write + share (mean - write)``, whatever its writer writes in the run."""

    def __init__(
        self, model: TransformerBridge, edge: Edge, mean: Float[Tensor, "d_model"], share: float
    ) -> None:
        self.model, self.edge, self.mean, self.share = model, edge, mean, share

    def hooks(self) -> list[Hook]:
        """One keeps what is written, the other changes what is read."""
        writer, reader = self.edge
        return [(output_hook(writer), self._keep), (input_hook(self.model, reader), self)]

    def _keep(self, value: Tensor, hook: object) -> Tensor:
        self.write = component_output(self.model, {output_hook(self.edge[0]): value}, self.edge[0])
        return value

    def __call__(self, value: Tensor, hook: object) -> Tensor:
        reader, value = self.edge[1], value.clone()
        read = value[:, :, reader.head] if reader.kind in CHANNELS else value
        read += self.share * (self.mean - self.write)
        return value


def plant(model: TransformerBridge, task: CleanCorrupt, faults: Sequence[Fault]) -> list[Hook]:
    """Hooks that plant faults in runs of this task; cut edges carry its mean, and come last.

    Example:
        >>> from iclutils import models
        >>> from iclutils.interp import clean_corrupt
        >>> net = models.load("induction-0")
        >>> task = clean_corrupt.copying(net, 8, 8, torch.Generator().manual_seed(0))
        >>> heads = tuple(graph.head(1, h) for h in range(4))
        >>> hooks = failures.plant(net, task, [failures.Fault("even", heads)])
        >>> lost = failures.score(net, task) - failures.score(net, task, hooks)
        >>> bool(lost.mean() > 1)
        True
    """
    known = graph.all_heads(model)
    hooks: list[Hook] = []
    for fault in sorted(faults, key=lambda fault: fault.kind == "cut"):
        for node in fault.heads:
            if node not in known:
                raise unknown("head", str(node), [str(n) for n in known])
        if not fault.strength:
            continue
        if fault.kind == "cut":
            hooks += mix_in_mean(model, task, fault.edges, fault.strength)
        elif fault.kind == "overactive":
            hooks += [_edit("z", n, _scale(1 + EXCESS * fault.strength)) for n in fault.heads]
        else:
            check_editable(model)
            change = partial(_mix, kind=fault.kind, strength=fault.strength)
            hooks += [_edit("pattern", n, change) for n in fault.heads]
    return hooks


def mix_in_mean(
    model: TransformerBridge, task: CleanCorrupt, edges: Iterable[Edge], share: float
) -> list[Hook]:
    """Hooks by which edges carry ``share`` of their writer's mean and 1 - share of its write."""
    edges = list(edges)
    for edge in edges:
        graph.of(model).index(edge)
    own = component_outputs(model, task.clean, {u for u, _ in edges})
    edits = [EdgeEdit(model, edge, own[edge[0]].mean((0, 1)), share) for edge in edges]
    return [hook for edit in edits for hook in edit.hooks()]


def _edit(part: str, head: Node, change: Callable[[Tensor], Tensor]) -> Hook:
    """Hook that changes what one head attends to (batch, dest, src) or puts out, before W_O."""
    axis = 1 if part == "pattern" else 2

    def edit(value: Tensor, hook: object) -> Tensor:
        value = value.clone()
        value.select(axis, head.head).copy_(change(value.select(axis, head.head)))
        return value

    return get_act_name(part, head.layer), edit


def _scale(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda z: factor * z


def _mix(pattern: Pattern, kind: str, strength: float) -> Pattern:
    """Rows mixed with even attention, with the first token, or with themselves one source back."""
    if kind == "even":
        target = uniform_pattern(pattern.shape[-1]).to(pattern).expand_as(pattern)
    elif kind == "sink":
        target = torch.zeros_like(pattern)
        target[..., 0] = 1
    else:
        target = pattern.roll(-1, -1)
        target[..., -1] = 0
        target[..., 0] += pattern[..., 0]
    return torch.lerp(pattern, target, strength)


def damage_mlp(layer: int, noise: float, generator: Generator) -> Callable[[PreTrainedModel], None]:
    """For ``models.edit_weights``: normal noise of this deviation on an MLP layer's weights.

    An error that is none of the kinds.
    """

    def edit(network: PreTrainedModel) -> None:
        (mlp,) = (m for n, m in network.named_modules() if n.endswith(f".{layer}.mlp"))
        for weight in mlp.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator).to(weight)

    return edit


def observe(
    model: TransformerBridge,
    task: CleanCorrupt,
    hooks: Sequence[Hook] = (),
    watch: Iterable[str] = (),
    corrupt: bool = False,
) -> tuple[Float[Tensor, "batch entry vocab"], dict[str, Tensor]]:
    """Logits at the scored positions under ``hooks``, and activations as they are after them."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Hook:
        def store(value: Tensor, hook: object) -> Tensor:
            seen[name] = value
            return value

        return name, store

    single = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in")
    split = any(name.endswith(single) for name, _ in hooks)
    with split_qkv_input(model) if split else nullcontext():
        logits = scored_logits(model, task, [*hooks, *map(keep, dict.fromkeys(watch))], corrupt)
    return logits, seen


def score(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook] = ()
) -> Float[Tensor, "batch"]:
    """Score under ``hooks``, in nats."""
    return task.score(observe(model, task, hooks)[0])


@dataclass(frozen=True)
class Features:
    """What is seen of every case at some heads and edges; NaN where undefined.

    ``values`` holds, (case, head): ``entropy`` of attention, over that of even attention;
    ``first``, attention on the first token; ``sink``, share of rows that give it most;
    ``uniformity``, ||X - mean|| / ||X|| of what the head writes over all positions (Dong et al.
    2021); ``routed``, attention on the source minus that on the best other position; ``arrives``,
    share of entries in which what the head would move from the source speaks for the answer more
    than for any other token of the sequence (or choice); ``norm`` of what it writes; ``direct``,
    what that adds to the answer's logit over the mean logit. And ``effect`` (case, edge): nats
    lost when the edge carries what the model under test writes on the corrupt sequence.
    ``score`` (case) in nats; ``correct``: at least half of the answers are right.
    """

    heads: tuple[Node, ...]
    edges: tuple[Edge, ...]
    values: dict[str, Float[Tensor, "case place"]]
    score: Float[Tensor, "case"]
    correct: Bool[Tensor, "case"]


def features(
    model: TransformerBridge,
    task: CleanCorrupt,
    heads: Sequence[Node],
    edges: Sequence[Edge] = (),
    hooks: Sequence[Hook] = (),
) -> Features:
    """The features of every case under ``hooks``, which stand for what is wrong with the model."""
    known = graph.all_heads(model)
    for node in heads:
        if node not in known:
            raise unknown("head", str(node), [str(n) for n in known])
    layers = sorted({n.layer for n in heads})
    watch = [get_act_name(part, la) for la in layers for part in PARTS]
    logits, seen = observe(model, task, hooks, [*watch, SCALE])
    score, tokens, toward = (
        task.score(logits),
        token_directions(model),
        answer_direction(model, task),
    )
    batch = torch.arange(len(task), device=task.at.device)[:, None]
    rivals = tokens[task.clean if task.choices is None else task.choices]

    def of_head(node: Node) -> dict[str, Tensor]:
        pattern, z, values = (seen[get_act_name(part, node.layer)] for part in PARTS)
        rows = pattern[batch, node.head, task.at]  # (case, entry, src)
        out = model.W_O[node.layer, node.head]
        write = z[:, :, node.head] @ out
        own, sizes = write[batch, task.at], write.norm(dim=-1)
        spread = (write - write.mean(1, keepdim=True)).norm(dim=(1, 2))
        routed = arrives = torch.full_like(rows[..., 0], torch.nan)
        if task.source is not None:
            at = task.source[..., None]
            routed = rows.gather(-1, at)[..., 0] - rows.scatter(-1, at, 0).amax(-1)
            key_head = node.head * values.shape[2] // model.cfg.n_heads
            moved = values[:, :, key_head][batch, task.source] @ out
            right = (moved * tokens[task.answer]).sum(-1)
            arrives = (right >= (moved @ rivals.mT).amax(-1) - 1e-4).to(rows)
        return {
            "entropy": relative_entropy(rows, task.at).mean(-1),
            "first": rows[..., 0].mean(-1),
            "sink": (rows[..., 0] > rows[..., 1:].amax(-1)).to(rows).mean(-1),
            "uniformity": spread / write.norm(dim=(1, 2)),
            "routed": routed.mean(-1),
            "arrives": arrives.mean(-1),
            "norm": sizes[batch, task.at].mean(-1),
            "direct": (own / seen[SCALE][batch, task.at] * toward).sum(-1).mean(-1),
        }

    columns = [of_head(node) for node in heads]
    found = {name: torch.stack([c[name] for c in columns], 1) for name in columns[0]}
    found["effect"] = _effects(model, task, hooks, edges, score)
    right = task.is_correct(logits).float().mean(-1) >= 0.5
    return Features(tuple(heads), tuple(edges), found, score, right)


def relative_entropy(
    rows: Float[Tensor, "case entry src"], at: Int[Tensor, "case entry"]
) -> Float[Tensor, "case entry"]:
    """Entropy of rows of attention over that of even attention; 0 at the first position."""
    return torch.special.entr(rows).sum(-1) / torch.log(at + 1.0).clamp(min=1e-9)


def _effects(
    model: TransformerBridge,
    task: CleanCorrupt,
    hooks: Sequence[Hook],
    edges: Sequence[Edge],
    score: Float[Tensor, "case"],
) -> Float[Tensor, "case edge"]:
    names = {output_hook(u) for u, _ in edges}
    clean = observe(model, task, hooks, names)[1] if edges else {}
    corrupt = observe(model, task, hooks, names, corrupt=True)[1] if edges else {}
    lost = [score.new_zeros(len(score), 0)]
    for u, v in bar(edges, "edges"):
        cut = sum(h.share for _, h in hooks if isinstance(h, EdgeEdit) and h.edge == (u, v))
        before, after = (component_output(model, seen, u) for seen in (clean, corrupt))
        change = (1 - cut) * (after - before)
        patched, _ = observe(model, task, [*hooks, *add_to_inputs(model, {v: change})])
        lost.append((score - task.score(patched))[:, None])
    return torch.cat(lost, 1)


@dataclass(frozen=True)
class Reference:
    """Reference distribution: quantiles 1 and 99 %, median and 1.4826 MAD of healthy features."""

    of: Features
    low: dict[str, Tensor]
    high: dict[str, Tensor]
    median: dict[str, Tensor]
    spread: dict[str, Tensor]


def reference_distribution(healthy: Features) -> Reference:
    """What is usual among healthy cases that the model solves."""
    count = int(healthy.correct.sum())
    if count < LEAST:
        raise IclError(
            f"A reference needs {LEAST} correctly solved cases, and the model solves {count} "
            f"of {len(healthy.correct)}: give more, or easier ones."
        )
    solved = {k: v[healthy.correct] for k, v in healthy.values.items() if v.shape[1]}
    solved["score"] = healthy.score[healthy.correct]
    median = {k: v.median(0).values for k, v in solved.items()}
    return Reference(
        of=healthy,
        low={k: v.quantile(0.01, 0) for k, v in solved.items()},
        high={k: v.quantile(0.99, 0) for k, v in solved.items()},
        median=median,
        spread={k: MAD * (v - median[k]).abs().median(0).values for k, v in solved.items()},
    )


@dataclass(frozen=True)
class Flags:
    """Which kinds (in the order of ``KINDS``) are flagged; ``wrong``: score below healthy 1 %."""

    kinds: Bool[Tensor, "case kind"]
    wrong: Bool[Tensor, "case"]

    @property
    def unknown(self) -> Bool[Tensor, "case"]:
        """Wrong, and nothing to say why."""
        return self.wrong & ~self.kinds.any(1)


def flags(
    seen: Features, reference: Reference, roles: Sequence[Sequence[Node]], majority: float = 0.5
) -> Flags:
    """Compare cases with the healthy ones: a flag for every kind, none instead of the others.

    ``even``: entropy above the healthy 99 %, or uniformity below 1 %. ``sink``: entropy below 1 %
    or first-token attention above 99 %, and the first token gets most. ``misrouted``: attention on
    the source below 1 %, by a head that looks at it when healthy, whose values there would serve
    as well as ever, and that is not mostly collapsed. ``overactive``: norm or direct effect in the
    usual direction 3.5 robust standard deviations up. Each in at least ``majority`` of the heads of
    one role. ``cut``: some edge's effect is below 1 %.

    Args:
        seen: the cases.
        reference: of the same heads and edges.
        roles: heads that do the same.
        majority: share of a role's heads that a flag needs.
    """
    if (seen.heads, seen.edges) != (reference.of.heads, reference.of.edges):
        raise IclError("Take the features of cases and of the reference at the same places.")
    values, low, high, median = seen.values, reference.low, reference.high, reference.median

    def outlier(name: str) -> Tensor:
        moved = (values[name] - median[name]) * torch.where(median[name] < 0, -1, 1)
        return torch.nan_to_num(moved / reference.spread[name], nan=0.0) > FAR

    entropy, sink = values["entropy"], values["sink"] > 0.5
    flagged = {
        "even": (entropy > high["entropy"]) | (values["uniformity"] < low["uniformity"]),
        "sink": ((entropy < low["entropy"]) | (values["first"] > high["first"])) & sink,
        "misrouted": (
            (values["routed"] < low["routed"])
            & (median["routed"] > 0)
            & ~(sink | (entropy > (1 + median["entropy"]) / 2))
            & ~(values["arrives"] < low["arrives"])
        ),
        "overactive": outlier("norm") | outlier("direct"),
    }
    columns = []
    for kind in KINDS:
        if kind == "cut":
            cut = values["effect"] < low["effect"] if seen.edges else values["effect"].bool()
            columns.append(cut.any(1))
        else:
            of = [flagged[kind][:, [seen.heads.index(n) for n in role]] for role in roles]
            shares = torch.stack([heads.float().mean(1) for heads in of], 1)
            columns.append((shares >= majority).any(1))
    return Flags(torch.stack(columns, 1), seen.score < low["score"])


def first_match(flagged: Bool[Tensor, "case kind"]) -> list[str]:
    """The note's answer: the first of its four questions with a yes, else ``unknown``."""
    first = flagged.int().argmax(1).tolist()
    return [
        NOTE[KINDS[f]] if hit else "unknown"
        for f, hit in zip(first, flagged.any(1).tolist(), strict=True)
    ]


def repair(
    model: TransformerBridge,
    kind: str,
    fitting: CleanCorrupt,
    hooks: Sequence[Hook],
    heads: Sequence[Node] = (),
    edges: Sequence[Edge] = (),
    reference: Reference | None = None,
) -> Callable[[CleanCorrupt], list[Hook]]:
    """The suggested fix for a kind of failure: gives the hooks for any cases, fitted on some.

    ``even``: scores times a temperature (Zhai et al. 2023). ``sink``: the first token is masked.
    ``cut``: a share of what the writer writes is added back. ``misrouted``: rows are put on the
    source (PASTA; Zhang et al. 2024). ``overactive``: long writes are scaled down to the usual
    length. What is not there cannot come back: a row that is exactly even holds no scores.

    Args:
        model: the healthy model.
        kind: the failure.
        fitting: failing cases, on which the temperature or the share is chosen.
        hooks: what is wrong with the model on them.
        heads: where to repair; for a cut, ``edges`` instead.
        edges: the edges to restore.
        reference: usual lengths, for ``overactive``.
    """
    if kind not in KINDS:
        raise unknown("failure", kind, KINDS)
    if kind == "overactive" and reference is None:
        raise IclError("To repair overactivity, give the reference: it holds the usual lengths.")

    def fix(task: CleanCorrupt, amount: float) -> list[Hook]:
        if kind == "cut":
            return mix_in_mean(model, fitting, edges, -amount)
        if kind == "overactive":
            return [_shortened(model, task, n, usual[n]) for n in heads]
        changes: dict[str, Callable[[Tensor], Tensor]] = {
            "even": partial(sharpened, temperature=amount),
            "sink": without_first,
            "misrouted": partial(_put_on_source, task=task),
        }
        return [_edit("pattern", n, changes[kind]) for n in heads]

    usual: dict[Node, float] = {}
    if reference is not None:
        at = {n: i for i, n in enumerate(reference.of.heads)}
        usual = {n: float(reference.median["norm"][at[n]]) for n in heads if n in at}

    def fitted(amount: float) -> float:
        return float(score(model, fitting, [*hooks, *fix(fitting, amount)]).mean())

    amounts = {"even": TEMPERATURES, "cut": GAINS}.get(kind, (1.0,))
    best = amounts[0] if len(amounts) == 1 else max(bar(amounts, "amounts"), key=fitted)
    return partial(fix, amount=best)


def _shortened(model: TransformerBridge, task: CleanCorrupt, head: Node, usual: float) -> Hook:
    """Hook that scales a head's writes down to the usual mean length at the scored positions."""
    out = model.W_O[head.layer, head.head]

    def shorten(z: Tensor) -> Tensor:
        batch = torch.arange(len(z), device=z.device)[:, None]
        length = (z[batch, task.at] @ out).norm(dim=-1).mean(-1).clamp(min=1e-9)
        return z * (usual / length).clamp(max=1)[:, None, None]

    return _edit("z", head, shorten)


def _put_on_source(pattern: Pattern, task: CleanCorrupt) -> Pattern:
    if task.source is None:
        raise IclError("This task names no source to route to.")
    batch = torch.arange(len(pattern), device=pattern.device)[:, None]
    rows = torch.zeros_like(pattern[batch, task.at]).scatter(-1, task.source[..., None], 1)
    return pattern.index_put((batch, task.at), rows)


def sharpened(pattern: Pattern, temperature: float) -> Pattern:
    """Rows of attention whose scores are multiplied by ``temperature``."""
    powers = (pattern / pattern.amax(-1, keepdim=True)).pow(temperature)
    return powers / powers.sum(-1, keepdim=True)


def without_first(pattern: Pattern) -> Pattern:
    """Rows without the first token; those that hold nothing else stay as they are."""
    rest = pattern.clone()
    rest[..., 0] = 0
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 1e-6, rest / mass.clamp(min=1e-6), pattern)
