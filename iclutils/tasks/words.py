"""Functions between words, which only examples can tell: lines ``big -> small`` and a query.

Our lists are tables of ``data/words``, one kind of word each: a function goes from the first
column to another, or by a rule of spelling, so that several functions ask about the same words
and the query alone does not say which is meant. Every third row of a table is held out (``test``).
The tasks are those of {cite}`hendel2023` and {cite}`todd2024`; lists in the latter's format are
read from a folder.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import IclError, unknown
from .prompts import Prompts, Role
from .text import Piece, Split, encode, first_tokens

Pair = tuple[str, str]  # a word and what the function makes of it

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

    The classes of a prompt are the answers of its examples, in their order, and one more, if the
    function has one: the query's, or where an example shows that, another answer. ``whole`` ends
    in the newline and in -1 after that; see ``interp.readout.with_answers``.
    """

    prompts: Prompts
    whole: Int[Tensor, "batch longest"]


def load(name: str, split: Split | None = None, folder: str | Path | None = None) -> list[Pair]:
    """The pairs of a function; of no ``split``, all.

    A name that is none of ours is ``NAME.json`` in ``folder``, or where the environment variable
    ``ICLUTILS_FUNCTIONS`` says: a list of objects with ``input`` and ``output``, the format of
    {cite}`todd2024`. Of a word that stands there twice the first line counts.
    """
    if name in FUNCTIONS:
        table, column = FUNCTIONS[name]
        header, *rows = _rows(TABLES / f"{table}.tsv")
        pairs = [
            (row[0], RULES[column](row[0]) if column in RULES else row[header.index(column)])
            for row in rows
        ]
        pairs = [pair for pair in pairs if pair[1] != "-"]
    else:
        pairs = _outside(name, folder)
    if split is None:
        return pairs
    return [p for i, p in enumerate(pairs) if (i % HELD_OUT == HELD_OUT - 1) == (split == "test")]


def _rows(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]


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


def kinds(pairs: Sequence[Pair]) -> int:
    """How many different answers there are: with few, the query's may stand in an example."""
    return len({answer for _, answer in pairs})


def kept(pairs: Sequence[Pair]) -> float:
    """Share of answers that the query holds: they begin with its first three letters, or stand
    in it."""
    lower = [(word.lower(), answer.lower()) for word, answer in pairs]
    return sum(a.startswith(w[:3]) or a in w for w, a in lower) / len(pairs)


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

    The answers of a prompt's examples begin with different tokens; where a function has too few,
    as sentiment has two, they repeat, all about as often. No example asks for the query's answer or
    has the query for an answer. ``shared`` gives all prompts the same examples. ``new`` leaves out
    examples that show the query's answer. ``shuffled`` deals the examples' answers out to other
    examples: the same words, and (but for answers that repeat) no function.
    """
    if count < 1 or examples < 0 or (shuffled and examples < 2):
        raise IclError(
            f"Need a prompt and no example at least (two, to shuffle); got count={count}, "
            f"examples={examples}."
        )
    pool, asked = load(name, "train", folder), load(name, split, folder)
    answers = list(dict.fromkeys(answer for _, answer in (*pool, *asked)))
    spaced = [f" {answer}" for answer in answers]
    first = dict(zip(answers, first_tokens(spaced, tokenizer), strict=True))

    def fits(query: Pair, example: Pair) -> bool:
        same = example[1] == query[1]
        unclear = first[example[1]] == first[query[1]] and not same
        return not (unclear or example[0] in query or example[1] == query[0] or (new and same))

    def chosen(fitting: Callable[[Pair], bool]) -> list[Pair]:
        """Examples in random order: one of each answer, then another of each, until enough."""
        by_token = defaultdict[int, list[tuple[int, Pair]]](list)  # place and pair, by answer
        for place, i in enumerate(torch.randperm(len(pool), generator=generator).tolist()):
            if fitting(pool[i]):
                by_token[first[pool[i][1]]].append((place, pool[i]))
        # Of answers that begin with one token the one that was drawn first.
        groups = [[it for it in same if it[1][1] == same[0][1][1]] for same in by_token.values()]
        in_turns = [one for turn in zip_longest(*groups) for one in turn if one]
        if len(in_turns) < examples:
            few = f"{name!r} has too few pairs for {examples} examples: {len(in_turns)} fit."
            raise IclError(f"{few} Show fewer.")
        return [pair for _, pair in sorted(in_turns[:examples])]

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
    first = dict(zip(pool, first_tokens([f" {word}" for word in pool], tokenizer), strict=True))
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


def _derangement(count: int, generator: Generator) -> list[int]:
    """A random order of ``count`` things in which none keeps its place."""
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        if all(i != place for place, i in enumerate(order)):
            return order


def _forever(pairs: Sequence[Pair], generator: Generator) -> Iterator[Pair]:
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
    pieces: list[Piece] = []
    for word, answer in shown:
        pieces += [
            (word, Role.TEXT),
            (" ->", Role.FORMAT),
            (f" {answer}", Role.LABEL),
            ("\n", Role.FORMAT),
        ]
    return [*pieces, (f"{query} ->", Role.QUERY)]
