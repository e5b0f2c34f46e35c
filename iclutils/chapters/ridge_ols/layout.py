"""The channels of the residual stream, and how a layer reads, writes and multiplies them.

Column t has the address ±(cos θ, sin θ, 1), θ = 2π t / columns, so large that it alone sets the
scale of a LayerNorm. Column 0, the start token, has *rest*: columns with nothing to fetch attend to
it. *zero* is subtracted in every reading, as the LayerNorm subtracts the mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Gelu = Literal["gelu", "gelu_new"]  # exact, or by tanh; the names are those of GPT-2's config
LN_EPSILON = 1e-5  # as in GPT-2
ADDRESS, REST, ZERO = slice(0, 6), slice(6, 8), slice(8, 9)
FIRST = 9  # of the fields


def stencil(
    order: int, eps: float
) -> tuple[Float[Tensor, "neurons"], Float[Tensor, "neurons"], Float[Tensor, "neurons"]]:
    """(left, right, out) of the GELUs G that multiply: ``xy ≈ Σ out_k G(left_k x + right_k y)``,
    from second differences of G around 0. Order 0 is the paper's ({cite}`akyurek2023`, lemma 1),
    ``sqrt(π/2) (G(x + y) - G(x) - G(y))`` at the scale ε; order J ≥ 1 takes 4 J GELUs, on the
    central difference of J steps up to ε, with an error of order ε^2J."""
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
    left, right, weight = torch.tensor(rows, dtype=torch.float64).T
    return left, right, weight


def leading_error(
    order: int, eps: float, x: Float[Tensor, "*shape"], y: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """First term of (what the stencil gives - xy) in powers of ε, for the exact GELU; the paper's
    is of fourth order in the numbers, not of third."""
    if order == 0:
        return -(eps**2) * ((x + y) ** 4 - x**4 - y**4) / 12
    power = 2 * order
    factor = math.factorial(order) / (2**order * (power + 1)) * (eps / order) ** power
    return -factor * ((x + y) ** (power + 2) - (x - y) ** (power + 2)) / 4


def best_eps(order: int, dtype: torch.dtype) -> float:
    """The ε at which truncation (``leading_error``, as ε^2J, or ε² for order 0) and rounding of the
    GELUs' linear halves (as 1/ε) are about equal, for factors as large as four."""
    large = torch.tensor(4.0, dtype=torch.float64)
    left, right, out = stencil(order, 1.0)
    rounding = float((out * (left + right) * large / 2).norm()) * torch.finfo(dtype).eps / 2
    truncation = abs(float(leading_error(order, 1.0, large, large)))
    return (rounding / truncation) ** (1 / (2 * max(order, 1) + 1))


@dataclass(frozen=True)
class Numerics:
    """How a construction calculates. A LayerNorm is off by |fields|² / (8 ratio²), relatively, and
    a quotient by 10⁻⁵ width / (8 address²), from the LayerNorm's own epsilon."""

    order: int  # of the stencil of a product
    eps: float  # its scale
    ratio: float  # of an address to a field of size 1
    balanced: bool  # fields are stored small, and LayerNorm and matrices share the large factors
    gelu: Gelu = "gelu"

    @classmethod
    def paper(cls, dtype: torch.dtype) -> Numerics:
        """Three GELUs for a product, ε at its best for the precision."""
        return cls(0, best_eps(0, dtype), 1e8 if dtype == torch.float64 else 2e4, False)

    @classmethod
    def improved(cls, dtype: torch.dtype) -> Numerics:
        """Long stencils, balanced weights, ε at its best for the precision."""
        order, ratio = (6, 1e7) if dtype == torch.float64 else (4, 2e4)
        return cls(order, best_eps(order, dtype), ratio, True)


@dataclass(frozen=True)
class Layout:
    """Channels of ``columns`` columns, the start token included; ``fields`` has their sizes."""

    fields: Mapping[str, int]
    columns: int
    numerics: Numerics

    @cached_property
    def width(self) -> int:
        return FIRST + sum(self.fields.values())

    @property
    def field_unit(self) -> float:
        """Size of a field of value 1 in the stream."""
        return self.numerics.ratio**-0.5 if self.numerics.balanced else 1.0

    @property
    def gain(self) -> float:
        """Weight of every LayerNorm."""
        return math.sqrt(self.numerics.ratio) if self.numerics.balanced else 1.0

    def pick(self, name: str) -> Float[Tensor, "size width"]:
        """Rows that read or write a field; ``pick("x") - pick("y")`` reads a difference."""
        names = list(self.fields)
        start = FIRST + sum(self.fields[field] for field in names[: names.index(name)])
        return self._rows(slice(start, start + self.fields[name]))

    @cached_property
    def where(self) -> Float[Tensor, "3 width"]:
        """Rows that read (cos θ, sin θ, 1), all 0 in the start token."""
        return self._rows(ADDRESS)[:3] / self.numerics.ratio

    def angle(self, column: int) -> Float[Tensor, "3"]:
        """(cos θ, sin θ, 1) of a column."""
        theta = 2 * math.pi * column / self.columns
        return torch.tensor([math.cos(theta), math.sin(theta), 1.0], dtype=torch.float64)

    def address(self, column: int) -> Float[Tensor, "1 width"]:
        """Row that adds the address of a column to the stream, once for each unit written."""
        row = torch.zeros(1, self.width, dtype=torch.float64)
        angle = self.angle(column)
        row[0, ADDRESS] = torch.cat([angle, -angle]) * self.numerics.ratio
        return row

    @cached_property
    def places(self) -> Float[Tensor, "columns width"]:
        """The positional embedding: rest in the start token, then the address of each column."""
        rest = torch.zeros(1, self.width, dtype=torch.float64)
        rest[0, REST] = torch.tensor([1.0, -1.0]).double() * math.sqrt(2) * self.numerics.ratio
        rows = [rest] + [self.address(column) for column in range(1, self.columns)]
        return torch.cat(rows) * self.field_unit

    def reading(self, rows: Float[Tensor, "count width"]) -> Float[Tensor, "width count"]:
        """The matrix that reads rows behind a LayerNorm."""
        rows = rows - rows.sum(1, keepdim=True) * self._rows(ZERO)
        norm = 4 * (self.numerics.ratio * self.field_unit) ** 2  # of an address, squared
        unit = self.gain * self.field_unit / math.sqrt(norm / self.width + LN_EPSILON)
        return rows.T / unit  # the size of a field of value 1 behind a LayerNorm

    def value(
        self, stream: Float[Tensor, "*batch pos width"], name: str
    ) -> Float[Tensor, "*batch pos size"]:
        """Value of a field, read from the stream."""
        return stream @ self.pick(name).T.to(stream) / self.field_unit

    def _rows(self, which: slice) -> Float[Tensor, "size width"]:
        return torch.eye(self.width, dtype=torch.float64)[which]
