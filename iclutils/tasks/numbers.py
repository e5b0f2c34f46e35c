"""Numbers written in tokens: one-dimensional regression for models that read text, or ids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import IclError
from .regression import Contexts, Task, sample

LARGEST = math.sqrt(3)  # U(-√3, √3) has variance 1
TASK = Task(1, inputs="uniform", weights="uniform*2+-1")


@dataclass(frozen=True)
class NumberFormat:
    """How pairs of numbers are written: tokens for numbers from -√3 to √3, and those around."""

    values: Int[Tensor, "value"]  # smallest number first
    start: tuple[int, ...] = ()  # before the first pair
    before: tuple[int, ...] = ()  # before an x
    between: tuple[int, ...] = ()  # between an x and its y
    after: tuple[int, ...] = ()  # after a y

    @property
    def numbers(self) -> Float[Tensor, "value"]:
        """The number that each value token stands for."""
        return torch.linspace(-LARGEST, LARGEST, len(self.values), dtype=torch.float64)

    @property
    def pair(self) -> int:
        """How many tokens a pair takes."""
        return 2 + len(self.before) + len(self.between) + len(self.after)

    def nearest(self, numbers: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Index of the value nearest to each number."""
        step = 2 * LARGEST / (len(self.values) - 1)
        return ((numbers + LARGEST) / step).round().long().clamp(0, len(self.values) - 1)

    def write(
        self, xs: Float[Tensor, "batch n 1"], ys: Float[Tensor, "batch n"]
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "n"]]:
        """Tokens of the contexts, and the positions whose next token is a y."""
        batch, count = ys.shape
        pairs = torch.tensor([*self.before, 0, *self.between, 0, *self.after])
        pairs = pairs.repeat(batch, count, 1)
        x, y = len(self.before), len(self.before) + 1 + len(self.between)
        pairs[..., x] = self.values[self.nearest(xs[..., 0].cpu())]
        pairs[..., y] = self.values[self.nearest(ys.cpu())]
        start = torch.tensor(self.start, dtype=torch.long).expand(batch, -1)
        tokens = torch.cat([start, pairs.flatten(1)], 1)
        return tokens, len(self.start) + y - 1 + self.pair * torch.arange(count)


def of_text(tokenizer: PreTrainedTokenizerBase) -> NumberFormat:
    """Numbers as a tokenizer writes them: 0 .. 99, or the digits, if each is a single token."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    for count in (100, 10):
        for space in (" ", ""):
            written = [ids(f"{space}{i}") for i in range(count)]
            if all(len(one) == 1 for one in written) and len(set(written)) == count:
                values = torch.tensor([one[0] for one in written])
                gap = "" if space else " "
                around = (ids(f"Input:{gap}"), ids(f" Output:{gap}"), ids("\n"))
                return NumberFormat(values, (), *around)
    raise IclError(
        "This tokenizer writes neither 0 .. 99 nor the digits as single tokens, so that no token "
        "stands for a number. Use another model."
    )


def of_ids(vocab: int, bos: int | None) -> NumberFormat:
    """Token ids as numbers, at most a hundred of them, for a model without words."""
    ids = [i for i in range(vocab) if i != bos][:100]
    if len(ids) < 5:
        raise IclError(f"A vocabulary of {vocab} is too small to write numbers in.")
    return NumberFormat(torch.tensor(ids), () if bos is None else (bos,))


def contexts(form: NumberFormat, count: int, pairs: int, generator: Generator) -> Contexts:
    """Contexts of ``TASK`` as they can be written: x is rounded, then y = w x, and y as well."""
    drawn = sample(TASK, count, pairs, generator)
    written = form.numbers.to(drawn.xs)
    xs = written[form.nearest(drawn.xs)]
    ys = written[form.nearest((xs * drawn.weights[:, None]).sum(-1))]
    return Contexts(xs, ys, drawn.weights)
