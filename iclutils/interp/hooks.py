"""Interventions as hooks: ablate heads and MLP layers, cut attention, read chosen activations.

A head (its ``z``, before ``W_O``) or MLP layer becomes zero at every position, its mean over batch
and positions, or what it computes on *other* sequences (resample). Zero is off the model's usual
path and can hurt for that alone; resample keeps the statistics and removes the content.

Here are the hooks, for a forward pass of your own. What a removal costs a task, in nats, measures
``patching.ablate``; what is left of an answer, under any replacement, ``removal.without``.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import IclError, unknown
from ..models import TransformerBridge, check_parts, check_tokens, get_act_name
from .invariants import check_editable, skip_layers

Head = tuple[int, int]
Heads = Sequence[Head] | Sequence[Sequence[Head]]  # for all rows of a batch, or for each its own
How = Literal["zero", "mean", "resample"]
Hook = tuple[str, Callable[..., Tensor]]
Tokens = Int[Tensor, "batch pos"]
Other = Int[Tensor, "other_batch other_pos"]  # must match; a mismatch is refused with a cure
ROWS = 1024  # rows of d_model (batch x pos) in a pass of ``logits_without``
CUT = -10_000.0  # score of an edge that is cut; its exponential is 0 in float32


def run_with_hooks(
    model: TransformerBridge,
    tokens: Tokens,
    hooks: Sequence[Hook],
    watch: Iterable[str] = (),
    stop_at_layer: int | None = None,
) -> tuple[Float[Tensor, "batch entry out"], dict[str, Tensor]]:
    """Run one forward pass under ``hooks``: logits (or the residual stream before the layer at
    which it stops), and the activations named in ``watch``."""
    check_tokens(model, tokens)
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> tuple[str, Callable[..., None]]:
        return name, lambda value, hook: seen.update({name: value})  # hook.name may be an alias

    every: list[Any] = [*hooks, *map(keep, watch)]
    check_parts(model, (name for name, _ in every), model.hook_dict)
    with torch.no_grad():
        out = model.run_with_hooks(tokens, fwd_hooks=every, stop_at_layer=stop_at_layer)
    return out, seen


def run_from(
    model: TransformerBridge,
    layer: int,
    tokens: Tokens,
    start: Float[Tensor, "batch pos d_model"],
    hooks: Sequence[Hook],
    watch: Iterable[str] = (),
    stop_at_layer: int | None = None,
) -> tuple[Float[Tensor, "batch entry out"], dict[str, Tensor]]:
    """Run as ``run_with_hooks``, from what a layer reads of the residual stream on (``start``, of
    these tokens), or what the final norm reads if ``layer`` is the number of layers."""
    with skip_layers(model, layer, start):
        return run_with_hooks(model, tokens, hooks, watch, stop_at_layer)


def logits_under(
    model: TransformerBridge,
    tokens: Tokens,
    ways: Sequence[Sequence[Hook]],
    at: Int[Tensor, "batch entry"] | None = None,
) -> Iterator[Float[Tensor, "batch entry vocab"]]:
    """Yield logits under each list of hooks in turn, at positions ``at`` or all. The layers below
    the first hooked one of a list are those of a single pass, for all lists."""
    firsts = [_layers(name for name, _ in hooks)[0] if hooks else 0 for hooks in ways]
    names = {layer: get_act_name("resid_pre", layer) for layer in set(firsts)}
    seen = activations(model, tokens, [*names.values()])
    last = [] if at is None else [at_positions(at)]
    for layer, hooks in zip(firsts, ways, strict=True):
        yield run_from(model, layer, tokens, seen[names[layer]], [*hooks, *last])[0]


def logits_without(
    model: TransformerBridge,
    tokens: Tokens,
    ways: Sequence[tuple[Mapping[int, Tensor], Mapping[int, Tensor]]],
    at: Int[Tensor, "batch entry"],
) -> Iterator[tuple[Int[Tensor, "some"], Float[Tensor, "some entry vocab"]]]:
    """Yield logits at positions ``at`` without heads, in many ways at once: some rows of (way x
    batch) at a time, in no order, and the logits of these. A way is a pair: which heads
    (``head_masks``), and what stands there by layer (as in ``put_heads``)."""
    batch, layers, device = len(tokens), model.cfg.n_layers, tokens.device
    row = torch.arange(batch, device=device).repeat(len(ways))  # (way x batch)
    values = list({id(new): new for _, new in ways}.values())
    source = [next(i for i, x in enumerate(values) if x is new) for _, new in ways]
    new_of = torch.tensor(source, device=device).repeat_interleave(batch)
    by_row = any(x.ndim == 4 and len(x) > 1 for new in values for x in new.values())
    if by_row:
        distinct, state = tokens, row
    else:
        distinct, which = torch.cat([tokens, at], 1).unique(dim=0, return_inverse=True)
        distinct, state = distinct[:, : tokens.shape[1]], which[row]
    stream, _ = run_with_hooks(model, distinct, [], (), 0)  # (state, pos, d_model)
    none = torch.zeros(1, 1, model.cfg.n_heads, 1, dtype=torch.bool)
    size = max(1, ROWS // tokens.shape[1])
    starts = sorted({0, *(layer for masks, _ in ways for layer in masks)})
    for first, end in pairwise([*starts, layers]):
        marks = [masks.get(first, none).expand(batch, -1, -1, -1) for masks, _ in ways]
        lost = torch.cat(marks).to(device)[:, 0, :, 0]  # (way x batch, head)
        kind = new_of.masked_fill(~lost.any(1), -1)  # which replacement acts here, -1: none
        past = torch.cat([state[:, None], kind[:, None], lost.long()], 1)
        before, (states, state) = state, past.unique(dim=0, return_inverse=True)
        # of each state one row of (way x batch), which stands for all
        one = state.new_empty(len(states)).scatter_(0, state, torch.arange(len(row), device=device))
        after = []
        for number, some in enumerate(one.split(size)):
            rows, start = row[some], stream[before[some]]
            hooks = [_put_by_row(first, lost[some], kind[some], values, rows)]
            if end < layers:
                after.append(run_from(model, first, tokens[rows], start, hooks, (), end)[0])
                continue
            hooks.append(at_positions(at[rows]))
            logits, _ = run_from(model, first, tokens[rows], start, hooks)
            mine = (state // size == number).nonzero()[:, 0]
            yield mine, logits[state[mine] - number * size]
        stream = torch.cat(after) if after else stream


def _put_by_row(
    layer: int, lost: Tensor, kind: Tensor, values: Sequence[Mapping[int, Tensor]], rows: Tensor
) -> Hook:
    """Put the values of a row's kind (row,) in the place of ``z`` of the heads that it has lost
    (row, head); ``rows`` says where in the batch each row is."""

    def put(z: Tensor, hook: object) -> Tensor:
        for i in set(kind.tolist()) - {-1}:
            new = values[i][layer]
            new = new[rows] if new.ndim == 4 and len(new) > 1 else new
            z = torch.where((lost & (kind == i)[:, None])[:, None, :, None], new, z)
        return z

    return get_act_name("z", layer), put


def _layers(names: Iterable[str]) -> list[int]:
    """Return the layers whose activations are named, the lowest first."""
    return sorted(int(re.findall(r"blocks\.(\d+)\.", name)[0]) for name in names)


def at_positions(at: Int[Tensor, "batch entry"]) -> Hook:
    """Make the hook that hands the unembedding these positions alone."""

    def pick(resid: Tensor, hook: object) -> Tensor:
        return resid[torch.arange(len(at), device=resid.device)[:, None], at]

    return "unembed.hook_in", pick


def logits_at(
    model: TransformerBridge,
    tokens: Tokens,
    at: Int[Tensor, "batch entry"],
    hooks: Sequence[Hook] = (),
) -> Float[Tensor, "batch entry vocab"]:
    """Return logits at these positions alone, under ``hooks``, without gradients."""
    return run_with_hooks(model, tokens, [*hooks, at_positions(at)])[0]


def set_activation(name: str, new: Float[Tensor, "..."], heads: Sequence[int] = ()) -> Hook:
    """Make the hook that replaces an activation, or of ``z`` these heads alone."""

    def replace(value: Tensor, hook: object) -> Tensor:
        if not heads:
            return new.expand_as(value)
        value = value.clone()
        value[:, :, heads] = new.expand_as(value)[:, :, heads]
        return value

    return name, replace


def ablate_heads(
    model: TransformerBridge, tokens: Tokens, heads: Iterable[Head], how: How, other: Other
) -> list[Hook]:
    """Make hooks that ablate heads, (layer, head) pairs, when ``tokens`` are run.

    ``other``: sequences of the same shape, the source of resampled activations.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.interp import hooks
        >>> net = models.load("induction-0")
        >>> tokens, other = torch.randint(500, (2, 4, 20))
        >>> [name for name, _ in hooks.ablate_heads(net, tokens, [(1, 0), (1, 2)], "mean", other)]
        ['blocks.1.attn.hook_z']
    """
    return ablate_sets(model, tokens, [list(heads)], how, other)[0]


def ablate_sets(
    model: TransformerBridge, tokens: Tokens, sets: Sequence[Heads], how: How, other: Other
) -> list[list[Hook]]:
    """Make hooks as ``ablate_heads`` does for each set of heads; what replaces them is read once. A
    set is a list of heads, or one list for each row of ``tokens``."""
    chosen = [head_masks(model, heads, len(tokens)) for heads in sets]
    names = {layer: get_act_name("z", layer) for masks in chosen for layer in masks}
    values = replacements(model, tokens, names.values(), how, other)
    return [put_heads(masks, {la: values[names[la]] for la in masks}) for masks in chosen]


def head_masks(
    model: TransformerBridge, heads: Heads, rows: int
) -> dict[int, Bool[Tensor, "row 1 head 1"]]:
    """Mark by layer which heads each row has; one row stands for all where one list does."""
    own = any(not each or isinstance(each[0], Sequence) for each in heads)
    lists: Any = heads if own else [heads]
    if own and len(lists) not in (1, rows):
        raise IclError(f"A set has heads for {len(lists)} rows, and the task has {rows}.")
    masks: dict[int, Tensor] = {}
    for row, (layer, head) in ((row, head) for row, each in enumerate(lists) for head in each):
        check_head(model, (layer, head))
        none = torch.zeros(len(lists), 1, model.cfg.n_heads, 1, dtype=torch.bool)
        masks.setdefault(layer, none)[row, 0, head] = True
    return masks


def put_heads(
    masks: Mapping[int, Bool[Tensor, "row 1 head 1"]], values: Mapping[int, Float[Tensor, "..."]]
) -> list[Hook]:
    """Make hooks that put ``values``, by layer, in the place of ``z`` of the marked heads."""

    def replace(layer: int, mask: Tensor) -> Hook:
        new = values[layer]
        return get_act_name("z", layer), lambda z, hook: torch.where(mask.to(z.device), new, z)

    return [replace(*item) for item in masks.items()]


def cut_attention(
    model: TransformerBridge, cut: Mapping[int, Bool[Tensor, "..."]], renormalise: bool = True
) -> list[Hook]:
    """Make hooks that cut edges of attention: ``cut[layer]`` is (batch, dest, src) or with heads
    (batch, head, dest, src). Renormalised, the scores become -10,000 before the softmax and the
    rest of the row takes over (uniform without a rest); else the weights become 0."""
    check_editable(model)
    part, value = ("attn_scores", CUT) if renormalise else ("pattern", 0.0)

    def hook_for(layer: int, edges: Tensor) -> Hook:
        edges = edges[:, None] if edges.ndim == 3 else edges
        name = get_act_name(part, layer)
        return name, lambda values, hook: values.masked_fill(edges.to(values.device), value)

    return [hook_for(*pair) for pair in cut.items()]


def check_head(model: TransformerBridge, head: Head) -> None:
    """Refuse a head, (layer, head), that the model does not have."""
    if not (0 <= head[0] < model.cfg.n_layers and 0 <= head[1] < model.cfg.n_heads):
        raise IclError(
            f"There is no head {head[0]}.{head[1]}: the model has {model.cfg.n_layers} layers of "
            f"{model.cfg.n_heads} heads, counted from 0."
        )


def replacements(
    model: TransformerBridge, tokens: Tokens, names: Iterable[str], how: How, other: Other
) -> Mapping[str, Tensor]:
    """Return what replaces ablated activations (zero, their mean, those of ``other``), by name."""
    names = list(names)
    if how == "zero":
        return {name: torch.zeros((), device=tokens.device) for name in names}
    if how == "mean":
        cache = activations(model, tokens, names)
        return {name: cache[name].mean((0, 1), keepdim=True) for name in names}
    if how == "resample":
        if other.shape != tokens.shape:
            raise IclError(
                f"Resampling needs sequences of the same shape; got {tuple(other.shape)} for "
                f"{tuple(tokens.shape)}."
            )
        return activations(model, other, names)
    raise unknown("ablation", how, ["zero", "mean", "resample"])


def activations(
    model: TransformerBridge, tokens: Tokens, names: Collection[str]
) -> dict[str, Tensor]:
    """Read the named activations of blocks in a run that goes no further than they are and unembeds
    one place at most. With logits: ``run_with_hooks``."""
    if not names:
        return {}
    stop = _layers(names)[-1] + 1
    first = at_positions(torch.zeros_like(tokens[:, :1]))
    seen = run_with_hooks(model, tokens, [first], names, stop)[1]
    check_parts(model, names, seen)
    return seen
