"""Program: a whole transformer whose weights are set by hand, which reads a context of pairs.

Example:
    >>> from iclutils.chapters.constructions import program
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from .block import Block
from .layout import Layout

Labels = Float[Tensor, "*label_batch label_n"]  # one for each x; a mismatch is refused with a cure
TOKEN = ("label", "input")  # the fields that the embedding fills


@dataclass(frozen=True)
class Program:
    """Embedding, blocks and a linear read-out.

    The tokens are the paper's, (0, x_i) and (y_i, 0) in turn, behind a start token: x_i stands in
    column 2i - 1 and y_i in column 2i. Called with xs and ys, a program predicts each y from the
    pairs before it, as a trained learner does. It has ``per_example`` blocks for each example and
    ``extra`` ones, and reads at most ``examples`` examples before a query.
    """

    layout: Layout
    blocks: tuple[Block, ...]
    per_example: int
    dtype: torch.dtype = torch.float64

    @property
    def dim(self) -> int:
        """d, numbers in an input."""
        return self.layout.fields["input"]

    @property
    def examples(self) -> int:
        """Most pairs that a prediction can rest on."""
        return (self.layout.columns - 2) // 2

    @property
    def extra(self) -> int:
        """Blocks that belong to no example."""
        return len(self.blocks) - self.examples * self.per_example

    @property
    def hidden(self) -> int:
        """Neurons of the widest MLP."""
        return max(block.hidden for block in self.blocks)

    @property
    def embedding(self) -> Float[Tensor, "channels width"]:
        """Reads a token (y, x)."""
        rows = torch.cat([self.layout.pick(name) for name in TOKEN])
        return rows * self.layout.field_unit

    @property
    def read_out(self) -> Float[Tensor, "width"]:
        """Reads the prediction from the last stream, without a LayerNorm."""
        return self.layout.pick("prediction")[0] / self.layout.field_unit

    @property
    def largest(self) -> float:
        """Largest absolute value of a weight or bias, embeddings included."""
        outer = (self.layout.places, self.embedding, self.read_out)
        return max(*(float(part.abs().max()) for part in outer), *self._largest_of_blocks())

    def _largest_of_blocks(self) -> list[float]:
        return [block.largest for block in self.blocks]

    def to(self, dtype: torch.dtype) -> Program:
        """The same program with every weight rounded to ``dtype``, in which it runs."""
        moved: dict[int, Block] = {}
        for block in self.blocks:
            moved.setdefault(id(block), block.to(dtype))
        blocks = tuple(moved[id(block)] for block in self.blocks)
        return replace(self, blocks=blocks, dtype=dtype)

    def __call__(self, xs: Float[Tensor, "*batch n d"], ys: Labels) -> Float[Tensor, "*batch n"]:
        """The prediction of each y from the pairs before it and its own x; the first is 0."""
        last = self.stream(xs, ys)[-1]
        return last[..., 1::2, :] @ self.read_out.to(self.dtype)

    def stream(
        self, xs: Float[Tensor, "*batch n d"], ys: Labels
    ) -> list[Float[Tensor, "*batch pos width"]]:
        """The residual stream: embedding, then after each block. The last y is not read."""
        *batch, count, dim = xs.shape
        if dim != self.dim:
            raise IclError(f"The program reads inputs of {self.dim} numbers, not {dim}.")
        if list(ys.shape) != [*batch, count]:
            raise IclError(f"xs {tuple(xs.shape)} needs ys {(*batch, count)}: one y for each x.")
        if not 1 <= count <= self.examples + 1:
            raise IclError(
                f"The program reads 1 to {self.examples + 1} pairs, the query's included, not "
                f"{count}. Build it for more examples."
            )
        if not bool(torch.isfinite(xs).all() and torch.isfinite(ys).all()):
            raise IclError("A context has a value that is not finite.")
        tokens = torch.zeros(*batch, 2 * count, dim + 1, dtype=self.dtype, device=xs.device)
        tokens[..., 1::2, 1:] = xs.to(self.dtype)
        tokens[..., 2::2, 0] = ys[..., :-1].to(self.dtype)
        places = self.layout.places[: 2 * count].to(tokens)
        stream = [tokens @ self.embedding.to(tokens) + places]
        for block in self.blocks:
            stream.append(block(stream[-1]))
        return stream


def columns(examples: int) -> int:
    """Columns of a program: start, a pair for each example, and a query.

    Example:
        >>> program.columns(3)
        8
    """
    return 2 * examples + 2


def check(dim: int, examples: int, **positive: float) -> None:
    """Refuse sizes and numbers with which no program can be built.

    Example:
        >>> try:
        ...     program.check(dim=0, examples=2)
        ... except ValueError as error:
        ...     print(error)
        A program needs d ≥ 1 and n ≥ 1, not d = 0 and n = 2.
    """
    if dim < 1 or examples < 1:
        raise IclError(f"A program needs d ≥ 1 and n ≥ 1, not d = {dim} and n = {examples}.")
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise IclError(f"The {name} must be positive and finite, not {value}.")
