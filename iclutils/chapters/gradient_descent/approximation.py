"""Approximation: how far attention by features is from softmax attention.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import approximation
    >>> generator = torch.Generator().manual_seed(0)
    >>> queries, keys, values = torch.randn(3, 2, 6, 4, generator=generator).double()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError, unknown
from ...progress import bar
from .features import (
    Keys,
    Queries,
    Values,
    attention,
    directions,
    feature_attention,
    log_normaliser,
    positive_random,
    scaled,
    taylor,
)

METHODS = ("taylor", "iid", "orthogonal", "unsigned")
AT_ONCE = 2**22  # numbers in the largest tensor of a sweep


class Errors(NamedTuple):
    """Relative errors of attention outputs over draws, batch and queries: median and 90 %."""

    median: Float[Tensor, "scale size"]
    high: Float[Tensor, "scale size"]


def kernel_error(
    queries: Queries,
    keys: Keys,
    values: Values,
    sizes: Sequence[int],
    scales: Sequence[float] = (1.0,),
    *,
    method: str = "iid",
    exact_normaliser: bool = False,
    draws: int = 200,
    generator: torch.Generator | None = None,
) -> Errors:
    """|attention by features - softmax attention| / |softmax attention|.

    Args:
        queries: at scale 1.
        keys: at scale 1.
        values: the same at all scales.
        sizes: numbers of random features; with ``taylor``, degrees.
        scales: queries and keys are multiplied by each.
        method: ``taylor``; random features of directions that are ``iid``, ``orthogonal``, or
            ``unsigned``, orthogonal with the signs of the QR forgotten.
        exact_normaliser: divide by the exact D_q instead of the one of the features.
        draws: independent sets of directions; ``taylor`` draws nothing.
        generator: of the draws.

    Example:
        >>> few = approximation.kernel_error(queries, keys, values, [0, 8], method="taylor")
        >>> bool(few.median[0, 1] < few.median[0, 0])
        True
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if method != "taylor" and (generator is None or draws < 1):
        raise IclError(f"Method {method!r} draws directions: give a generator and draws ≥ 1.")
    if not (sizes and scales):
        raise IclError("Give at least one size and one scale.")
    rows = []
    for scale in bar(scales, "scales"):
        q, k = scale * queries, scale * keys
        exact = attention(q, k, values)
        total = log_normaliser(q, k) if exact_normaliser else None
        q, k = scaled(q), scaled(k)
        for size in sizes:
            errors = [
                (found - exact).norm(dim=-1) / exact.norm(dim=-1)
                for found in _outputs(q, k, values, size, method, total, draws, generator)
            ]
            flat = torch.cat([part.flatten() for part in errors])
            rows.append(flat.quantile(flat.new_tensor([0.5, 0.9])))
    table = torch.stack(rows).unflatten(0, (len(scales), len(sizes)))
    return Errors(table[..., 0], table[..., 1])


def _outputs(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    size: int,
    method: str,
    normaliser: Tensor | None,
    draws: int,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    """Attention by features, (draw, *batch, query, value), as many draws at once as fit."""
    if method == "taylor" or generator is None:
        features = taylor(queries, size), taylor(keys, size)
        yield feature_attention(*features, values, normaliser=normaliser)
        return
    tokens = queries[..., 0].numel() + keys[..., 0].numel()
    at_once = max(1, AT_ONCE // (size * tokens))
    for first in range(0, draws, at_once):
        drawn = directions(
            size,
            queries.shape[-1],
            generator,
            method != "iid",
            draws=min(at_once, draws - first),
            signed=method != "unsigned",
            dtype=queries.dtype,
        )
        features = positive_random(queries, drawn), positive_random(keys, drawn)
        yield feature_attention(*features, values, logarithms=True, normaliser=normaliser)
