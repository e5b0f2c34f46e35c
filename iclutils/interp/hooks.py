"""Interventions: change what one component writes, and see what follows.

A component is a set of attention heads (their ``z``, before ``W_O``) or a set of whole MLP
layers. Its output is replaced at every position by zero, by its mean over the batch and the
positions, or by what it computes on *other* sequences of the same shape (resample). Zero is off
the model's usual path and can hurt for that reason alone; resample keeps the statistics and
removes the content. ``direct_k_input`` patches single edges: some heads' writes into another
head's key input, and nothing else (path patching; Wang et al. 2022).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import hooks
    >>> from iclutils.chapters import induction
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task = repeated_tokens(net, 4, 20, generator)
    >>> other = repeated_tokens(net, 4, 20, generator).tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import IclError, unknown
from ..models import TransformerBridge, cached, check_tokens

Head = tuple[int, int]
How = Literal["zero", "mean", "resample"]
Hook = tuple[str, Callable[..., Tensor]]
Tokens = Int[Tensor, "batch pos"]
Other = Int[Tensor, "other_batch other_pos"]  # must match; a mismatch is refused with a cure


def z_name(layer: int) -> str:
    """Hook of the heads' outputs before ``W_O``: (batch, pos, head, d_head).

    Example:
        >>> hooks.z_name(1)
        'blocks.1.attn.hook_z'
    """
    return f"blocks.{layer}.attn.hook_z"


def mlp_name(layer: int) -> str:
    """Hook of the MLP layer's output: (batch, pos, d_model)."""
    return f"blocks.{layer}.hook_mlp_out"


def pattern_name(layer: int) -> str:
    """Hook of the attention patterns: (batch, head, dest, src).

    Example:
        >>> hooks.pattern_name(0)
        'blocks.0.attn.hook_pattern'
    """
    return f"blocks.{layer}.attn.hook_pattern"


def head_ablation(
    model: TransformerBridge, tokens: Tokens, heads: Iterable[Head], how: How, other: Other
) -> list[Hook]:
    """Hooks that ablate heads.

    Args:
        model: the model.
        tokens: the sequences to be run.
        heads: (layer, head) pairs.
        how: ``"zero"``, ``"mean"`` or ``"resample"``.
        other: sequences of the same shape, the source of resampled activations.

    Example:
        >>> heads = induction.find(net, task).all_induction
        >>> hooks = hooks.head_ablation(net, task.tokens, heads, "mean", other)
        >>> before, after = (induction.clean_loss(net, task, h).mean() for h in ([], hooks))
        >>> bool(after - before > 1)
        True
    """
    chosen: dict[int, list[int]] = {}
    for layer, head in heads:
        if not (0 <= layer < model.cfg.n_layers and 0 <= head < model.cfg.n_heads):
            raise IclError(
                f"There is no head {layer}.{head}: the model has {model.cfg.n_layers} layers of "
                f"{model.cfg.n_heads} heads, counted from 0."
            )
        chosen.setdefault(layer, []).append(head)
    values = _replacements(model, tokens, [z_name(layer) for layer in chosen], how, other)

    def hook_for(layer: int) -> Hook:
        def replace(z: Tensor, hook: object) -> Tensor:
            z = z.clone()
            z[:, :, chosen[layer]] = values[z_name(layer)].expand_as(z)[:, :, chosen[layer]]
            return z

        return z_name(layer), replace

    return [hook_for(layer) for layer in chosen]


def mlp_ablation(
    model: TransformerBridge, tokens: Tokens, layers: Iterable[int], how: How, other: Other
) -> list[Hook]:
    """Hooks that ablate whole MLP layers at every position; arguments as in ``head_ablation``.

    Example:
        >>> hooks = hooks.mlp_ablation(net, task.tokens, [0], "zero", other)
        >>> [name for name, _ in hooks]
        ['blocks.0.hook_mlp_out']
    """
    layers = list(layers)
    for layer in layers:
        if not 0 <= layer < model.cfg.n_layers:
            raise IclError(f"There is no layer {layer}: the model has {model.cfg.n_layers}.")
    values = _replacements(model, tokens, [mlp_name(layer) for layer in layers], how, other)

    def hook_for(layer: int) -> Hook:
        def replace(out: Tensor, hook: object) -> Tensor:
            return values[mlp_name(layer)].expand_as(out)

        return mlp_name(layer), replace

    return [hook_for(layer) for layer in layers]


