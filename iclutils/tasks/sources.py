"""Sources of prompts: made-up topics, real text or functions between words, asked alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

from jaxtyping import Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import IclError, unknown
from ..models import TransformerBridge, text_tokenizer
from . import generator, text, topics, words
from .prompts import Prompts, join

PAPER_SEED, PAPER_SEEDS = 42, 5  # seeds 42 .. 46 (Wang et al. 2023, section 2.1)
EXAMPLES = 5  # of a function between words: one "shot"
NAMES = ("topics", *text.TASKS, *words.FUNCTIONS)

Generators = Callable[[str, int], Generator]  # by purpose and draw, as ``Session.generator``


@dataclass(frozen=True)
class Topics:
    """Made-up topics: every prompt has demonstrations of its own unless they are to be shared."""

    generator: Generators
    device: str

    def evaluation(self, count: int, shots: int = 1) -> Prompts:
        """Draw about ``count`` prompts on which accuracy and loyalty are measured."""
        generator = self.generator("evaluation", shots)
        return topics.sample(count, generator, shots=shots).to(self.device)

    def varied(self, count: int) -> Prompts:
        """Draw about ``count`` prompts with demonstrations of their own, for saliency."""
        return topics.sample(count, self.generator("varied", 0)).to(self.device)

    def fixed(
        self, draw: int, count: int, train_per_class: int = 0
    ) -> tuple[Prompts, Prompts | None]:
        """Draw ``count`` queries on demonstration set ``draw``, and others to train on, if any: of
        hard texts, so that there are errors to explain."""
        more, generator = 4 * train_per_class, self.generator("fixed", draw)
        both = topics.sample(count + more, generator, shared=True, texts=topics.HARD)
        both = both.to(self.device)
        return both[:count], both[count:] if more else None


@dataclass(frozen=True)
class Text:
    """A text data set, with demonstrations and test rows chosen as in the paper; methods as of
    topics. Prompts longer than the context are left out."""

    task: text.TextTask
    words: PreTrainedTokenizerBase
    context: int
    device: str
    seed: int
    train: list[text.Row]
    test: list[text.Row]

    def _build(self, examples: list[list[text.Row]], queries: list[text.Row]) -> Prompts:
        built = text.build(
            self.task, self.words, examples, queries, context=self.context, over_long="drop"
        )
        return built.to(self.device)

    def _over_seeds(
        self, count: int, examples: Callable[[int, int], list[list[text.Row]]]
    ) -> Prompts:
        """Build prompts on the paper's five seeds, an equal share of the test rows each."""
        parts = []
        for seed in range(self.seed, self.seed + PAPER_SEEDS):
            rows = text.evaluation_rows(self.test, seed, ceil(count / PAPER_SEEDS))
            parts.append(self._build(examples(seed, len(rows)), rows))
        return join(parts)

    def evaluation(self, count: int, shots: int = 1) -> Prompts:
        """Take the paper's five demonstration sets, an equal share each; of ``shots`` as many as
        the paper says fit 1024 tokens, in proportion, and as there are rows."""
        labels, classes = [label for _, label in self.train], len(self.task.label_words)
        fitting = self.task.most_shots * max(1, self.context // text.CONTEXT)
        shots = min(shots, fitting, *map(labels.count, range(classes)))

        def same_for_all(seed: int, rows: int) -> list[list[text.Row]]:
            return [text.demonstrations(self.train, classes, shots, seed)[0]] * rows

        return self._over_seeds(count, same_for_all)

    def varied(self, count: int) -> Prompts:
        """Take the paper's five seeds, an equal share each."""
        draw = partial(text.demonstrations_per_query, self.train, len(self.task.label_words), 1)
        return self._over_seeds(count, draw)

    def fixed(
        self, draw: int, count: int, train_per_class: int = 0
    ) -> tuple[Prompts, Prompts | None]:
        """Take as training rows those after the demonstrations, as many of each class."""
        seed, classes = self.seed + draw, len(self.task.label_words)
        examples, others = text.demonstrations(self.train, classes, 1, seed, train_per_class)
        rows = text.evaluation_rows(self.test, seed, count)
        test = self._build([examples] * len(rows), rows)
        return test, self._build([examples] * len(others), others) if others else None


@dataclass(frozen=True)
class Words:
    """A function between words; methods as of topics. A shot is five examples."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    context: int
    device: str
    generator: Generators

    def _draw(
        self,
        count: int,
        generator: Generator,
        shots: int = 1,
        split: text.Split = "test",
        shared: bool = False,
    ) -> Prompts:
        drawn = words.ask(
            self.name, self.tokenizer, count, EXAMPLES * shots, generator,
            split=split, context=self.context, shared=shared)  # fmt: skip
        return drawn.prompts.to(self.device)

    def evaluation(self, count: int, shots: int = 1) -> Prompts:
        """Draw ``count`` prompts."""
        return self._draw(count, self.generator("evaluation", shots), shots)

    def varied(self, count: int) -> Prompts:
        """Draw ``count`` prompts with examples of their own, for saliency."""
        return self._draw(count, self.generator("varied", 0))

    def fixed(
        self, draw: int, count: int, train_per_class: int = 0
    ) -> tuple[Prompts, Prompts | None]:
        """Draw ``count`` queries on one set of examples, and training words on the same, if any."""
        first, again = (self.generator("fixed", draw) for _ in range(2))  # draw the same examples
        test, more = self._draw(count, first, shared=True), train_per_class * (EXAMPLES + 1)
        return test, self._draw(more, again, split="train", shared=True) if more else None

    def shared(self, sets: int, queries: int) -> Prompts:
        """Draw prompts on several sets of examples, each asked several queries."""
        draws = (self.generator("shared", draw) for draw in range(sets))
        return join([self._draw(queries, draw, shared=True) for draw in draws])


Source = Topics | Text | Words


def _reads_topics(model: TransformerBridge) -> bool:
    """Whether a model has as many tokens as the made-up topics, and no words of its own."""
    if model.cfg.d_vocab != topics.VOCAB:
        return False
    try:
        text_tokenizer(model)
    except IclError:
        return True
    return False


def compatible_tasks(
    model: TransformerBridge, wanted: str, usual: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the tasks to put to a model: those wanted (``"sst2,trec"``), or the usual; a model
    without the vocabulary of the made-up topics gets our sentences about films instead."""
    if wanted:
        return tuple(name.strip() for name in wanted.split(","))
    if usual == ("topics",) and not _reads_topics(model):
        return ("sentiment",)
    return usual


def open_source(
    task: str,
    model: TransformerBridge,
    generator: Generators = generator,
    seed: int = 0,
    labels: str = "own",
) -> Source:
    """Open the source of one task's prompts, one of ``NAMES``, for one model. Topics and words take
    a generator for each purpose and draw, as ``Session.generator``; texts are chosen by ``seed``
    alone (0 for the paper's sets); ``labels``: see ``text.with_labels``. For texts of your own see
    ``own_prompt``."""
    if task not in NAMES:
        raise unknown("task", task, NAMES)
    device = str(model.cfg.device)
    if task in text.TASKS:
        own = text.with_labels(text.TASKS[task], labels)
        parts = text.load(task, "train"), text.load(task, "test")
        first = PAPER_SEED + PAPER_SEEDS * seed
        return Text(own, text_tokenizer(model), model.cfg.n_ctx, device, first, *parts)
    if task in words.FUNCTIONS:
        return Words(task, text_tokenizer(model), model.cfg.n_ctx, device, generator)
    if not _reads_topics(model):
        raise IclError(
            f"This model has {model.cfg.d_vocab} tokens, the made-up topics {topics.VOCAB} without "
            f"words: choose a text task for it ({', '.join(text.TASKS)})."
        )
    return Topics(generator, device)


def token_strings(model: TransformerBridge, tokens: Int[Tensor, "token"]) -> list[str]:
    """Spell a model's tokens in words; those of the made-up topics by their names."""
    if _reads_topics(model):
        return [topics.NAMES[token] for token in tokens.tolist()]
    return [text_tokenizer(model).decode([token]) for token in tokens.tolist()]


def own_prompt(
    model: TransformerBridge,
    demonstrations: Sequence[tuple[str, str]],
    query: str,
    answer: str = "",
) -> tuple[Prompts, list[str]]:
    """Build one prompt of the reader's own, from texts with their labels and the text to be
    labelled; return it and its labels in the order of classes. Without a right ``answer`` its class
    is the first, as a place holder. Of a label of several tokens the first counts.

    Example:
        >>> from iclutils import models
        >>> from iclutils.chapters.label_anchors import saliency
        >>> from iclutils.tasks import sources
        >>> net = models.load("smollm2")
        >>> examples = [("a great film", "good"), ("a waste of time", "bad")]
        >>> prompts, labels = sources.own_prompt(net, examples, "I loved it", "good")
        >>> s_wp = saliency.measure(net, prompts).mean[0, :, 0]  # into label words, by layer
        >>> labels, s_wp.shape
        (['good', 'bad'], torch.Size([30]))
    """
    labels = list(dict.fromkeys(label.strip() for _, label in demonstrations))
    if len(labels) < 2 or not query:
        raise IclError(
            "Give demonstrations with at least two labels, [(text, label), ...], and a query; got "
            f"{len(labels)} labels and the query {query!r}."
        )
    if answer.strip() not in ("", *labels):
        raise IclError(f"The answer {answer!r} is no label of an example: {', '.join(labels)}.")
    task = text.TextTask("your prompt", "Text:", "Label:", tuple(f" {label}" for label in labels))
    examples = [(demo, labels.index(label.strip())) for demo, label in demonstrations]
    gold = labels.index(answer.strip() or labels[0])
    reads, context = text_tokenizer(model), model.cfg.n_ctx
    prompts = text.build(task, reads, [examples], [(query, gold)], context=context)
    return prompts.to(model.W_E.device), labels
