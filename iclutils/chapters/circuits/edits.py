"""Edits: what one head attends to, what it puts out, or what one wire carries, changed in a run.

Faults, their confirmation and their repair are all made of these three. Edits compose in the order
of the list of hooks; sequences outside ``rows`` keep every bit.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import edits
    >>> from iclutils.interp import clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> task = clean_corrupt.copying(net, 4, 6, torch.Generator().manual_seed(0))
    >>> head = graph.head(1, 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import IclError
from ...interp import graph
from ...interp.clean_corrupt import CleanCorrupt, scored_logits
from ...interp.graph import (
    CHANNELS,
    Edge,
    Node,
    component_output,
    input_hook,
    output_hook,
    split_qkv_input,
)
from ...interp.hooks import Hook
from ...models import TransformerBridge, get_act_name

Rows = Bool[Tensor, "batch"]
Edit = Callable[[Tensor], Tensor]
Sources = Mapping[Node, Int[Tensor, "batch pos"]]  # where single heads should look, from everywhere


def pattern_edit(head: Node, edit: Edit, rows: Rows | None = None) -> Hook:
    """Hook that changes what a head attends to: ``edit`` gets (batch, dest, src)."""
    return get_act_name("pattern", head.layer), _one(lambda v: v[:, head.head], edit, rows)


def output_edit(head: Node, edit: Edit, rows: Rows | None = None) -> Hook:
    """Hook that changes what a head puts out before W_O: ``edit`` gets (batch, pos, d_head)."""
    return get_act_name("z", head.layer), _one(lambda v: v[:, :, head.head], edit, rows)


def _one(part: Edit, edit: Edit, rows: Rows | None) -> Callable[..., Tensor]:
    def change(value: Tensor, hook: object) -> Tensor:
        value = value.clone()
        before = part(value)
        after = edit(before)
        before[:] = after if rows is None else torch.where(rows[:, None, None], after, before)
        return value

    return change


def length(
    z: Float[Tensor, "*lead d_head"], out: Float[Tensor, "d_head d_model"]
) -> Float[Tensor, "*lead"]:
    """Length of what a head writes, ||z W_O||, without writing it.

    Example:
        >>> edits.length(torch.tensor([3.0, 4.0]), torch.eye(2))
        tensor(5.)
    """
    return ((z @ (out @ out.T)) * z).sum(-1).clamp(min=0).sqrt()


def expected(
    behaviour: CleanCorrupt, head: Node, sources: Sources | None = None
) -> tuple[Int[Tensor, "batch dest"], Int[Tensor, "batch dest"]] | None:
    """Positions where it is known what a head should attend to, and what that is.

    All positions for heads in ``sources``; for others the scored ones, if the behaviour says.

    Example:
        >>> at, source = edits.expected(task, head)
        >>> torch.equal(at, task.at), torch.equal(source, task.source)
        (True, True)
    """
    if sources and head in sources:
        source = sources[head]
        if source.shape != behaviour.clean.shape:
            raise IclError(f"Give a source for every position of every sequence, for head {head}.")
        return torch.arange(source.shape[1], device=source.device).expand_as(source), source
    return None if behaviour.source is None else (behaviour.at, behaviour.source)


def force(head: Node, at: Int[Tensor, "batch dest"], source: Int[Tensor, "batch dest"]) -> Hook:
    """Hook that makes a head attend at these positions to ``source``, and to nothing else."""

    def edit(pattern: Tensor) -> Tensor:
        batch = torch.arange(len(pattern), device=pattern.device)[:, None]
        pattern = pattern.clone()
        pattern[batch, at] = torch.zeros_like(pattern[batch, at]).scatter(-1, source[..., None], 1)
        return pattern

    return pattern_edit(head, edit)


def set_length(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    head: Node,
    wanted: float,
    only_down: bool = False,
) -> Hook:
    """Hook that scales what a head puts out, one factor for each sequence.

    The mean length of what it writes at the scored positions becomes ``wanted``; with
    ``only_down`` shorter writes stay as they are.
    """
    out = model.W_O[head.layer, head.head]

    def edit(z: Tensor) -> Tensor:
        batch = torch.arange(len(z), device=z.device)[:, None]
        factor = wanted / length(z[batch, behaviour.at], out).mean(-1).clamp(min=1e-9)
        return z * (factor.clamp(max=1) if only_down else factor)[:, None, None]

    return output_edit(head, edit)


class WireEdit:
    """One wire carries ``write + share (mean - write)``, whatever its writer writes in the run.

    Args:
        model: the model.
        edge: the wire.
        mean: what is mixed in, (d_model,).
        share: how much of it, for each sequence; 1 cuts the wire, a negative share brings back
            what another edit has taken.
    """

    def __init__(
        self,
        model: TransformerBridge,
        edge: Edge,
        mean: Float[Tensor, "d_model"],
        share: Float[Tensor, "batch"],
    ) -> None:
        self.model, self.edge, self.mean, self.share = model, edge, mean, share
        self.live: Tensor | None = None

    def hooks(self) -> list[Hook]:
        """To be run where inputs are forked (see ``observe``)."""
        return [
            (output_hook(self.edge[0]), self._keep),
            (input_hook(self.model, self.edge[1]), self),
        ]

    def added(
        self, write: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """What the wire carries beyond what is written."""
        return self.share[:, None, None] * (self.mean - write)

    def _keep(self, value: Tensor, hook: object) -> Tensor:
        writer = self.edge[0]
        self.live = component_output(self.model, {output_hook(writer): value}, writer)
        return value

    def __call__(self, value: Tensor, hook: object) -> Tensor:
        assert self.live is not None
        reader = self.edge[1]
        if reader.kind not in CHANNELS:
            return value + self.added(self.live)
        value = value.clone()
        value[:, :, reader.head] += self.added(self.live)
        return value


def needs_fork(hooks: Iterable[Hook]) -> bool:
    """Whether some hook changes the input of one reader alone."""
    ends = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in")
    return any(name.endswith(ends) for name, _ in hooks)


def observe(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    hooks: Sequence[Hook] = (),
    watch: Iterable[str] = (),
    corrupt: bool = False,
) -> tuple[Float[Tensor, "batch entry vocab"], dict[str, Tensor]]:
    """Logits at the scored positions under ``hooks``, and activations as they are after them.

    Inputs are forked where a hook needs it.
    """
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Hook:
        def store(value: Tensor, hook: object) -> Tensor:
            seen[name] = value
            return value

        return name, store

    with split_qkv_input(model) if needs_fork(hooks) else nullcontext():
        logits = scored_logits(
            model, behaviour, [*hooks, *map(keep, dict.fromkeys(watch))], corrupt
        )
    return logits, seen


def score(
    model: TransformerBridge, behaviour: CleanCorrupt, hooks: Sequence[Hook] = ()
) -> Float[Tensor, "batch"]:
    """Score under ``hooks``, in nats.

    Example:
        >>> clean, _ = clean_corrupt.baselines(net, task)
        >>> torch.allclose(edits.score(net, task), clean, atol=1e-4)
        True
    """
    return behaviour.score(observe(model, behaviour, hooks)[0])


def carried(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    hooks: Sequence[Hook],
    edges: Iterable[Edge],
    corrupt: bool = False,
) -> dict[Edge, Float[Tensor, "batch pos d_model"]]:
    """What wires carry in a run under ``hooks``: what is written, as other edits leave it.

    Example:
        >>> wire = (graph.head(0, 0), graph.of(net).readers[-1])
        >>> edits.carried(net, task, [], [wire])[wire].shape[:2] == task.clean.shape
        True
    """
    edges = list(edges)
    _, seen = observe(model, behaviour, hooks, {output_hook(u) for u, _ in edges}, corrupt)
    out = {}
    for edge in edges:
        live = component_output(model, seen, edge[0])
        edits = [h for _, h in hooks if isinstance(h, WireEdit) and h.edge == edge]
        out[edge] = sum((edit.added(live) for edit in edits), live)
    return out


def healthy_inputs(model: TransformerBridge, behaviour: CleanCorrupt) -> list[Hook]:
    """Hooks that let every component, and the last LayerNorm, read what it reads when healthy.

    Every fault then shows where it sits and nowhere else, all in one run, whose score means
    nothing.
    """
    layers = model.cfg.n_layers
    names = [f"blocks.{la}.hook_resid_pre" for la in range(layers)]
    names.append(f"blocks.{layers - 1}.hook_resid_post")
    if not graph.of(model).parallel:
        names += [f"blocks.{la}.hook_resid_mid" for la in range(layers)]
    _, seen = observe(model, behaviour, (), names)
    return [(name, lambda value, hook, own=own: own) for name, own in seen.items()]
