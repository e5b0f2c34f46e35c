"""Transformers with weights set by hand that run an algorithm ({cite}`akyurek2023`, section 3).

``mov``, ``mul``, ``div`` and ``aff`` are the paper's primitives (lemma 1), each as weights of one
GPT-2 block; ``gradient_program`` and ``ridge_program`` put them together (theorems 1 and 2). All is
in float64: products come from the small curvature of a GELU near 0.

Column t of the stream has the address ±(cos θ, sin θ, 1), θ = 2π t / columns, so large that it
alone sets the scale of a LayerNorm. Column 0, the start token, has *rest*: columns with nothing to
fetch attend to it. *zero* is subtracted in every reading, as the LayerNorm subtracts the mean."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

LN_EPSILON = 1e-5  # as in GPT-2
ADDRESS, REST, ZERO, FIRST = slice(0, 6), slice(6, 8), slice(8, 9), 9  # channels; fields follow
MARGIN = 60.0  # by which the column to fetch from wins the softmax: e^-60 is nothing in float64
DOUBLE = torch.float64

Rows = Float[Tensor, "count width"]  # each reads a number from the stream, or writes one to it
Stream = Float[Tensor, "*batch pos width"]
Labels = Float[Tensor, "*label_batch label_n"]


# How a construction calculates; a LayerNorm is off by |fields|² / (8 RATIO²), relatively.
ORDER, EPS = 6, 0.047  # stencil of a product, at the scale where truncation equals rounding
RATIO = 1e7  # of an address to a field of size 1
GAIN = math.sqrt(RATIO)  # weight of every LayerNorm: a field of 1 is 1 / GAIN in the stream


def stencil(order: int, eps: float) -> Float[Tensor, "3 neurons"]:
    """Return (left, right, out) of GELUs G that multiply: ``xy ≈ Σ out_k G(left_k x + right_k y)``,
    second differences of G around 0. Order 0 is the paper's (lemma 1) at the scale ε,
    ``sqrt(π/2) (G(x + y) - G(x) - G(y))``. Order J ≥ 1 takes 4 J GELUs; its error is of ε^2J."""
    bend = math.sqrt(math.pi / 2)
    rows = []
    if order == 0:
        rows = [(eps, eps, bend / eps**2), (eps, 0, -bend / eps**2), (0, eps, -bend / eps**2)]
    for step in range(1, order + 1):
        scale = step * eps / order
        # weight of the second difference over ``step`` steps in the central one of order 2J
        ways = math.factorial(order - step) * math.factorial(order + step)
        share = (-1) ** (step + 1) * 2 * math.factorial(order) ** 2 / ways
        out = bend * share / (4 * scale**2)
        rows += [(scale, scale, out), (-scale, -scale, out)]
        rows += [(scale, -scale, -out), (-scale, scale, -out)]
    return torch.tensor(rows, dtype=DOUBLE).T


@dataclass(frozen=True)
class Layout:
    """Channels of ``columns`` columns, the start token included; ``fields`` has their sizes."""

    fields: Mapping[str, int]
    columns: int

    @property
    def width(self) -> int:
        """Return the channels of the residual stream."""
        return FIRST + sum(self.fields.values())

    def pick(self, name: str) -> Float[Tensor, "size width"]:
        """Return rows that read or write a field; ``pick("x") - pick("y")`` reads a difference."""
        names = list(self.fields)
        start = FIRST + sum(self.fields[field] for field in names[: names.index(name)])
        return self._rows(slice(start, start + self.fields[name]))

    @property
    def where(self) -> Float[Tensor, "3 width"]:
        """Return rows that read (cos θ, sin θ, 1), all 0 in the start token."""
        return self._rows(ADDRESS)[:3] / RATIO

    @property
    def angles(self) -> Float[Tensor, "columns 3"]:
        """Return (cos θ, sin θ, 1) of every column."""
        theta = 2 * math.pi * torch.arange(self.columns, dtype=DOUBLE) / self.columns
        return torch.stack([theta.cos(), theta.sin(), torch.ones_like(theta)], 1)

    @property
    def addresses(self) -> Float[Tensor, "columns width"]:
        """Return rows that add a column's address, once for each unit written."""
        both = torch.cat([self.angles, -self.angles], 1)
        return both @ self._rows(ADDRESS) * RATIO

    @property
    def places(self) -> Float[Tensor, "columns width"]:
        """Return the positional embedding: rest in the start token, then each column's address."""
        rest = self._rows(REST)[:1] - self._rows(REST)[1:]
        rest = rest * math.sqrt(2) * RATIO
        return torch.cat([rest, self.addresses[1:]]) / GAIN

    def stream(self, **fields: Float[Tensor, "*batch pos _"]) -> Stream:
        """Return a residual stream: places, and the values of fields, from column 0 on."""
        values = torch.cat(list(fields.values()), -1) / GAIN
        return self.places[: values.shape[-2]] + values @ torch.cat([*map(self.pick, fields)])

    def value(self, stream: Stream, name: str) -> Float[Tensor, "*batch pos size"]:
        """Return a field's value in a stream."""
        return stream @ self.pick(name).T * GAIN

    def reading(self, rows: Rows) -> Float[Tensor, "width count"]:
        """Return the matrix that reads rows behind a LayerNorm."""
        rows = rows - rows.sum(1, keepdim=True) * self._rows(ZERO)
        norm = 4 * (RATIO / GAIN) ** 2  # of an address, squared
        return rows.T * math.sqrt(norm / self.width + LN_EPSILON)

    def _rows(self, channels: slice) -> Rows:
        return torch.eye(self.width, dtype=DOUBLE)[channels]


