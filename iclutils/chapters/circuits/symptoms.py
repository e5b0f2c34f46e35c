"""Symptoms: what can be seen of a case, and what is usual where the model answers rightly.

A case is one sequence; what is seen at several scored positions is averaged over them. Whether a
number is unusual is asked of a ``Reference``: the same numbers of healthy cases solved correctly.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import symptoms
    >>> from iclutils.interp import clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> task = clean_corrupt.copying(net, 4, 6, torch.Generator().manual_seed(0))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import IclError
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Edge, Node, add_to_inputs
from ...interp.hooks import Hook
from ...interp.statistics import MAD
from ...models import TransformerBridge, get_act_name
from ...progress import bar
from .edits import Sources, carried, expected, length, observe

LEAST = 30  # correctly solved cases behind a reference
OF_HEADS = (
    "entropy", "first", "sunk", "token_uniformity", "routed", "arrives", "norm", "direct",
)  # fmt: skip
SCALE = "ln_final.hook_scale"


@dataclass(frozen=True)
class Symptoms:
    """What is seen of every case. NaN where a number is undefined.

    Attributes:
        heads, wires: what was looked at, in the order of the tensors.
        score: mean log p of the right answers, nats.
        correct: whether at least half of the answers are right.
        entropy: of attention, over that of even attention: 0 one source, 1 even.
        first, sunk: attention on the first token; share of rows that give it most.
        token_uniformity: ||X - mean|| / ||X|| of a head's writes over all positions (Dong et al.
            2021); 0 if it writes the same everywhere. NaN if it writes nothing.
        routed: attention on the source minus that on the best other position; NaN without sources.
        arrives: share of entries in which what the head would move from the right source speaks
            for the answer more than for any other token of the sequence (or choice); NaN without.
        norm: length of what a head writes.
        direct: what it adds to the answer's logit over the mean logit, LayerNorm as in the run.
        effect: nats lost when the wire carries what the model under test writes on the corrupt
            sequence.
    """

    heads: tuple[Node, ...]
    wires: tuple[Edge, ...]
    score: Float[Tensor, "case"]
    correct: Bool[Tensor, "case"]
    entropy: Float[Tensor, "case head"]
    first: Float[Tensor, "case head"]
    sunk: Float[Tensor, "case head"]
    token_uniformity: Float[Tensor, "case head"]
    routed: Float[Tensor, "case head"]
    arrives: Float[Tensor, "case head"]
    norm: Float[Tensor, "case head"]
    direct: Float[Tensor, "case head"]
    effect: Float[Tensor, "case wire"]

    @property
    def names(self) -> list[str]:
        """What each item of the vector is."""
        heads = [f"{name} {node}" for name in OF_HEADS for node in self.heads]
        return [*heads, *(f"effect {u} -> {v}" for u, v in self.wires)]

    def to_vector(self) -> Float[Tensor, "case item"]:
        """All numbers of a case but its score, side by side."""
        return torch.cat([*(getattr(self, name) for name in OF_HEADS), self.effect], 1)

    def at(self, head: Node) -> int:
        """Where a head stands in the tensors."""
        if head not in self.heads:
            raise IclError(f"Head {head} is not among those whose symptoms were taken.")
        return self.heads.index(head)


@dataclass(frozen=True)
class Reference:
    """Quantiles 1 and 99 %, median and 1.4826 MAD of every number, from healthy cases."""

    of: Symptoms
    low: dict[str, Tensor]
    high: dict[str, Tensor]
    median: dict[str, Tensor]
    spread: dict[str, Tensor]

    @classmethod
    def from_healthy(cls, healthy: Symptoms) -> Reference:
        """What is usual among healthy cases that the model solves."""
        count = int(healthy.correct.sum())
        if count < LEAST:
            raise IclError(
                f"A reference needs {LEAST} correctly solved cases, and the model solves {count} "
                f"of {len(healthy.correct)}: give more, or easier ones."
            )
        held = {
            name: getattr(healthy, name)[healthy.correct] for name in (*OF_HEADS, "effect", "score")
        }
        median = {k: v.median(0).values for k, v in held.items()}
        return cls(
            of=healthy,
            low={k: _quantile(v, 0.01) for k, v in held.items()},
            high={k: _quantile(v, 0.99) for k, v in held.items()},
            median=median,
            spread={k: MAD * (v - median[k]).abs().median(0).values for k, v in held.items()},
        )


def _quantile(values: Tensor, share: float) -> Tensor:
    return values.quantile(share, 0) if values.numel() else values[0]  # no wire was looked at


def symptoms(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    heads: Sequence[Node],
    wires: Sequence[Edge] = (),
    hooks: Sequence[Hook] = (),
    sources: Sources | None = None,
) -> Symptoms:
    """The symptoms of every case under ``hooks``, which stand for what is wrong with the model.

    Args:
        model: the model.
        behaviour: its sequences are the cases.
        heads: heads to look at.
        wires: wires whose effect is measured, one forward pass for each and three more.
        hooks: what is done to the model (``faults.plant``); none for the healthy one.
        sources: where single heads should look, for every position (a previous-token head: one
            back); ``behaviour.source`` for all others.

    Example:
        >>> seen = symptoms.symptoms(net, task, graph.all_heads(net))
        >>> seen.entropy.shape
        torch.Size([4, 8])
    """
    heads = tuple(heads)
    for node in heads:
        if (
            node.kind != "head"
            or node.layer >= model.cfg.n_layers
            or node.head >= model.cfg.n_heads
        ):
            raise IclError(f"Only the model's own heads can be looked at; got {node}.")
    if not heads:
        raise IclError("Give at least one head to look at.")
    layers = sorted({n.layer for n in heads})
    watch = [get_act_name(part, la) for la in layers for part in ("pattern", "z", "v")]
    logits, seen = observe(model, behaviour, hooks, [*watch, SCALE])
    score = behaviour.score(logits)
    columns = []
    for node in heads:
        known = expected(behaviour, node, sources)
        source = None if known is None else known[1]
        if source is not None and source.shape == behaviour.clean.shape:
            source = source.gather(1, behaviour.at)
        columns.append(_of_head(model, behaviour, node, seen, source))
    return Symptoms(
        heads=heads,
        wires=tuple(wires),
        score=score,
        correct=behaviour.is_correct(logits).float().mean(-1) >= 0.5,
        effect=_effects(model, behaviour, hooks, wires, score),
        **{k: torch.stack([c[k] for c in columns], 1) for k in OF_HEADS},
    )


def _of_head(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    node: Node,
    seen: dict[str, Tensor],
    source: Tensor | None,
) -> dict[str, Tensor]:
    batch = torch.arange(len(behaviour), device=behaviour.at.device)[:, None]
    rows = seen[get_act_name("pattern", node.layer)][
        batch, node.head, behaviour.at
    ]  # (case, entry, src)
    z = seen[get_act_name("z", node.layer)][:, :, node.head]
    out = model.W_O[node.layer, node.head]
    size = length(z, out)
    write = z[batch, behaviour.at] @ out
    toward = towards(model, behaviour)
    scale = seen[SCALE][batch, behaviour.at]
    routed = arrives = torch.full_like(rows[..., 0], torch.nan)
    if source is not None:
        at = source[..., None]
        routed = rows.gather(-1, at)[..., 0] - rows.scatter(-1, at, 0).amax(-1)
        values = seen[get_act_name("v", node.layer)]
        key_head = node.head * values.shape[2] // model.cfg.n_heads
        moved = values[:, :, key_head][batch, source] @ out
        arrives = _speaks_for(model, behaviour, moved)
    return {
        "entropy": entropy(rows, behaviour.at).mean(-1),
        "first": rows[..., 0].mean(-1),
        "sunk": (rows[..., 0] > rows[..., 1:].amax(-1)).to(rows).mean(-1),
        "token_uniformity": _norm(length(z - z.mean(1, keepdim=True), out)) / _norm(size),
        "routed": routed.mean(-1),
        "arrives": arrives.mean(-1),
        "norm": size[batch, behaviour.at].mean(-1),
        "direct": ((through(model, write) / scale) * toward).sum(-1).mean(-1),
    }


def entropy(
    rows: Float[Tensor, "case entry *head src"], at: Int[Tensor, "case entry"]
) -> Float[Tensor, "case entry *head"]:
    """Entropy of rows of attention over that of even attention; 0 at the first position.

    Example:
        >>> rows = torch.full((1, 1, 4), 0.25)
        >>> symptoms.entropy(rows, torch.tensor([[3]])).round(decimals=3)
        tensor([[1.]])
    """
    most = torch.log(at + 1.0).clamp(min=1e-9)
    value = torch.special.entr(rows).sum(-1)
    return value / most.reshape(*most.shape, *[1] * (value.dim() - 2)).to(value)


def _norm(sizes: Tensor) -> Tensor:
    return sizes.square().sum(-1).sqrt()


def through(
    model: TransformerBridge, write: Float[Tensor, "*lead d_model"]
) -> Float[Tensor, "*lead d_model"]:
    """A write behind the last LayerNorm, but for its scale (no centring in RMS norm).

    Example:
        >>> symptoms.through(net, torch.zeros(net.cfg.d_model)).abs().max()
        tensor(0.)
    """
    if "RMS" not in str(model.cfg.normalization_type):
        write = write - write.mean(-1, keepdim=True)
    return write * model.ln_final.weight


def towards(
    model: TransformerBridge, behaviour: CleanCorrupt
) -> Float[Tensor, "case entry d_model"]:
    """The direction of the answer's logit over the mean of all tokens (or choices).

    Example:
        >>> symptoms.towards(net, task).shape[:2] == task.at.shape
        True
    """
    words = model.W_U.T
    if behaviour.choices is None:
        return words[behaviour.answer] - words.mean(0)
    return words[behaviour.answer] - words[behaviour.choices].mean(1, keepdim=True)


def _speaks_for(model: TransformerBridge, behaviour: CleanCorrupt, moved: Tensor) -> Tensor:
    rivals = behaviour.clean if behaviour.choices is None else behaviour.choices
    behind, words = through(model, moved), model.W_U.T
    right = (behind * words[behaviour.answer]).sum(-1)
    most = (behind @ words[rivals].transpose(1, 2)).amax(-1)
    return (right >= most - 1e-4).to(moved)


def _effects(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    hooks: Sequence[Hook],
    wires: Sequence[Edge],
    score: Tensor,
) -> Tensor:
    if not wires:
        return score.new_zeros(len(score), 0)
    clean = carried(model, behaviour, hooks, wires)
    corrupt = carried(model, behaviour, hooks, wires, corrupt=True)
    lost = []
    for edge in bar(wires, "wires"):
        shift = add_to_inputs(model, {edge[1]: corrupt[edge] - clean[edge]})
        logits, _ = observe(model, behaviour, [*hooks, *shift])
        lost.append(score - behaviour.score(logits))
    return torch.stack(lost, 1)
