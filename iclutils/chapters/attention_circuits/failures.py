"""Failures: planted on purpose, found again by their features, and repaired.

Rows of attention are mixed with even attention (``even``: rank collapse; Dong et al. 2021), with
the first token (``sink``; Xiao et al. 2024) or with themselves one source earlier (``misrouted``);
edges carry their writer's mean (``cut``); heads put out too much (``overactive``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from transformers import PreTrainedModel

from ...errors import IclError
from ...interp import graph
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Edge, Node, component_output, output_hook
from ...interp.head_scores import uniform_pattern
from ...interp.hooks import Hook, at_positions, check_editable, check_head, run_with_hooks
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
SPLIT = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in")
SCALE = "ln_final.hook_scale"

Pattern = Float[Tensor, "batch dest src"]


@dataclass(frozen=True)
class Fault:
    """A fault of some heads, of strength 0 (none) to 1; of ``cut``, of all edges to ``readers``."""

    kind: str
    heads: tuple[Node, ...]
    readers: tuple[Node, ...] = ()
    strength: float = 1.0

    def __post_init__(self) -> None:
        if bool(self.readers) != (self.kind == "cut"):
            raise IclError("Name readers for a cut, and only for a cut: edges run to them.")

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


@dataclass
class EdgeEdit:
    """One edge carries ``write + share (mean - write)``, whatever its writer writes in the run:
    ``keep`` hooks what is written, the edit itself what is read."""

    edge: Edge
    mean: Float[Tensor, "d_model"]
    share: float
    model: TransformerBridge

    def keep(self, value: Tensor, hook: object) -> Tensor:
        self.write = component_output(self.model, {output_hook(self.edge[0]): value}, self.edge[0])
        return value

    def __call__(self, value: Tensor, hook: object) -> Tensor:
        reader, value = self.edge[1], value.clone()
        read = value[:, :, reader.head] if reader.kind in graph.CHANNELS else value
        read += self.share * (self.mean - self.write)
        return value


def plant(model: TransformerBridge, task: CleanCorrupt, faults: Sequence[Fault]) -> list[Hook]:
    """Hooks that plant faults in runs of this task; cut edges carry its mean, and come last."""
    hooks: list[Hook] = []
    for fault in sorted(faults, key=lambda fault: fault.kind == "cut"):
        kind, strength = fault.kind, fault.strength
        for node in fault.heads:
            check_head(model, (node.layer, node.head))
        if not strength:
            continue
        if kind == "cut":
            hooks += mix_in_mean(model, task, fault.edges, strength)
        elif kind == "overactive":
            scale = partial(torch.mul, other=1 + EXCESS * strength)
            hooks += [_edit("z", n, scale) for n in fault.heads]
        else:
            check_editable(model)
            mix = partial(_mix, kind=kind, strength=strength)
            hooks += [_edit("pattern", n, mix) for n in fault.heads]
    return hooks


def mix_in_mean(
    model: TransformerBridge, task: CleanCorrupt, edges: Sequence[Edge], share: float
) -> list[Hook]:
    """Hooks by which edges carry ``share`` of their writer's mean and 1 - share of its write."""
    graph.of(model).mask(edges)  # refuses edges that there are not
    own = graph.component_outputs(model, task.clean, {u for u, _ in edges})
    hooks: list[Hook] = []
    for writer, reader in edges:
        edit = EdgeEdit((writer, reader), own[writer].mean((0, 1)), share, model)
        hooks += [(output_hook(writer), edit.keep), (graph.input_hook(model, reader), edit)]
    return hooks


def _edit(part: str, head: Node, change: Callable[[Tensor], Tensor]) -> Hook:
    """Hook that changes what one head attends to (batch, dest, src) or puts out, before W_O."""
    axis = 1 if part == "pattern" else 2

    def edit(value: Tensor, hook: object) -> Tensor:
        value = value.clone()
        value.select(axis, head.head).copy_(change(value.select(axis, head.head)))
        return value

    return get_act_name(part, head.layer), edit


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
    """For ``models.edit_weights``, an error that is none of the kinds: noise of this standard
    deviation on an MLP layer's weights."""

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
    stop_at_layer: int | None = None,
) -> tuple[Float[Tensor, "batch entry out"], dict[str, Tensor]]:
    """Logits at the scored positions under ``hooks`` (or the residual stream before a layer), and
    activations as they are after them."""
    split = any(name.endswith(SPLIT) for name, _ in hooks)
    tokens, every = task.corrupt if corrupt else task.clean, [*hooks, at_positions(task.at)]
    with graph.split_qkv_input(model) if split else nullcontext():
        return run_with_hooks(model, tokens, every, watch, stop_at_layer)


