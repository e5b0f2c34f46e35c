"""What a model answers at the target, and how loyal a changed model's answers are.

Of the logits only those of the label words and the likeliest words are kept, so that thousands of
prompts under dozens of changes fit into memory. Source: Wang et al. 2023, section 2.2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...interp.hooks import Hook
from ...interp.kv_cache import answer_from_cache, cache_demonstrations, demonstrations, sets
from ...interp.readout import in_batches, target_logits
from ...models import TransformerBridge
from ...tasks.prompts import Prompts, class_logits

LIKELIEST = 10  # words kept of every answer


@dataclass(frozen=True)
class Answers:
    """Logits of the classes, likeliest tokens (best first) and class of the query."""

    class_logits: Float[Tensor, "batch cls"]
    words: Int[Tensor, "batch k"]
    gold: Int[Tensor, "batch"]

    @classmethod
    def of(cls, prompts: Prompts, logits: Float[Tensor, "batch vocab"]) -> Answers:
        """The answers that logits at the targets of ``prompts`` give."""
        words = logits.topk(min(LIKELIEST, logits.shape[1])).indices
        return cls(class_logits(prompts, logits), words, prompts.gold)

    @classmethod
    def join(cls, parts: Sequence[Answers]) -> Answers:
        """Those of several batches as one."""
        columns = zip(*((p.class_logits, p.words, p.gold) for p in parts), strict=True)
        return cls(*map(torch.cat, columns))

    def __getitem__(self, rows: slice | Int[Tensor, "rows"]) -> Answers:
        """Those of some of the prompts."""
        return Answers(self.class_logits[rows], self.words[rows], self.gold[rows])

    @property
    def predicted(self) -> Int[Tensor, "batch"]:
        """Class of the likeliest label word."""
        return self.class_logits.argmax(-1)

    @property
    def margin(self) -> Float[Tensor, "batch"]:
        """By how much the right class's logit exceeds the next."""
        gold = self.gold[:, None]
        rest = self.class_logits.scatter(1, gold, -torch.inf).amax(1)
        return self.class_logits.gather(1, gold)[:, 0] - rest

    @property
    def correct(self) -> Bool[Tensor, "batch"]:
        """Whether that is the query's class."""
        return self.predicted == self.gold


def answers(
    model: TransformerBridge,
    prompts: Prompts,
    hooks: Sequence[Hook] = (),
    batch_size: int | None = None,
) -> Answers:
    """Answers of a model; ``hooks`` are of the whole batch, and only without ``batch_size``."""
    if hooks:
        return Answers.of(prompts, target_logits(model, prompts, hooks, batch_size))

    def of(batch: Prompts, _: Tensor) -> Iterable[Tensor]:
        return vars(Answers.of(batch, target_logits(model, batch))).values()

    return Answers(*in_batches(prompts, batch_size, "answers", of))


def answers_by_set(
    model: TransformerBridge,
    prompts: Prompts,
    shown: Callable[[Prompts], Sequence[Hook]] = lambda _: (),
    asked: Callable[[Prompts], Sequence[Hook]] = lambda _: (),
    batch_size: int | None = None,
) -> Answers:
    """The same where many prompts share their demonstrations, which are read once: each set
    (prompts of one row, without a query) under the hooks that ``shown`` makes of it, its queries
    under those that ``asked`` makes of its prompts, ``batch_size`` in a pass."""
    by_set, groups = [], sets(prompts)
    for rows in groups:
        one = prompts[rows[:1]]
        keep = demonstrations(one)
        width = int(keep.sum())
        alone = replace(one, tokens=one.tokens[:, :width], roles=one.roles[:, :width])
        held = cache_demonstrations(model, one, keep, shown(alone))
        for few in map(prompts.__getitem__, rows.split(batch_size or len(rows))):
            by_set.append(Answers.of(few, answer_from_cache(model, held, few, hooks=asked(few))))
    return Answers.join(by_set)[torch.cat(groups).argsort()]


def centred(told: Answers, prompts: Prompts) -> Answers:
    """Answers less the mean logit of each class over the prompts with the same demonstrations: a
    preference for one label word would decide in place of the query."""
    logits = told.class_logits.clone()
    for rows in sets(prompts):
        logits[rows] -= logits[rows].mean(0)
    return replace(told, class_logits=logits)


def word_loyalty(changed: Answers, clean: Answers, k: int = 5) -> Float[Tensor, "batch"]:
    """Return how alike the ``k`` likeliest words of both models are: those in both over those in
    either, 0 to 1."""
    same = changed.words[:, :k, None] == clean.words[:, None, :k]  # (batch, k, k)
    shared = same.sum((1, 2)).float()
    return shared / (2 * k - shared)


def label_loyalty(changed: Answers, clean: Answers) -> Bool[Tensor, "batch"]:
    """Return whether the changed model predicts the same class as the unmodified one."""
    return changed.predicted == clean.predicted
