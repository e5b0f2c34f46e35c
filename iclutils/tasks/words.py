"""Functions between words, which only examples can tell: lines ``big -> small`` and a query.

A function goes from the first column of a table in ``data/words`` to another, or by a rule of
spelling; every third row is held out. The tasks are those of {cite}`hendel2023` and
{cite}`todd2024`.
"""

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
from ..models import start_tokens
from .prompts import Prompts, Role
from .text import Piece, Split, encode, first_tokens, pieces_in_place

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


class WordPrompts(NamedTuple):
    """Prompts of a function, and their whole answers, which end in the newline, and -1. A prompt's
    classes are the answers of its examples, in their order, and one more, if there is one."""

    prompts: Prompts
    whole: Int[Tensor, "batch longest"]


def load(name: str, split: Split | None = None) -> list[Pair]:
    """Return the pairs of one of ``FUNCTIONS``; of no ``split``, all. An unknown name raises."""
    if name not in FUNCTIONS:
        raise unknown("function", name, FUNCTIONS)
    return half([(word, answer) for word, answer in columns(*FUNCTIONS[name])], split)


def columns(table: str, *names: str) -> list[Row]:
    """Return the rows of a list that have something in all these columns: the word, then what
    stands there, or what a rule of spelling makes of it."""
    lines = (TABLES / f"{table}.tsv").read_text(encoding="utf-8").splitlines()
    header, *rows = (line.split("\t") for line in lines)

    def part(row: list[str], name: str) -> str:
        return RULES[name](row[0]) if name in RULES else row[header.index(name)]

    parts = [(row[0], *(part(row, name) for name in names)) for row in rows]
    return [row for row in parts if "-" not in row]


def half(rows: Sequence[Kind], split: Split | None) -> list[Kind]:
    """Return the rows to train on, or those held out, every third; of no ``split``, all."""
    if split is None:
        return list(rows)
    return [x for i, x in enumerate(rows) if (i % HELD_OUT == HELD_OUT - 1) == (split == "test")]


def share_in_query(pairs: Sequence[Pair]) -> float:
    """Return the share of answers that begin with the query's three letters, or stand in it."""
    lower = [(word.lower(), answer.lower()) for word, answer in pairs]
    return sum(a.startswith(w[:3]) or a in w for w, a in lower) / len(pairs)


def by_list(values: Mapping[str, SupportsFloat]) -> Float[Tensor, "table"]:
    """Return means over the functions of each word list, which share words and are one repetition;
    what is none of ``FUNCTIONS`` stands for itself."""
    parts = defaultdict[str, list[float]](list)
    for function, value in values.items():
        parts[FUNCTIONS.get(function, (function,))[0]].append(float(value))
    return torch.tensor([sum(each) / len(each) for each in parts.values()])


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
    shuffled: bool = False,
) -> WordPrompts:
    """Draw ``count`` prompts of a function: ``examples`` training pairs, and a word of ``split``.
    Examples' answers begin with different tokens, or repeat about equally often where there are
    too few. No example has the query in it. ``shared``: all prompts have the same examples;
    ``shuffled``: their answers are dealt out anew. For two functions side by side see ``rivals``.
    """
    pool, rest = load(name, "train"), load(name, split)
    answers = list(dict.fromkeys(answer for _, answer in (*pool, *rest)))
    first = dict(zip(answers, first_tokens(_spaced(answers), tokenizer, " ->"), strict=True))

    def fits(query: Pair, example: Pair) -> bool:
        unclear = first[example[1]] == first[query[1]] and example[1] != query[1]
        return not (unclear or example[0] in query or example[1] == query[0])

    def draw(fitting: Callable[[Pair], bool]) -> list[Pair]:
        """Draw examples in random order: one of each answer, then another of each, until enough."""
        order = torch.randperm(len(pool), generator=generator).tolist()
        by_token = defaultdict[int, list[Pair]](list)
        for pair in filter(fitting, (pool[i] for i in order)):
            same = by_token[first[pair[1]]]
            if not same or same[0][1] == pair[1]:  # one answer alone begins with a token
                same.append(pair)
        rounds = [pair for turn in zip_longest(*by_token.values()) for pair in turn if pair]
        if len(rounds) < examples:
            raise IclError(f"{name!r} has too few pairs for {examples} examples: {len(rounds)} fit")
        taken = {*rounds[:examples]}
        return [pool[i] for i in order if pool[i] in taken]

    common = draw(lambda pair: True) if shared else []
    rest = [query for query in rest if all(fits(query, pair) for pair in common)]
    if not rest:
        raise IclError(f"No word of {name!r} can be asked after these examples: show fewer.")
    queries, demos = [], []
    for query in islice(_forever(rest, generator), count):
        queries.append(query)
        demos.append(common if shared else draw(partial(fits, query)))
    classes = min(examples + 1, len(set(first.values())))
    labels = []
    for n, (_, answer) in enumerate(queries):
        if shuffled:
            others = _derangement(examples, generator)
            demos[n] = [(demos[n][i][0], demos[n][j][1]) for i, j in enumerate(others)]
        row: dict[int, str] = {}
        for one in (*(one for _, one in demos[n]), answer, *answers):
            row.setdefault(first[one], one)
        labels.append(list(row.values())[:classes])
    return _write(tokenizer, demos, queries, labels, first, context)


