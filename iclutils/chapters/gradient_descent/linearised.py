"""When softmax attention is close to linear attention: where its scores are small.

To first order in the scores, softmax attention over n keys is

    mean_i v_i + (1/n) Σ_i (v_i - v̄) (k_i - k̄)·q/√d,

the mean value and a linear attention of centred values and keys: one step of gradient descent on
least squares, with an intercept, at the rate 1/√d (``descent``: the pairs are the centred (k_i,
v_i)). What is left out is of second order in the scores.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import features, linearised
    >>> generator = torch.Generator().manual_seed(0)
    >>> queries, keys, values = torch.randn(3, 4, 2, generator=generator).double()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from .features import Keys, Queries, Values, attention, checked_values, scores


def linearised(queries: Queries, keys: Keys, values: Values) -> Float[Tensor, "*batch query value"]:
    """The first-order expansion of softmax attention, above.

    Example:
        >>> small = 1e-4 * queries
        >>> exact = features.attention(small, keys, values)
        >>> torch.allclose(linearised.linearised(small, keys, values), exact, atol=1e-6)
        True
    """
    mean = checked_values(keys, values).mean(-2, keepdim=True)
    exponent = scores(queries, keys)
    centred = exponent - exponent.mean(-1, keepdim=True)
    return mean + centred @ (values - mean) / keys.shape[-2]


class Departure(NamedTuple):
    """At each scale, root mean squares over batch, queries and channels."""

    error: Float[Tensor, "scale"]  # softmax attention - linearised, grows as scale²
    moved: Float[Tensor, "scale"]  # softmax attention - mean value, grows as the scale
    spread: Float[Tensor, "scale"]  # the standard deviation of a query's scores


def linearisation_error(
    queries: Queries, keys: Keys, values: Values, scales: Sequence[float]
) -> Departure:
    """How far the expansion is from attention, with all scores multiplied by each scale.

    ``error`` / ``moved`` is the part of what attention does that is not linear.

    Example:
        >>> found = linearised.linearisation_error(queries, keys, values, [0.01, 1.0])
        >>> bool(found.error[0] < found.error[1])
        True
    """
    if not scales:
        raise IclError("Give at least one scale.")
    rows = []
    for scale in scales:
        exact = attention(scale * queries, keys, values)
        error = exact - linearised(scale * queries, keys, values)
        moved = exact - values.mean(-2, keepdim=True)
        spread = scores(scale * queries, keys).var(-1, correction=0).mean()
        rows.append(torch.stack([error.square().mean(), moved.square().mean(), spread]).sqrt())
    return Departure(*torch.stack(rows, -1))
