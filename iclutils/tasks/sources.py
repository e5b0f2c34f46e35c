"""Sources of classification prompts: the same questions to made-up topics and to real text.

A chapter asks a source for prompts and need not know where they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """Made-up topics: every prompt has demonstrations of its own unless they are to be shared.

    Every source has the same three methods.
    """

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
        """``count`` queries on demonstration set number ``draw``, and ``train_per_class`` others
        for each class on the same demonstrations, to train on (None if 0).

        The texts are the hard ones, so that there are errors to mend and to explain, and the
        training queries are of random classes.
        """
        more, generator = 4 * train_per_class, self.generator("fixed", draw)
        both = topics.sample(count + more, generator, shared=True, texts=topics.HARD)
        both = both.to(self.device)
        return both[:count], both[count:] if more else None


@dataclass(frozen=True)
class Text:
    """A text data set, with demonstrations and test rows chosen as in the paper.

    Prompts that are longer than the context are left out.
    """

    task: text.TextTask
    words: PreTrainedTokenizerBase
    context: int
    device: str
    seed: int
    train: list[text.Row]
    test: list[text.Row]

    def _choose(self, seed: int, shots: int, more: int = 0) -> tuple[list[text.Row], ...]:
        return text.demonstrations(self.train, len(self.task.label_words), shots, seed, more)

    def _build(self, shown: list[list[text.Row]], asked: list[text.Row]) -> Prompts:
        prompts, _ = text.build(
            self.task, self.words, shown, asked, context=self.context, over_long="drop"
        )
        return prompts.to(self.device)

    def _over_seeds(self, count: int) -> list[tuple[int, list[text.Row]]]:
        """The paper's five seeds, each with an equal share of the test rows."""
        each = ceil(count / PAPER_SEEDS)
        seeds = range(self.seed, self.seed + PAPER_SEEDS)
        return [(seed, text.evaluation_rows(self.test, seed, each)) for seed in seeds]

    def evaluation(self, count: int, shots: int = 1) -> Prompts:
        """As of topics, on the paper's five demonstration sets, an equal share each."""
        shots = min(shots, self.task.most_shots)
        parts = self._over_seeds(count)
        shown = [self._choose(seed, shots)[0] for seed, _ in parts]
        return join(
            [
                self._build([demos] * len(rows), rows)
                for demos, (_, rows) in zip(shown, parts, strict=True)
            ]
        )

    def varied(self, count: int) -> Prompts:
        """As of topics, on the paper's five seeds, an equal share each."""
        classes = len(self.task.label_words)
        return join(
            [
                self._build(
                    text.demonstrations_per_query(self.train, classes, 1, seed, len(rows)), rows
                )
                for seed, rows in self._over_seeds(count)
            ]
        )

    def fixed(
        self, draw: int, count: int, train_per_class: int = 0
    ) -> tuple[Prompts, Prompts | None]:
        """As of topics; training rows are those after the demonstrations."""
        seed = self.seed + draw
        shown, others = self._choose(seed, 1, train_per_class)
        rows = text.evaluation_rows(self.test, seed, count)
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

    Args:
        task: ``"topics"`` or a name in ``text.TASKS``.
        model: the model that will read them.
        generator: for topics, a generator for each purpose and draw (``Session.generator``);
            texts are chosen as in the paper, by ``seed`` alone.
        seed: 0 for the paper's demonstration sets, another number for others.
        folder: where the rows of a text task lie (see ``text.load``).

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.tasks import sources
        >>> def generator(purpose, draw):
        ...     return torch.Generator().manual_seed(draw)
        ...
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
    return Text(
        text.TASKS[task],
        tokenizer(model),
        model.cfg.n_ctx,
        device,
        PAPER_SEED + PAPER_SEEDS * seed,
        text.load(task, "train", folder),
        text.load(task, "test", folder),
    )
