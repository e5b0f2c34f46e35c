"""Ridge: a program that updates a ridge solution with one example at a time.

Source: Akyurek et al. 2023 {cite}`akyurek2023`, theorem 2, by the formula of Sherman and Morrison:
with A = λI + Σ xxᵀ, ``(A + xxᵀ)⁻¹ = A⁻¹ - A⁻¹x (A⁻¹x)ᵀ / (1 + xᵀA⁻¹x)``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from ...errors import unknown
from .block import Block
from .layout import Layout, Numerics
from .primitives import Neurons, aff, assemble, mov, mul, products
from .program import Program, check, columns

Form = Literal["inverse", "gain"]
FORMS = ("inverse", "gain")


def ridge_program(
    dim: int,
    examples: int,
    penalty: float,
    form: Form = "gain",
    numerics: Numerics | None = None,
) -> Program:
    """Four blocks for an example, then one (two for ``inverse``), in O(d²) channels and neurons.

    In ``inverse``, the paper's form, the state is A⁻¹, which starts at I/λ, and b = Σ xy; at the
    end w = A⁻¹b. In ``gain`` it is M = λA⁻¹, which starts at I and only shrinks, symmetric by
    storage, and w itself, which is corrected by its error e = y - xᵀw (recursive least squares):
    w + Mx e / (λ + xᵀMx). No quantity is as large as 1/λ, and none is recovered at the end as the
    difference of large ones.

    Example i, in every column after y_i, with u = Mx (or A⁻¹x):

    1. fetch x = x_i; u, and for ``gain`` xᵀw
    2. xᵀu
    3. the column of y_i, and it alone, multiplies its address by q = 1 + xᵀA⁻¹x; this column is
       not needed after this example
    4. fetch u (and e) from there, which the LayerNorm divides by q; the update

    Columns that come before y_i cannot see it and fetch nothing in 4: they stay as they are.

    Args:
        dim: d.
        examples: n; the program reads n + 1 pairs, the query's included.
        penalty: λ.
        form: ``gain`` or ``inverse``.
        numerics: how it calculates; ``Numerics.improved(torch.float64)`` if omitted.
    """
    check(dim, examples, **{"penalty λ": penalty})
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    numerics = numerics or Numerics.improved(torch.float64)
    return _Ridge(dim, examples, penalty, form == "gain", numerics).program()


class _Ridge:
    def __init__(
        self, dim: int, examples: int, penalty: float, gain: bool, numerics: Numerics
    ) -> None:
        self.dim, self.examples, self.penalty, self.gain = dim, examples, penalty, gain
        pairs = dim * (dim + 1) // 2 if gain else dim**2
        fields = {"label": 1, "input": dim, "weights": dim, "prediction": 1}
        fields |= {"matrix": pairs, "x": dim, "u": dim, "growth": 1, "divided": dim}
        # The sum that a column keeps: xᵀw, for gain, or Σ xy; and what it fetches: e/q, or y.
        fields |= {"dot": 1} if gain else {"sum": dim}
        self.layout = Layout(fields | {"fetched": 1}, columns(examples), 1, numerics)
        square = torch.arange(dim**2).view(dim, dim)
        if gain:
            upper = torch.triu_indices(dim, dim)
            square[upper[0], upper[1]] = torch.arange(pairs)
            square[upper[1], upper[0]] = torch.arange(pairs)
        self.square = square
        self.sizes = self._sizes() if numerics.balanced else dict.fromkeys(self._sizes(), 1.0)

    def _sizes(self) -> dict[str, float]:
        """Typical sizes of the factors. |u/q| and |e/q| are at most about 1 / (2 sqrt(λ))."""
        steep = 1 / (2 * math.sqrt(self.penalty))
        sizes = {"matrix": 0.25, "u": 1.0, "divided": steep / 4, "fetched": steep, "sum": 1.0}
        if not self.gain:
            scale = {"matrix": 0.25 / self.penalty, "u": 1 / self.penalty}
            sizes |= scale | {"fetched": math.sqrt(self.dim), "sum": float(self.examples)}
        return sizes

    def program(self) -> Program:
        first, last = self._multiply(), self._update()
        blocks: list[Block] = []
        for example in range(1, self.examples + 1):
            blocks += self._step(example, first, last)
        return Program(self.layout, (*blocks, *self._finish()), 4)

    def _multiply(self) -> list[Neurons]:
        layout, pick = self.layout, self.layout.pick
        x = pick("x")
        sizes = (self.sizes["matrix"], 1.0)
        parts = [mul(layout, self._matrix(), x[:, None], pick("u")[:, None], sizes)]
        if self.gain:  # M is kept as M - I, so that it need not be set at first
            parts.append(aff(layout, x, pick("u")))
            parts.append(mul(layout, x[None], pick("weights")[:, None], pick("dot")[None]))
        else:
            parts.append(aff(layout, x / self.penalty, pick("u")))
        return parts

    def _matrix(self) -> torch.Tensor:
        return self.layout.pick("matrix")[self.square]

    def _step(self, example: int, first: list[Neurons], last: list[Neurons]) -> list[Block]:
        layout, pick = self.layout, self.layout.pick
        given, answer = 2 * example - 1, 2 * example
        u, growth, divided, fetched = map(pick, ("u", "growth", "divided", "fetched"))
        dots = mul(layout, pick("x")[None], u[:, None], growth[None], (1.0, self.sizes["u"]))
        scale = self.penalty if self.gain else 1.0
        grow = mov(layout, growth / scale, layout.address(answer), answer, answer)
        early, late = [], [mov(layout, u, divided, answer)]
        if self.gain:
            read = torch.cat([u, pick("label") - pick("dot")]) / scale
            late = [mov(layout, read, torch.cat([divided, fetched]), answer)]
        else:
            early = [mov(layout, pick("label"), fetched, answer)]
        return [
            assemble(layout, [mov(layout, pick("input"), pick("x"), given)], first),
            assemble(layout, early, [dots]),
            assemble(layout, [grow]),
            assemble(layout, late, last),
        ]

    def _update(self) -> list[Neurons]:
        layout, pick = self.layout, self.layout.pick
        x, u, divided, fetched = map(pick, ("x", "u", "divided", "fetched"))
        rows, cols = torch.cartesian_prod(torch.arange(self.dim), torch.arange(self.dim)).T
        if self.gain:
            rows, cols = rows[rows <= cols], cols[rows <= cols]
        target = self._matrix()[rows, cols]
        sizes = (self.sizes["u"], self.sizes["divided"])
        parts = [products(layout, u[rows], divided[cols], -target, sizes)]
        used = [x, u, pick("growth"), divided, fetched]
        every = fetched.expand_as(x)
        sizes = (1.0, self.sizes["fetched"])
        if self.gain:
            parts.append(products(layout, u, every, pick("weights"), sizes))
            used.append(pick("dot"))
        else:
            parts.append(products(layout, x, every, pick("sum"), sizes))
        rows_used = torch.cat(used)
        return [*parts, aff(layout, rows_used, -rows_used)]

    def _finish(self) -> list[Block]:
        layout, pick = self.layout, self.layout.pick
        weights = pick("weights")
        query = mul(layout, pick("input")[None], weights[:, None], pick("prediction")[None])
        blocks = [assemble(layout, (), [query])]
        if not self.gain:
            sizes = (self.sizes["matrix"], self.sizes["sum"])
            solve = mul(layout, self._matrix(), pick("sum")[:, None], weights[:, None], sizes)
            start = aff(layout, pick("sum") / self.penalty, weights)
            blocks.insert(0, assemble(layout, (), [solve, start]))
        return blocks
