"""Faults: failures planted on purpose, so that a detector can be asked for what is known.

Five kinds, after the four of the note (attention can collapse in two ways):

- ``even``: rows of attention are mixed with even attention (rank collapse; Dong et al. 2021);
- ``sink``: rows are mixed with the first token (entropy collapse, sinks; Zhai et al. 2023, Xiao et
  al. 2024);
- ``cut``: wires carry the mean of what is written on them, and nothing else;
- ``misrouted``: every row is moved one source earlier; what would fall off stays at the first;
- ``overactive``: what a head puts out is up to four times as large.

A strength of 1 is all of it, 0 is none, bit for bit. Collapse of full strength keeps nothing of a
row, so no change of temperature can bring it back. ``damage_mlp`` is of no such kind.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import edits, faults
    >>> from iclutils.interp import clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> task = clean_corrupt.copying(net, 8, 8, torch.Generator().manual_seed(0))
    >>> pattern = torch.eye(3)[None]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor
from transformers import PreTrainedModel

from ...errors import IclError, unknown
from ...interp import graph
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Edge, Node, component_outputs
from ...interp.head_scores import uniform_pattern
from ...interp.hooks import Hook, check_editable
from ...models import TransformerBridge
from .edits import Rows, WireEdit, output_edit, pattern_edit

KINDS = ("even", "sink", "cut", "misrouted", "overactive")
ON_PATTERNS = ("even", "sink", "misrouted")
EXCESS = 3.0  # an overactive head of full strength puts out 1 + EXCESS times as much


@dataclass(frozen=True)
class Fault:
    """A fault of some heads; of ``cut``, the wires from all of them to all ``readers``."""

    kind: str
    heads: tuple[Node, ...]
    readers: tuple[Node, ...] = ()
    strength: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("fault", self.kind, KINDS)
        if not self.heads or any(n.kind != "head" for n in self.heads):
            raise IclError("A fault needs at least one head to sit in, and nothing but heads.")
        if bool(self.readers) != (self.kind == "cut"):
            raise IclError("Name readers for a cut, and only for a cut: wires run to them.")
        if not 0 <= self.strength <= 1:
            raise IclError(f"The strength of a fault lies in 0..1; got {self.strength}.")

    @property
    def wires(self) -> tuple[Edge, ...]:
        """The wires that are cut."""
        return tuple((u, v) for u in self.heads for v in self.readers)

    @property
    def parts(self) -> frozenset[Node]:
        """Components that work wrongly: the heads, or those whose inputs are cut off."""
        if self.kind != "cut":
            return frozenset(self.heads)
        out = {
            Node("mlp", v.layer) if v.kind == "mlp_in" else graph.head(v.layer, v.head)
            for v in self.readers
            if v.kind != "logits"
        }
        return frozenset(out)


def plant(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    faults: Sequence[Fault],
    rows: Rows | None = None,
) -> list[Hook]:
    """Hooks that plant faults in runs of this behaviour; run them with ``edits.observe``.

    Args:
        model: the model.
        behaviour: its clean sequences give the mean that cut wires carry.
        faults: composed in this order.
        rows: sequences that get them; all if None.

    Example:
        >>> broken = faults.Fault("even", tuple(graph.head(1, h) for h in range(4)))
        >>> hooks = faults.plant(net, task, [broken])
        >>> bool(edits.score(net, task, hooks).mean() < edits.score(net, task).mean() - 1)
        True
    """
    known = graph.all_heads(model)
    everyone = torch.ones(len(behaviour), dtype=torch.bool, device=behaviour.clean.device)
    chosen = everyone if rows is None else rows.to(everyone.device)
    if len(chosen) != len(behaviour):
        raise IclError(f"Need one row for each of {len(behaviour)} sequences; got {len(chosen)}.")
    if any(fault.kind in ON_PATTERNS for fault in faults):
        check_editable(model)
    wires = [edge for fault in faults for edge in fault.wires]
    if len(set(wires)) < len(wires):
        raise IclError("A wire can be cut only once: give it one strength.")
    hooks: list[Hook] = []
    for fault in sorted(faults, key=lambda fault: fault.kind == "cut"):  # cuts see the others
        for node in fault.heads:
            if node not in known:
                raise unknown("head", str(node), [str(n) for n in known])
        for edge in fault.wires:
            graph.of(model).index(edge)
        if fault.strength > 0:
            hooks += _hooks(model, behaviour, fault, chosen)
    return hooks


def _hooks(
    model: TransformerBridge, behaviour: CleanCorrupt, fault: Fault, rows: Rows
) -> list[Hook]:
    amount = fault.strength
    if fault.kind == "cut":
        mean = {
            u: w.mean((0, 1))
            for u, w in component_outputs(model, behaviour.clean, fault.heads).items()
        }
        share = amount * rows.to(model.W_O.dtype)
        edits = [WireEdit(model, edge, mean[edge[0]], share) for edge in fault.wires]
        return [hook for edit in edits for hook in edit.hooks()]
    if fault.kind == "overactive":
        return [output_edit(n, lambda z: (1 + EXCESS * amount) * z, rows) for n in fault.heads]
    return [
        pattern_edit(n, lambda p: torch.lerp(p, TARGETS[fault.kind](p), amount), rows)
        for n in fault.heads
    ]


def evenly(pattern: Float[Tensor, "batch dest src"]) -> Float[Tensor, "batch dest src"]:
    """Every row spread over all it may see.

    Example:
        >>> faults.evenly(pattern)[0, -1].round(decimals=3)
        tensor([0.3330, 0.3330, 0.3330])
    """
    return uniform_pattern(pattern.shape[-1]).to(pattern).expand_as(pattern)


def at_first(pattern: Float[Tensor, "batch dest src"]) -> Float[Tensor, "batch dest src"]:
    """Every row on the first token."""
    out = torch.zeros_like(pattern)
    out[..., 0] = 1
    return out


def one_earlier(pattern: Float[Tensor, "batch dest src"]) -> Float[Tensor, "batch dest src"]:
    """Every row moved one source towards the start; what would fall off stays at the first."""
    out = pattern.roll(-1, -1)
    out[..., -1] = 0
    out[..., 0] += pattern[..., 0]
    return out


TARGETS = {"even": evenly, "sink": at_first, "misrouted": one_earlier}


def damage_mlp(layer: int, noise: float, generator: Generator) -> Callable[[PreTrainedModel], None]:
    """For ``models.edit_weights``: normal noise of this standard deviation on an MLP's weights.

    An error that is none of the kinds. The edit raises IclError if there is no such layer.

    Example:
        >>> edit = faults.damage_mlp(0, noise=0.1, generator=torch.Generator().manual_seed(0))
        >>> worse = models.edit_weights("induction-0", edit)
        >>> bool((models.logits(worse, task.clean) != models.logits(net, task.clean)).any())
        True
    """

    def edit(network: PreTrainedModel) -> None:
        found = [m for n, m in network.named_modules() if n.endswith(f".{layer}.mlp")]
        if not found:
            raise IclError(f"This network has no MLP layer {layer}.")
        for weight in found[0].parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight += noise * drawn.to(weight)

    return edit
