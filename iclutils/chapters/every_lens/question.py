"""One prompt that only its examples can answer, and the parts of it that can be taken away.

Functions between words stand on lists of ``tasks/data/words`` that share no word: each goes from
the first column to another, and has a rival on the same words. Every third row is held out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...interp.clean_corrupt import Margin, classification, of_rivals
from ...interp.hooks import logits_at
from ...interp.removal import Outcome, outcome
from ...models import TransformerBridge, start_tokens, text_tokenizer
from ...tasks import words
from ...tasks.prompts import Prompts, leave_out

FUNCTIONS = {  # list, column, rival (the word itself, where the list has no other column)
    "past": ("verbs", "past", "gerund"),
    "comparative": ("adjectives", "comparative", "superlative"),
    "plural": ("nouns", "plural", "kind"),
    "agent": ("agents", "agent", "gerund"),
    "adjective": ("qualities", "adjective", "plural"),
    "adverb": ("manners", "adverb", "word"),
    "upper case": ("titles", "capitalised", "plural"),
    "first of three": ("triples", "first", "last"),
    "next": ("steps", "next", "previous"),
    "capital": ("countries", "capital", "language"),
    "opposite": ("contraries", "opposite", "gerund"),
    "French": ("foreign", "french", "word"),
    "first name": ("surnames", "first", "word"),
    "colour": ("things", "colour", "word"),
    "third person": ("actions", "third-person", "gerund"),
    "gerund": ("deeds", "gerund", "past"),
    "lower case": ("places", "lower", "plural"),
}
TWICE = {"clean", "banana", "lemon", "cherry", "strawberry", "raspberry"}  # in two of the lists


@dataclass(frozen=True)
class Question:
    """Prompts, corrupt twins in which every example answers otherwise, and their examples."""

    task: Margin
    example: Int[Tensor, "batch pos"]  # the example a token belongs to; -1 none, the last the query
    cues: Int[Tensor, "batch demo"]  # the token before the answer of each example
    shows: Int[Tensor, "batch demo"]  # which of the choices each example stands for

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, rows: slice | Tensor) -> "Question":
        return Question(*(field[rows] for field in vars(self).values()))

    @property
    def at(self) -> Int[Tensor, "batch"]:
        """Return the target, where the answer is predicted."""
        return self.task.at[:, 0]

    @property
    def examples(self) -> int:
        """Return how many examples each prompt has."""
        return self.cues.shape[1]

    @property
    def answers(self) -> Int[Tensor, "batch demo"]:
        """Return where the answers of the examples stand."""
        return self.cues + 1

    def margin(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch"]:
        """Return the logit of the right answer less the mean of the other choices, in nats."""
        return self.task.score(logits[:, None])

    def outcome(self, logits: Float[Tensor, "*way batch vocab"]) -> Outcome:
        """Return probability, margin and success of the right answer."""
        shape, flat = logits.shape[:-1], logits.reshape(-1, *logits.shape[-2:])
        every = [outcome(self.task, each) for each in flat]
        return Outcome(*(torch.stack(x).reshape(shape) for x in zip(*every, strict=True)))

    def shuffle(self, generator: torch.Generator) -> "Question":
        """Return the same words and answers, no example with its own: the form, not the mapping."""
        place = torch.rand(self.cues.shape, generator=generator).argsort(1).to(self.cues)
        order = torch.zeros_like(place).scatter(1, place, place.roll(1, 1))
        source, sides = self.answers.gather(1, order), (self.task.clean, self.task.corrupt)
        clean, corrupt = (x.scatter(1, self.answers, x.gather(1, source)) for x in sides)
        task = replace(self.task, clean=clean, corrupt=corrupt)
        return replace(self, task=task, shows=self.shows.gather(1, order))

    @property
    def bare(self) -> tuple[Int[Tensor, "batch pos"], Tensor]:
        """Return prompts ``without`` any examples."""
        return self.without(range(self.examples))

    def without(self, examples: Sequence[int]) -> tuple[Int[Tensor, "batch pos"], Tensor]:
        """Return the clean prompts without some examples: tokens, padded at the end, and target."""
        gone = torch.isin(self.example, torch.tensor([*examples], device=self.example.device))
        return leave_out(self.task.clean, self.at, gone)


def lost_without_each(model: TransformerBridge, asked: Question) -> Float[Tensor, "batch example"]:
    """Return how much of the lead, in nats, the clean prompts lose without each example in turn."""

    def lead(tokens: Int[Tensor, "batch pos"], at: Tensor) -> Float[Tensor, "batch"]:
        return asked.margin(logits_at(model, tokens, at[:, None])[:, 0])

    less = [lead(*asked.without([i])) for i in range(asked.examples)]
    return lead(asked.task.clean, asked.at)[:, None] - torch.stack(less, 1)


def of_words(
    model: TransformerBridge,
    function: str,
    count: int,
    examples: int,
    generator: torch.Generator,
    split: words.Split = "test",
) -> Question:
    """Return prompts about one of ``FUNCTIONS``, asked of held-out words, or of those that examples
    are of (``"train"``); corrupt: about its rival. No word comes twice in a prompt."""
    train, test = words.half(rows(function), "train"), words.half(rows(function), split)
    reader = text_tokenizer(model)
    drawn = words.rivals(train, test, reader, count, examples, generator, " ")
    start = len(start_tokens(reader))
    return of_lines(Margin(**vars(of_rivals(model, *drawn))), examples, start)


def of_lines(task: Margin, examples: int, start: int = 0) -> Question:
    """Return the question of prompts of so many lines ``word -> answer``, all of one length in
    tokens, and one without its answer. The newline before a line belongs to it, so that a prompt
    without examples begins with one; ``start`` tokens (BOS) before the first belong to none."""
    place = torch.arange(task.clean.shape[1], device=task.clean.device)
    # tokens of a line, the last of which has two fewer
    line = (len(place) - start + 2) // (examples + 1)
    cues = (start + line - 3 + line * place[:examples]).expand(len(task), -1)
    example = (place[:, None] > cues[0] + 1).sum(1)
    example[:start] = -1
    return Question(task, example.expand_as(task.clean), cues, torch.zeros_like(cues))


def rows(function: str) -> list[words.Row]:
    """Return words and what one of ``FUNCTIONS`` and its rival make of them, where these differ."""
    table, *names = FUNCTIONS[function]
    columns = words.columns(table, *names)
    return [row for row in columns if row[1] != row[2] and row[0] not in TWICE]


def of_prompts(prompts: Prompts) -> Question:
    """Return labelled texts; corrupt: every example carries the label word of the next class."""
    task = Margin(**vars(classification(prompts)))
    place = torch.arange(prompts.tokens.shape[1], device=prompts.tokens.device)
    example = (place[:, None] > prompts.label_pos[:, None]).sum(-1)
    example[:, 0] = -1  # BOS, or the first word of the template: never taken away
    return Question(task, example, prompts.cue_pos, prompts.demo_class)
