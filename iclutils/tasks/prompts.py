"""Prompts of in-context classification: tokens, and where in them everything stands.

A demonstration ends in a cue and a label word, the query, which comes last, in the cue alone.
Positions are data, never found again in the text. Shorter prompts are padded on the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ..errors import IclError


class Role(IntEnum):
    """Purpose of a token."""

    TEXT = 0  # the text of a demonstration
    FORMAT = 1  # template words, cues and newlines of the demonstrations, and BOS
    LABEL = 2  # label words of the demonstrations, all their sub-tokens
    QUERY = 3  # everything from the query on
    PAD = 4


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts with the same number of demonstrations, which stand in the order of the
    prompt, classes in that of their ids; ``by_class`` and ``by_demonstration`` convert."""

    tokens: Int[Tensor, "batch pos"]
    roles: Int[Tensor, "batch pos"]
    target: Int[Tensor, "batch"]  # q, the last token, where the class is predicted
    label_pos: Int[Tensor, "batch label"]  # first sub-token of each demonstration's label word, or
    # what is cut or measured in their place, which may be fewer
    cue_pos: Int[Tensor, "batch demo"]  # the token before it
    demo_class: Int[Tensor, "batch demo"]
    gold: Int[Tensor, "batch"]  # class of the query
    label_words: Int[Tensor, "batch cls"]  # vocabulary id of each class's first sub-token

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.label_words.shape[1]

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """Return whether a token is a real one, not padding."""
        return self.roles != Role.PAD

    def __getitem__(self, rows: int | slice | Int[Tensor, "rows"]) -> "Prompts":
        """Take some of the prompts, or a single one, without the padding that they all have."""
        if isinstance(rows, int):
            rows = range(len(self))[rows]  # IndexError: the end of a loop
            rows = slice(rows, rows + 1)
        chosen = {name: value[rows] for name, value in vars(self).items()}
        if not len(chosen["target"]):
            raise IclError("There are no prompts: give at least one.")
        longest = int(chosen["target"].max()) + 1
        cut = {name: chosen[name][:, :longest] for name in ("tokens", "roles")}
        return Prompts(**chosen | cut)

    def to(self, device: str | torch.device) -> "Prompts":
        """Move the prompts to another device."""
        return Prompts(**{name: value.to(device) for name, value in vars(self).items()})

    def of_class(self) -> Bool[Tensor, "batch demo cls"]:
        """Tell which demonstration shows which class."""
        classes = torch.arange(self.classes, device=self.demo_class.device)
        return self.demo_class[..., None] == classes

    def in_demonstrations(self, role: Role) -> Bool[Tensor, "batch demo pos"]:
        """Tell which tokens of each demonstration have a role; a label ends it."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        begun = (self.label_pos[:, :, None] <= place).sum(1, keepdim=True)  # label words so far
        number = torch.arange(self.label_pos.shape[1], device=place.device)[:, None]
        return (self.roles == role)[:, None] & (begun == number + (role == Role.LABEL))

    def by_class(
        self, values: Shaped[Tensor, "batch *between demo"]
    ) -> Shaped[Tensor, "batch *between cls"]:
        """Sum over the demonstrations of each class: from prompt order to class order."""
        member = self.of_class().view(len(self), *[1] * (values.ndim - 2), -1, self.classes)
        return (values[..., None] * member).sum(-2)

    def by_demonstration(
        self, values: Shaped[Tensor, "batch *between cls"]
    ) -> Shaped[Tensor, "batch *between demo"]:
        """Give each demonstration the value of its class: from class order to prompt order."""
        order = self.demo_class.view(len(self), *[1] * (values.ndim - 2), -1)
        return values.gather(-1, order.expand(*values.shape[:-1], -1))

    def check(self, unseen: int = 0) -> None:
        """Refuse prompts whose parts contradict each other; the last ``unseen`` classes need no
        demonstration."""
        words = self.label_words.sort(-1).values
        if bool((words[:, 1:] == words[:, :-1]).any()):
            raise IclError("Two label words begin with the same token: give every class its own.")
        if not bool(self.of_class()[..., : self.classes - unseen].any(1).all()):
            raise IclError("Some class has no demonstration: show every class at least once.")
        labels = self.tokens.gather(1, self.label_pos)
        if not bool((labels == self.by_demonstration(self.label_words)).all()):
            raise IclError("A label position does not hold its demonstration's label word.")
        if not bool((self.target == self.real.sum(-1) - 1).all()):
            raise IclError("The target must be the last token of each prompt.")


def leave_out(
    tokens: Int[Tensor, "batch pos"], target: Int[Tensor, "batch"], gone: Bool[Tensor, "batch pos"]
) -> tuple[Int[Tensor, "batch shorter"], Int[Tensor, "batch"]]:
    """Take some tokens out of prompts; return them, padded on the right, and their target."""
    order = gone.long().sort(dim=1, stable=True).indices
    place = torch.arange(gone.shape[1], device=gone.device)
    target = target - (gone & (place <= target[:, None])).sum(1)
    return tokens.gather(1, order)[:, : int(target.max()) + 1], target


def join(parts: Sequence[Prompts]) -> Prompts:
    """Join several batches to one, padded to the longest."""
    longest = max(p.tokens.shape[1] for p in parts)

    def padded(part: Prompts) -> dict[str, Tensor]:
        more = 0, longest - part.tokens.shape[1]
        tokens, roles = pad(part.tokens, more), pad(part.roles, more, value=int(Role.PAD))
        return vars(part) | {"tokens": tokens, "roles": roles}

    columns = [padded(part) for part in parts]
    return Prompts(**{name: torch.cat([c[name] for c in columns]) for name in columns[0]})


def class_logits(
    prompts: Prompts, logits: Float[Tensor, "batch vocab"]
) -> Float[Tensor, "batch cls"]:
    """Return logits of the label words; their softmax is the prediction (Wang et al. 2023)."""
    return logits.gather(1, prompts.label_words)


def correct(prompts: Prompts, logits: Float[Tensor, "batch vocab"]) -> Bool[Tensor, "batch"]:
    """Tell whether the likeliest label word is the query's."""
    return class_logits(prompts, logits).argmax(-1) == prompts.gold
