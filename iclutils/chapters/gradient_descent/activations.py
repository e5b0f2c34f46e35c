"""Queries, keys, values and outputs of the heads of a model, as its attention uses them.

After rotation where positions are rotary. Scores are q·k / sqrt(d_head): where they are not,
the model is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import IclError
from ...interp.hooks import check_editable
from ...models import ActivationCache, TransformerBridge, cached, check_tokens, get_act_name

TOLERANCE = 1e-4  # of the largest score: the model's float32 against our float64


class Activations(NamedTuple):
    """What the heads of one layer work with, in float64: (batch, head, pos, d_head) each."""

    query: Float[Tensor, "batch head pos d_head"]
    key: Float[Tensor, "batch head pos d_head"]
    value: Float[Tensor, "batch head pos d_head"]
    z: Float[Tensor, "batch head pos d_head"]


def read_heads(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], layers: list[int] | None = None
) -> Iterator[Activations]:
    """Queries, keys, values and outputs of every head, one layer at a time.

    Keys and values that several heads share are repeated for each.
    """
    check_tokens(model, tokens)
    check_editable(model)
    layers = list(range(model.cfg.n_layers)) if layers is None else layers
    for layer in layers:
        if not 0 <= layer < model.cfg.n_layers:
            raise IclError(f"There is no layer {layer}: the model has {model.cfg.n_layers}.")
    _, cache = cached(model, tokens, _wanted(layers))
    for layer in layers:
        yield _activations(model, cache, layer)


def _wanted(layers: list[int]) -> Callable[[str], bool]:
    parts = ("q", "k", "v", "rot_q", "rot_k", "cos", "sin", "attn_scores")
    names = {f"blocks.{la}.attn.hook_{part}" for la in layers for part in parts}
    names |= {get_act_name("z", la) for la in layers}
    return names.__contains__


def _activations(model: TransformerBridge, cache: ActivationCache, layer: int) -> Activations:
    heads, prefix = model.cfg.n_heads, f"blocks.{layer}.attn.hook_"
    value, z, scores = (cache[prefix + part].double() for part in ("v", "z", "attn_scores"))
    both = []
    for part in ("q", "k"):
        if f"{prefix}rot_{part}" in cache:
            both.append(cache[f"{prefix}rot_{part}"].double())
        elif f"{prefix}cos" in cache:
            turn = (cache[prefix + name].double() for name in ("cos", "sin"))
            both.append(_rotated(cache[prefix + part].double(), *turn))
        else:
            both.append(cache[prefix + part].double())
    query, key, value, z = (
        x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (*both, value, z)
    )
    lower = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    ours = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~lower, 0.0)
    theirs = scores.masked_fill(~lower, 0.0)
    if not (ours - theirs).abs().max() <= TOLERANCE * (1 + theirs.abs().max()):
        raise IclError(
            "This model's attention scores are not q·k / sqrt(d_head) of the queries and keys that "
            "it shows (another scale, other positions, a window): use one like GPT-2 or Llama."
        )
    return Activations(query, key, value, z)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first channels, halves paired, as GPT-NeoX and Llama have them."""
    width = cos.shape[-1]
    part, rest = states[..., :width], states[..., width:]
    turned = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], -1)
    return torch.cat([part * cos[:, :, None] + turned * sin[:, :, None], rest], -1)
