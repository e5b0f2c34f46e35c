r"""Few-shot text classification as in Wang et al. 2023 (arXiv 2305.14160, §2.1, App. A).

A prompt is written as ``cue text, newline, answer cue, label word`` for each demonstration and
the same without a label word for the query, joined by newlines::

    Review: a great movie
    Sentiment: Positive
    Review: fine work here
    Sentiment:

``demonstrations`` and its kin choose rows as the released code does, number for number;
``build`` writes the prompts and says where in them everything stands. Nothing is prepended (the
code runs GPT-2 without BOS) and nothing is ever cut off.

Example:
    >>> from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> from iclutils.tasks import classification
    >>> words = "? Review : \n Sentiment Negative Positive dull fine bad great".split(" ")
    >>> core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    >>> cut = (Regex(r"\n|:"), "isolated"), (" ", "removed")
    >>> core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(*one) for one in cut])
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", eos_token="?")
    >>> task = classification.TASKS["sst2"]
    >>> rows = [("dull", 0), ("fine", 1), ("bad", 0), ("great", 1)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import IclError
from .datasets import SOURCES, Row, Source
from .prompts import Prompts, Role


@dataclass(frozen=True)
class Task:
    """The template of one data set.

    Attributes:
        title: its name in print.
        cue: what stands before a text.
        answer_cue: what stands before a label word.
        label_words: one word per class, by class id, with the space before it.
        source: where its rows come from, if they are those of a data set.
        most_shots: demonstrations per class that fit the context (paper, table 1).
    """

    title: str
    cue: str
    answer_cue: str
    label_words: tuple[str, ...]
    source: Source | None = None
    most_shots: int = 5


TASKS = {
    "sst2": Task("SST-2", "Review:", "Sentiment:", (" Negative", " Positive"), SOURCES["sst2"]),
    "trec": Task(
        "TREC",
        "Question:",
        "Answer Type:",
        (" Abbreviation", " Entity", " Description", " Person", " Location", " Number"),
        SOURCES["trec"],
    ),
    "ag_news": Task(
        "AG News",
        "Article:",
        "Answer:",
        (" World", " Sports", " Business", " Technology"),
        SOURCES["ag_news"],
        most_shots=3,
    ),
    "emoc": Task(
        "EmoC", "Dialogue:", "Emotion:", (" Others", " Happy", " Sad", " Angry"), SOURCES["emoc"]
    ),
}


def demonstrations(
    rows: Sequence[Row], classes: int, shots: int, seed: int, more: int = 0
) -> tuple[list[int], list[int]]:
    """One set of demonstrations for all queries, and rows to train the re-weighting on.

    All rows are shuffled by NumPy's legacy generator and walked once: the first ``shots`` of each
    class become demonstrations, the ``more`` next ones training rows, both in the order in which
    they are met. So the order of the labels is random, but fixed by the seed (released code; the
    paper uses one shot and seeds 42 to 46, §2.1, and ``more=4`` for the re-weighting, App. G).

    Returns:
        Row numbers of the demonstrations and of the training rows.

    Example:
        >>> shown, more = classification.demonstrations(rows, classes=2, shots=1, seed=42)
        >>> sorted(rows[i][1] for i in shown), more
        ([0, 1], [])
    """
    _check_supply(rows, classes, shots, shots + more)
    order = list(range(len(rows)))
    np.random.RandomState(seed).shuffle(order)
    taken = [0] * classes
    first: list[int] = []
    second: list[int] = []
    for i in order:
        label = rows[i][1]
        if taken[label] < shots + more:
            (first if taken[label] < shots else second).append(i)
            taken[label] += 1
    return first, second


def demonstrations_per_query(
    rows: Sequence[Row], classes: int, shots: int, seed: int, queries: int
) -> list[list[int]]:
    """Demonstrations of the saliency experiment: another set for every query.

    Each class gives ``shots`` rows, drawn with replacement by one legacy generator that runs on
    from query to query; each set is then put into an order drawn by a new generator from the
    same seed. So the order of the labels is one and the same for all queries (released code).

    Returns:
        Row numbers, ``classes * shots`` for each query.
    """
    _check_supply(rows, classes, shots, 1)
    labels = np.array([label for _, label in rows])
    members = [np.flatnonzero(labels == c) for c in range(classes)]
    order = np.random.default_rng(seed).permutation(classes * shots)
    generator = np.random.RandomState(seed)
    sets = []
    for _ in range(queries):
        drawn = np.concatenate([generator.choice(ids, shots) for ids in members])
        sets.append(drawn[order].tolist())
    return sets


def evaluation_rows(count: int, seed: int, limit: int = 1000) -> list[int]:
    """Which of ``count`` test rows are evaluated: a random ``limit`` of them, or all in new order.

    The order is that of ``Dataset.shuffle(seed)`` in Hugging Face's ``datasets``, which the
    released code calls.
    """
    return np.random.default_rng(seed).permutation(count)[:limit].tolist()


def label_tokens(task: Task, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, "cls"]:
    """Vocabulary id of the first sub-token of each class's label word (§2.1, footnote 2)."""
    core = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    missing = {tokenizer.unk_token, getattr(core, "unk_token", None), None}
    first: list[int] = []
    for word in task.label_words:
        ids = tokenizer(word, add_special_tokens=False)["input_ids"]
        if not ids or tokenizer.convert_ids_to_tokens(ids[0]) in missing:
            raise IclError(
                f"The label word {word!r} is not in the vocabulary of this model's tokenizer. "
                "Use a model that was trained on text, or other label words."
            )
        if ids[0] in first:
            other = task.label_words[first.index(ids[0])]
            raise IclError(
                f"The label words {other!r} and {word!r} begin with the same sub-token, so the "
                "model cannot tell their classes apart there. Use other label words."
            )
        first.append(ids[0])
    return torch.tensor(first)


