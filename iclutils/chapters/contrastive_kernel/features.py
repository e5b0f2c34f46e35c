"""Features: softmax attention as a linear model in the space of a feature map.

Softmax attention weighs a key k by exp(k·q / √d) = φ(k)·φ(q). Features of exp(a·b), for tokens
times d^(-1/4) (``rescale``): ``positive_random``; exact for one query and its keys: ``gram``.
Shapes: queries (*batch, query, channel), keys (*batch, key, channel), values (*batch, key, value);
``allowed`` (…, query, key) tells which keys a query may look at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...interp.at_query import Allowed, Keys, Queries, scores
from ...progress import bar

Values = Float[Tensor, "*batch key value"]
AT_ONCE = 2**22  # numbers in the largest tensor of a sweep


def rescale(z: Float[Tensor, "*batch channel"]) -> Float[Tensor, "*batch channel"]:
    """Return z / d^(1/4), so that inner products of such are k·q / √d."""
    return z / z.shape[-1] ** 0.25


def attention(
    queries: Queries, keys: Keys, values: Values, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query value"]:
    """Return softmax attention, exact: Σ_i v_i exp(k_i·q/√d) / D_q."""
    return scores(queries, keys, allowed).softmax(-1) @ values


def directions(
    count: int,
    dim: int,
    generator: torch.Generator,
    draws: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "draw feature channel"]:
    """Draw directions ω for ``positive_random``, each N(0, I), on the generator's device."""
    place: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": dtype}
    return torch.randn((draws, count, dim), **place)


def positive_random(
    z: Float[Tensor, "*batch channel"], directions: Float[Tensor, "*draw feature channel"]
) -> Float[Tensor, "*shape feature"]:
    """Return logarithms of positive random features, ω·z - |z|²/2 - log(m)/2: (*draw, *batch, m).
    The mean of φ(a)·φ(b) over ω ~ N(0, I) is exp(a·b) ({cite}`choromanski2021`, lemma 1)."""
    flat = z.reshape(-1, z.shape[-1])
    along = flat @ directions.mT - flat.square().sum(-1, keepdim=True) / 2
    logs = along - math.log(directions.shape[-2]) / 2
    return logs.reshape(*directions.shape[:-2], *z.shape[:-1], directions.shape[-2])


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


def log_kernel(queries: Queries, keys: Keys) -> Float[Tensor, "*batch query key"]:
    """Return log φ(q)·φ(k) from the logarithms of positive features: a product of matrices, each
    token's largest feature put to 1, or the slow sum of exponentials where that is lost."""
    top_query, top_key = queries.amax(-1, keepdim=True), keys.amax(-1, keepdim=True)
    kernel = (queries - top_query).exp() @ (keys - top_key).exp().mT
    limits = torch.finfo(kernel.dtype)
    if bool((kernel > limits.tiny / limits.eps).all()):
        return kernel.log() + top_query + top_key.mT
    return (queries[..., :, None, :] + keys[..., None, :, :]).logsumexp(-1)


def feature_attention(
    queries: Queries, keys: Keys, values: Float[Tensor, "*#batch key value"]
) -> Float[Tensor, "*batch query value"]:
    """Return Σ_i v_i φ(k_i)·φ(q) / D_q, from logarithms of features (``positive_random``)."""
    return log_kernel(queries, keys).softmax(-1) @ values


def relative_errors(
    phi: tuple[Tensor, Tensor], values: Values, exact: Tensor
) -> Float[Tensor, "_"]:
    """Return |``feature_attention`` - exact| / |exact| of every query, from logarithms."""
    missed = feature_attention(*phi, values) - exact
    return (missed.norm(dim=-1) / exact.norm(dim=-1)).flatten()


def kernel_error(
    queries: Queries,
    keys: Keys,
    values: Values,
    sizes: Sequence[int],
    scales: Sequence[float],
    draws: int,
    generator: torch.Generator,
) -> Float[Tensor, "scale size"]:
    """Measure ``relative_errors`` for tokens times scales and numbers of random features, the
    median over draws of directions, batch and queries."""
    rows = []
    for scale in bar(scales, "scales"):
        exact = attention(scale * queries, scale * keys, values)
        q, k = rescale(scale * queries), rescale(scale * keys)
        tokens = q[..., 0].numel() + k[..., 0].numel()
        for size in sizes:
            errors = []
            for some in torch.arange(draws).split(max(1, AT_ONCE // (size * tokens))):
                omega = directions(size, q.shape[-1], generator, len(some), q.dtype)  # (draw, m, d)
                phi = positive_random(q, omega), positive_random(k, omega)
                errors.append(relative_errors(phi, values, exact))
            rows.append(torch.cat(errors).quantile(0.5))
    return torch.stack(rows).unflatten(0, (len(scales), len(sizes)))
