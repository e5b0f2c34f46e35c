"""Prompts of in-context classification: tokens, and where in them everything stands.

A prompt is ``demonstration .. demonstration query``; a demonstration ends in a cue and a label
word, the query in the cue alone. Positions are data that a prompt's builder returns, never found
again by searching the text, so the lenses work alike on made-up topics and on real text, with
any template and any number of demonstrations. Prompts of different lengths are padded on the
right; nothing before the padding can see it.

Example:
    >>> import torch
    >>> from iclutils.tasks import prompts, topics
    >>> asked = topics.sample(3, torch.Generator().manual_seed(0), classes=2)
    >>> scores = torch.zeros(3, len(topics.NAMES))
    >>> scores[:, asked.label_words[0, 0]] = 1.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ..errors import IclError


class Role(IntEnum):
    """What a token is there for."""

    TEXT = 0  # the text of a demonstration
    FORMAT = 1  # template words, cues and newlines of the demonstrations, and BOS
    LABEL = 2  # label words of the demonstrations, all their sub-tokens
    QUERY = 3  # everything from the query on
    PAD = 4


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts with the same number of demonstrations.

    Attributes:
        tokens: token ids, padded on the right.
        roles: the ``Role`` of every token.
        target: q, the position of the prompt's last token, where the class is predicted.
        label_pos: position of the first sub-token of every demonstration's label word, in the
            order of the prompt.
        cue_pos: position of every demonstration's cue, the token before its label word.
        demo_class: class of every demonstration.
        gold: class of the query.
        label_words: vocabulary id of the first sub-token of each class's label word; it may
            differ from prompt to prompt.
    """

    tokens: Int[Tensor, "batch pos"]
    roles: Int[Tensor, "batch pos"]
    target: Int[Tensor, "batch"]
    label_pos: Int[Tensor, "batch demo"]
    cue_pos: Int[Tensor, "batch demo"]
    demo_class: Int[Tensor, "batch demo"]
    gold: Int[Tensor, "batch"]
    label_words: Int[Tensor, "batch cls"]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.label_words.shape[1]

    @property
    def kept(self) -> Bool[Tensor, "batch pos"]:
        """Whether a token is a real one, not padding."""
        return self.roles != Role.PAD

    def __getitem__(self, rows: slice | Int[Tensor, "rows"]) -> Prompts:
        """Some of the prompts, with the padding that they all have cut off."""
        chosen = {name: value[rows] for name, value in vars(self).items()}
        longest = int(chosen["target"].max()) + 1
        chosen["tokens"] = chosen["tokens"][:, :longest]
        chosen["roles"] = chosen["roles"][:, :longest]
        return Prompts(**chosen)

    def to(self, device: str | torch.device) -> Prompts:
        """The same prompts on another device."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()})

    def of_class(self) -> Bool[Tensor, "batch demo cls"]:
        """Which demonstration shows which class."""
        return self.demo_class[..., None] == torch.arange(
            self.classes, device=self.demo_class.device
        )

    def check(self) -> None:
        """Refuse prompts whose parts contradict each other."""
        words = self.label_words.sort(-1).values
        if bool((words[:, 1:] == words[:, :-1]).any()):
            raise IclError("Two classes share a label word: give every class its own.")
        if not bool(self.of_class().any(1).all()):
            raise IclError("Some class has no demonstration: show every class at least once.")
        shown = self.tokens.gather(1, self.label_pos)
        if not bool((shown == self.label_words.gather(1, self.demo_class)).all()):
            raise IclError("A label position does not hold its demonstration's label word.")
        last = self.kept.sum(-1) - 1
        if not bool((self.target == last).all()):
            raise IclError("The target must be the last token of each prompt.")


def join(parts: Sequence[Prompts]) -> Prompts:
    """Several batches as one, padded to the longest.

    Example:
        >>> len(prompts.join([asked, asked]))
        6
    """
    shapes = {(p.label_pos.shape[1], p.classes) for p in parts}
    if len(shapes) != 1:
        raise IclError(f"Only prompts of one shape can be joined; got {sorted(shapes)}.")
    longest = max(p.tokens.shape[1] for p in parts)
    pad = {"tokens": 0, "roles": int(Role.PAD)}
    return Prompts(
        **{
            field.name: torch.cat(
                [
                    functional.pad(
                        getattr(p, field.name),
                        (0, longest - p.tokens.shape[1]),
                        value=pad[field.name],
                    )
                    if field.name in pad
                    else getattr(p, field.name)
                    for p in parts
                ]
            )
            for field in fields(Prompts)
        }
    )


def class_logits(
    prompts: Prompts, logits: Float[Tensor, "batch vocab"]
) -> Float[Tensor, "batch cls"]:
    """Logits of the label words at the target; their softmax is the prediction over classes.

    The label probabilities of Wang et al. 2023 are normalised over the classes, not over the
    vocabulary.
    """
    return logits.gather(1, prompts.label_words)


def predicted_class(prompts: Prompts, logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, "batch"]:
    """Class of the likeliest label word at the target.

    Example:
        >>> prompts.predicted_class(asked, scores)[0]
        tensor(0)
    """
    return class_logits(prompts, logits).argmax(-1)


def correct(prompts: Prompts, logits: Float[Tensor, "batch vocab"]) -> Bool[Tensor, "batch"]:
    """Whether the likeliest label word is the query's.

    Example:
        >>> bool((prompts.correct(asked, scores)[0] == (asked.gold[0] == 0)))
        True
    """
    return predicted_class(prompts, logits) == prompts.gold
