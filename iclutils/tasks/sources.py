"""Sources of classification prompts: made-up topics or real text, asked in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

from torch import Generator
from transformers import PreTrainedTokenizerBase

from ..errors import IclError, unknown
from ..models import TransformerBridge, tokenizer
from . import text, topics
from .prompts import Prompts, join

PAPER_SEED, PAPER_SEEDS = 42, 5  # seeds 42 .. 46 (Wang et al. 2023, section 2.1)
NAMES = ("topics", *text.TASKS)


@dataclass(frozen=True)
class Topics:
    """Made-up topics: every prompt has demonstrations of its own unless they are to be shared."""

    generator: Callable[[str, int], Generator]
    device: str

    def evaluation(self, count: int, shots: int = 1) -> Prompts:
        """About ``count`` prompts on which accuracy and loyalty are measured."""
        generator = self.generator("evaluation", shots)
        return topics.sample(count, generator, shots=shots).to(self.device)

    def varied(self, count: int) -> Prompts:
        """About ``count`` prompts with demonstrations of their own, for saliency."""
        return topics.sample(count, self.generator("varied", 0)).to(self.device)

    def fixed(
        self, draw: int, count: int, train_per_class: int = 0
    ) -> tuple[Prompts, Prompts | None]:
        """``count`` queries on demonstration set number ``draw``, and others to train on, if any.

        The texts are the hard ones, so that there are errors to explain.
        """
        more, generator = 4 * train_per_class, self.generator("fixed", draw)
        both = topics.sample(count + more, generator, shared=True, texts=topics.HARD)
        both = both.to(self.device)
        return both[:count], both[count:] if more else None


@dataclass(frozen=True)
class Text:
    """A text data set, with demonstrations and test rows chosen as in the paper.

    The methods are those of topics. Prompts longer than the context are left out.
    """

    task: text.TextTask
    words: PreTrainedTokenizerBase
    context: int
    device: str
    seed: int
    train: list[text.Row]
    test: list[text.Row]

    def _build(self, shown: list[list[text.Row]], asked: list[text.Row]) -> Prompts:
        prompts = text.build(
            self.task, self.words, shown, asked, context=self.context, over_long="drop"
        )
        return prompts.to(self.device)

    def _shared(self, seed: int, shots: int, more: int = 0) -> tuple[list[text.Row], ...]:
        return text.demonstrations(self.train, len(self.task.label_words), shots, seed, more)

    def _over_seeds(self, count: int, shown: Callable[[int, int], list[list[text.Row]]]) -> Prompts:
        """Prompts on the paper's five seeds, an equal share of the test rows each."""
        parts = []
        for seed in range(self.seed, self.seed + PAPER_SEEDS):
            rows = text.evaluation_rows(self.test, seed, ceil(count / PAPER_SEEDS))
            parts.append(self._build(shown(seed, len(rows)), rows))
        return join(parts)

    def evaluation(self, count: int, shots: int = 1) -> Prompts:
        """On the paper's five demonstration sets, an equal share each."""
        shots = min(shots, self.task.most_shots)
        return self._over_seeds(count, lambda seed, rows: [self._shared(seed, shots)[0]] * rows)

    def varied(self, count: int) -> Prompts:
        """On the paper's five seeds, an equal share each."""
        draw = partial(text.demonstrations_per_query, self.train, len(self.task.label_words), 1)
        return self._over_seeds(count, draw)

    def fixed(
        self, draw: int, count: int, train_per_class: int = 0
    ) -> tuple[Prompts, Prompts | None]:
        """Training rows are those after the demonstrations, as many of each class."""
        shown, others = self._shared(self.seed + draw, 1, train_per_class)
        rows = text.evaluation_rows(self.test, self.seed + draw, count)
        asked = self._build([shown] * len(rows), rows)
        return asked, self._build([shown] * len(others), others) if others else None


Source = Topics | Text


def suited(model: TransformerBridge, asked: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the tasks to put to a model: those asked for (``"sst2,trec"``), or what suits it.

    A model with the vocabulary of the made-up topics gets those, any other that would have got
    them SST-2.
    """
    if asked:
        names = tuple(name.strip() for name in asked.split(","))
        for name in names:
            if name not in NAMES:
                raise unknown("task", name, NAMES)
        return names
    if usual == ("topics",) and model.cfg.d_vocab != topics.VOCAB:
        return ("sst2",)
    return usual


def open_source(
    task: str,
    model: TransformerBridge,
    generator: Callable[[str, int], Generator] | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
) -> Source:
    """The source of one task's prompts for one model.

    Topics need a generator for each purpose and draw (``Session.generator``); texts are chosen
    by ``seed`` alone (0 for the paper's sets), their rows loaded as by ``text.load``.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.tasks import generator, sources
        >>> source = sources.open_source("topics", models.load("anchors-0"), generator)
        >>> len(source.evaluation(5, 1))
        5
    """
    if task not in NAMES:
        raise unknown("task", task, NAMES)
    device = str(model.cfg.device)
    if task == "topics":
        if model.cfg.d_vocab != topics.VOCAB:
            raise IclError(
                f"This model has {model.cfg.d_vocab} tokens, the made-up topics {topics.VOCAB}: "
                f"choose a text task for it ({', '.join(text.TASKS)})."
            )
        if generator is None:
            raise IclError("Topics are drawn at random: give a generator, as book.generator.")
        return Topics(generator, device)
    rows = text.load(task, "train", folder), text.load(task, "test", folder)
    seed = PAPER_SEED + PAPER_SEEDS * seed
    return Text(text.TASKS[task], tokenizer(model), model.cfg.n_ctx, device, seed, *rows)
