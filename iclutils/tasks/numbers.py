"""Numbers written in tokens: one-dimensional regression for models that read text, or ids."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import IclError
from ..models import TransformerBridge, start_tokens, text_tokenizer
from .regression import Contexts, Task, sample
from .text import pieces_in_place

LARGEST = math.sqrt(3)  # U(-√3, √3) has variance 1
FEWEST = 3  # pairs that tell algorithms apart
TASK = Task(1, inputs="uniform", weights="uniform*2+-1")


@dataclass(frozen=True)
class NumberFormat:
    """How pairs of numbers are written: tokens for numbers from low to high, and those around."""

    values: Int[Tensor, "value part"]  # smallest number first, all of as many tokens
    start: tuple[int, ...] = ()  # before the first pair
    between: tuple[int, ...] = ()  # between an x and its y
    after: tuple[int, ...] = ()  # after a y
    low: float = -LARGEST
    high: float = LARGEST

    @property
    def numbers(self) -> Float[Tensor, "value"]:
        """Return the number that each value stands for."""
        return torch.linspace(self.low, self.high, len(self.values), dtype=torch.float64)

    @property
    def pair(self) -> int:
        """Return how many tokens a pair takes."""
        return len(self.between) + len(self.after) + 2 * self.values.shape[1]

    def fitting(self, context: int, most: int) -> int:
        """Return how many pairs, up to ``most``, fit so long a context; fewer than three raise."""
        pairs = min(most, (context - len(self.start)) // self.pair)
        if pairs < FEWEST:
            raise IclError(
                f"Only {pairs} pairs of numbers fit the {context} tokens that this model reads; "
                f"at least {FEWEST} are needed."
            )
        return pairs

    def nearest(self, numbers: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return the index of the value nearest to each number."""
        step = (self.high - self.low) / (len(self.values) - 1)
        return ((numbers - self.low) / step).round().long().clamp(0, len(self.values) - 1)

    def write(
        self, xs: Float[Tensor, "batch n 1"], ys: Float[Tensor, "batch n"]
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "n"]]:
        """Write contexts; return tokens, and the positions whose next token begins a y."""
        x, y = (self.values[self.nearest(numbers.cpu())] for numbers in (xs[..., 0], ys))

        def same(ids: tuple[int, ...]) -> Tensor:
            return torch.tensor(ids, dtype=torch.long).expand(*x.shape[:2], -1)

        pairs = torch.cat([x, same(self.between), y, same(self.after)], -1)
        tokens = torch.cat([same(self.start)[:, 0], pairs.flatten(1)], 1)
        first = len(self.start) + x.shape[-1] + len(self.between) - 1
        return tokens, first + self.pair * torch.arange(x.shape[1])


def of_model(model: TransformerBridge) -> NumberFormat:
    """Write numbers as the model's tokenizer does, or as token ids where it reads no text."""
    try:
        reader = text_tokenizer(model)
    except IclError:
        first = getattr(model.cfg, "bos_token_id", None)
        return of_ids(model.cfg.d_vocab, None if first is None else int(first))
    return of_text(reader)


def of_text(tokenizer: PreTrainedTokenizerBase) -> NumberFormat:
    """Write numbers as a tokenizer does, in lines ``x -> y``; a space stands before a number. They
    are 0 .. 99, or the digits, if each is a single token where it stands; else this raises. BOS
    comes first where the tokenizer gives it to every text."""

    def lines(digits: list[str], blank: str) -> list[list[list[int]]]:
        """Return the ids of x, arrow, y and newline, of each of three lines alike."""
        texts = [[f"{blank}{x}", " ->", f" {x}", "\n"] * 3 for x in digits]
        return pieces_in_place(tokenizer, texts)

    for count in (100, 10):
        digits = [str(i) for i in range(count)]
        written = [ids[6] for ids in lines(digits, " ")]  # y of the second line
        if len(set(map(tuple, written))) < count or len({len(one) for one in written}) > 1:
            continue
        values = torch.tensor(written)
        gap = int((values == values[0]).all(0).long().cumprod(0).sum())  # a space of its own
        if values.shape[1] - gap != 1:
            continue
        # Where a space is a token, it stands between arrow and y alone, and no line begins with it.
        cut = lines(digits, "" if gap else " ")
        x, arrow, y, newline = cut[0][4:8]
        if any(ids[4] != one[gap:] for ids, one in zip(cut, written, strict=True)):
            continue
        start = start_tokens(tokenizer)
        if gap:  # and where a text begins with one in any case, so does the first line
            start += cut[0][0][: len(cut[0][0]) - len(x)]
        return NumberFormat(values[:, gap:], tuple(start), (*arrow, *y[:gap]), tuple(newline))
    raise IclError("This tokenizer does not write digits as single tokens. Use another model.")


def of_ids(vocab: int, bos: int | None) -> NumberFormat:
    """Take token ids as numbers, at most a hundred of them, for a model without words."""
    ids = [i for i in range(vocab) if i != bos][:100]
    if len(ids) < 5:
        raise IclError(f"A vocabulary of {vocab} is too small to write numbers in.")
    return NumberFormat(torch.tensor(ids)[:, None], () if bos is None else (bos,))


def contexts(form: NumberFormat, count: int, pairs: int, generator: Generator) -> Contexts:
    """Draw contexts of ``TASK`` as they can be written: x is rounded, then y = w x, and y too."""
    drawn = sample(TASK, count, pairs, generator)
    written = form.numbers.to(drawn.xs)
    xs = written[form.nearest(drawn.xs)]
    ys = written[form.nearest((xs * drawn.weights[:, None]).sum(-1))]
    return Contexts(xs, ys, drawn.weights)
