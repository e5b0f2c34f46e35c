"""Transformers with weights set by hand that run an algorithm ({cite}`akyurek2023`, section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .layout import Layout, Numerics
from .primitives import Block, aff, assemble, div, mov, mul, products

Labels = Float[Tensor, "*label_batch label_n"]  # one for each x; a mismatch is refused with a cure
Form = Literal["inverse", "gain"]


@dataclass(frozen=True)
class Program:
    """Embedding, blocks and a linear read-out: an in-context regressor. The tokens are the paper's,
    (0, x_i) in column 2i - 1 and (y_i, 0) in column 2i, behind a start token."""

    layout: Layout
    blocks: tuple[Block, ...]
    dtype: torch.dtype = torch.float64

    @property
    def embedding(self) -> Float[Tensor, "channels width"]:
        """Reads a token (y, x)."""
        rows = torch.cat([self.layout.pick("label"), self.layout.pick("input")])
        return rows * self.layout.field_unit

    @property
    def read_out(self) -> Float[Tensor, "width"]:
        """Reads the prediction from the last stream, without a LayerNorm."""
        return self.layout.pick("prediction")[0] / self.layout.field_unit

    @property
    def largest(self) -> float:
        """Largest absolute value of a weight or bias, embeddings included."""
        outer = (self.layout.places, self.embedding, self.read_out)
        return max(*(float(part.abs().max()) for part in outer), *(b.largest for b in self.blocks))

    def to(self, dtype: torch.dtype) -> Program:
        """The same program with every weight rounded to ``dtype``, in which it runs."""
        return replace(self, blocks=tuple(block.to(dtype) for block in self.blocks), dtype=dtype)

    def __call__(self, xs: Float[Tensor, "*batch n d"], ys: Labels) -> Float[Tensor, "*batch n"]:
        """The prediction of each y from the pairs before it and its own x; the first is 0."""
        last = self.stream(xs, ys)[-1]
        return last[..., 1::2, :] @ self.read_out.to(self.dtype)

    def stream(
        self, xs: Float[Tensor, "*batch n d"], ys: Labels
    ) -> list[Float[Tensor, "*batch pos width"]]:
        """The residual stream: embedding, then after each block. The last y is not read."""
        *batch, count, dim = xs.shape
        tokens = torch.zeros(*batch, 2 * count, dim + 1, dtype=self.dtype, device=xs.device)
        tokens[..., 1::2, 1:] = xs.to(self.dtype)
        tokens[..., 2::2, 0] = ys[..., :-1].to(self.dtype)
        places = self.layout.places[: 2 * count].to(tokens)
        stream = [tokens @ self.embedding.to(tokens) + places]
        for block in self.blocks:
            stream.append(block(stream[-1]))
        return stream


def gradient_program(
    dim: int, examples: int, rate: float, penalty: float = 0.0, numerics: Numerics | None = None
) -> Program:
    """One step of gradient descent for each example, w' = w - 2α (x (xᵀw) - x y + λ w), from 0, in
    O(d) channels and neurons: two blocks a step, one for the prediction (theorem 1). Step i, in
    every column after y_i: fetch x = x_i, and calculate xᵀw; then fetch the residual xᵀw - y and a
    flag from the column of y_i, and change w. Columns before it fetch nothing."""
    numerics = numerics or Numerics.improved(torch.float64)
    fields = {"label": 1, "input": dim, "weights": dim, "prediction": 1}
    fields |= {"x": dim, "dot": 1, "residual": 1, "flag": 1}
    layout = Layout(fields, 2 * examples + 2, numerics)
    pick = layout.pick
    x, dot, residual, flag, weights = map(pick, ("x", "dot", "residual", "flag", "weights"))
    sizes = (1.0, math.sqrt(dim) if numerics.balanced else 1.0)

    dots = mul(layout, x[None], weights[:, None], dot[None])
    changes = [products(layout, x, residual.expand_as(x), -2 * rate * weights, sizes)]
    if penalty > 0:
        decay = -2 * rate * penalty * weights
        changes.append(products(layout, weights, flag.expand_as(x), decay))
    used = torch.cat([x, dot, residual, flag])
    changes.append(aff(layout, used, -used))
    read = torch.cat([dot - pick("label"), layout.where[2:]])
    blocks = []
    for example in range(1, examples + 1):
        given, answer = 2 * example - 1, 2 * example
        blocks.append(assemble(layout, mov(layout, pick("input"), x, given), [dots]))
        fetch = mov(layout, read, torch.cat([residual, flag]), answer)
        blocks.append(assemble(layout, fetch, changes))
    return Program(layout, (*blocks, _predict(layout)))


def ridge_program(
    dim: int, examples: int, penalty: float, form: Form = "gain", numerics: Numerics | None = None
) -> Program:
    """A ridge solution, updated with one example at a time by the formula of Sherman and Morrison:
    with A = λI + Σ xxᵀ, ``(A + xxᵀ)⁻¹ = A⁻¹ - A⁻¹x (A⁻¹x)ᵀ / (1 + xᵀA⁻¹x)`` (theorem 2). Four
    blocks for an example, then one (two for ``inverse``), in O(d²) channels and neurons.

    In ``inverse``, the paper's form, the state is A⁻¹, which starts at I/λ, and b = Σ xy; at the
    end w = A⁻¹b. In ``gain`` it is M = λA⁻¹, from I, and w itself (recursive least squares): w + Mx
    e / (λ + xᵀMx) with e = y - xᵀw. Nothing is as large as 1/λ. Example i, with u = Mx (or A⁻¹x):
    columns after y_i fetch x_i and calculate u (and xᵀw), then xᵀu; the column of y_i divides by
    q = 1 + xᵀA⁻¹x; the columns fetch u/q (and e/q) from there and update."""
    gain, numerics = form == "gain", numerics or Numerics.improved(torch.float64)
    pairs = dim * (dim + 1) // 2 if gain else dim**2
    fields = {"label": 1, "input": dim, "weights": dim, "prediction": 1}
    fields |= {"matrix": pairs, "x": dim, "u": dim, "growth": 1, "divided": dim}
    fields |= {"dot": 1} if gain else {"sum": dim}  # xᵀw, or Σ xy
    layout = Layout(fields | {"fetched": 1}, 2 * examples + 2, numerics)  # e/q, or y, is fetched
    pick = layout.pick
    x, u, weights, growth = map(pick, ("x", "u", "weights", "growth"))
    divided, fetched, label = map(pick, ("divided", "fetched", "label"))

    square = torch.arange(dim**2).view(dim, dim)  # where each entry of the matrix is stored
    upper = torch.triu_indices(dim, dim)
    if gain:
        square[upper[0], upper[1]] = square[upper[1], upper[0]] = torch.arange(pairs)
    matrix = pick("matrix")[square]

    # Typical sizes of the factors; |u/q| and |e/q| are at most about 1 / (2 sqrt(λ)).
    steep = 1 / (2 * math.sqrt(penalty))
    size = {"matrix": 0.25, "u": 1.0, "divided": steep / 4, "fetched": steep, "sum": 1.0}
    if not gain:
        size |= {"matrix": 0.25 / penalty, "u": 1 / penalty}
        size |= {"fetched": math.sqrt(dim), "sum": float(examples)}
    size = size if numerics.balanced else dict.fromkeys(size, 1.0)

    multiply = [mul(layout, matrix, x[:, None], u[:, None], (size["matrix"], 1.0))]
    if gain:  # M is kept as M - I, so that it need not be set at first
        multiply += [aff(layout, x, u), mul(layout, x[None], weights[:, None], pick("dot")[None])]
    else:
        multiply.append(aff(layout, x / penalty, u))
    dots = mul(layout, x[None], u[:, None], growth[None], (1.0, size["u"]))

    rows, cols = upper if gain else torch.cartesian_prod(*[torch.arange(dim)] * 2).T
    sizes = (size["u"], size["divided"])
    update = [products(layout, u[rows], divided[cols], -matrix[rows, cols], sizes)]
    kept, factor = (weights, u) if gain else (pick("sum"), x)
    sizes = (1.0, size["fetched"])
    update.append(products(layout, factor, fetched.expand_as(x), kept, sizes))
    used = torch.cat([x, u, growth, divided, fetched, *([pick("dot")] if gain else [])])
    update.append(aff(layout, used, -used))

    scale = penalty if gain else 1.0
    read = torch.cat([u, label - pick("dot")]) / scale if gain else u
    write = torch.cat([divided, fetched]) if gain else divided
    blocks: list[Block] = []
    for example in range(1, examples + 1):
        given, answer = 2 * example - 1, 2 * example
        blocks += [
            assemble(layout, mov(layout, pick("input"), x, given), multiply),
            assemble(layout, None if gain else mov(layout, label, fetched, answer), [dots]),
            assemble(layout, div(layout, layout.where[2:] + growth / scale, answer)),
            assemble(layout, mov(layout, read, write, answer), update),
        ]
    if not gain:
        sizes = (size["matrix"], size["sum"])
        solve = mul(layout, matrix, kept[:, None], weights[:, None], sizes)
        blocks.append(assemble(layout, None, [solve, aff(layout, kept / penalty, weights)]))
    return Program(layout, (*blocks, _predict(layout)))


def _predict(layout: Layout) -> Block:
    """The block that predicts w·x."""
    query, weights = layout.pick("input")[None], layout.pick("weights")[:, None]
    return assemble(layout, None, [mul(layout, query, weights, layout.pick("prediction")[None])])
