"""One prompt that only its examples can answer, and the parts of it that can be taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import IclError
from ...interp.clean_corrupt import CleanCorrupt, classification, two_functions
from ...models import TransformerBridge
from ...tasks.prompts import Prompts, leave_out

ANSWER, LINE = 2, 4  # of ``word -> answer \\n``: where the answer stands, and the tokens of a line


class Margin(CleanCorrupt):
    """The same task, scored by the logit of the right answer less the mean of the other choices, in
    nats: it does not saturate where the answer is nearly certain, as a log-probability does."""

    def compare(
        self, right: Float[Tensor, "*lead"], choices: Float[Tensor, "*lead choice"]
    ) -> Float[Tensor, "*lead"]:
        """Margin of single predictions, in nats."""
        return right - (choices.sum(-1) - right) / (choices.shape[-1] - 1)


@dataclass(frozen=True)
class Question:
    """Prompts, corrupt twins in which every example answers otherwise, and their examples."""

    task: Margin
    example: Int[Tensor, "batch pos"]  # the example a token belongs to; -1 none, the last the query
    cues: Int[Tensor, "batch demo"]  # the token before the answer of each example
    shows: Int[Tensor, "batch demo"]  # which of the choices each example stands for

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, rows: slice | Tensor) -> Question:
        return Question(*(field[rows] for field in vars(self).values()))

    @property
    def at(self) -> Int[Tensor, "batch"]:
        """The target, where the answer is predicted."""
        return self.task.at[:, 0]

    @property
    def examples(self) -> int:
        """How many examples each prompt has."""
        return self.cues.shape[1]

    @property
    def answers(self) -> Int[Tensor, "batch demo"]:
        """Where the answers of the examples stand."""
        return self.cues + 1

    @property
    def shown(self) -> Bool[Tensor, "batch pos"]:
        """The tokens of the examples."""
        return (self.example >= 0) & (self.example < self.examples)

    def margin(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch"]:
        """Logit of the right answer less the mean of the other choices, in nats."""
        return self.task.score(logits[:, None])

    def choice_logits(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch choice"]:
        assert self.task.choices is not None
        return logits.gather(1, self.task.choices)

    def mixed(self, generator: torch.Generator) -> Question:
        """The same prompts, each example clean or corrupt by a fair coin (of two choices only)."""
        if self.task.choices is None or self.task.choices.shape[1] != 2:
            raise IclError("Only questions of two choices can have mixed examples.")
        coin = torch.randint(0, 2, self.shows.shape, generator=generator).to(self.shows)
        other = self.task.corrupt.gather(1, self.answers)
        own = self.task.clean.gather(1, self.answers)
        tokens = self.task.clean.scatter(1, self.answers, torch.where(coin == 1, other, own))
        return replace(self, task=replace(self.task, clean=tokens), shows=self.shows ^ coin)

    def without(self, examples: Sequence[int]) -> tuple[Int[Tensor, "batch pos"], Tensor]:
        """The clean prompts without some examples: tokens, padded on the right, and target."""
        gone = torch.isin(self.example, torch.tensor([*examples], device=self.example.device))
        return leave_out(self.task.clean, self.at, gone)


def of_words(
    model: TransformerBridge,
    function: str,
    rival: str,
    count: int,
    examples: int,
    generator: torch.Generator,
) -> Question:
    """``word -> answer`` lines of a function, asked of held-out words; corrupt: of its rival. The
    newline before a line belongs to it, so that a prompt without examples begins with one."""
    task = Margin(**vars(two_functions(model, function, rival, count, examples, generator)))
    place = torch.arange(task.clean.shape[1], device=task.clean.device)
    cues = ANSWER - 1 + LINE * torch.arange(examples, device=place.device)
    example = (place[:, None] > cues + 1).sum(1)
    shows = torch.zeros(count, examples, dtype=torch.long, device=place.device)
    return Question(task, example.expand_as(task.clean), cues.expand(count, -1), shows)


def of_prompts(prompts: Prompts) -> Question:
    """Labelled texts; corrupt: every demonstration carries the label word of the next class."""
    task = Margin(**vars(classification(prompts)))
    place = torch.arange(prompts.tokens.shape[1], device=prompts.tokens.device)
    example = (place[:, None] > prompts.label_pos[:, None]).sum(-1)
    example[:, 0] = -1  # BOS, or the first word of the template: never taken away
    return Question(task, example, prompts.cue_pos, prompts.demo_class)
