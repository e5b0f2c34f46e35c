"""Clean/corrupt tasks: every sequence comes twice, and the answer can be told of one alone.

Length, scored positions and right answers of the *clean* and the *corrupt* sequence are the same.
The score is one number per sequence: the mean log-probability of the right answers, in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from ..errors import IclError
from ..models import TransformerBridge
from ..tasks.prompts import Prompts
from ..tasks.repeated import repeated_tokens
from .hooks import Hook, logits_at

Logits = Float[Tensor, "*lead batch entry vocab"]
CONSTANT = 1e-6  # nats; a smaller gap between clean and corrupt runs is no gap


@dataclass(frozen=True)
class CleanCorrupt:
    """A batch of clean and corrupt sequences and the predictions that are scored."""

    clean: Int[Tensor, "batch pos"]
    corrupt: Int[Tensor, "corrupt_batch corrupt_pos"]  # a mismatch is refused with a cure
    at: Int[Tensor, "batch entry"]  # positions whose next-token prediction is scored, increasing
    answer: Int[Tensor, "batch entry"]  # the right next token there
    source: Int[Tensor, "batch entry"] | None = None  # position that the answer can be read from
    choices: Int[Tensor, "batch choice"] | None = None  # tokens of the softmax; all if None

    def __post_init__(self) -> None:
        if not len(self.clean) or not self.at.shape[1]:
            raise IclError("There is nothing to score: give at least one sequence and one entry.")
        inside = int(self.at.min()) >= 0 and int(self.at.max()) < self.clean.shape[1]
        if self.clean.shape != self.corrupt.shape or not inside:
            raise IclError("Need both sides of one shape, and scored positions inside them.")

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, rows: slice | Tensor) -> "CleanCorrupt":
        """Take some of the sequences."""
        some: dict[str, Any] = {k: None if v is None else v[rows] for k, v in vars(self).items()}
        return replace(self, **some)

    def compare(
        self, right: Float[Tensor, "*lead"], choices: Float[Tensor, "*lead choice"]
    ) -> Float[Tensor, "*lead"]:
        """Score single predictions, from the logits of the right answer and of all choices: log p,
        in nats. Another task overrides this, and nothing else."""
        return right - choices.logsumexp(-1)

    @final
    def by_entry(self, logits: Logits) -> Float[Tensor, "*lead batch entry"]:
        """Score every entry, in nats."""
        return self.compare(*self._compared(logits))

    @final
    def score(self, logits: Logits) -> Float[Tensor, "*lead batch"]:
        """Return the mean score of the entries, in nats."""
        return self.by_entry(logits).mean(-1)

    def is_correct(self, logits: Logits) -> Bool[Tensor, "*lead batch entry"]:
        """Tell whether no other token (or choice) has a higher logit than the right answer."""
        right, choices = self._compared(logits)
        return right >= choices.max(-1).values

    def _compared(self, logits: Logits) -> tuple[Tensor, Tensor]:
        """Return logits of the right answers, and of all that they are compared with."""
        lead = logits.shape[:-1]
        right = logits.gather(-1, self.answer[..., None].expand(*lead, 1))[..., 0]
        if self.choices is None:
            return right, logits
        return right, logits.gather(-1, self.choices[:, None].expand(*lead, -1))


class Margin(CleanCorrupt):
    """The same task, scored by the logit of the right answer less the mean of the other choices, in
    nats: it does not saturate where the answer is nearly certain, as a log-probability does."""

    def compare(
        self, right: Float[Tensor, "*lead"], choices: Float[Tensor, "*lead choice"]
    ) -> Float[Tensor, "*lead"]:
        """Return the margin of single predictions, in nats."""
        return margin(right, choices)


def margin(
    right: Float[Tensor, "*some"], choices: Float[Tensor, "*some choice"]
) -> Float[Tensor, "*some"]:
    """Return the lead of ``right``, one of ``choices``, over the mean of the others, in nats."""
    return right - (choices.sum(-1) - right) / (choices.shape[-1] - 1)


def scored_logits(
    model: TransformerBridge, task: CleanCorrupt, hooks: Sequence[Hook] = (), corrupt: bool = False
) -> Float[Tensor, "batch entry vocab"]:
    """Return logits at the scored positions alone, under ``hooks``, without gradients."""
    return logits_at(model, task.corrupt if corrupt else task.clean, task.at, hooks)


def baselines(
    model: TransformerBridge, task: CleanCorrupt
) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch"]]:
    """Score the clean and the corrupt run, in nats: the 1 and the 0 of every share. Refuses a task
    on which they score the same."""
    clean, corrupt = (task.score(scored_logits(model, task, corrupt=c)) for c in (False, True))
    if abs(float((clean - corrupt).mean())) < CONSTANT:
        raise IclError(
            "The clean and the corrupt sequences score the same: this model does not show the "
            "behaviour, or the corruption takes nothing away. There is no circuit to look for."
        )
    return clean, corrupt


def share(
    lost: Float[Tensor, "*item batch"],
    clean: Float[Tensor, "batch"],
    corrupt: Float[Tensor, "batch"],
) -> Float[Tensor, "*item"]:
    """Return nats lost as a share of what the corruption takes, mean over mean."""
    return lost.mean(-1) / (clean - corrupt).mean()


def copying(
    model: TransformerBridge, count: int, length: int, generator: Generator, narrow: bool = False
) -> CleanCorrupt:
    """Predict the second copy of ``length`` distinct random tokens (chapter 01's task). Corrupt:
    the first copy is another draw. ``narrow``: softmax over the second copy's tokens alone."""
    clean = repeated_tokens(model, count, length, generator, distinct=True).tokens
    first, corrupt = slice(1, length + 1), clean.clone()
    other = repeated_tokens(model, count, length, generator, distinct=True)
    corrupt[:, first] = other.tokens[:, first]
    at = torch.arange(length + 1, 2 * length, device=clean.device).expand(count, -1)
    return CleanCorrupt(
        clean=clean,
        corrupt=corrupt,
        at=at,
        answer=clean.gather(1, at + 1),
        source=at - length + 1,
        choices=clean[:, length + 1 :] if narrow else None,
    )


def classification(prompts: Prompts) -> CleanCorrupt:
    """Name the class of the query (chapter 02's task). Corrupt: every demonstration carries the
    first sub-token of the next class's label word. The answer has a source where every class has
    one demonstration."""
    prompts.check()
    other = prompts.label_words.gather(1, (prompts.demo_class + 1) % prompts.classes)
    same = (prompts.demo_class == prompts.gold[:, None]).long()
    once = prompts.label_pos.shape[1] == prompts.classes
    return CleanCorrupt(
        clean=prompts.tokens,
        corrupt=prompts.tokens.scatter(1, prompts.label_pos, other),
        at=prompts.target[:, None],
        answer=prompts.label_words.gather(1, prompts.gold[:, None]),
        source=prompts.label_pos.gather(1, same.argmax(1, keepdim=True)) if once else None,
        choices=prompts.label_words,
    )


def of_rivals(
    model: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
    corrupt: Int[Tensor, "batch pos"],
    choices: Int[Tensor, "batch 2"],
) -> CleanCorrupt:
    """Make a task of what ``words.rivals`` draws: say the first answer, not the second."""
    clean, corrupt, choices = (x.to(model.cfg.device) for x in (clean, corrupt, choices))
    at = torch.full_like(choices[:, :1], clean.shape[1] - 1)
    return CleanCorrupt(clean, corrupt, at, choices[:, :1], choices=choices)


def one_token(
    task: CleanCorrupt, position: int, entry: int, generator: Generator, vocab: int
) -> CleanCorrupt:
    """Corrupt the same sequences at one position alone, and score one entry alone; the token
    there is drawn anew, uniform over the others of the vocabulary."""
    step = torch.randint(1, vocab, (len(task),), generator=generator)
    corrupt = task.clean.clone()
    corrupt[:, position] = (corrupt[:, position] + step.to(corrupt.device)) % vocab
    at, answer = (x[:, entry : entry + 1] for x in (task.at, task.answer))
    return replace(task, corrupt=corrupt, at=at, answer=answer, source=None)
