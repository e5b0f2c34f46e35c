"""How heads work together, and which of them can go.

The correlation of two heads' activations (see the page *What the sources got wrong*) means nothing:
the basis of each head's ``z`` can be rotated without changing the model. Interventions mean
something."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import GPT2LMHeadModel, PreTrainedModel

from ...errors import IclError
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Node
from ...interp.hooks import activations
from ...interp.patching import ablate
from ...models import TransformerBridge, get_act_name
from ...models.checkpoint import write_out


def interactions(
    model: TransformerBridge,
    task: CleanCorrupt,
    groups: Sequence[Sequence[Node]],
    alone: Float[Tensor, "group batch"] | None = None,
) -> tuple[Float[Tensor, "group batch"], Float[Tensor, "group group batch"]]:
    """Return the nats lost without each group of heads and MLP layers (``alone``, if known), and
    the interaction of every two, D(a, b) - D(a) - D(b), with D the nats lost by resample ablation:
    below 0 for a pipeline (serial), about 0 for independent groups (parallel), above 0 for back-ups
    (Wang et al. 2022); NaN on the diagonal."""
    pairs = list(combinations(range(len(groups)), 2))
    unions = [list(dict.fromkeys([*groups[a], *groups[b]])) for a, b in pairs]
    sets = unions if alone is not None else [*groups, *unions]
    lost = ablate(model, task, sets)
    if alone is None:
        alone, lost = lost[: len(groups)], lost[len(groups) :]
    beyond = alone.new_full((len(groups), len(groups), len(task)), torch.nan)
    for (a, b), both in zip(pairs, lost, strict=True):
        beyond[a, b] = beyond[b, a] = both - alone[a] - alone[b]
    return alone, beyond


def note_correlation(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "layer head head"]:
    """Return the note's measure: Pearson correlation of two heads' flattened ``z``."""
    names = [get_act_name("z", layer) for layer in range(model.cfg.n_layers)]
    cache = activations(model, tokens, names)
    flat = [cache[name].permute(2, 0, 1, 3).flatten(1).double() for name in names]
    return torch.stack([torch.corrcoef(z).reshape(len(z), len(z)) for z in flat])


def is_redundant(losses: Float[Tensor, "*item batch"]) -> Bool[Tensor, "*item"]:
    """Tell which parts can be spared: mean loss plus two standard errors below 0.01 nats."""
    return losses.mean(-1) + 2 * losses.std(-1) / losses.shape[-1] ** 0.5 < 0.01


def prune(network: PreTrainedModel, heads: Iterable[Node]) -> None:
    """Zero values and output rows of heads, in place (``models.edit_weights``): no gradient reaches
    them, so training leaves them pruned. ``patching.ablate`` asks the same without an edit."""
    with torch.no_grad():
        for node in heads:
            for part in _head_weights(network, node.layer, node.head):
                part.zero_()


def rotate_head_basis(
    network: PreTrainedModel, layer: int, head: int, rotation: Float[Tensor, "size size"]
) -> None:
    """Rotate the basis of one head, in place: W_V R, b_V R, R^T W_O (``models.edit_weights``). What
    the head writes stays the same, whatever it attends to."""
    into, *values = _head_weights(network, layer, head)
    with torch.no_grad():
        for part in values:
            part.copy_(part @ rotation)
        into.copy_(rotation.T @ into)


def _head_weights(network: PreTrainedModel, layer: int, head: int) -> list[Tensor]:
    """Return views of a head's W_O (d_head, d_model), W_V (d_model, d_head) and, if there is one,
    b_V, of a GPT-2 or a model built like Llama, whose shared values are first written out."""
    config = network.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = slice(head * width, (head + 1) * width)
    attn: Any
    if isinstance(network, GPT2LMHeadModel):
        attn, start = network.transformer.h[layer].attn, 2 * config.hidden_size
        values = slice(start + rows.start, start + rows.stop)
        parts = [attn.c_proj.weight[rows], attn.c_attn.weight[:, values]]
        return [*parts, attn.c_attn.bias[values]]
    write_out(network)
    blocks = getattr(network.base_model, "layers", None)
    attn = getattr(blocks[layer], "self_attn", None) if blocks is not None else None
    if not all(hasattr(attn, name) for name in ("o_proj", "v_proj")):
        raise IclError("Only models with the architecture of GPT-2 or Llama can be edited.")
    bias = [] if attn.v_proj.bias is None else [attn.v_proj.bias[rows]]
    return [attn.o_proj.weight[:, rows].T, attn.v_proj.weight[rows].T, *bias]