def score(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook] = ()
) -> Float[Tensor, "batch"]:
    """Score under ``hooks``, in nats."""
    return task.score(observe(model, task, hooks)[0])


@dataclass(frozen=True)
class Features:
    """Measures of every case (sequence): ``score`` in nats, whether at least half of the answers
    are ``correct``, and ``values`` at every head or, for ``effect``, edge; NaN where undefined.
    ``entropy`` of attention, over that of even attention; ``first``, attention on the first token;
    ``sink``, share of rows that give it most; ``uniformity``, ||X - mean|| / ||X|| of what the head
    writes; ``routed``, attention on the source minus that on the best other position; ``arrives``,
    share of entries in which what it would move from the source speaks for the answer most;
    ``norm`` of what it writes; ``direct``, what that adds to the answer's logit; ``effect``, nats
    lost when the edge carries what is written on the corrupt sequence."""

    heads: tuple[Node, ...]
    edges: tuple[Edge, ...]
    values: dict[str, Float[Tensor, "case place"]]
    score: Float[Tensor, "case"]
    correct: Bool[Tensor, "case"]

    def of_cases(self, rows: Int[Tensor, "row"]) -> Features:
        """The same of some cases alone."""
        values = {name: value[rows] for name, value in self.values.items()}
        return replace(self, values=values, score=self.score[rows], correct=self.correct[rows])

    def __add__(self, other: Features) -> Features:
        """The cases of both."""
        values = {name: torch.cat([x, other.values[name]]) for name, x in self.values.items()}
        score, correct = (
            torch.cat(pair) for pair in ((self.score, other.score), (self.correct, other.correct))
        )
        return replace(self, values=values, score=score, correct=correct)


