"""Features: softmax attention as a linear model in the space of a feature map.

Softmax attention weighs a key k by exp(k·q / √d) = φ(k)·φ(q). Features of exp(a·b), for tokens
``scaled`` by d^(-1/4): ``taylor``, ``positive_random``; exact for one query and its keys: ``gram``.
Shapes: queries (*batch, query, channel), keys (*batch, key, channel), values (*batch, key, value);
``allowed`` (…, query, key) tells which keys a query may look at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from sklearn.preprocessing import PolynomialFeatures
from torch import Tensor

from ...errors import IclError, unknown
from ...interp.at_query import Allowed, Keys, Queries, scores
from ...progress import bar

Values = Float[Tensor, "*batch key value"]
METHODS = ("taylor", "iid", "orthogonal", "unsigned")
MOST = 200_000  # Taylor features; beyond, they would not fit in memory for a context
AT_ONCE = 2**22  # numbers in the largest tensor of a sweep


def scaled(z: Float[Tensor, "*batch channel"]) -> Float[Tensor, "*batch channel"]:
    """z / d^(1/4), so that inner products of such are k·q / √d."""
    return z / z.shape[-1] ** 0.25


def attention(
    queries: Queries, keys: Keys, values: Values, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query value"]:
    """Softmax attention, exact: Σ_i v_i exp(k_i·q/√d) / D_q."""
    return scores(queries, keys, allowed).softmax(-1) @ values


def log_normaliser(queries: Queries, keys: Keys) -> Float[Tensor, "*batch query"]:
    """log D_q = log Σ_i exp(k_i·q/√d), for every query another."""
    return scores(queries, keys).logsumexp(-1)


def taylor(z: Float[Tensor, "*batch channel"], degree: int) -> Float[Tensor, "*batch feature"]:
    """All monomials of z up to a degree, Π_c z_c^{a_c} / √a_c!: (degree + d choose d) of them. The
    inner product of taylor(a) and taylor(b) is Σ_{r ≤ degree} (a·b)^r / r!."""
    dim = z.shape[-1]
    count = math.comb(degree + dim, dim)
    if count > MOST:
        raise IclError(f"{count} Taylor features do not fit: take a lower degree or dimension.")
    powers = torch.from_numpy(PolynomialFeatures(degree).fit(np.zeros((1, dim))).powers_).to(z)
    power = z[..., None] ** torch.arange(degree + 1).to(z)  # every power of every channel once
    monomials = (-torch.lgamma(powers + 1).sum(-1) / 2).exp()
    for channel in range(dim):
        monomials = monomials * power[..., channel, powers[:, channel].long()]
    return monomials


def needed_degree(largest: float, tolerance: float = 1e-12) -> int:
    """The degree from which the truncated series of exp(x) is right to a relative tolerance for all
    |x| ≤ ``largest``, here k·q/√d. The remainder, at most |x|^(R+1)/(R+1)! · max(1, e^x), is
    compared with e^x: negative scores are the hard ones."""
    for degree in range(1001):
        exponent = (degree + 1) * math.log(max(largest, 1e-300)) - math.lgamma(degree + 2) + largest
        if exponent <= math.log(tolerance):
            return degree
    raise IclError(f"No degree up to 1000 serves scores up to {largest}: use the kernel form.")


def directions(
    count: int,
    dim: int,
    generator: torch.Generator,
    method: str = "iid",
    draws: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "draw feature channel"]:
    """Directions ω for ``positive_random``, each N(0, I), on the generator's device.
    ``orthogonal``: blocks of d rows at right angles, with lengths of independent normal vectors;
    ``unsigned``: without the signs of R's diagonal, so not uniform."""
    if method not in METHODS[1:]:
        raise unknown("method of random directions", method, METHODS[1:])

    def normals(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device, dtype=dtype)

    normal = normals(draws, count, dim)
    if method == "iid":
        return normal
    unit, upper = torch.linalg.qr(normals(draws, math.ceil(count / dim), dim, dim))
    if method == "orthogonal":
        unit = unit * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return unit.reshape(draws, -1, dim)[:, :count] * normal.norm(dim=-1, keepdim=True)


def positive_random(
    z: Float[Tensor, "*batch channel"], directions: Float[Tensor, "*draw feature channel"]
) -> Float[Tensor, "*shape feature"]:
    """Logarithms of the positive random features, ω·z - |z|²/2 - log(m)/2: (*draw, *batch, m). The
    mean of φ(a)·φ(b) over ω ~ N(0, I) is exp(a·b) ({cite}`choromanski2021`, lemma 1)."""
    flat = z.reshape(-1, z.shape[-1])
    along = flat @ directions.mT - flat.square().sum(-1, keepdim=True) / 2
    logs = along - math.log(directions.shape[-2]) / 2
    return logs.reshape(*directions.shape[:-2], *z.shape[:-1], directions.shape[-2])


