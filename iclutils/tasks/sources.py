"""Sources of classification prompts: the same questions to made-up topics and to real text.

A chapter asks a source for prompts and need not know where they come from. ``open_source`` knows
the made-up topics (``"topics"``) and the text data sets of ``iclutils.tasks.classification``.

Example:
    >>> import iclutils
    >>> from iclutils import models
    >>> from iclutils.tasks import sources
    >>> net = models.load("anchors-0")
    >>> book = iclutils.begin(device="cpu")
    mini tier, the tier's own models, seed 0, cpu
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Protocol, runtime_checkable

from torch import Generator
from transformers import PreTrainedTokenizerBase

from ..errors import IclError, unknown
from ..models import TransformerBridge, tokenizer
from . import classification, datasets, topics
from .prompts import Prompts, join

PAPER_SEED, PAPER_SEEDS = 42, 5  # seeds 42 .. 46 (Wang et al. 2023, section 2.1)


@runtime_checkable
class Source(Protocol):
    """Where prompts come from."""

    def evaluation(self, count: int, shots: int = 1) -> Prompts:
        """About ``count`` prompts on which accuracy and loyalty are measured."""

    def varied(self, count: int) -> Prompts:
        """About ``count`` prompts with demonstrations of their own, for saliency."""

    def fixed(
        self, draw: int, count: int, train_per_class: int = 0
    ) -> tuple[Prompts, Prompts | None]:
        """``count`` queries on demonstration set ``draw``, and ``train_per_class`` others for
        each class on the same demonstrations, to train on (None if 0)."""


@dataclass(frozen=True)
class Topics:
    """Made-up topics: every prompt has demonstrations of its own unless they are to be shared."""

    generator: Callable[[str, int], Generator]
    device: str

    def evaluation(self, count: int, shots: int = 1) -> Prompts:
        """See ``Source``."""
        generator = self.generator("evaluation", shots)
        return topics.sample(count, generator, shots=shots).to(self.device)

    def varied(self, count: int) -> Prompts:
        """See ``Source``."""
        generator = self.generator("varied", 0)
        return topics.sample(count, generator).to(self.device)

    def fixed(
        self, draw: int, count: int, train_per_class: int = 0
    ) -> tuple[Prompts, Prompts | None]:
        """See ``Source``; the texts are the hard ones, so that there are errors to mend and to
        explain, and the training queries, four times ``train_per_class``, are of random classes."""
        more = 4 * train_per_class
        generator = self.generator("fixed", draw)
        both = topics.sample(count + more, generator, shared=True, texts=topics.HARD)
        both = both.to(self.device)
        return both[slice(0, count)], both[slice(count, None)] if more else None


@dataclass(frozen=True)
class Text:
    """A text data set, with demonstrations and test rows chosen as in the paper.

    Prompts that are longer than the context are left out.
    """

    task: classification.Task
    words: PreTrainedTokenizerBase
    context: int
    device: str
    seed: int
    train: list[datasets.Row]
    test: list[datasets.Row]

    @property
    def _classes(self) -> int:
        return len(self.task.label_words)

    def _build(self, shown: list[list[int]], asked: list[datasets.Row]) -> Prompts:
        demos = [[self.train[i] for i in ids] for ids in shown]
        prompts, _ = classification.build(
            self.task, self.words, demos, asked, context=self.context, over_long="drop"
        )
        return prompts.to(self.device)

    def _on_set(self, draw: int, count: int, shots: int, more: int) -> tuple[Prompts, list[int]]:
        seed = self.seed + draw
        shown, others = classification.demonstrations(self.train, self._classes, shots, seed, more)
        rows = classification.evaluation_rows(len(self.test), seed, count)
        return self._build([shown] * len(rows), [self.test[i] for i in rows]), others

    def evaluation(self, count: int, shots: int = 1) -> Prompts:
        """See ``Source``: the paper's five demonstration sets, an equal share each."""
        each, shots = ceil(count / PAPER_SEEDS), min(shots, self.task.most_shots)
        return join([self._on_set(draw, each, shots, 0)[0] for draw in range(PAPER_SEEDS)])

    def varied(self, count: int) -> Prompts:
        """See ``Source``."""
        rows = classification.evaluation_rows(len(self.test), self.seed, count)
        shown = classification.demonstrations_per_query(
            self.train, self._classes, 1, self.seed, len(rows)
        )
        return self._build(shown, [self.test[i] for i in rows])

    def fixed(
        self, draw: int, count: int, train_per_class: int = 0
    ) -> tuple[Prompts, Prompts | None]:
        """See ``Source``; training rows are those after the demonstrations."""
        asked, others = self._on_set(draw, count, 1, train_per_class)
        if not others:
            return asked, None
        shown, _ = classification.demonstrations(self.train, self._classes, 1, self.seed + draw)
        return asked, self._build([shown] * len(others), [self.train[i] for i in others])


def suited(model: TransformerBridge, asked: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the tasks to put to a model: those asked for (``"sst2,trec"``), or what suits it.

    A model with the vocabulary of the made-up topics gets those, any other that would have got
    them SST-2.

    Example:
        >>> sources.suited(net, "", ("topics",))
        ('topics',)
    """
    if asked:
        names = tuple(name.strip() for name in asked.split(","))
        for name in names:
            if name not in ("topics", *classification.TASKS):
                raise unknown("task", name, ("topics", *classification.TASKS))
        return names
    if usual == ("topics",) and model.cfg.d_vocab != topics.VOCAB:
        return ("sst2",)
    return usual


def open_source(
    task: str, model: TransformerBridge, generator: Callable[[str, int], Generator], seed: int = 0
) -> Source:
    """The source of one task's prompts for one model.

    Args:
        task: ``"topics"`` or a name in ``classification.TASKS``.
        model: the model that will read them.
        generator: a generator for each purpose and draw (``Session.generator``).
        seed: 0 for the paper's demonstration sets, another number for others.

    Example:
        >>> source = sources.open_source("topics", net, book.generator)
        >>> len(source.evaluation(5, 1))
        5
    """
    device = str(model.cfg.device)
    if task == "topics":
        if model.cfg.d_vocab != topics.VOCAB:
            raise IclError(
                f"This model has {model.cfg.d_vocab} tokens, the made-up topics {topics.VOCAB}: "
                f"choose a text task for it ({', '.join(classification.TASKS)})."
            )
        return Topics(generator, device)
    if task not in classification.TASKS:
        raise unknown("task", task, ("topics", *classification.TASKS))
    return Text(
        classification.TASKS[task],
        tokenizer(model),
        model.cfg.n_ctx,
        device,
        PAPER_SEED + PAPER_SEEDS * seed,
        datasets.load(task, "train"),
        datasets.load(task, "test"),
    )
