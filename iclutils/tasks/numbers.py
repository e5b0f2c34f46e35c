"""Numbers written in tokens: linear regression for models that read text, or ids.

A *script* says which tokens stand for which numbers: K tokens in order, spread evenly over
[-√3, √3], so that a uniform choice has mean 0 and variance 1. Pairs of one-dimensional contexts
(y = w x, w ~ U(-1, 1)) are rounded to them and written one after another, with separators if the
model reads text: ``Input: 12 Output: 37`` and a newline.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.tasks import numbers
    >>> script = numbers.of_ids(vocab=60, bos=59)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import IclError
from .regression import Contexts, Task, sample

REACH = math.sqrt(3)  # the largest number; U(-REACH, REACH) has variance 1
LAW = Task(1, inputs="uniform", weights="uniform*2+-1")
FEWEST = 5  # values that are worth calling numbers


@dataclass(frozen=True)
class Script:
    """How numbers are written.

    Attributes:
        values: tokens of the numbers, smallest first.
        start: tokens before the first pair.
        before: tokens before an x.
        between: tokens between an x and its y.
        after: tokens after a y.
    """

    values: Int[Tensor, "value"]
    start: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def grid(self) -> Float[Tensor, "value"]:
        """The number that each value token stands for."""
        return torch.linspace(-REACH, REACH, len(self.values), dtype=torch.float64)

    @property
    def pair(self) -> int:
        """Tokens of one pair."""
        return 2 + len(self.before) + len(self.between) + len(self.after)

    def nearest(self, numbers: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Index of the value nearest to each number."""
        step = 2 * REACH / (len(self.values) - 1)
        return ((numbers + REACH) / step).round().long().clamp(0, len(self.values) - 1)

    def rounded(self, numbers: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The numbers as they can be written."""
        return self.grid.to(numbers)[self.nearest(numbers)]

    def write(
        self, xs: Float[Tensor, "batch n 1"], ys: Float[Tensor, "batch n"]
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "n"]]:
        """Tokens of the contexts, and the positions whose next token is a y."""
        batch, count = ys.shape

        def fixed(tokens: tuple[int, ...]) -> Tensor:
            return torch.tensor(tokens, dtype=torch.long).expand(batch, count, len(tokens))

        x, y = (self.values[self.nearest(part.cpu())][..., None] for part in (xs[..., 0], ys))
        pairs = [fixed(self.before), x, fixed(self.between), y, fixed(self.after)]
        start = torch.tensor(self.start, dtype=torch.long).expand(batch, len(self.start))
        tokens = torch.cat([start, torch.cat(pairs, -1).flatten(1)], 1)
        first = len(self.start) + len(self.before) + len(self.between)
        return tokens, first + self.pair * torch.arange(count)


def of_text(tokenizer: PreTrainedTokenizerBase) -> Script:
    """Numbers as a tokenizer writes them: 0 .. 99, or the digits, if each is a single token."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    for count in (100, 10):
        for space in (" ", ""):
            written = [ids(f"{space}{i}") for i in range(count)]
            if all(len(one) == 1 for one in written) and len(set(written)) == count:
                values = torch.tensor([one[0] for one in written])
                gap = "" if space else " "
                return Script(values, (), ids(f"Input:{gap}"), ids(f" Output:{gap}"), ids("\n"))
    raise IclError(
        "This tokenizer writes neither 0 .. 99 nor the digits as single tokens, so that no token "
        "stands for a number. Use another model."
    )


def of_ids(vocab: int, bos: int | None) -> Script:
    """Token ids as numbers, at most a hundred of them, for a model without words."""
    ids = [i for i in range(vocab) if i != bos][:100]
    if len(ids) < FEWEST:
        raise IclError(f"A vocabulary of {vocab} is too small to write numbers in.")
    return Script(torch.tensor(ids), () if bos is None else (bos,))


def contexts(script: Script, count: int, pairs: int, generator: Generator) -> Contexts:
    """Contexts of ``LAW`` as they can be written: x is rounded, then y = w x, then y is rounded.

    Example:
        >>> drawn = numbers.contexts(script, 2, 5, torch.Generator().manual_seed(0))
        >>> torch.equal(script.rounded(drawn.ys), drawn.ys)
        True
    """
    drawn = sample(LAW, count, pairs, generator)
    xs = script.rounded(drawn.xs)
    ys = script.rounded((xs * drawn.weights[:, None]).sum(-1))
    return Contexts(xs, ys, drawn.weights)
