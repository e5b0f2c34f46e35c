"""Layout: what each channel of the residual stream holds, and how a layer reads and writes it.

Channels are *address*, *rest*, *zero* and the caller's own fields.

The address of column t is (cos θ, sin θ, 1) and its negative, with θ = 2π t / columns. It is far
larger than all fields together, so that it alone sets the scale of a LayerNorm: a LayerNorm then
multiplies the fields by one known number. Columns are found by their address, in a constant number
of channels. Column 0 is a start token: all its fields are 0, it has the channels *rest* in place of
an address, and the attention of a column goes there if it has nothing to fetch.
One channel is always 0 and is subtracted in every reading, which takes out the mean that the
LayerNorm subtracts. If an address is multiplied by q, all fields of its column are read divided by
q: that is the division.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError, unknown
from .block import LN_EPSILON, Gelu
from .stencils import best_eps, stencil

ADDRESS, REST, ZERO = slice(0, 6), slice(6, 8), slice(8, 9)
FIRST = 9  # of the fields


@dataclass(frozen=True)
class Numerics:
    """How a construction calculates.

    ``order`` and ``eps``: the stencil of a product (``stencils``). ``ratio``: how much larger the
    address is than a field of size 1. A LayerNorm is off by |fields|² / (8 ratio²), relatively, and
    a quotient by 10⁻⁵ width / (8 address²), from the LayerNorm's own epsilon.
    ``balanced``: fields are stored small, addresses with size 1, and what must be large is shared
    between the gain of the LayerNorm and the matrix behind it; else fields are stored as they
    are and the matrices bear it all, as in the paper.
    """

    order: int
    eps: float
    ratio: float
    balanced: bool
    gelu: Gelu = "gelu"

    def __post_init__(self) -> None:
        stencil(self.order, self.eps)
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise IclError(f"The ratio of address to fields must be positive, not {self.ratio}.")

    @classmethod
    def paper(cls, dtype: torch.dtype, eps: float | None = None) -> Numerics:
        """Three GELUs for a product, ε at its best for the precision unless given."""
        double = dtype == torch.float64
        return cls(0, best_eps(0, dtype) if eps is None else eps, 1e8 if double else 2e4, False)

    @classmethod
    def improved(cls, dtype: torch.dtype, eps: float | None = None) -> Numerics:
        """Long stencils, balanced weights, ε at its best for the precision unless given."""
        double = dtype == torch.float64
        order = 6 if double else 4
        return cls(
            order, best_eps(order, dtype) if eps is None else eps, 1e7 if double else 2e4, True
        )


@dataclass(frozen=True)
class Layout:
    """Channels of ``columns`` columns, the start token included, for blocks of ``heads`` heads."""

    fields: Mapping[str, int]
    columns: int
    heads: int
    numerics: Numerics

    def __post_init__(self) -> None:
        if self.columns < 2 or self.heads < 1 or any(size < 1 for size in self.fields.values()):
            raise IclError("A layout needs a start token, another column, heads and real fields.")

    @cached_property
    def width(self) -> int:
        """Channels: the fields and nine more, rounded up to a multiple of the heads."""
        return math.ceil((FIRST + sum(self.fields.values())) / self.heads) * self.heads

    @property
    def field_unit(self) -> float:
        """What a field of value 1 adds to the stream."""
        return self.numerics.ratio**-0.5 if self.numerics.balanced else 1.0

    @property
    def gain(self) -> float:
        """Weight of every LayerNorm."""
        return math.sqrt(self.numerics.ratio) if self.numerics.balanced else 1.0

    @cached_property
    def seen_unit(self) -> float:
        """What a field of value 1 is behind a LayerNorm."""
        norm = 4 * (self.numerics.ratio * self.field_unit) ** 2  # of an address, squared
        return self.gain * self.field_unit / math.sqrt(norm / self.width + LN_EPSILON)

    def pick(self, name: str) -> Float[Tensor, "size width"]:
        """The channels of a field, as rows that read or write it.

        Sums of such rows are read and written too: ``pick("x") - pick("y")`` reads a difference.
        """
        if name not in self.fields:
            raise unknown("field", name, self.fields)
        start = FIRST
        for field, size in self.fields.items():
            if field == name:
                break
            start += size
        return self._rows(slice(start, start + self.fields[name]))

    @cached_property
    def where(self) -> Float[Tensor, "3 width"]:
        """Rows that read (cos θ, sin θ, 1), all 0 in the start token."""
        return self._rows(ADDRESS)[:3] / self.numerics.ratio

    def angle(self, column: int) -> Float[Tensor, "3"]:
        """(cos θ, sin θ, 1) of a column."""
        if not 1 <= column < self.columns:
            raise IclError(f"Column {column} is not among the columns 1..{self.columns - 1}.")
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
        return rows.T / self.seen_unit

    def value(
        self, stream: Float[Tensor, "*batch pos width"], name: str
    ) -> Float[Tensor, "*batch pos size"]:
        """What a field holds."""
        return stream @ self.pick(name).T.to(stream) / self.field_unit

    def _rows(self, which: slice) -> Float[Tensor, "size width"]:
        return torch.eye(self.width, dtype=torch.float64)[which]
