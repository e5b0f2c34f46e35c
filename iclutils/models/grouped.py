"""Heads that share keys and values, written out: the same network with a set for every head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def write_out(network: PreTrainedModel) -> PreTrainedModel:
    """Give every query head its group's key and value as its own, in place; the output is equal.

    So each lens reads, patches or re-weights one head alone. It takes separate projections, as in
    Llama, Mistral and Qwen; other networks with grouped heads stay as they are.
    """
    config = network.config
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) or heads
    layers = [part for part in network.modules() if hasattr(part, "num_key_value_groups")]
    if shared == heads or not layers or not all(map(_separate, layers)):
        return network
    layer: Any
    for layer in layers:
        for projection in (layer.k_proj, layer.v_proj):
            for name, rows in list(projection.named_parameters()):
                by_group = rows.data.unflatten(0, (-1, layer.head_dim))
                own = by_group.repeat_interleave(layer.num_key_value_groups, 0).flatten(0, 1)
                setattr(projection, name, nn.Parameter(own))
            projection.out_features = len(projection.weight)
        layer.num_key_value_groups = 1
    config.num_key_value_heads = heads
    return network


def _separate(layer: nn.Module) -> bool:
    """Whether keys and values have matrices of their own, and no norm that runs over all heads."""
    norm = getattr(getattr(layer, "k_norm", None), "weight", torch.empty(0))
    norms_one_head = norm.shape in ((0,), (layer.head_dim,))
    linear = [isinstance(getattr(layer, f"{p}_proj", None), nn.Linear) for p in "kv"]
    return all(linear) and norms_one_head
