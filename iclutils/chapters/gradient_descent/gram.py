"""Features from the Gram matrix: exact and finite, for keys and queries of any length.

``features.taylor`` needs too many features where heads are wide or their scores large. One query
and n keys span n + 1 dimensions, so as many features have all their inner products
exp(a·b / sqrt(d)), and a step of gradient descent in them is one in the space of all features.
Computed in float64.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import gram
    >>> from iclutils.chapters.gradient_descent.features import attention
    >>> generator = torch.Generator().manual_seed(0)
    >>> keys, values = torch.randn(2, 5, 3, generator=generator).double()
    >>> query = torch.randn(3, generator=generator).double()
    >>> demos = torch.tensor([True, True, True, False, False])
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError
from .contrastive import checked_demos
from .explicit import descend
from .features import checked_values, scores

SMALLEST = 1e-290  # D in scaled features; below, float64 begins to lose digits


class Learned(NamedTuple):
    """An explicit linear model before and after its step: what it says to query and keys.

    The similarities are v_i·W φ(k_i), one for each key. Their errors are relative to the largest
    of a context; kernels (``contrastive.alignment``) keep the small ones, too.
    """

    before: Float[Tensor, "*batch value"]
    after: Float[Tensor, "*batch value"]
    similarity_before: Float[Tensor, "*batch key"]
    similarity_after: Float[Tensor, "*batch key"]


def learned(
    query: Float[Tensor, "*batch channel"],
    keys: Float[Tensor, "*batch key channel"],
    values: Float[Tensor, "*batch key value"],
    demos: Bool[Tensor, "*demos"],
    allowed: Bool[Tensor, "*allowed"],
    rate: float = 1.0,
) -> Learned:
    """W from W_0 by ``rate`` times autograd's gradient of the contrastive loss.

    The loss is -1/(rate · D) Σ v_i·W φ(k_i) over the demonstrations that the query may look at.

    Args:
        query: one query of each context.
        keys: all keys.
        values: all values.
        demos: which keys are demonstrations, (…, key).
        allowed: which keys the query may look at, (…, key).
        rate: η.

    Example:
        >>> found = gram.learned(query, keys, values, demos, torch.ones(5, dtype=torch.bool))
        >>> torch.allclose(found.after, attention(query[None], keys, values)[0])
        True
    """
    if not rate > 0:
        raise IclError(f"A learning rate must be above 0; got {rate}.")
    scores(query[..., None, :], keys, allowed[..., None, :])  # refuses what cannot be
    chosen = checked_demos(demos, keys)
    v = checked_values(keys, values).double()
    phi_q, phi_k, log_scale = features(query, keys)
    total = ((phi_k @ phi_q[..., None])[..., 0] * allowed).sum(-1)
    if not bool((total > SMALLEST).all()):
        raise IclError(
            "Queries and keys are too long or too far apart for features in float64: subtract the "
            "mean key from all keys, or use contrastive.dual_step, which needs no features."
        )

    def agreement(matrix: Tensor) -> Tensor:
        return (v * (phi_k @ matrix.mT)).sum(-1)

    def loss(matrix: Tensor) -> Tensor:
        towards = (agreement(matrix) * (allowed & chosen)).sum(-1)
        return -(towards / (rate * total)).sum()

    start = (v * (allowed & ~chosen)[..., None]).mT @ phi_k / total[..., None, None]
    final = descend(loss, start, rate)
    factor = log_scale.exp()[..., None]
    return Learned(
        (start @ phi_q[..., None])[..., 0],
        (final @ phi_q[..., None])[..., 0],
        agreement(start) * factor,
        agreement(final) * factor,
    )


def features(
    query: Float[Tensor, "*batch channel"], keys: Float[Tensor, "*batch key channel"]
) -> tuple[
    Float[Tensor, "*batch feature"],
    Float[Tensor, "*batch key feature"],
    Float[Tensor, "*batch"],
]:
    """φ(q) and φ(k) of one query and its keys, scaled so that no entry exceeds 1.

    The first coordinate is along φ(q), so that products with the query keep their relative
    precision however small they are; the others are a square root of what is left of the keys'
    Gram matrix.

    Returns:
        exp(-a) φ(q), exp(-b) φ(k), and b - a. So k·q / sqrt(d) is the log of their product plus
        a + b, and a similarity of a W that was made with D in these features is exp(a - b) of
        the true one. a is half of |q|² / sqrt(d), b that of the longest key.

    Example:
        >>> q, k, shift = gram.features(query, keys)
        >>> bool(q.abs().max() <= 1 + 1e-9), k.shape[0]
        (True, 5)
    """
    q, k = query.double(), keys.double()
    root = math.sqrt(query.shape[-1])
    half_q, half_k = ((x * x).sum(-1) / (2 * root) for x in (q, k))
    longest = half_k.amax(-1)
    cross = (k @ q[..., None])[..., 0] / root - half_q[..., None]
    cosine = (cross - half_k).exp()  # of φ(k) and φ(q)
    gram = (k @ k.mT / root - half_k[..., None] - half_k[..., None, :]).exp()
    values, vectors = torch.linalg.eigh(gram - cosine[..., None] * cosine[..., None, :])
    length = (half_k - longest[..., None]).exp()
    others = vectors * values.clamp_min(0).sqrt()[..., None, :] * length[..., None]
    phi_k = torch.cat([(cross - longest[..., None]).exp()[..., None], others], -1)
    phi_q = torch.zeros_like(phi_k[..., 0, :])
    phi_q[..., 0] = 1.0
    return phi_q, phi_k, longest - half_q