class Head(NamedTuple):
    """Weights of an attention head, whose scores are divided by the root of the width."""

    query: Float[Tensor, "width 3"]
    query_bias: Float[Tensor, "3"]
    key: Float[Tensor, "width 3"]
    value: Float[Tensor, "width count"]
    out: Rows


class Neurons(NamedTuple):
    """Weights of a few neurons of an MLP."""

    into: Float[Tensor, "width neurons"]
    out: Float[Tensor, "neurons width"]


def mov(layout: Layout, read: Rows, write: Rows, source: int, target: int | None = None) -> Head:
    """Add what column ``source`` reads to column ``target``, or to all from ``source`` on. The
    score is positive for the source alone and 0 for the start token, which holds nothing."""
    gap = 1 - math.cos(2 * math.pi / layout.columns)  # of the cosine, to the next column
    query = torch.zeros(layout.width, 3, dtype=DOUBLE)
    bias = layout.angles[source] - torch.tensor([0, 0, 2 - gap / 2], dtype=DOUBLE)
    if target is not None:
        query[:, 2] = layout.reading(layout.angles[target, None, :2] @ layout.where[:2])[:, 0]
        bias[2] -= 1
    sharp = 2 * MARGIN / gap
    query, key, bias = _share(query * sharp, layout.reading(layout.where), bias * sharp)
    root = layout.width**0.25  # the scores are divided by its square
    value, out = _share(layout.reading(read), write / GAIN)
    return Head(query * root, bias * root, key * root, value, out)


def mul(
    layout: Layout,
    left: Float[Tensor, "a b width"],
    right: Float[Tensor, "b c width"],
    write: Float[Tensor, "a c width"],
    sizes: tuple[float, float] = (1.0, 1.0),
) -> Neurons:
    """Add the product of two matrices, in every column. Before the GELU the factors are
    divided by ``sizes``, their typical deviations."""
    every = (*left.shape[:2], *right.shape[1:])  # (a, b, c, width): one product of numbers for each
    parts = (left[:, :, None], right[None], write[:, None])
    first, second, out = (part.expand(every).flatten(0, 2) for part in parts)
    x, y, weight = stencil(ORDER, EPS)
    into = torch.einsum("wi,k->wik", layout.reading(first) / sizes[0], x)
    into += torch.einsum("wi,k->wik", layout.reading(second) / sizes[1], y)
    out = torch.einsum("iw,k->ikw", out, weight) * (sizes[0] * sizes[1] / GAIN)
    return Neurons(into.flatten(1), out.flatten(0, 1))


