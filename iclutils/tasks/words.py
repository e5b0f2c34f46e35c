"""Functions between words, which only examples can tell: lines ``big -> small`` and a query.

Our lists are tables of ``data/words``: a function goes from the first column to another, or by a
rule of spelling, so that the query alone does not say which is meant. Every third row is held out
(``test``). The tasks are those of {cite}`hendel2023` and {cite}`todd2024`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple, SupportsFloat, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import IclError, unknown
from .prompts import Prompts, Role
from .text import Piece, Split, encode, first_tokens

Pair = tuple[str, str]  # a word and what the function makes of it
Row = tuple[str, ...]  # a word and what stands in some columns
Kind = TypeVar("Kind", bound=Row)

TABLES = Path(__file__).parent / "data" / "words"
RULES: dict[str, Callable[[str], str]] = {
    "first-letter": lambda word: word[0],
    "last-letter": lambda word: word[-1],
    "upper-case": str.upper,
}
FUNCTIONS = {  # table and column, or rule
    "opposite": ("opposites", "opposite"),
    "plural": ("nouns", "plural"),
    "kind": ("nouns", "kind"),
    "french": ("nouns", "french"),
    "first-letter": ("nouns", "first-letter"),
    "last-letter": ("nouns", "last-letter"),
    "upper-case": ("nouns", "upper-case"),
    "past": ("verbs", "past"),
    "gerund": ("verbs", "gerund"),
    "third-person": ("verbs", "third-person"),
    "comparative": ("adjectives", "comparative"),
    "superlative": ("adjectives", "superlative"),
    "capital": ("countries", "capital"),
    "language": ("countries", "language"),
    "continent": ("countries", "continent"),
    "young": ("animals", "young"),
    "colour": ("things", "colour"),
    "next-number": ("numbers", "next"),
}
HELD_OUT = 3  # every third row


class Asked(NamedTuple):
    """Prompts of a function, and their whole answers, of which they know the first token.

    A prompt's classes are the answers of its examples, in their order, and one more, if there is
    one: the query's, or another. ``whole`` ends in the newline, and -1 (``readout.with_answers``).
    """

    prompts: Prompts
    whole: Int[Tensor, "batch longest"]


def load(name: str, split: Split | None = None, folder: str | Path | None = None) -> list[Pair]:
    """The pairs of a function; of no ``split``, all.

    A name that is none of ours is ``NAME.json`` in ``folder``, or where the environment variable
    ``ICLUTILS_FUNCTIONS`` says: a list of objects with ``input`` and ``output``, the format of
    {cite}`todd2024`. Of a word that stands there twice the first line counts.
    """
    if name not in FUNCTIONS:
        return half(_outside(name, folder), split)
    return half([(word, answer) for word, answer in columns(*FUNCTIONS[name])], split)


def columns(table: str, *names: str) -> list[Row]:
    """Rows of a list: the word, then what these columns have, or rules of spelling make of it;
    without those where one has none."""
    lines = (TABLES / f"{table}.tsv").read_text(encoding="utf-8").splitlines()
    header, *rows = (line.split("\t") for line in lines)

    def part(row: list[str], name: str) -> str:
        return RULES[name](row[0]) if name in RULES else row[header.index(name)]

    found = [(row[0], *(part(row, name) for name in names)) for row in rows]
    return [row for row in found if "-" not in row]


def half(rows: Sequence[Kind], split: Split | None) -> list[Kind]:
    """The rows to train on, or those held out, every third; of no ``split``, all."""
    if split is None:
        return list(rows)
    return [x for i, x in enumerate(rows) if (i % HELD_OUT == HELD_OUT - 1) == (split == "test")]


def listed(name: str, folder: str | Path | None = None) -> Path | None:
    """The file of a function that is none of ours, if there is one."""
    place = folder or os.environ.get("ICLUTILS_FUNCTIONS")
    path = Path(place) / f"{name}.json" if place else None
    return path if path and path.is_file() else None


def _outside(name: str, folder: str | Path | None) -> list[Pair]:
    path = listed(name, folder)
    if path is None:
        error = unknown("function", name, FUNCTIONS)
        raise IclError(f"{error} Others are read from NAME.json in the folder ICLUTILS_FUNCTIONS.")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        pairs = [(str(row["input"]).strip(), str(row["output"]).strip()) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise IclError(
            f"{path} must be a list of objects with 'input' and 'output' "
            f"({type(error).__name__}: {error})."
        ) from None
    if not pairs:
        raise IclError(f"{path} is empty: list objects with 'input' and 'output'.")
    for n, pair in enumerate(pairs):
        if not all(pair) or "\n" in "".join(pair):
            raise IclError(f"{path}, entry {n}: a word or its answer is blank or has two lines.")
    return list({word: (word, answer) for word, answer in reversed(pairs)}.values())[::-1]


def kept(pairs: Sequence[Pair]) -> float:
    """Share of answers that the query holds: they begin with its first three letters, or stand
    in it."""
    lower = [(word.lower(), answer.lower()) for word, answer in pairs]
    return sum(a.startswith(w[:3]) or a in w for w, a in lower) / len(pairs)


def by_list(values: Mapping[str, SupportsFloat]) -> Float[Tensor, "_"]:
    """Means over the functions of each word list: those of one share words, and are one
    repetition."""
    found = defaultdict[str, list[float]](list)
    for function, value in values.items():
        found[FUNCTIONS.get(function, (function,))[0]].append(float(value))
    return torch.tensor([sum(each) / len(each) for each in found.values()])


# Prompts


def ask(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    examples: int,
    generator: Generator,
    *,
    split: Split = "test",
    context: int = 1024,
    shared: bool = False,
    new: bool = False,
    shuffled: bool = False,
    folder: str | Path | None = None,
) -> Asked:
    """``count`` prompts of a function: ``examples`` of its training pairs, and a word of ``split``.

    Examples' answers begin with different tokens, or repeat about equally often where there are
    too few. No example asks for the query's answer or has the query for an answer. ``shared``: all
    prompts have the same examples. ``new``: no example shows the query's answer. ``shuffled``: the
    examples' answers are dealt out anew, the same words and no function.
    """
    if count < 1 or examples < 0 or (shuffled and examples < 2):
        raise IclError(
            f"Need a prompt and no example at least (two, to shuffle); got count={count}, "
            f"examples={examples}."
        )
    pool, asked = load(name, "train", folder), load(name, split, folder)
    answers = list(dict.fromkeys(answer for _, answer in (*pool, *asked)))
    first = dict(zip(answers, first_tokens(_spaced(answers), tokenizer), strict=True))

    def fits(query: Pair, example: Pair) -> bool:
        same = example[1] == query[1]
        unclear = first[example[1]] == first[query[1]] and not same
        return not (unclear or example[0] in query or example[1] == query[0] or (new and same))

    def chosen(fitting: Callable[[Pair], bool]) -> list[Pair]:
        """Examples in random order: one of each answer, then another of each, until enough."""
        order = torch.randperm(len(pool), generator=generator).tolist()
        by_token = defaultdict[int, list[Pair]](list)
        for pair in filter(fitting, (pool[i] for i in order)):
            same = by_token[first[pair[1]]]
            if not same or same[0][1] == pair[1]:  # one answer alone begins with a token
                same.append(pair)
        rounds = [pair for turn in zip_longest(*by_token.values()) for pair in turn if pair]
        if len(rounds) < examples:
            few = f"{name!r} has too few pairs for {examples} examples: {len(rounds)} fit."
            raise IclError(f"{few} Show fewer.")
        taken = {*rounds[:examples]}
        return [pool[i] for i in order if pool[i] in taken]

    shown, queries = [], []
    common = chosen(lambda pair: True) if shared else []
    asked = [query for query in asked if all(fits(query, pair) for pair in common)]
    if not asked:
        raise IclError(f"No word of {name!r} can be asked after these examples: show fewer.")
    for query in islice(_forever(asked, generator), count):
        queries.append(query)
        shown.append(common if shared else chosen(partial(fits, query)))
    classes = min(examples + 1, len(set(first.values())))
    labels, gold = [], []
    for n, (demos, (_, answer)) in enumerate(zip(shown, queries, strict=True)):
        if shuffled:
            others = _derangement(examples, generator)
            shown[n] = demos = [(demos[i][0], demos[j][1]) for i, j in enumerate(others)]
        row: dict[int, str] = {}
        for one in (*(one for _, one in demos), answer, *answers):
            row.setdefault(first[one], one)
        labels.append(list(row.values())[:classes])
        gold.append(labels[-1].index(answer))
    return _write(tokenizer, shown, queries, labels, gold, first, context)


def recall(
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    examples: int,
    generator: Generator,
    *,
    split: Split = "test",
    context: int = 1024,
) -> Asked:
    """Prompts of arbitrary pairs of nouns, one of which is asked again: classes are the pairs."""
    pool = [word for word, _ in load("plural", split)]
    first = dict(zip(pool, first_tokens(_spaced(pool), tokenizer), strict=True))
    pool = list({first[word]: word for word in pool}.values())
    if not 1 <= examples <= len(pool) // 2:
        raise IclError(f"Need 1 to {len(pool) // 2} pairs to recall; got {examples}.")
    shown, gold = [], torch.randint(examples, (count,), generator=generator).tolist()
    for _ in range(count):
        drawn = [pool[i] for i in torch.randperm(len(pool), generator=generator)[: 2 * examples]]
        shown.append(list(zip(drawn[:examples], drawn[examples:], strict=True)))
    queries = [demos[g] for demos, g in zip(shown, gold, strict=True)]
    labels = [[answer for _, answer in demos] for demos in shown]
    return _write(tokenizer, shown, queries, labels, gold, first, context)


def of_both(name: str, other: str, split: Split) -> list[Row]:
    """Words that two functions have in one half, and what each makes of them."""
    mine, theirs = (dict(load(each, split)) for each in (name, other))
    return [(word, mine[word], theirs[word]) for word in mine if word in theirs]


def rivals(
    shown: Sequence[Row],
    asked: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    examples: int,
    generator: Generator,
    blank: str = "",
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"], Int[Tensor, "batch 2"]]:
    """Prompts of a function, the same with its rival's answers, and both answers.

    Rows are a word and both answers, each a single token (of three words, three). ``blank`` stands
    before each word. No word comes twice in a prompt; see ``ask`` for all other functions.
    """

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def single(row: Row) -> bool:
        lengths = [len(ids(x)) for x in (blank + row[0], *_spaced(row[1:]))]
        return row[1] != row[2] and lengths == [2 * row[0].count(", ") + 1, 1, 1]

    pool, asked = ([*filter(single, rows)] for rows in (shown, asked))
    sides: tuple[list[list[int]], list[list[int]]] = [], []
    answers = []
    for query in islice(_forever(asked, generator), count if asked else 0):
        rows = [query]
        for i in torch.randperm(len(pool), generator=generator).tolist():
            if len(rows) <= examples and not _said(pool[i]) & _said(*rows):
                rows.append(pool[i])
        if len(rows) <= examples:
            break
        for column, side in enumerate(sides, 1):
            lines = [(blank + row[0], row[column]) for row in rows[1:]]
            side.append(ids("".join(text for text, _ in _pieces(lines, blank + query[0]))))
        answers.append([ids(answer)[0] for answer in _spaced(query[1:])])
    if len(answers) < count:
        raise IclError(
            f"Too few words are single tokens of this model: {len(pool)} to show, {len(asked)} to "
            "ask. Show fewer examples, or ask about another function."
        )
    return torch.tensor(sides[0]), torch.tensor(sides[1]), torch.tensor(answers)


def _said(*rows: Row) -> set[str]:
    """The words of rows; a row may begin with three."""
    return {word for row in rows for part in row for word in part.split(", ")}


def _spaced(answers: Iterable[str]) -> list[str]:
    """Answers with the space that stands before them in a prompt."""
    return [f" {answer}" for answer in answers]


def _derangement(count: int, generator: Generator) -> list[int]:
    """A random order of ``count`` things in which none keeps its place."""
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        if all(i != place for place, i in enumerate(order)):
            return order


def _forever(pairs: Sequence[Kind], generator: Generator) -> Iterator[Kind]:
    """All pairs in random order, again and again."""
    while True:
        yield from (pairs[i] for i in torch.randperm(len(pairs), generator=generator).tolist())


def _write(
    tokenizer: PreTrainedTokenizerBase,
    shown: Sequence[Sequence[Pair]],
    queries: Sequence[Pair],
    labels: Sequence[Sequence[str]],
    gold: Sequence[int],
    first: dict[str, int],
    context: int,
) -> Asked:
    """The prompts, given that in ``labels`` the classes that no example shows come last."""
    rows = list(zip(shown, labels, strict=True))
    parts = [_pieces(demos, word) for demos, (word, _) in zip(shown, queries, strict=True)]
    prompts = encode(
        tokenizer,
        parts,
        [[row.index(answer) for _, answer in demos] for demos, row in rows],
        gold,
        torch.tensor([[first[answer] for answer in row] for row in labels]),
        context=context,
        unseen=max(len(row) - len({answer for _, answer in demos}) for demos, row in rows),
    )
    lines = [f" {answer}\n" for _, answer in queries]
    whole = tokenizer(lines, add_special_tokens=False)["input_ids"]
    longest = max(map(len, whole))
    return Asked(prompts, torch.tensor([ids + [-1] * (longest - len(ids)) for ids in whole]))


def _pieces(shown: Sequence[Pair], query: str) -> list[Piece]:
    roles = (Role.TEXT, Role.FORMAT, Role.LABEL, Role.FORMAT)
    lines = ((word, " ->", f" {answer}", "\n") for word, answer in shown)
    pieces = [piece for line in lines for piece in zip(line, roles, strict=True)]
    return [*pieces, (f"{query} ->", Role.QUERY)]
