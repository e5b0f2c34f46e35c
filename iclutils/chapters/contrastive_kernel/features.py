"""Features: softmax attention as a linear model in the space of a feature map.

Softmax attention weighs a key k by exp(k·q / √d) = φ(k)·φ(q); ``gram`` has such features of one
query and its keys. Shapes: queries (*batch, query, channel), keys (*batch, key, channel), values
(*batch, key, value); ``allowed`` (…, query, key) tells which keys a query may look at.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ...interp.at_query import Allowed, Keys, Queries, scores

Values = Float[Tensor, "*batch key value"]


def attention(
    queries: Queries, keys: Keys, values: Values, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query value"]:
    """Return softmax attention, exact: Σ_i v_i exp(k_i·q/√d) / D_q."""
    return scores(queries, keys, allowed).softmax(-1) @ values


def gram(
    query: Float[Tensor, "*batch channel"], keys: Keys
) -> tuple[Float[Tensor, "*batch feature"], Float[Tensor, "*batch key feature"]]:
    """Return φ(q) and φ(k) of one query and n keys, n + 1 features, float64, none above 1: their
    inner products are exp(a·b / √d) up to a factor for the query and one for the keys. The first
    coordinate is along φ(q), so that products with the query keep their relative precision; the
    others are a square root of what is left of the keys' Gram matrix."""
    q, k = query.double(), keys.double()
    root = math.sqrt(query.shape[-1])
    half_q, half_k = ((x * x).sum(-1) / (2 * root) for x in (q, k))
    cross = (k @ q[..., None])[..., 0] / root - half_q[..., None]  # (*batch, key)
    cosine = (cross - half_k).exp()  # of φ(k) and φ(q)
    kernel = (k @ k.mT / root - half_k[..., None] - half_k[..., None, :]).exp()  # (key, key)
    values, vectors = torch.linalg.eigh(kernel - cosine[..., None] * cosine[..., None, :])
    longest = half_k.amax(-1, keepdim=True)
    length = (half_k - longest).exp()[..., None]
    others = vectors * values.clamp_min(0).sqrt()[..., None, :] * length
    phi_k = torch.cat([(cross - longest).exp()[..., None], others], -1)
    phi_q = torch.zeros_like(phi_k[..., 0, :])
    phi_q[..., 0] = 1.0
    return phi_q, phi_k
