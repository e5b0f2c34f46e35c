"""Repeated random tokens, the task on which induction heads show themselves.

A *doubled* sequence is ``[BOS, r_1 .. r_L, r_1 .. r_L]`` with every ``r`` uniform over the
vocabulary. The first half cannot be predicted; the second can, by whoever looks up what followed
the current token before. Entry ``i`` of the next-token predictions is about token ``i + 1``, so:

- ``first_half``: entries ``0 .. L-1`` (about ``r_1 .. r_L`` of the first copy);
- ``second_half``: entries ``L .. 2L-1``, as the note takes it. Its first entry asks for ``r_1``
  after ``r_L``, which no repetition has announced;
- ``clean_half``: entries ``L+1 .. 2L-1``, those that a repetition announces.

Example:
    >>> import torch
    >>> from iclutils.tasks import repeated
    >>> generator = torch.Generator().manual_seed(0)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ..errors import IclError


@dataclass(frozen=True)
class Doubled:
    """A batch of doubled sequences and the slices of their next-token predictions."""

    tokens: Int[Tensor, "batch pos"]
    length: int

    @property
    def first_half(self) -> slice:
        """Predictions of the first copy: L entries, unpredictable."""
        return slice(0, self.length)

    @property
    def second_half(self) -> slice:
        """Predictions of the second copy as the note slices them: L entries."""
        return slice(self.length, 2 * self.length)

    @property
    def clean_half(self) -> slice:
        """Predictions of the second copy that a repetition announces: L - 1 entries."""
        return slice(self.length + 1, 2 * self.length)


def doubled(
    count: int,
    length: int,
    vocab: int,
    bos: int,
    generator: Generator,
    distinct: bool = False,
) -> Doubled:
    """Sample doubled sequences (Olsson et al. 2022; seed note 003).

    Args:
        count: number of sequences.
        length: L, tokens in one copy; the sequences have 2L + 1 tokens.
        vocab: vocabulary size; tokens are uniform over it, BOS left out.
        bos: id of the first token.
        generator: source of randomness.
        distinct: draw the tokens of a copy without replacement, so that nothing repeats by chance.

    Example:
        >>> task = repeated.doubled(2, 3, vocab=50, bos=0, generator=generator)
        >>> task.tokens.shape, bool((task.tokens[:, 1:4] == task.tokens[:, 4:]).all())
        (torch.Size([2, 7]), True)
    """
    if length < 2 or count < 1:
        raise IclError(f"Need length >= 2 and count >= 1; got length={length}, count={count}.")
    if distinct and length > vocab - 1:
        raise IclError(f"There are no {length} distinct tokens in a vocabulary of {vocab}.")
    if distinct:
        order = torch.rand(count, vocab - 1, generator=generator).argsort(-1)[:, :length]
        copy = _around(order, bos)
    else:
        copy = _uniform((count, length), vocab, bos, generator)
    first = torch.full((count, 1), bos)
    return Doubled(torch.cat([first, copy, copy], 1), length)


def repeated(
    count: int, length: int, times: int, vocab: int, bos: int, generator: Generator
) -> Int[Tensor, "batch pos"]:
    """``[BOS, s, s, ..]`` with one random segment ``s`` of ``length`` tokens ``times`` over.

    Example:
        >>> tokens = repeated.repeated(1, 2, 3, vocab=50, bos=0, generator=generator)[0]
        >>> len(tokens), len(set(tokens[1:].tolist())) <= 2
        (7, True)
    """
    if min(length, times, count) < 1:
        raise IclError("Need count, length and times of at least 1.")
    segment = _uniform((count, length), vocab, bos, generator)
    return torch.cat([torch.full((count, 1), bos), segment.repeat(1, times)], 1)


def tiled(
    segment: Int[Tensor, "batch longest"], period: Int[Tensor, "batch 1"], length: int, bos: int
) -> Int[Tensor, "batch pos"]:
    """BOS, then the first ``period`` tokens of each segment over and over, ``length`` in all."""
    repeat = segment.gather(1, torch.arange(length - 1)[None] % period)
    return torch.cat([torch.full((len(segment), 1), bos), repeat], 1)


def markov_chain(vocab: int, sharpness: float, seed: int) -> Float[Tensor, "vocab vocab"]:
    """Cumulative rows of a fixed random transition matrix, softmax(sharpness x normal)."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(vocab, vocab, generator=generator)
    return torch.softmax(sharpness * scores, -1).cumsum(-1)


def _uniform(shape: tuple[int, int], vocab: int, bos: int, generator: Generator) -> Tensor:
    """Uniform ids over the vocabulary without ``bos``."""
    return _around(torch.randint(0, vocab - 1, shape, generator=generator), bos)


def _around(drawn: Tensor, bos: int) -> Tensor:
    """Ids 0 .. vocab-2 moved so that ``bos`` is skipped."""
    return drawn + (drawn >= bos).long()