def gram(
    query: Float[Tensor, "*batch channel"], keys: Keys
) -> tuple[Float[Tensor, "*batch feature"], Float[Tensor, "*batch key feature"]]:
    """φ(q) and φ(k) of one query and n keys, n + 1 features, float64, none above 1: their inner
    products are exp(a·b / √d) up to a factor for the query and one for the keys. The first
    coordinate is along φ(q), so that products with the query keep their relative precision; the
    others are a square root of what is left of the keys' Gram matrix."""
    q, k = query.double(), keys.double()
    root = math.sqrt(query.shape[-1])
    half_q, half_k = ((x * x).sum(-1) / (2 * root) for x in (q, k))
    cross = (k @ q[..., None])[..., 0] / root - half_q[..., None]
    cosine = (cross - half_k).exp()  # of φ(k) and φ(q)
    kernel = (k @ k.mT / root - half_k[..., None] - half_k[..., None, :]).exp()
    values, vectors = torch.linalg.eigh(kernel - cosine[..., None] * cosine[..., None, :])
    longest = half_k.amax(-1, keepdim=True)
    length = (half_k - longest).exp()[..., None]
    others = vectors * values.clamp_min(0).sqrt()[..., None, :] * length
    phi_k = torch.cat([(cross - longest).exp()[..., None], others], -1)
    phi_q = torch.zeros_like(phi_k[..., 0, :])
    phi_q[..., 0] = 1.0
    return phi_q, phi_k


def balance(queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
    """The same attention with the mean key taken off all keys, and as long queries as keys: both
    cancel in the softmax, but random features miss by what grows with the lengths."""
    keys = keys - keys.mean(-2, keepdim=True)
    long, short = (z.square().sum(-1).mean(-1)[..., None, None] for z in (queries, keys))
    factor = (short / long) ** 0.25
    return queries * factor, keys / factor


def log_kernel(queries: Queries, keys: Keys) -> Float[Tensor, "*batch query key"]:
    """log φ(q)·φ(k) from the logarithms of positive features: a product of matrices, each token's
    largest feature put to 1, or the slow sum of exponentials where that is lost."""
    top_query, top_key = queries.amax(-1, keepdim=True), keys.amax(-1, keepdim=True)
    kernel = (queries - top_query).exp() @ (keys - top_key).exp().mT
    limits = torch.finfo(kernel.dtype)
    if bool((kernel > limits.tiny / limits.eps).all()):
        return kernel.log() + top_query + top_key.mT
    return (queries[..., :, None, :] + keys[..., None, :, :]).logsumexp(-1)


def feature_attention(
    queries: Queries,
    keys: Keys,
    values: Float[Tensor, "*#batch key value"],
    logarithms: bool = False,
) -> Float[Tensor, "*batch query value"]:
    """Σ_i v_i φ(k_i)·φ(q) / D_q, from features or (``positive_random``) their logarithms."""
    if logarithms:
        return log_kernel(queries, keys).softmax(-1) @ values
    weights = queries @ keys.mT
    return weights @ values / weights.sum(-1, keepdim=True)


def relative_errors(
    phi: tuple[Tensor, Tensor], values: Values, exact: Tensor, logarithms: bool = True
) -> Float[Tensor, "_"]:
    """``|feature_attention - exact| / |exact|``, of every query."""
    missed = feature_attention(*phi, values, logarithms) - exact
    return (missed.norm(dim=-1) / exact.norm(dim=-1)).flatten()


def kernel_error(
    queries: Queries,
    keys: Keys,
    values: Values,
    sizes: Sequence[int],
    scales: Sequence[float] = (1.0,),
    *,
    method: str = "iid",
    draws: int = 200,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "scale size"]:
    """|attention by features - softmax attention| / |softmax attention|, for tokens times scales:
    the median over draws, batch and queries. ``sizes`` are numbers of random features, for each
    draw of ``directions`` by a method; with the method ``taylor`` they are degrees."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    rows = []
    for scale in bar(scales, "scales"):
        q, k = scale * queries, scale * keys
        exact = attention(q, k, values)
        for size in sizes:
            each = _features(scaled(q), scaled(k), size, method, draws, generator)
            errors = [relative_errors(phi, values, exact, method != "taylor") for phi in each]
            rows.append(torch.cat(errors).quantile(0.5))
    return torch.stack(rows).unflatten(0, (len(scales), len(sizes)))


def _features(
    q: Tensor, k: Tensor, size: int, method: str, draws: int, generator: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features of queries and keys, with a draw axis if random: as many draws at once as fit."""
    if method == "taylor":
        yield taylor(q, size), taylor(k, size)
        return
    at_once = max(1, AT_ONCE // (size * (q[..., 0].numel() + k[..., 0].numel())))
    for first in range(0, draws, at_once):
        some = min(at_once, draws - first)
        omega = directions(size, q.shape[-1], generator, method, some, q.dtype)
        yield positive_random(q, omega), positive_random(k, omega)