def write(task: Task, shown: Sequence[Row], query: str) -> str:
    """The prompt as text: demonstrations, then the query without a label word.

    Example:
        >>> print(classification.write(task, [("dull", 0)], "great"))
        Review: dull
        Sentiment: Negative
        Review: great
        Sentiment:
    """
    return "".join(piece for piece, _ in _pieces(task, shown, query))


def build(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    shown: Sequence[Sequence[Row]],
    queries: Sequence[Row],
    *,
    context: int,
    over_long: Literal["error", "drop"] = "error",
) -> tuple[Prompts, list[int]]:
    """Write and tokenise prompts, and say where in them everything stands.

    A prompt is tokenised as one string. A token belongs to the piece of the template that its
    last character comes from, so that a space goes with the word after it.

    Args:
        task: the template.
        tokenizer: the model's; see ``iclutils.models.tokenizer``.
        shown: the demonstrations of each query, equally many; ``[one] * len(queries)`` where all
            share theirs.
        queries: text and class of each query.
        context: how many tokens the model reads.
        over_long: what to do with prompts that are longer: refuse them all, or leave those
            queries out, as the saliency experiment of the released code does. Its other
            experiments cut the end off, that is the query, which this function never does.

    Returns:
        The prompts, and which queries they are of: all, unless some were dropped.

    Example:
        >>> asked, kept = classification.build(task, tokenizer, [rows[:2]], rows[3:], context=50)
        >>> [words[token] for token in asked.tokens[0, asked.label_pos[0]]]
        ['Negative', 'Positive']
    """
    if len(shown) != len(queries) or not queries:
        raise IclError(
            f"Give one list of demonstrations per query, and at least one query; got "
            f"{len(shown)} lists for {len(queries)} queries."
        )
    if len({len(rows) for rows in shown}) > 1:
        raise IclError("Every query needs the same number of demonstrations.")
    if not getattr(tokenizer, "is_fast", False):
        raise IclError(
            "This tokenizer does not say which characters a token comes from. Save it with a "
            "tokenizer.json (in transformers: a fast tokenizer)."
        )
    words = label_tokens(task, tokenizer)
    for n, row in enumerate(queries):
        _check_row(task, row, f"Query {n}")
        for d, row in enumerate(shown[n]):
            _check_row(task, row, f"Demonstration {d} of query {n}")
    parts = [_pieces(task, d, text) for d, (text, _) in zip(shown, queries, strict=True)]
    texts = ["".join(piece for piece, _ in p) for p in parts]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoded["input_ids"]
    kept = [n for n in range(len(ids)) if len(ids[n]) <= context]
    if len(kept) < len(ids) and (over_long == "error" or not kept):
        raise IclError(
            f"{len(ids) - len(kept)} of {len(ids)} prompts are longer than the {context} tokens "
            f"that the model reads: with {len(shown[0])} demonstrations the longest has "
            f"{max(map(len, ids))}. Show fewer demonstrations, use a model with a longer context, "
            'or leave those queries out with over_long="drop". Nothing is cut off.'
        )
    places = [_places(parts[n], encoded["offset_mapping"][n]) for n in kept]
    longest = max(len(ids[n]) for n in kept)
    pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    label_pos = torch.tensor([labels for _, labels in places])
    prompts = Prompts(
        tokens=torch.tensor([ids[n] + [pad] * (longest - len(ids[n])) for n in kept]),
        roles=torch.tensor([roles + [Role.PAD] * (longest - len(roles)) for roles, _ in places]),
        target=torch.tensor([len(roles) - 1 for roles, _ in places]),
        label_pos=label_pos,
        cue_pos=label_pos - 1,
        demo_class=torch.tensor([[label for _, label in shown[n]] for n in kept]),
        gold=torch.tensor([queries[n][1] for n in kept]),
        label_words=words.expand(len(kept), -1),
    )
    prompts.check()
    return prompts, kept


