"""Redundancy: which heads a task can spare, and what pruning saves."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Node
from ...interp.hooks import Hook, at_positions, check_editable
from ...models import TransformerBridge, get_act_name
from .interactions import head_weights


def importance(model: TransformerBridge, task: CleanCorrupt) -> Float[Tensor, "layer head batch"]:
    """|d score / d mask| for a mask of 1 on each head, in nats (Michel et al. 2019, equation 2)."""
    check_editable(model)
    tokens, layers, heads = task.clean, model.cfg.n_layers, model.cfg.n_heads
    mask = torch.ones(layers, len(tokens), 1, heads, 1, device=tokens.device, requires_grad=True)

    def masked(layer: int) -> Hook:
        return get_act_name("z", layer), lambda z, hook: z * mask[layer]

    with torch.enable_grad():
        hooks = [*map(masked, range(layers)), at_positions(task.at)]
        logits = model.run_with_hooks(tokens, fwd_hooks=[*hooks])
        (slope,) = torch.autograd.grad(task.score(logits).sum(), mask)
    return slope[:, :, 0, :, 0].abs().transpose(1, 2)


def redundant(losses: Float[Tensor, "*item batch"]) -> Bool[Tensor, "*item"]:
    """Which parts can be spared: mean loss plus two standard errors below 0.01 nats."""
    return losses.mean(-1) + 2 * losses.std(-1) / losses.shape[-1] ** 0.5 < 0.01


def prune(network: PreTrainedModel, heads: Iterable[Node]) -> None:
    """Zero the values and the output rows of heads, in place (``models.edit_weights``): no gradient
    reaches a pruned head, so training leaves it pruned."""
    for node in heads:
        with torch.no_grad():
            for part in head_weights(network, node.layer, node.head):
                part.zero_()
