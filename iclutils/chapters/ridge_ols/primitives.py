"""The primitives of {cite}`akyurek2023`, lemma 1, as weights of a standard block.

``mov`` and ``div`` give the weights of an attention head, ``mul`` and ``aff`` those of neurons.
They read and write rows over the channels of a ``Layout``. Writing adds to the stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from .layout import LN_EPSILON, Gelu, Layout, stencil

MARGIN = 60.0  # by which the column to fetch from wins the softmax: e^-60 is nothing in float64


@dataclass(frozen=True)
class Block:
    """A GPT-2 block of one head, with the names and shapes of the weights in its checkpoints."""

    weights: dict[str, Tensor]
    gelu: Gelu = "gelu"

    def __call__(self, x: Float[Tensor, "*batch pos width"]) -> Float[Tensor, "*batch pos width"]:
        """The residual stream after the block, in the precision of the weights."""
        query, key, value = self._linear(self._norm(x, "ln_1"), "attn.c_attn").chunk(3, -1)
        future = torch.ones(*[x.shape[-2]] * 2, dtype=torch.bool, device=x.device).triu(1)
        scores = (query @ key.mT / math.sqrt(x.shape[-1])).masked_fill(future, -math.inf)
        x = x + self._linear(scores.softmax(-1) @ value, "attn.c_proj")
        kind = "none" if self.gelu == "gelu" else "tanh"
        hidden = functional.gelu(self._linear(self._norm(x, "ln_2"), "mlp.c_fc"), approximate=kind)
        return x + self._linear(hidden, "mlp.c_proj")

    def to(self, dtype: torch.dtype) -> Block:
        """The same block with every weight rounded to ``dtype``."""
        return Block({name: weight.to(dtype) for name, weight in self.weights.items()}, self.gelu)

    @property
    def largest(self) -> float:
        """Largest absolute value of a weight, bias or gain."""
        return max(float(weight.abs().max()) for weight in self.weights.values())

    def _norm(self, x: Tensor, name: str) -> Tensor:
        gain, shift = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], gain, shift, LN_EPSILON)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


class Head(NamedTuple):
    """Weights of an attention head, without the factor for its size."""

    query: Float[Tensor, "width 3"]
    query_bias: Float[Tensor, "3"]
    key: Float[Tensor, "width 3"]
    value: Float[Tensor, "width count"]
    out: Float[Tensor, "count width"]


class Neurons(NamedTuple):
    """Weights of a few neurons of an MLP."""

    into: Float[Tensor, "width neurons"]
    out: Float[Tensor, "neurons width"]


def mov(
    layout: Layout,
    read: Float[Tensor, "count width"],
    write: Float[Tensor, "count width"],
    source: int,
    target: int | None = None,
) -> Head:
    """Add what column ``source`` reads to column ``target``, or to all from ``source`` on. The
    score is positive for the source alone and 0 for the start token, which holds nothing."""
    gap = 1 - math.cos(2 * math.pi / layout.columns)  # of the cosine, to the next column
    query = torch.zeros(layout.width, 3, dtype=torch.float64)
    bias = layout.angle(source) - torch.tensor([0, 0, 2 - gap / 2]).double()
    if target is not None:
        query[:, 2] = layout.reading(layout.angle(target)[None, :2] @ layout.where[:2])[:, 0]
        bias[2] -= 1
    sharp = 2 * MARGIN / gap
    query, key, bias = _share(query * sharp, layout.reading(layout.where), bias * sharp)
    return Head(query, bias, key, *_share(layout.reading(read), write * layout.field_unit))


def _share(left: Tensor, right: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
    """Two factors of a product, scaled against one another until neither is the larger."""
    largest = max(float(part.abs().max()) for part in (left, *bias))
    factor = math.sqrt(float(right.abs().max()) / largest) if largest > 0 else 0.0
    factor = factor or 1.0  # nothing read, or nothing written
    return left * factor, right / factor, *(part * factor for part in bias)


def products(
    layout: Layout,
    left: Float[Tensor, "count width"],
    right: Float[Tensor, "count width"],
    write: Float[Tensor, "count width"],
    sizes: tuple[float, float] = (1.0, 1.0),
) -> Neurons:
    """Add left_i times right_i along the row write_i, for every i; rows to write may repeat. The
    factors are divided by ``sizes``, their typical standard deviations, before the GELU."""
    x, y, weight = stencil(layout.numerics.order, layout.numerics.eps)
    into = torch.einsum("wi,k->wik", layout.reading(left) / sizes[0], x)
    into += torch.einsum("wi,k->wik", layout.reading(right) / sizes[1], y)
    out = torch.einsum("iw,k->ikw", write, weight) * (sizes[0] * sizes[1] * layout.field_unit)
    return Neurons(into.flatten(1), out.flatten(0, 1))


def mul(
    layout: Layout,
    left: Float[Tensor, "a b width"],
    right: Float[Tensor, "b c width"],
    write: Float[Tensor, "a c width"],
    sizes: tuple[float, float] = (1.0, 1.0),
) -> Neurons:
    """Add the product of two matrices, in every column; ``sizes`` as for ``products``."""
    every = (*left.shape[:2], *right.shape[1:])
    parts = (left[:, :, None], right[None], write[:, None])
    first, second, into = (part.expand(every).reshape(-1, layout.width) for part in parts)
    return products(layout, first, second, into, sizes)


def aff(
    layout: Layout, read: Float[Tensor, "count width"], write: Float[Tensor, "count width"]
) -> Neurons:
    """Add what is read, a linear map of fields; G(z) - G(-z) is z, exactly."""
    into, out = _share(layout.reading(read), write * layout.field_unit)
    return Neurons(torch.cat([into, -into], 1), torch.cat([out, -out]))


def div(layout: Layout, by: Float[Tensor, "1 width"], column: int) -> Head:
    """Divide by |by| all that is read in one column from here on: the head multiplies its address,
    and every LayerNorm divides by that. Other columns find this one if ``by`` is positive."""
    return mov(layout, by - layout.where[2:], layout.address(column), column, column)


def assemble(layout: Layout, head: Head | None = None, neurons: Sequence[Neurons] = ()) -> Block:
    """One block out of a head and neurons; without a head its attention reads nothing."""
    width = layout.width
    inner = torch.zeros(3, width, width, dtype=torch.float64)
    bias = torch.zeros(3, width, dtype=torch.float64)
    project = torch.zeros(width, width, dtype=torch.float64)
    if head:
        root = width**0.25  # the scores are divided by its square
        inner[0, :, :3], bias[0, :3] = head.query * root, head.query_bias * root
        inner[1, :, :3] = head.key * root
        inner[2, :, : head.value.shape[1]] = head.value
        project[: len(head.out)] = head.out
    empty = torch.zeros(width, dtype=torch.float64)
    parts = neurons or [Neurons(empty[:, None], empty[None])]
    into = torch.cat([part.into for part in parts], 1)
    weights = {
        "attn.c_attn.weight": inner.permute(1, 0, 2).reshape(width, 3 * width),
        "attn.c_attn.bias": bias.flatten(),
        "attn.c_proj.weight": project,
        "attn.c_proj.bias": empty,
        "mlp.c_fc.weight": into,
        "mlp.c_fc.bias": into.new_zeros(into.shape[1]),
        "mlp.c_proj.weight": torch.cat([part.out for part in parts]),
        "mlp.c_proj.bias": empty,
    }
    for norm in ("ln_1", "ln_2"):
        weights |= {f"{norm}.weight": empty + layout.gain, f"{norm}.bias": empty}
    return Block(weights, layout.numerics.gelu)