def features(
    model: TransformerBridge,
    task: CleanCorrupt,
    heads: Sequence[Node],
    edges: Sequence[Edge] = (),
    hooks: Sequence[Hook] = (),
) -> Features:
    """The features of every case under ``hooks``, which stand for what is wrong with the model."""
    for node in heads:
        check_head(model, (node.layer, node.head))
    watch = [get_act_name(part, node.layer) for node in heads for part in ("pattern", "z", "v")]
    writes = {output_hook(u) for u, _ in edges}
    logits, seen = observe(model, task, hooks, {*watch, *writes, SCALE})
    score, tokens = task.score(logits), token_directions(model)
    batch = torch.arange(len(task), device=task.at.device)[:, None]
    toward = answer_direction(model, task) / seen[SCALE][batch, task.at]
    rivals = tokens[task.clean if task.choices is None else task.choices]

    def of_head(node: Node) -> dict[str, Tensor]:
        rows = seen[get_act_name("pattern", node.layer)][batch, node.head, task.at]
        values = seen[get_act_name("v", node.layer)]
        write = component_output(model, seen, node)
        spread = (write - write.mean(1, keepdim=True)).norm(dim=(1, 2))
        routed = arrives = torch.full_like(rows[..., 0], torch.nan)
        if task.source is not None:
            at = task.source[..., None]
            routed = rows.gather(-1, at)[..., 0] - rows.scatter(-1, at, 0).amax(-1)
            read = values[batch, task.source, node.head * values.shape[2] // model.cfg.n_heads]
            moved = read @ model.blocks[node.layer].attn.W_O[node.head]
            right = (moved * tokens[task.answer]).sum(-1)
            arrives = (right >= (moved @ rivals.mT).amax(-1) - 1e-4).to(rows)
        by_entry = {
            "entropy": relative_entropy(rows, task.at),
            "first": rows[..., 0],
            "sink": (rows[..., 0] > rows[..., 1:].amax(-1)).to(rows),
            "uniformity": (spread / write.norm(dim=(1, 2)))[:, None],
            "routed": routed,
            "arrives": arrives,
            "norm": write[batch, task.at].norm(dim=-1),
            "direct": (write[batch, task.at] * toward).sum(-1),
        }
        return {name: value.mean(-1) for name, value in by_entry.items()}

    by_head = [of_head(node) for node in heads]
    values = {name: torch.stack([one[name] for one in by_head], 1) for name in by_head[0]}
    values["effect"] = score[:, None] - _without(model, task, hooks, edges, seen)
    right = task.is_correct(logits).float().mean(-1) >= 0.5
    return Features(tuple(heads), tuple(edges), values, score, right)


def relative_entropy(
    rows: Float[Tensor, "case entry src"], at: Int[Tensor, "case entry"]
) -> Float[Tensor, "case entry"]:
    """Entropy of rows of attention over that of even attention; 0 at the first position."""
    return torch.special.entr(rows).sum(-1) / torch.log(at + 1.0).clamp(min=1e-9)


def _without(
    model: TransformerBridge,
    task: CleanCorrupt,
    hooks: Sequence[Hook],
    edges: Sequence[Edge],
    own: dict[str, Tensor],
) -> Float[Tensor, "case edge"]:
    """Score when each edge, as far as it is not cut, carries what is written on the corrupt side;
    ``own``: activations of the clean one."""
    names, last = {output_hook(u) for u, _ in edges}, max((u.layer for u, _ in edges), default=0)
    other = observe(model, task, hooks, names, True, max(last, 0) + 1)[1] if edges else {}
    scores = torch.zeros(len(task), len(edges), device=task.at.device)
    for i, (u, v) in enumerate(bar(edges, "edges")):
        cut = sum(h.share for _, h in hooks if isinstance(h, EdgeEdit) and h.edge == (u, v))
        clean, corrupt = (component_output(model, side, u) for side in (own, other))
        change = graph.add_to_inputs(model, {v: (1 - cut) * (corrupt - clean)})
        scores[:, i] = score(model, task, [*hooks, *change])
    return scores


@dataclass(frozen=True)
class Reference:
    """The usual values of each name in ``Features``, among healthy cases that the model solves:
    what ``flags`` compares cases with."""

    of: Features

    def __post_init__(self) -> None:
        count = int(self.of.correct.sum())
        if count < LEAST:
            raise IclError(f"A reference needs {LEAST} correctly solved cases; got {count}.")

    def solved(self, name: str) -> Float[Tensor, "case place"]:
        values = self.of.score[:, None] if name == "score" else self.of.values[name]
        return values[self.of.correct]

    def quantile(self, name: str, q: float) -> Float[Tensor, "place"]:
        return self.solved(name).quantile(q, 0)

    def median(self, name: str) -> Float[Tensor, "place"]:
        return self.solved(name).median(0).values

    def spread(self, name: str) -> Float[Tensor, "place"]:
        """1.4826 MAD: the standard deviation, were the values normal."""
        return MAD * (self.solved(name) - self.median(name)).abs().median(0).values


@dataclass(frozen=True)
class Flags:
    """Which kinds (in the order of ``KINDS``) are flagged; ``wrong``: score below healthy 1 %."""

    kinds: Bool[Tensor, "case kind"]
    wrong: Bool[Tensor, "case"]

    @property
    def unknown(self) -> Bool[Tensor, "case"]:
        """Wrong, and nothing to say why."""
        return self.wrong & ~self.kinds.any(1)


def flags(seen: Features, reference: Reference, roles: Sequence[Sequence[Node]]) -> Flags:
    """A flag for every kind that cases show against healthy ones, none instead of the others.
    ``roles``: groups of heads that do the same, in one of which half must be conspicuous; of a cut,
    the effect of some edge must be below the healthy 1 %. A head is misrouted only if it looks at
    the source when healthy, if its values there would serve as well as ever, and if it is not
    mostly collapsed."""
    if (seen.heads, seen.edges) != (reference.of.heads, reference.of.edges):
        raise IclError("Take the features of cases and of the reference at the same places.")

    def below(name: str) -> Bool[Tensor, "case place"]:
        return seen.values[name] < reference.quantile(name, 0.01)

    def above(name: str) -> Bool[Tensor, "case place"]:
        return seen.values[name] > reference.quantile(name, 0.99)

    def outlier(name: str) -> Bool[Tensor, "case place"]:
        usual = reference.median(name)
        moved = (seen.values[name] - usual) * torch.where(usual < 0, -1, 1)
        return torch.nan_to_num(moved / reference.spread(name), nan=0.0) > FAR

    def in_a_role(heads: Bool[Tensor, "case head"]) -> Bool[Tensor, "case"]:
        places = [[seen.heads.index(node) for node in role] for role in roles]
        shares = torch.stack([heads[:, place].float().mean(1) for place in places])
        return (shares >= 0.5).any(0)

    on_first = seen.values["sink"] > 0.5
    collapsed = on_first | (seen.values["entropy"] > (1 + reference.median("entropy")) / 2)
    astray = below("routed") & (reference.median("routed") > 0)
    kinds = {
        "even": in_a_role(above("entropy") | below("uniformity")),
        "sink": in_a_role((below("entropy") | above("first")) & on_first),
        "cut": below("effect").any(1) if seen.edges else torch.zeros_like(seen.correct),
        "misrouted": in_a_role(astray & ~collapsed & ~below("arrives")),
        "overactive": in_a_role(outlier("norm") | outlier("direct")),
    }
    wrong = seen.score < reference.quantile("score", 0.01)
    return Flags(torch.stack([kinds[kind] for kind in KINDS], 1), wrong)


def false_alarms(
    healthy: Features, roles: Sequence[Sequence[Node]], generator: Generator, draws: int = 50
) -> Float[Tensor, "case"]:
    """Share of draws in which each healthy case raises a flag: a draw splits the cases in two, and
    either half is compared with the other."""
    alarms, count = torch.zeros_like(healthy.score), len(healthy.score)
    for _ in range(draws):
        order = torch.randperm(count, generator=generator).to(alarms.device)
        one, other = order.split((count + 1) // 2)
        for held_out, rest in ((one, other), (other, one)):
            reference = Reference(healthy.of_cases(rest))
            alarms[held_out] += flags(healthy.of_cases(held_out), reference, roles).kinds.any(1)
    return alarms / draws


def repair(
    model: TransformerBridge,
    kind: str,
    fitting: CleanCorrupt,
    hooks: Sequence[Hook],
    heads: Sequence[Node] = (),
    edges: Sequence[Edge] = (),
    reference: Reference | None = None,
) -> Callable[[CleanCorrupt], list[Hook]]:
    """The fix for a failure at ``heads`` (or ``edges``) under ``hooks``: makes hooks for any cases.
    ``even``: scores times a temperature (Zhai et al. 2023); ``sink``: the first token is masked;
    ``cut``: a share of what the writer writes is added back; ``misrouted``: rows are put on the
    source (PASTA; Zhang et al. 2024); ``overactive``: writes are scaled down to the usual length of
    ``reference``. Temperature and share are those that score best on ``fitting``."""

    def fix(task: CleanCorrupt, amount: float) -> list[Hook]:
        if kind == "cut":
            return mix_in_mean(model, fitting, edges, -amount)
        if kind == "overactive" and reference is not None:
            usual = dict(zip(reference.of.heads, reference.median("norm").tolist(), strict=True))
            return [_shorten(model, task, node, usual[node]) for node in heads]
        changes: dict[str, Callable[[Tensor], Tensor]] = {
            "even": partial(sharpened, temperature=amount),
            "sink": without_first,
            "misrouted": partial(_put_on_source, task=task),
        }
        return [_edit("pattern", node, changes[kind]) for node in heads]

    def fitted(amount: float) -> float:
        return float(score(model, fitting, [*hooks, *fix(fitting, amount)]).mean())

    amounts = {"even": TEMPERATURES, "cut": GAINS}.get(kind, ())
    return partial(fix, amount=max(bar(amounts, "amounts"), key=fitted, default=1.0))


def _shorten(model: TransformerBridge, task: CleanCorrupt, head: Node, usual: float) -> Hook:
    """Hook that scales a head's writes down to the usual mean length at the scored positions."""

    def shorten(z: Tensor) -> Tensor:
        batch = torch.arange(len(z), device=z.device)[:, None]
        write = z[batch, task.at] @ model.blocks[head.layer].attn.W_O[head.head]
        length = write.norm(dim=-1).mean(-1).clamp(min=1e-9)
        return z * (usual / length).clamp(max=1)[:, None, None]

    return _edit("z", head, shorten)


def _put_on_source(pattern: Pattern, task: CleanCorrupt) -> Pattern:
    assert task.source is not None
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
