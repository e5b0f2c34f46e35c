"""Numbers written in tokens: one-dimensional regression for models that read text, or ids."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import IclError
from ..models import TransformerBridge, words
from .regression import Contexts, Task, sample

LARGEST = math.sqrt(3)  # U(-√3, √3) has variance 1
FEWEST = 3  # pairs that tell algorithms apart
TASK = Task(1, inputs="uniform", weights="uniform*2+-1")
SHARES = Task(1, inputs="uniform*1+0", weights="uniform*1+0")  # y is a share of x: no middle


@dataclass(frozen=True)
class NumberFormat:
    """How pairs of numbers are written: tokens for numbers from low to high, and those around."""

    values: Int[Tensor, "value part"]  # smallest number first, all of as many tokens
    start: tuple[int, ...] = ()  # before the first pair
    before: tuple[int, ...] = ()  # before an x
    between: tuple[int, ...] = ()  # between an x and its y
    after: tuple[int, ...] = ()  # after a y
    low: float = -LARGEST
    high: float = LARGEST

    @property
    def numbers(self) -> Float[Tensor, "value"]:
        """The number that each value stands for."""
        return torch.linspace(self.low, self.high, len(self.values), dtype=torch.float64)

    @property
    def pair(self) -> int:
        """How many tokens a pair takes."""
        around = len(self.before) + len(self.between) + len(self.after)
        return around + 2 * self.values.shape[1]

    def fitting(self, context: int, most: int) -> int:
        """How many pairs, up to ``most``, a model reads at once that has so long a context."""
        pairs = min(most, (context - len(self.start)) // self.pair)
        if pairs < FEWEST:
            raise IclError(
                f"Only {pairs} pairs of numbers fit the {context} tokens that this model reads; "
                f"at least {FEWEST} are needed."
            )
        return pairs

    def nearest(self, numbers: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Index of the value nearest to each number."""
        step = (self.high - self.low) / (len(self.values) - 1)
        return ((numbers - self.low) / step).round().long().clamp(0, len(self.values) - 1)

    def write(
        self, xs: Float[Tensor, "batch n 1"], ys: Float[Tensor, "batch n"]
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "n"]]:
        """Tokens of the contexts, and the positions whose next token begins a y."""
        x, y = (self.values[self.nearest(numbers.cpu())] for numbers in (xs[..., 0], ys))

        def same(ids: tuple[int, ...]) -> Tensor:
            return torch.tensor(ids, dtype=torch.long).expand(*x.shape[:2], -1)

        pairs = torch.cat([same(self.before), x, same(self.between), y, same(self.after)], -1)
        tokens = torch.cat([same(self.start)[:, 0], pairs.flatten(1)], 1)
        first = len(self.start) + len(self.before) + x.shape[-1] + len(self.between) - 1
        return tokens, first + self.pair * torch.arange(x.shape[1])


def of_model(model: TransformerBridge) -> NumberFormat:
    """Numbers as the model's tokenizer writes them, or its token ids where it reads no text."""
    try:
        return of_text(words(model))
    except IclError:
        first = getattr(model.cfg, "bos_token_id", None)
        return of_ids(model.cfg.d_vocab, None if first is None else int(first))


def of_text(
    tokenizer: PreTrainedTokenizerBase, number: str = "", pair: str = "{x} ->{y}\n"
) -> NumberFormat:
    """Numbers as a tokenizer writes them, in pairs; a space stands before a number.

    ``number`` shows how, a 0 for each digit: ``"0"`` stands for 0 .. 9, ``"0.0"`` for 0.0 .. 9.9.
    Without it they are 0 .. 99, or the digits, if each is a single token.
    """

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    around = dict(zip(("before", "between", "after"), re.split("{x}|{y}", pair), strict=True))
    for count in [10 ** number.count("0")] if number else [100, 10]:
        written = [ids(f" {_written(i, number)}") for i in range(count)]
        if len(set(written)) < count or len({len(one) for one in written}) > 1:
            continue
        values = torch.tensor(written)
        gap = int((values == values[0]).all(0).long().cumprod(0).sum())  # a space of its own
        if not number and values.shape[1] - gap > 1:
            continue
        space = written[0][:gap]
        parts: dict[str, Any] = {
            name: ids(text) + (space if text and name != "after" else ())
            for name, text in around.items()
        }
        return NumberFormat(values[:, gap:], **parts)
    wanted = f"all numbers like {number} in as many tokens" if number else "digits as single tokens"
    raise IclError(f"This tokenizer does not write {wanted}. Use another model.")


def _written(number: int, places: str) -> str:
    """A number with its digits in the places of the zeros."""
    digits = iter(str(number).zfill(places.count("0")))
    return re.sub("0", lambda _: next(digits), places) if places else str(number)


def of_ids(vocab: int, bos: int | None) -> NumberFormat:
    """Token ids as numbers, at most a hundred of them, for a model without words."""
    ids = [i for i in range(vocab) if i != bos][:100]
    if len(ids) < 5:
        raise IclError(f"A vocabulary of {vocab} is too small to write numbers in.")
    return NumberFormat(torch.tensor(ids)[:, None], () if bos is None else (bos,))


def contexts(
    form: NumberFormat, count: int, pairs: int, generator: Generator, task: Task = TASK
) -> Contexts:
    """Contexts of a task as they can be written: x is rounded, then y = w x, and y as well."""
    drawn = sample(task, count, pairs, generator)
    written = form.numbers.to(drawn.xs)
    xs = written[form.nearest(drawn.xs)]
    ys = written[form.nearest((xs * drawn.weights[:, None]).sum(-1))]
    return Contexts(xs, ys, drawn.weights)
