"""Pruning: heads taken out of the weights for good, and what a forward pass then costs.

For ``models.edit_weights``. The value columns of a pruned head and its rows of the output matrix
are zero, so it writes nothing, and no gradient reaches either: training leaves it pruned
(``training.tune``).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import pruning
    >>> from iclutils.interp import graph
    >>> net = models.load("induction-0")
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import GPT2LMHeadModel

from ...errors import IclError
from ...interp.graph import Node
from ...models import TransformerBridge


def prune(network: nn.Module, heads: Iterable[Node]) -> None:
    """Zero the values and the output rows of these heads, in place.

    The same predictions as zero ablation of what they write; the bias after ``W_O`` stays.

    Example:
        >>> edit = lambda network: pruning.prune(network, [graph.head(1, 0)])
        >>> without = models.edit_weights("induction-0", edit)
        >>> without.W_V[1, 0].abs().max()
        tensor(0.)
    """
    if not isinstance(network, GPT2LMHeadModel):
        raise IclError("Only models with the architecture of GPT-2 can be pruned.")
    layers, count = network.config.n_layer, network.config.n_head
    width = network.config.n_embd // count
    for node in heads:
        if node.kind != "head" or not (0 <= node.layer < layers and 0 <= node.head < count):
            raise IclError(
                f"There is no head {node}: the model has {layers} layers of {count} heads."
            )
        block: Any = network.transformer.h[node.layer]
        attn = block.attn
        rows = slice(node.head * width, (node.head + 1) * width)
        values = slice(
            2 * network.config.n_embd + rows.start, 2 * network.config.n_embd + rows.stop
        )
        with torch.no_grad():
            attn.c_proj.weight[rows] = 0
            attn.c_attn.weight[:, values] = 0
            attn.c_attn.bias[values] = 0


def cost(model: TransformerBridge, length: int, removed: int = 0) -> int:
    """Multiply-adds of the matrix products of one forward pass of a GPT-2, all positions read out.

    The MLP, the unembedding and every head: four projections a position, and two products with
    the whole square of scores, as eager attention computes them.

    Args:
        model: of the shape of GPT-2.
        length: tokens of the sequence.
        removed: heads that are gone, in any layers.

    Example:
        >>> pruning.cost(net, length=10, removed=4) < pruning.cost(net, length=10)
        True
    """
    cfg = model.cfg
    left = cfg.n_layers * cfg.n_heads - removed
    if removed < 0 or left < 0:
        raise IclError(f"{removed} heads cannot be removed: there are {left + removed}.")
    one_head = 4 * length * cfg.d_model * cfg.d_head + 2 * length**2 * cfg.d_head
    one_mlp = 2 * length * cfg.d_model * (cfg.d_mlp or 0)
    return left * one_head + cfg.n_layers * one_mlp + length * cfg.d_model * cfg.d_vocab
