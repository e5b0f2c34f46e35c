"""What a model answers at the target, and how loyal a changed model's answers are.

Of the logits only those of the label words and the likeliest words are kept, so that thousands of
prompts under dozens of changes fit into memory. Source: Wang et al. 2023, section 2.2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...interp.hooks import Head, Hook, ablate_sets
from ...interp.kv_cache import answer_from_cache, cache_demonstrations, demonstrations, sets
from ...interp.readout import in_batches, target_logits
from ...models import TransformerBridge
from ...tasks.prompts import Prompts, Role, class_logits

LIKELIEST = 10  # words kept of every answer
Hooks = Callable[[Prompts], Sequence[Hook]]  # made for the prompts of a pass


@dataclass(frozen=True)
class Answers:
    """Logits of the classes, likeliest tokens (best first) and class of the query."""

    class_logits: Float[Tensor, "batch cls"]
    words: Int[Tensor, "batch k"]
    gold: Int[Tensor, "batch"]

    @classmethod
    def of(cls, prompts: Prompts, logits: Float[Tensor, "batch vocab"]) -> "Answers":
        """Return the answers that logits at the targets of ``prompts`` give."""
        words = logits.topk(min(LIKELIEST, logits.shape[1])).indices
        return cls(class_logits(prompts, logits), words, prompts.gold)

    @classmethod
    def join(cls, parts: "Sequence[Answers]") -> "Answers":
        """Return the answers of several batches as one."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*map(torch.cat, columns))

    def __getitem__(self, rows: slice | Int[Tensor, "rows"]) -> "Answers":
        """Return the answers to some of the prompts."""
        return Answers(self.class_logits[rows], self.words[rows], self.gold[rows])

    @property
    def predicted(self) -> Int[Tensor, "batch"]:
        """Return the class of the likeliest label word."""
        return self.class_logits.argmax(-1)

    @property
    def correct(self) -> Bool[Tensor, "batch"]:
        """Return whether the query's class is predicted."""
        return self.predicted == self.gold


def collect(
    prompts: Prompts,
    batch_size: int | None,
    what: str,
    logits: Callable[[Prompts, Int[Tensor, "rows"]], Float[Tensor, "rows vocab"]],
) -> Answers:
    """Return the answers to all prompts, ``batch_size`` in a pass (None: all), from ``logits`` of
    some prompts and their rows; ``what`` names the progress bar."""
    columns = in_batches(
        prompts,
        batch_size,
        what,
        lambda some, rows: vars(Answers.of(some, logits(some, rows))).values(),
    )
    return Answers(*columns)


def answers(
    model: TransformerBridge,
    prompts: Prompts,
    hooks: Sequence[Hook] = (),
    batch_size: int | None = None,
) -> Answers:
    """Return the model's answers, as log-probabilities in nats; ``hooks`` are of the whole batch:
    with ``batch_size`` they raise ``IclError``. Where many prompts share their demonstrations
    ``answers_by_set`` is faster."""
    if hooks:
        return Answers.of(prompts, target_logits(model, prompts, hooks, batch_size))
    return collect(prompts, batch_size, "answers", lambda some, _: target_logits(model, some))


def answers_by_set(
    model: TransformerBridge,
    prompts: Prompts,
    on_shown: Hooks = lambda _: (),
    on_query: Hooks = lambda _: (),
    batch_size: int | None = None,
) -> Answers:
    """Return the answers to prompts that share demonstrations, each set of which is read once,
    under the hooks that ``on_shown`` makes of them (a prompt each, without its query), and queries
    under those that ``on_query`` makes of their prompts, ``batch_size`` of either in a pass."""
    parts, groups, size = [], sets(prompts), batch_size or len(prompts)
    for some in (groups[i : i + size] for i in range(0, len(groups), size)):
        one_each = prompts[torch.stack([rows[0] for rows in some])]
        hooks = on_shown(demonstrations_alone(one_each))
        held = cache_demonstrations(model, one_each, demonstrations(one_each), hooks)
        rows = torch.cat(some)
        of_set = torch.cat([torch.full_like(x, number) for number, x in enumerate(some)])
        for at, number in zip(rows.split(size), of_set.split(size), strict=True):
            queries, own = prompts[at], held if len(some) == 1 else held[number]
            logits = answer_from_cache(model, own, queries, hooks=on_query(queries))
            parts.append(Answers.of(queries, logits))
    return Answers.join(parts)[torch.cat(groups).argsort()]


def demonstrations_alone(prompts: Prompts) -> Prompts:
    """Return prompts without their queries."""
    mine = demonstrations(prompts)
    width = int(mine.sum(1).max())
    roles = prompts.roles.masked_fill(~mine, int(Role.PAD))
    return replace(prompts, tokens=prompts.tokens[:, :width], roles=roles[:, :width])


def answers_by_set_without(
    model: TransformerBridge, prompts: Prompts, sets: Sequence[Sequence[Head]], others: Prompts
) -> list[Answers]:
    """Return the answers without each set of heads, which write their mean over ``others``, where
    prompts share demonstrations: each set of these is read once."""
    ways = ablate_sets(model, others.tokens, sets, "mean", others.tokens)
    always: list[Hooks] = [lambda _, hooks=hooks: hooks for hooks in ways]  # type: ignore[misc]
    return [answers_by_set(model, prompts, hooks, hooks) for hooks in always]


def centre(raw: Answers, prompts: Prompts) -> Answers:
    """Return answers less the mean logit of each class over the prompts with the same
    demonstrations: a preference for one label word would decide in place of the query."""
    logits = raw.class_logits.clone()
    for rows in sets(prompts):
        logits[rows] -= logits[rows].mean(0)
    return replace(raw, class_logits=logits)


def word_loyalty(changed: Answers, clean: Answers, k: int = 5) -> Float[Tensor, "batch"]:
    """Return how many of the ``k`` likeliest words are in both models, over those in either."""
    same = changed.words[:, :k, None] == clean.words[:, None, :k]  # (batch, k, k)
    shared = same.sum((1, 2)).float()
    return shared / (2 * k - shared)


def label_loyalty(changed: Answers, clean: Answers) -> Bool[Tensor, "batch"]:
    """Return whether the changed model predicts the same class as the unmodified one."""
    return changed.predicted == clean.predicted