def aff(layout: Layout, read: Rows, write: Rows) -> Neurons:
    """Add what is read, a linear map of fields; G(z) - G(-z) is z, exactly."""
    into, out = _share(layout.reading(read), write / GAIN)
    return Neurons(torch.cat([into, -into], 1), torch.cat([out, -out]))


def div(layout: Layout, by: Float[Tensor, "1 width"], column: int) -> Head:
    """Divide by |by| all that is read in one column from here on: the head multiplies its address,
    and every LayerNorm divides by that. Other columns find this one if ``by`` is positive."""
    return mov(layout, by - layout.where[2:], layout.addresses[column, None], column, column)


def _share(left: Tensor, right: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
    """Scale two factors of a product against one another until neither is the larger."""
    largest = max(float(part.abs().max()) for part in (left, *bias))
    factor = math.sqrt(float(right.abs().max()) / largest) if largest > 0 else 0.0
    factor = factor or 1.0  # nothing read, or nothing written
    return left * factor, right / factor, *(part * factor for part in bias)


@dataclass(frozen=True)
class Block:
    """A GPT-2 block of at most one head. Every weight that is not here is 0."""

    layout: Layout
    head: Head | None
    neurons: Neurons

    def __call__(self, x: Stream) -> Stream:
        """Return the residual stream after the block."""
        if self.head:
            query, query_bias, key, value, out = self.head
            seen = self._norm(x)
            scores = (seen @ query + query_bias) @ (seen @ key).mT / math.sqrt(x.shape[-1])
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            x = x + scores.masked_fill(future, -math.inf).softmax(-1) @ (seen @ value) @ out
        return x + functional.gelu(self._norm(x) @ self.neurons.into) @ self.neurons.out

    def _norm(self, x: Stream) -> Stream:
        return functional.layer_norm(x, x.shape[-1:], eps=LN_EPSILON) * GAIN


def assemble(layout: Layout, head: Head | None = None, *neurons: Neurons) -> Block:
    """Return one block out of a head, or none, and any number of neurons."""
    nothing = torch.zeros(layout.width, 0, dtype=DOUBLE)
    into = torch.cat([nothing, *(part.into for part in neurons)], 1)
    return Block(layout, head, Neurons(into, torch.cat([nothing.mT, *(n.out for n in neurons)])))


@dataclass(frozen=True)
class Program:
    """An in-context regressor of blocks. Its tokens are the paper's, (0, x_i) in column 2i - 1 and
    (y_i, 0) in column 2i, behind a start token."""

    layout: Layout
    blocks: tuple[Block, ...]

    def __call__(self, xs: Float[Tensor, "*batch n d"], ys: Labels) -> Float[Tensor, "*batch n"]:
        """Predict each y from the pairs before it and its own x; the first prediction is 0."""
        return self.layout.value(self.stream(xs, ys)[-1], "prediction")[..., 1::2, 0]

    def stream(self, xs: Float[Tensor, "*batch n d"], ys: Labels) -> list[Stream]:
        """Return the residual stream: embedding, then after each block. The last y is not read."""
        inputs = xs.new_zeros(*ys.shape[:-1], 2 * ys.shape[-1], xs.shape[-1], dtype=DOUBLE)
        labels = torch.zeros_like(inputs[..., :1])
        inputs[..., 1::2, :], labels[..., 2::2, 0] = xs.double(), ys[..., :-1].double()
        streams = [self.layout.stream(input=inputs, label=labels)]
        for block in self.blocks:
            streams.append(block(streams[-1]))
        return streams


def gradient_program(dim: int, examples: int, rate: float) -> Program:
    """Take a step of gradient descent for each example, w' = w - 2α (x (xᵀw) - x y), from 0, in
    O(d) channels and neurons: two blocks a step, one for the prediction (theorem 1). Step i, in
    every column after y_i: fetch x = x_i, and calculate xᵀw; then fetch the residual xᵀw - y from
    the column of y_i, and change w."""
    fields = {"label": 1, "input": dim, "weights": dim, "prediction": 1}
    fields |= {"x": dim, "dot": 1, "residual": 1}
    layout = Layout(fields, 2 * examples + 2)
    label, query, weights, _, x, dot, residual = map(layout.pick, fields)
    used, change = torch.cat([x, dot, residual]), -2 * rate * weights[:, None]
    dots = mul(layout, x[None], weights[:, None], dot[None])
    changes = [
        mul(layout, x[:, None], residual[None], change, (1.0, math.sqrt(dim))),
        aff(layout, used, -used),
    ]
    blocks = []
    for column in range(1, 2 * examples, 2):
        blocks.append(assemble(layout, mov(layout, query, x, column), dots))
        blocks.append(assemble(layout, mov(layout, dot - label, residual, column + 1), *changes))
    return Program(layout, (*blocks, _predict(layout)))


def ridge_program(dim: int, examples: int, penalty: float) -> Program:
    """Update a ridge solution with one example at a time by the formula of Sherman and Morrison,
    ``(A + xxᵀ)⁻¹ = A⁻¹ - A⁻¹x (A⁻¹x)ᵀ / (1 + xᵀA⁻¹x)`` with A = λI + Σ xxᵀ (theorem 2): four
    blocks for an example, then one, in O(d²) channels and neurons.

    The state is M = λA⁻¹, from I, and w itself (recursive least squares), so that nothing is as
    large as 1/λ: w' = w + u e / q and M' = M - u uᵀ / q, with u = Mx, q = λ + xᵀu and e = y - xᵀw.
    Columns after y_i fetch x_i and calculate u and xᵀw, then xᵀu; the column of y_i divides by q/λ;
    the columns fetch u/q and e/q from there and update."""
    fields = {"label": 1, "input": dim, "weights": dim, "prediction": 1, "matrix": dim**2}
    fields |= {"x": dim, "u": dim, "dot": 1, "growth": 1, "divided": dim, "error": 1}
    layout = Layout(fields, 2 * examples + 2)
    picked = map(layout.pick, fields)
    label, query, weights, _, matrix, x, u, dot, growth, divided, error = picked
    matrix = matrix.unflatten(0, (dim, dim))  # M - I, so that it need not be set
    used = torch.cat([x, u, dot, growth, divided, error])
    steep = 1 / (2 * math.sqrt(penalty))  # |u/q| and |e/q| are at most about this
    multiply = [
        mul(layout, matrix, x[:, None], u[:, None], (0.25, 1.0)),
        aff(layout, x, u),
        mul(layout, x[None], weights[:, None], dot[None]),
    ]
    dots = mul(layout, x[None], u[:, None], growth[None])
    update = [
        mul(layout, u[:, None], divided[None], -matrix, (1.0, steep / 4)),
        mul(layout, u[:, None], error[None], weights[:, None], (1.0, steep)),
        aff(layout, used, -used),
    ]
    read, write = torch.cat([u, label - dot]) / penalty, torch.cat([divided, error])
    blocks = []
    for column in range(1, 2 * examples, 2):
        blocks += [
            assemble(layout, mov(layout, query, x, column), *multiply),
            assemble(layout, None, dots),
            assemble(layout, div(layout, layout.where[2:] + growth / penalty, column + 1)),
            assemble(layout, mov(layout, read, write, column + 1), *update),
        ]
    return Program(layout, (*blocks, _predict(layout)))


def _predict(layout: Layout) -> Block:
    """Return the block that predicts w·x."""
    query, weights = layout.pick("input")[None], layout.pick("weights")[:, None]
    return assemble(layout, None, mul(layout, query, weights, layout.pick("prediction")[None]))
