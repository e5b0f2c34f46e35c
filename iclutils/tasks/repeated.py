"""Repeated random tokens, the task on which induction heads show themselves (Olsson et al. 2022).

Only the second copy of ``[BOS, r_1 .. r_L, r_1 .. r_L]`` can be predicted; every r is uniform.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from ..errors import IclError
from ..models import TransformerBridge, bos, check_tokens, encode, text_tokenizer, token_ids


@dataclass(frozen=True)
class RepeatedTokens:
    """A batch of sequences whose first copy has ``length`` tokens. The slices are of next-token
    predictions: entry ``i`` is about token ``i + 1``."""

    tokens: Int[Tensor, "batch pos"]
    length: int

    @classmethod
    def draw(
        cls,
        count: int,
        length: int,
        vocab: int,
        bos: int,
        generator: Generator,
        times: int = 2,
        distinct: bool = False,
    ) -> "RepeatedTokens":
        """Sample over the ids 0 .. vocab - 1 without ``bos``; see ``repeated_tokens``."""
        if distinct:
            drawn = torch.rand(count, vocab - 1, generator=generator, dtype=torch.float32)
            copy = drawn.argsort(-1)[:, :length]
        else:
            copy = torch.randint(0, vocab - 1, (count, length), generator=generator)
        copy = copy + (copy >= bos).long()  # skip BOS
        return cls(torch.cat([torch.full((count, 1), bos), copy.repeat(1, times)], 1), length)

    @property
    def first_half(self) -> slice:
        """Return predictions of the first copy: L entries, unpredictable."""
        return slice(0, self.length)

    @property
    def second_half(self) -> slice:
        """Return those of the second copy: L entries, of which the first is not announced."""
        return slice(self.length, 2 * self.length)

    @property
    def clean_half(self) -> slice:
        """Return those of the second copy that a repetition announces: L - 1 entries."""
        return slice(self.length + 1, 2 * self.length)


def repeated_tokens(
    model: TransformerBridge,
    count: int,
    length: int,
    generator: Generator,
    times: int = 2,
    distinct: bool = False,
) -> RepeatedTokens:
    """Sample ``count`` sequences of BOS and ``times`` copies of L tokens of the model's tokenizer.
    With ``distinct`` nothing repeats within a copy.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> net, generator = models.load("induction-0"), torch.Generator().manual_seed(0)
        >>> task = repeated_tokens(net, 2, 3, generator)
        >>> task.tokens.shape, bool((task.tokens[:, 1:4] == task.tokens[:, 4:]).all())
        (torch.Size([2, 7]), True)
    """
    if times * length + 1 > model.cfg.n_ctx:
        raise IclError(
            f"L = {length} needs {times * length + 1} positions and the model has "
            f"{model.cfg.n_ctx}: use L <= {(model.cfg.n_ctx - 1) // times}."
        )
    known, first = token_ids(model), bos(model)
    place = int(torch.searchsorted(known, first))  # of BOS among the ids that are drawn from
    drawn = RepeatedTokens.draw(count, length, len(known), place, generator, times, distinct)
    return RepeatedTokens(known[drawn.tokens].to(model.cfg.device), length)


def text_twice(model: TransformerBridge, text: str) -> RepeatedTokens:
    """Return BOS and a text two times over: repeated tokens of your own, for any head score."""
    (ids,) = encode(text_tokenizer(model), [text])["input_ids"]
    if len(ids) < 2:
        raise IclError(f"The prompt {text!r} has {len(ids)} tokens: give at least two.")
    tokens = torch.tensor([[bos(model), *ids, *ids]], device=model.cfg.device)
    check_tokens(model, tokens)
    return RepeatedTokens(tokens, len(ids))