def asked(prompts: Prompts, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the word that each prompt of ``ask`` asks."""
    rows = zip(prompts.tokens, prompts.roles == Role.QUERY, strict=True)
    return [str(tokenizer.decode(row[own])).removesuffix("->").strip() for row, own in rows]


def answers(
    name: str, words: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Int[Tensor, "word"]:
    """Return the first token of what a function makes of each word; -1 where its list lacks it."""
    pairs = dict(load(name))
    known = [word for word in words if word in pairs]
    found = first_tokens(_spaced(pairs[word] for word in known), tokenizer, " ->")
    by_word = dict(zip(known, found, strict=True))
    return torch.tensor([by_word.get(word, -1) for word in words])


def rivals(
    train: Sequence[Row],
    test: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    examples: int,
    generator: Generator,
    blank: str = "",
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"], Int[Tensor, "batch 2"]]:
    """Draw prompts of a function, the same with its rival's answers, and both answers, the
    function's first. Examples are rows of ``train``, queries of ``test``: a word, or words with
    commas between them, and both answers. Each word, comma and answer must be a single token; other
    rows are left out, and too few raise ``IclError``. ``blank`` stands before each word. No word
    comes twice in a prompt. Prompts of one function alone: ``ask``."""

    def in_place(*pieces: str) -> list[list[int]]:
        return pieces_in_place(tokenizer, [pieces])[0]

    def single(row: Row) -> bool:
        first, second = (
            in_place("\n", blank + row[0], " ->", f" {answer}", "\n") for answer in row[1:]
        )
        lengths = [len(first[1]), len(first[3]), len(second[3])]
        return row[1] != row[2] and lengths == [2 * row[0].count(", ") + 1, 1, 1]

    start = start_tokens(tokenizer)
    pool, queries = ([*filter(single, rows)] for rows in (train, test))
    sides: tuple[list[list[int]], list[list[int]]] = [], []
    answers = []
    for query in islice(_forever(queries, generator), count if queries else 0):
        rows = [query]
        for i in torch.randperm(len(pool), generator=generator).tolist():
            if len(rows) <= examples and not _words(pool[i]) & _words(*rows):
                rows.append(pool[i])
        if len(rows) <= examples:
            break
        for column, side in enumerate(sides, 1):
            lines = [(blank + row[0], row[column]) for row in rows[1:]]
            text = "".join(text for text, _ in _pieces(lines, blank + query[0]))
            side.append(start + in_place(text)[0])
        answers.append(first_tokens(_spaced(query[1:]), tokenizer, " ->"))
    if len(answers) < count:
        raise IclError(
            f"Too few words are single tokens of this model: {len(pool)} to show, {len(queries)} "
            "to ask. Show fewer examples, or ask about another function."
        )
    return torch.tensor(sides[0]), torch.tensor(sides[1]), torch.tensor(answers)


def _words(*rows: Row) -> set[str]:
    """Return the words of rows; a row may begin with three."""
    return {word for row in rows for part in row for word in part.split(", ")}


def _spaced(answers: Iterable[str]) -> list[str]:
    """Put before answers the space that stands there in a prompt."""
    return [f" {answer}" for answer in answers]


def _derangement(count: int, generator: Generator) -> list[int]:
    """Draw an order of ``count`` things in which none keeps its place."""
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        if all(i != place for place, i in enumerate(order)):
            return order


def _forever(pairs: Sequence[Kind], generator: Generator) -> Iterator[Kind]:
    """Yield all pairs in random order, again and again."""
    while True:
        yield from (pairs[i] for i in torch.randperm(len(pairs), generator=generator).tolist())


def _write(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Sequence[Pair]],
    queries: Sequence[Pair],
    labels: Sequence[Sequence[str]],
    first: dict[str, int],
    context: int,
) -> WordPrompts:
    """Write the prompts; in ``labels`` the classes that no example has come last."""
    rows = list(zip(examples, queries, labels, strict=True))
    prompts = encode(
        tokenizer,
        [_pieces(demos, word) for demos, (word, _), _ in rows],
        [[row.index(answer) for _, answer in demos] for demos, _, row in rows],
        [row.index(answer) for _, (_, answer), row in rows],
        torch.tensor([[first[answer] for answer in row] for row in labels]),
        context=context,
        unseen=max(len(row) - len({answer for _, answer in demos}) for demos, _, row in rows),
    )
    lines = [(f"{word} ->", f" {answer}\n") for word, answer in queries]
    whole = [ids for _, ids in pieces_in_place(tokenizer, lines)]
    longest = max(map(len, whole))
    return WordPrompts(prompts, torch.tensor([ids + [-1] * (longest - len(ids)) for ids in whole]))


def _pieces(examples: Sequence[Pair], query: str) -> list[Piece]:
    roles = (Role.TEXT, Role.FORMAT, Role.LABEL, Role.FORMAT)
    lines = ((word, " ->", f" {answer}", "\n") for word, answer in examples)
    pieces = [piece for line in lines for piece in zip(line, roles, strict=True)]
    return [*pieces, (f"{query} ->", Role.QUERY)]
