"""Subspaces: whether two heads write into the same directions of the residual stream.

A head can only write into the row space of its ``W_O``. The projection kernel of two such spaces
is the sum of the squared cosines of their principal angles: 0 if no direction is shared, d_head if
all are. Two random spaces overlap too, so it is read against their mean and deviation. Computed by
TransformerLens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...interp.graph import Node, all_heads
from ...models import (
    TransformerBridge,
    orthonormal_subspace,
    projection_kernel,
    random_projection_kernel_moments,
)


@dataclass(frozen=True)
class Overlap:
    """Overlap of output spaces, and what random spaces of dimension d_head would have.

    A head that writes nothing has no space: NaN. One whose ``W_O`` is not of full rank has a
    smaller space, to which the random values do not apply.
    """

    kernel: Float[Tensor, "head head"]
    largest_cosine: Float[Tensor, "head head"]
    expected: float
    sd: float


def output_overlap(model: TransformerBridge, heads: Sequence[Node] | None = None) -> Overlap:
    """Overlap of the output spaces of some heads, of all if omitted, in the order given."""
    known = all_heads(model)
    heads = known if heads is None else list(heads)
    if any(node not in known for node in heads):
        raise IclError("Output spaces belong to heads: name them by graph.head(layer, head).")
    weights, spaces = model.W_O, []
    for node in heads:
        columns = weights[node.layer, node.head].T
        spaces.append(orthonormal_subspace(columns) if bool(columns.any()) else None)
    kernel, cosine = torch.full((2, len(heads), len(heads)), torch.nan)
    for i, one in enumerate(spaces):
        for j, two in enumerate(spaces[: i + 1]):
            if one is not None and two is not None:
                found = projection_kernel(one, two, check_orthonormal=False)
                kernel[i, j] = kernel[j, i] = found.score
                cosine[i, j] = cosine[j, i] = found.cosines.max()
    chance = random_projection_kernel_moments(model.cfg.d_model, model.cfg.d_head)
    return Overlap(kernel, cosine, chance.mean, chance.variance**0.5)