def _pieces(task: Task, shown: Sequence[Row], query: str) -> list[tuple[str, Role]]:
    """The prompt cut where roles change: joined, the pieces are the prompt."""
    pieces = []
    for text, label in shown:
        pieces += [
            (task.cue, Role.FORMAT),
            (f" {text}", Role.TEXT),
            (f"\n{task.answer_cue}", Role.FORMAT),
            (task.label_words[label], Role.LABEL),
            ("\n", Role.FORMAT),
        ]
    return [*pieces, (f"{task.cue} {query}\n{task.answer_cue}", Role.QUERY)]


def _places(
    pieces: Sequence[tuple[str, Role]], offsets: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Role of every token, and position of every label word's first sub-token.

    Args:
        pieces: the prompt, cut where roles change.
        offsets: first character of each token and the one after its last.
    """
    edges = np.cumsum([len(piece) for piece, _ in pieces])
    owner = np.searchsorted(edges, [end - 1 for _, end in offsets], side="right")
    roles = [int(pieces[p][1]) for p in owner]
    labels = []
    for p, (word, role) in enumerate(pieces):
        if role != Role.LABEL:
            continue
        at = int(np.searchsorted(owner, p))
        if at == len(owner) or owner[at] != p or offsets[at][0] < edges[p] - len(word):
            raise IclError(
                f"This tokenizer merges the label word {word!r} with what stands beside it, so "
                "it has no position of its own. Use another tokenizer or other label words."
            )
        labels.append(at)
    return roles, labels


def _check_row(task: Task, row: Row, who: str) -> None:
    text, label = row
    if not text.strip():
        raise IclError(f"{who} has a blank text. Leave that row out.")
    if not 0 <= label < len(task.label_words):
        raise IclError(
            f"{who} has class {label}; the classes of {task.title} are "
            f"0..{len(task.label_words) - 1}."
        )


def _check_supply(rows: Sequence[Row], classes: int, shots: int, needed: int) -> None:
    """Refuse a demand that the rows cannot meet."""
    if shots < 1:
        raise IclError(f"Show at least one demonstration per class; got shots={shots}.")
    have = [0] * classes
    for i, (_, label) in enumerate(rows):
        if not 0 <= label < classes:
            raise IclError(f"Row {i} has class {label}; there are the classes 0..{classes - 1}.")
        have[label] += 1
    for c, count in enumerate(have):
        if count < needed:
            raise IclError(
                f"Class {c} has {count} rows and {needed} are needed: take fewer demonstrations "
                "or training rows per class, or give more rows."
            )
