"""Repair: the suggested fix, fitted on some failing cases and judged on others and on healthy ones.

A fix acts where the failure shows and knows nothing of what was done to the model. It cannot
bring back what is not there: a row of attention that has become exactly even, or all sink, holds
nothing that a temperature or a mask could bring out.

Sources of the fixes: temperature (Zhai et al. 2023), rows steered from outside (PASTA; Zhang et
al. 2024), ablation or scaling of what over-fires (Wang et al. 2022, negative name movers).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import faults, repair
    >>> from iclutils.interp import clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> fitting, held = (clean_corrupt.copying(net, 8, 8, generator) for _ in range(2))
    >>> heads = tuple(graph.head(1, h) for h in range(4))
    >>> hooks = faults.plant(net, fitting, [faults.Fault("sink", heads, strength=0.5)])
    >>> row = torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.3, 0.2]]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError, unknown
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Edge, Node, component_outputs
from ...interp.hooks import Hook
from ...models import TransformerBridge
from ...progress import bar
from .edits import Sources, WireEdit, expected, force, pattern_edit, score, set_length
from .symptoms import Reference

SUGGESTED = {
    "even": "sharpen: attention scores times a temperature",
    "sink": "mask the first token",
    "cut": "add what the writer writes to what the reader reads",
    "misrouted": "force rows on the source; where none is known, move them one later",
    "overactive": "scale long writes down to the usual length",
}
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
GAINS = (0.0, 0.25, 0.5, 0.75, 1.0)
Pattern = Float[Tensor, "batch dest src"]


@dataclass(frozen=True)
class Repair:
    """A fix, ready for any sequences of the same model.

    Attributes:
        kind: the failure it is for.
        heads, wires: where it acts.
        amount: the temperature or the gain that was fitted; 1 elsewhere.
        lengths: usual length of what each head writes (``overactive``).
        means: mean write of each wire's writer (``cut``).
        fitted_on: tokens of the fitting cases.
    """

    kind: str
    heads: tuple[Node, ...]
    wires: tuple[Edge, ...]
    amount: float
    lengths: dict[Node, float]
    means: dict[Node, Tensor]
    fitted_on: Tensor

    def hooks(
        self, model: TransformerBridge, behaviour: CleanCorrupt, sources: Sources | None = None
    ) -> list[Hook]:
        """Hooks of the fix; append them to those of the fault."""
        if self.kind == "cut":
            share = -self.amount * torch.ones(len(behaviour), device=behaviour.clean.device)
            edits = [WireEdit(model, edge, self.means[edge[0]], share) for edge in self.wires]
            return [hook for edit in edits for hook in edit.hooks()]
        if self.kind == "overactive":
            return [set_length(model, behaviour, n, self.lengths[n], True) for n in self.heads]
        if self.kind == "misrouted":
            known = {n: expected(behaviour, n, sources) for n in self.heads}
            return [
                pattern_edit(n, one_later) if at is None else force(n, *at)
                for n, at in known.items()
            ]
        if self.kind == "even":
            return [pattern_edit(n, lambda p: sharpened(p, self.amount)) for n in self.heads]
        return [pattern_edit(n, without_first) for n in self.heads]


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


def one_later(pattern: Pattern) -> Pattern:
    """Every row moved one source towards its own position; what is there stays there."""
    out = pattern.roll(1, -1)
    out[..., 0] = 0
    own = pattern.diagonal(0, -2, -1)
    beyond = torch.diag_embed(own[..., :-1], 1, -2, -1)  # moved into the future
    return out - beyond + torch.diag_embed(own, 0, -2, -1)


def repair(
    model: TransformerBridge,
    kind: str,
    fitting: CleanCorrupt,
    hooks: Sequence[Hook],
    heads: Sequence[Node] = (),
    wires: Sequence[Edge] = (),
    reference: Reference | None = None,
    sources: Sources | None = None,
) -> Repair:
    """The suggested fix for a kind of failure; its one number is the best on ``fitting``.

    Args:
        model: the healthy model.
        kind: the failure (see ``SUGGESTED``).
        fitting: failing cases to fit on.
        hooks: what is wrong with the model on them.
        heads: where to repair; for a cut, ``wires`` instead.
        wires: the wires to restore.
        reference: usual lengths, for ``overactive``.
        sources: where heads should look (see ``symptoms.symptoms``).

    Example:
        >>> fix = repair.repair(net, "sink", fitting, hooks, heads=heads)
        >>> fix.kind
        'sink'
    """
    if kind not in SUGGESTED:
        raise unknown("failure", kind, SUGGESTED)
    if not (wires if kind == "cut" else heads):
        raise IclError(f"To repair {kind!r}, say which {'wires' if kind == 'cut' else 'heads'}.")
    if kind == "overactive" and reference is None:
        raise IclError("To repair overactivity, give the reference: it holds the usual lengths.")
    lengths, means = {}, {}
    if kind == "overactive" and reference is not None:
        lengths = {n: float(reference.median["norm"][reference.of.at(n)]) for n in heads}
    if kind == "cut":
        written = component_outputs(model, fitting.clean, {u for u, _ in wires})
        means = {u: write.mean((0, 1)) for u, write in written.items()}
    first = Repair(kind, tuple(heads), tuple(wires), 1.0, lengths, means, fitting.clean)
    grid = {"even": TEMPERATURES, "cut": GAINS}.get(kind, (1.0,))
    choices = [replace(first, amount=amount) for amount in grid]
    if len(choices) == 1:
        return first
    return max(
        bar(choices, "amounts"),
        key=lambda fix: float(
            score(model, fitting, [*hooks, *fix.hooks(model, fitting, sources)]).mean()
        ),
    )


@dataclass(frozen=True)
class Outcome:
    """Scores in nats: of the sick model before and after the fix, and of the healthy one."""

    before: Float[Tensor, "batch"]
    after: Float[Tensor, "batch"]
    clean_before: Float[Tensor, "batch"]
    clean_after: Float[Tensor, "batch"]

    @property
    def restored(self) -> float:
        """Share of the lost score that comes back; NaN if nothing was lost."""
        back = (self.after - self.before).mean()
        return float(back / (self.clean_before - self.before).mean())


def evaluate(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    hooks: Sequence[Hook],
    fix: Repair,
    sources: Sources | None = None,
) -> Outcome:
    """Apply a fix to held-out failing cases, and to the same cases of the healthy model.

    Example:
        >>> fix = repair.repair(net, "sink", fitting, hooks, heads=heads)
        >>> planted = faults.plant(net, held, [faults.Fault("sink", heads, strength=0.5)])
        >>> outcome = repair.evaluate(net, held, planted, fix)
        >>> bool(outcome.after.mean() > outcome.before.mean())
        True
    """
    same = behaviour.clean.shape[1] == fix.fitted_on.shape[1]
    if same and bool((behaviour.clean[:, None] == fix.fitted_on).all(-1).any()):
        raise IclError("Judge a fix on other sequences than those it was fitted on.")
    mend = fix.hooks(model, behaviour, sources)
    return Outcome(
        before=score(model, behaviour, hooks),
        after=score(model, behaviour, [*hooks, *mend]),
        clean_before=score(model, behaviour),
        clean_after=score(model, behaviour, mend),
    )
