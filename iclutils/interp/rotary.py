"""Queries and keys as attention compares them: normed (Qwen 3) and turned by where they stand.

Rotary positions (Su et al. 2021) turn pairs of channels by an angle that grows with the position,
so that a score depends on the distance of query and key alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import IclError
from ..models import ActivationCache, TransformerBridge, get_act_name

Angles = tuple[Float[Tensor, "*#lead pos width"], Float[Tensor, "*#lead pos width"]] | None
Vectors = Float[Tensor, "*lead d_head"]
FEW = 8  # tokens on which scores are compared, at least
CLOSE = 1e-4  # of the largest score: what the model's own may differ from ours


def angle_names(layers: int) -> set[str]:
    """Hooks of the cosines and sines of every layer, where there are any."""
    return {
        f"blocks.{layer}.attn.hook_{part}" for layer in range(layers) for part in ("cos", "sin")
    }


def angles(cache: ActivationCache | Mapping[str, Tensor], layer: int) -> Angles:
    """Cosines and sines of a layer, from activations by name with those of ``angle_names``."""
    prefix = f"blocks.{layer}.attn.hook_"
    if f"{prefix}cos" not in cache:
        return None
    return cache[f"{prefix}cos"], cache[f"{prefix}sin"]


def placed(
    model: TransformerBridge,
    layer: int,
    channel: str,
    states: Float[Tensor, "*lead pos head d_head"],
    turns: Angles,
) -> Float[Tensor, "*lead pos head d_head"]:
    """Queries or keys (``"q"``, ``"k"``) after the head's own norm and rotation, if it has them.

    The first channels turn, halves paired, as in GPT-NeoX, Llama and Qwen; whoever uses this
    compares it with what the model does.
    """
    norm = getattr(model.blocks[layer].attn, f"{channel}_norm", None)
    if norm is not None and norm.weight.shape == states.shape[-1:]:
        states = norm(states)
    if turns is None:
        return states
    cos, sin = (part[..., None, :] for part in turns)
    width = cos.shape[-1]
    part, rest = states[..., :width], states[..., width:]
    turned = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], -1)
    return torch.cat([part * cos + turned * sin, rest], -1)


_APART: WeakKeyDictionary[TransformerBridge, dict[tuple[int, int], tuple[Angles, Angles]]] = (
    WeakKeyDictionary()
)


def placed_apart(
    model: TransformerBridge, layer: int, distance: int, queries: Vectors, keys: Vectors
) -> tuple[Vectors, Vectors]:
    """Queries and keys as compared where the keys stand ``distance`` tokens before.

    Refuses a model whose attention scores are not those of ``placed`` queries and keys.
    """
    known = _APART.setdefault(model, {})
    if (layer, distance) not in known:
        known[layer, distance] = _angles_apart(model, layer, distance)
    parts = zip("qk", (queries, keys), known[layer, distance], strict=True)
    queries, keys = (
        placed(model, layer, channel, states[..., None, None, :], turns)[..., 0, 0, :]
        for channel, states, turns in parts
    )
    return queries, keys


def _angles_apart(model: TransformerBridge, layer: int, distance: int) -> tuple[Angles, Angles]:
    """Angles of a query and of a key so many tokens before it; None without rotary positions."""
    names = {get_act_name(part, layer) for part in ("q", "k", "attn_scores")}
    tokens = torch.arange(max(distance + 1, FEW), device=model.cfg.device)[None]
    with torch.no_grad():
        _, cache = model.run_with_cache(
            tokens % model.cfg.d_vocab,
            names_filter=(names | angle_names(layer + 1)).__contains__,
            stop_at_layer=layer + 1,
        )
    turns = angles(cache, layer)
    states = (placed(model, layer, c, cache[get_act_name(c, layer)], turns)[0] for c in "qk")
    q, k = (each.transpose(0, 1) for each in states)
    ours = (q @ k.mT / q.shape[-1] ** 0.5).tril()
    theirs = cache[get_act_name("attn_scores", layer)][0].tril()
    if not (ours - theirs).abs().max() <= CLOSE * (1 + theirs.abs().max()):
        raise IclError(
            "QK matching and composition at a distance cannot be read from this model's weights: "
            "its attention scores are not q·k / sqrt(d_head) of queries and keys with learned or "
            "rotary positions. Use a model like GPT-2, GPT-NeoX, Llama or Qwen."
        )
    if turns is None:
        return None, None
    cos, sin = turns
    at, first = slice(distance, distance + 1), slice(1)
    return (cos[0, at], sin[0, at]), (cos[0, first], sin[0, first])