def run(
    model: TransformerBridge, tokens: Tokens, hooks: Sequence[Hook], watch: Sequence[str] = ()
) -> tuple[Float[Tensor, "batch pos vocab"], dict[str, Tensor]]:
    """One forward pass under ``hooks``: logits, and the activations named in ``watch``.

    Example:
        >>> name = hooks.pattern_name(1)
        >>> logits, seen = hooks.run(net, task.tokens, [], watch=[name])
        >>> seen[name].shape
        torch.Size([4, 4, 41, 41])
    """
    check_tokens(model, tokens)
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Hook:
        def store(value: Tensor, hook: object) -> Tensor:
            seen[name] = value  # under the name asked for: hook.name may be another alias
            return value

        return name, store

    with torch.no_grad():
        out = model.run_with_hooks(tokens, fwd_hooks=[*hooks, *map(keep, watch)])
    return out, seen


def direct_k_input(
    model: TransformerBridge, tokens: Tokens, sources: Iterable[Head], target: Head, other: Other
) -> Float[Tensor, "batch dest src"]:
    """Attention pattern of ``target`` after patching only ``sources`` -> its key input.

    What the source heads write is replaced by what they write on ``other`` in the copy of the
    residual stream that the target head's keys read. Queries, values and every other reader keep
    the clean one, so a change of the pattern is K-composition and nothing else.

    Example:
        >>> found = induction.find(net, task)
        >>> sources, target = found.all_previous, found.induction
        >>> pattern = hooks.direct_k_input(net, task.tokens, sources, target, other)
        >>> pattern.sum(-1).round(decimals=3).unique()
        tensor([1.])
    """
    sources, (layer, head) = list(sources), target
    for la, h in sources:
        if la >= layer:
            raise IclError(
                f"No path from {la}.{h} to {layer}.{head}: the target must be in a later layer."
            )
    _same_shape(tokens, other)
    names = {z_name(la) for la, _ in sources}
    (_, clean), (_, foreign) = cached(model, tokens, names), cached(model, other, names)
    change = sum(
        (foreign[z_name(la)][:, :, h] - clean[z_name(la)][:, :, h]) @ model.W_O[la, h]
        for la, h in sources
    )

    def shift(resid: Tensor, hook: object) -> Tensor:
        resid = resid.clone()
        resid[:, :, head] += change
        return resid

    before = model.cfg.use_split_qkv_input
    try:
        model.set_use_split_qkv_input(True)
    except (AttributeError, NotImplementedError) as error:
        raise IclError(
            "This model cannot fork the inputs of queries, keys and values: use one like GPT-2, "
            "GPT-NeoX or Llama."
        ) from error
    try:
        _, seen = run(
            model, tokens, [(f"blocks.{layer}.attn.hook_k_input", shift)], [pattern_name(layer)]
        )
    finally:
        model.set_use_split_qkv_input(before)
    return seen[pattern_name(layer)][:, head]


def _replacements(
    model: TransformerBridge, tokens: Tokens, names: list[str], how: How, other: Other
) -> dict[str, Tensor]:
    if how == "zero":
        return {name: torch.zeros((), device=tokens.device) for name in names}
    if how == "mean":
        _, cache = cached(model, tokens, names)
        return {name: cache[name].mean((0, 1), keepdim=True) for name in names}
    if how == "resample":
        _same_shape(tokens, other)
        _, cache = cached(model, other, names)
        return {name: cache[name] for name in names}
    raise unknown("ablation", how, ["zero", "mean", "resample"])


def _same_shape(tokens: Tokens, other: Other) -> None:
    if other.shape != tokens.shape:
        raise IclError(
            f"Resampling needs sequences of the same shape; got {tuple(other.shape)} "
            f"for {tuple(tokens.shape)}."
        )
