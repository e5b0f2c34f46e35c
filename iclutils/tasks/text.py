"""Few-shot text classification as in Wang et al. 2023 (arXiv 2305.14160, section 2.1, app. A).

``load`` gives the rows of a data set, ``read`` those of your own, ``demonstrations`` chooses among
them as the released code does, and ``build`` writes prompts: ``cue text, newline, answer cue, label
word`` for each demonstration, the same without a label word for the query.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import torch
import yaml
from huggingface_hub import hf_hub_download
from jaxtyping import Int
from pyarrow import json as pyarrow_json
from pyarrow import parquet
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import IclError, unknown
from ..files import sha256
from .prompts import Prompts, Role

Row = tuple[str, int]  # a text and its class
Piece = tuple[str, Role]  # a part of a prompt, and what it is there for
Split = Literal["train", "test"]
LABELS = ("own", "swapped", "meaningless")  # kinds of label words

OWN = Path(__file__).parent / "data" / "texts"  # our own sets, a tab-separated file each
PASSAGES = Path(__file__).parent / "data" / "passages.tsv"  # of our own writing: kind and text
MEANINGLESS = (" foo", " bar", " lum", " vel", " mur", " tam")  # after Wei et al. 2023 (2303.03846)
CONTEXT = 1024  # of GPT-2, to which most_shots refers


@dataclass(frozen=True)
class File:
    """One split's parquet file on the hub, by its SHA-256 or by its rows of each class."""

    path: str
    digest: str | None = None
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextTask:
    """The template of a task, and the data set that it is written for, if there is one."""

    title: str
    cue: str  # before a text
    answer_cue: str  # before a label word
    label_words: tuple[str, ...]  # by class id, with the space before
    most_shots: int = 5  # per class that fit 1024 tokens (Wang et al. 2023, table 1)
    text: str = "text"  # columns of the data set
    label: str = "label"
    classes: tuple[str, ...] = ()  # its own names of its classes
    repo: str = ""  # where on the hub it lies
    revision: str = ""
    train: File | None = None
    test: File | None = None  # what the paper evaluates on
    one_token: bool = False  # whether every label word must be a single token


def _task(**fields: Any) -> TextTask:
    """A task from its fields in ``tasks.yml``, whose lists are tuples here."""

    def tuples(given: dict[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}

    files = {k: File(**tuples(v)) for k, v in fields.items() if isinstance(v, dict)}
    return TextTask(**tuples(fields) | files)


_FIELDS = yaml.safe_load((OWN / "tasks.yml").read_text(encoding="utf-8"))
TASKS = {name: _task(**fields) for name, fields in _FIELDS.items()}


# Rows


def load(name: str, split: Split, folder: str | Path | None = None) -> list[Row]:
    """All rows of one split of a task's data set, in their order.

    They are read from ``NAME.SPLIT.jsonl``, one JSON object a line, in ``folder`` or where the
    environment variable ``ICLUTILS_DATA_NAME`` or ``ICLUTILS_DATA`` says, or else from the hub.
    Our own sets come with the package.
    """
    if name not in TASKS:
        raise unknown("data set", name, TASKS)
    if (OWN / f"{name}.tsv").is_file():
        return part(_labelled(OWN / f"{name}.tsv", TASKS[name].classes)[1], split)
    file = f"{name}.{split}.jsonl"
    if folder is not None:
        return _rows(name, split, Path(folder) / file)
    named = (os.environ.get(key) for key in (f"ICLUTILS_DATA_{name.upper()}", "ICLUTILS_DATA"))
    present = (Path(one) / file for one in named if one and (Path(one) / file).is_file())
    return _rows(name, split, next(present, None) or _fetch(name, split))


def read(
    path: str | Path, cue: str = "Text:", answer_cue: str = "Label:"
) -> tuple[TextTask, list[Row]]:
    """A set of your own: its template and rows, for ``build`` or, by its path, ``open_source``.

    The file is tab-separated: a header ``label`` and ``text``, then one text a line. Every class
    needs two texts; its name is its label word, which must be one token of the model.
    """
    classes, rows = _labelled(Path(path))
    words = tuple(f" {name}" for name in classes)
    title = Path(path).stem
    return TextTask(title, cue, answer_cue, words, classes=classes, one_token=True), rows


def passages(
    tokenizer: PreTrainedTokenizerBase, length: int, bos: int
) -> tuple[list[str], Int[Tensor, "passage pos"]]:
    """Kinds and beginnings of our passages of prose, BOS and ``length`` tokens each."""
    lines = [line.split("\t") for line in PASSAGES.read_text(encoding="utf-8").splitlines()]
    kinds, texts = map(list, zip(*lines, strict=True))
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    shortest = min(map(len, ids))
    if not 1 <= length <= shortest:
        raise IclError(f"The passages have {shortest} tokens and more; got length={length}.")
    return kinds, torch.tensor([[bos, *row[:length]] for row in ids])


def part(rows: Sequence[Row], split: Split) -> list[Row]:
    """Of every class every other row: ``train`` to show, ``test`` to ask about."""
    of_class = defaultdict[int, Iterator[bool]](lambda: cycle([split == "train", split == "test"]))
    return [row for row in rows if next(of_class[row[1]])]


def _labelled(path: Path, classes: tuple[str, ...] = ()) -> tuple[tuple[str, ...], list[Row]]:
    """Classes (as they first come, unless given) and rows of a tab-separated file."""
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise IclError(
            f"{path} cannot be read as text ({type(error).__name__}: {error})."
        ) from None
    if header.split("\t") != ["label", "text"]:
        raise IclError(f"{path} must begin with the line label, tab, text; got {header!r}.")
    label_of: dict[str, str] = {}
    for number, line in enumerate(lines, 2):
        label, _, text = (piece.strip() for piece in line.partition("\t"))
        what = "no label" if not label else "no text" if not text else ""
        if what or text in label_of:
            what = what or "a text that stood there before"
            raise IclError(f"{path}, line {number} has {what}: mend it or take it out.")
        label_of[text] = label
    classes = classes or tuple(dict.fromkeys(label_of.values()))
    for label in (*classes, *label_of.values()):
        count = list(label_of.values()).count(label)
        if label not in classes or count < 2:
            raise IclError(
                f"{path} has {count} texts of the class {label!r}: every class needs two, one to "
                f"show and one to ask about. Its classes are {', '.join(classes)}."
            )
    if len(classes) < 2:
        raise IclError(f"{path} has {len(classes)} classes: give texts of two at least.")
    return classes, [(text, classes.index(label)) for text, label in label_of.items()]


def with_labels(task: TextTask, labels: str) -> TextTask:
    """The task with its ``own`` label words, with them ``swapped`` (each class has the next one's)
    or with ``meaningless`` words."""
    if labels not in LABELS:
        raise unknown("kind of labels", labels, LABELS)
    own, count = task.label_words, len(task.label_words)
    if labels == "meaningless" and count > len(MEANINGLESS):
        raise IclError(f"There are {len(MEANINGLESS)} words without a meaning for {count} classes.")
    kinds = {"own": own, "swapped": (*own[1:], own[0]), "meaningless": MEANINGLESS[:count]}
    return replace(task, label_words=kinds[labels])


def _how_local(name: str, split: str) -> str:
    data = TASKS[name]
    ids = ", ".join(f"{i} {word}" for i, word in enumerate(data.classes))
    return (
        f"put {name}.{split}.jsonl, one object a line with {data.text!r} and {data.label!r} "
        f"({ids}), in a folder and name it in ICLUTILS_DATA"
    )


def _fetch(name: str, split: Split) -> Path:
    """Download one split, or find it in the cache, and verify it."""
    data = TASKS[name]
    file = getattr(data, split)
    if file is None:
        raise IclError(
            f"{name!r} is not fetched from the hub: no copy of it in a plain format is pinned. "
            f"Instead, {_how_local(name, split)}, or leave {name!r} out of the tasks."
        )
    try:
        path = hf_hub_download(data.repo, file.path, repo_type="dataset", revision=data.revision)
    except Exception as error:  # the hub client raises many unrelated types
        raise IclError(
            f"Could not fetch {file.path} of the data set {data.repo} at "
            f"{data.revision[:12]} ({type(error).__name__}). Connect to the network and run "
            f"again, or {_how_local(name, split)}, or stay with the mini tier."
        ) from error
    if file.digest is not None and sha256(Path(path)) != file.digest:
        raise IclError(
            f"{path} does not match its pinned SHA-256. Delete that file and run again to "
            "download it anew."
        )
    return Path(path)


def _rows(name: str, split: Split, path: Path) -> list[Row]:
    """Rows of a JSON-lines or parquet file; counts tell whether its classes have our order."""
    data, parquets = TASKS[name], path.suffix == ".parquet"
    if not path.is_file():
        raise IclError(f"There is no {path}. To read rows from a folder, {_how_local(name, split)}")
    try:
        table = parquet.read_table(path) if parquets else pyarrow_json.read_json(path)
        texts, labels = (
            table[c].to_pylist() if c in table.column_names else None
            for c in (data.text, data.label)
        )
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise IclError(
            f"{path} cannot be read ({error}). Correct it, or delete it to download it anew."
        ) from error
    if texts is None or labels is None:
        raise IclError(
            f"{path} needs the columns {data.text!r} and {data.label!r}; it has "
            f"{', '.join(map(repr, table.column_names))}."
        )
    rows, count = list(zip(texts, labels, strict=True)), len(data.classes)
    for i, (text, label) in enumerate(rows):
        if not isinstance(text, str) or type(label) is not int or not 0 <= label < count:
            raise IclError(
                f"{path}, row {i}: {data.text!r} must be text, not {text!r}, and {data.label!r} a "
                f"class id in 0..{count - 1}, not {label!r}."
            )
    file = getattr(data, split)
    known = file.counts if file else ()
    counted = tuple(labels.count(c) for c in range(count))
    if known and (parquets or len(rows) == sum(known)) and counted != known:
        raise IclError(
            f"{path} has {counted} rows of the classes {' '.join(data.classes)}; that split "
            f"has {known}. Its classes are numbered in another order, or rows are missing "
            f"or changed. Get it again, or {_how_local(name, split)}."
        )
    return rows


# Choice


def demonstrations(
    rows: Sequence[Row], classes: int, shots: int, seed: int, more: int = 0
) -> tuple[list[Row], list[Row]]:
    """One set of demonstrations for all queries, and rows to train the re-weighting on.

    Of the shuffled rows the first ``shots`` of each class are demonstrations, the ``more`` next
    ones training rows (released code, section 2.1 and app. G).
    """
    _check_supply(rows, classes, shots + more)
    order = list(range(len(rows)))
    np.random.RandomState(seed).shuffle(order)
    taken = [0] * classes
    shown, others = list[Row](), list[Row]()
    for row in (rows[i] for i in order):
        if taken[row[1]] < shots + more:
            (shown if taken[row[1]] < shots else others).append(row)
            taken[row[1]] += 1
    return shown, others


def demonstrations_per_query(
    rows: Sequence[Row], classes: int, shots: int, seed: int, queries: int
) -> list[list[Row]]:
    """Another set of demonstrations for every query, as for saliency in the released code: each
    class gives ``shots`` rows, drawn with replacement, in one order of the labels for all."""
    _check_supply(rows, classes, 1)
    labels = np.array([label for _, label in rows])
    of_class = [np.flatnonzero(labels == c) for c in range(classes)]
    order = np.random.default_rng(seed).permutation(classes * shots)
    generator = np.random.RandomState(seed)
    sets = []
    for _ in range(queries):
        drawn = np.concatenate([generator.choice(ids, shots) for ids in of_class])
        sets.append([rows[i] for i in drawn[order]])
    return sets


def evaluation_rows(rows: Sequence[Row], seed: int, limit: int = 1000) -> list[Row]:
    """The first ``limit`` rows in the order of ``Dataset.shuffle(seed)`` of Hugging Face."""
    return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[:limit]]


def _check_supply(rows: Sequence[Row], classes: int, needed: int) -> None:
    for c in range(classes):
        count = sum(label == c for _, label in rows)
        if count < needed:
            raise IclError(
                f"Class {c} has {count} rows and {needed} are needed: take fewer demonstrations "
                "or training rows per class, or give more rows."
            )


# Prompts


def first_tokens(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Vocabulary id of the first sub-token of each word, with the space before."""
    core = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    missing = {tokenizer.unk_token, getattr(core, "unk_token", None), None}
    first = tokenizer(list(words), add_special_tokens=False)["input_ids"]
    for word, ids in zip(words, first, strict=True):
        if not ids or tokenizer.convert_ids_to_tokens(ids[0]) in missing:
            raise IclError(
                f"The label word {word!r} is not in the vocabulary of this model's tokenizer. "
                "Use a model that was trained on text, or other label words."
            )
        if not str(tokenizer.decode(ids[:1])).strip():
            raise IclError(
                f"Of the label word {word!r} this tokenizer makes a space and the rest, so its "
                "first sub-token says nothing. Use label words that are no numbers."
            )
    return [ids[0] for ids in first]


def label_tokens(task: TextTask, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, "cls"]:
    """Vocabulary id of the first sub-token of each class's label word (section 2.1, footnote 2)."""
    first = first_tokens(task.label_words, tokenizer)
    for i, word in enumerate(task.label_words):
        if first.index(first[i]) < i:
            other = task.label_words[first.index(first[i])]
            raise IclError(
                f"The label words {other!r} and {word!r} begin with the same sub-token, so the "
                "model cannot tell their classes apart there. Use other label words."
            )
        size = len(tokenizer(word, add_special_tokens=False)["input_ids"])
        if task.one_token and size > 1:
            raise IclError(
                f"The label word {word!r} of {task.title} is {size} tokens of this model: give "
                "that class a name that is one, such as a short common word."
            )
    return torch.tensor(first)


def build(
    task: TextTask,
    tokenizer: PreTrainedTokenizerBase,
    shown: Sequence[Sequence[Row]],
    queries: Sequence[Row],
    *,
    context: int,
    over_long: Literal["error", "drop"] = "error",
) -> Prompts:
    """Prompts of the queries, each with its demonstrations; ``"drop"`` leaves over-long ones out.

    A prompt is tokenised as one string. A token belongs to the piece of the template that its
    last character comes from, so that a space goes with the word after it. Nothing is cut off at
    ``context`` tokens, unlike in most experiments of the released code, which so lose the query.
    """
    if len(shown) != len(queries) or not queries or len({len(rows) for rows in shown}) > 1:
        raise IclError(
            "Give one list of demonstrations per query, equally long, and at least one query; "
            f"got {len(shown)} lists for {len(queries)} queries."
        )
    words = label_tokens(task, tokenizer)
    for n, (demos, query) in enumerate(zip(shown, queries, strict=True)):
        for text, label in (*demos, query):
            if not text.strip() or not 0 <= label < len(words):
                raise IclError(
                    f"Prompt {n} has a row {text!r} of class {label}: texts must not be blank, "
                    f"and the classes of {task.title} are 0..{len(words) - 1}."
                )
    return encode(
        tokenizer,
        [_pieces(task, d, text) for d, (text, _) in zip(shown, queries, strict=True)],
        [[label for _, label in demos] for demos in shown],
        [label for _, label in queries],
        words.expand(len(queries), -1),
        context=context,
        over_long=over_long,
    )


def encode(
    tokenizer: PreTrainedTokenizerBase,
    parts: Sequence[Sequence[Piece]],
    demo_class: Sequence[Sequence[int]],
    gold: Sequence[int],
    label_words: Int[Tensor, "batch cls"],
    *,
    context: int,
    over_long: Literal["error", "drop"] = "error",
    unseen: int = 0,
) -> Prompts:
    """Prompts of pieces that, joined, are their text; see ``build`` and ``Prompts.check``."""
    if not getattr(tokenizer, "is_fast", False):
        raise IclError(
            "This tokenizer does not say which characters a token comes from. Save it with a "
            "tokenizer.json (in transformers: a fast tokenizer)."
        )
    texts = ["".join(piece for piece, _ in p) for p in parts]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoded["input_ids"]
    kept = [n for n in range(len(ids)) if len(ids[n]) <= context]
    if len(kept) < len(ids) and (over_long == "error" or not kept):
        raise IclError(
            f"{len(ids) - len(kept)} of {len(ids)} prompts are longer than the {context} tokens "
            f"that the model reads: with {len(demo_class[0])} demonstrations the longest has "
            f"{max(map(len, ids))}. Show fewer demonstrations, use a model with a longer context, "
            'or leave those queries out with over_long="drop". Nothing is cut off.'
        )
    places = [_places(parts[n], encoded["offset_mapping"][n]) for n in kept]
    longest = max(len(ids[n]) for n in kept)
    pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    shape = len(kept), len(demo_class[0])
    label_pos = torch.tensor([at for _, at in places], dtype=torch.long).view(shape)
    prompts = Prompts(
        tokens=torch.tensor([ids[n] + [pad] * (longest - len(ids[n])) for n in kept]),
        roles=torch.tensor([roles + [Role.PAD] * (longest - len(roles)) for roles, _ in places]),
        target=torch.tensor([len(roles) - 1 for roles, _ in places]),
        label_pos=label_pos,
        cue_pos=label_pos - 1,
        demo_class=torch.tensor([demo_class[n] for n in kept], dtype=torch.long).view(shape),
        gold=torch.tensor([gold[n] for n in kept]),
        label_words=label_words[kept],
    )
    prompts.check(unseen)
    return prompts


def _pieces(task: TextTask, shown: Sequence[Row], query: str) -> list[Piece]:
    """The prompt cut where roles change: joined, the pieces are the prompt."""
    roles, words = (Role.FORMAT, Role.TEXT, Role.FORMAT, Role.LABEL, Role.FORMAT), task.label_words
    lines = ((task.cue, f" {text}", f"\n{task.answer_cue}", words[c], "\n") for text, c in shown)
    pieces = [piece for line in lines for piece in zip(line, roles, strict=True)]
    return [*pieces, (f"{task.cue} {query}\n{task.answer_cue}", Role.QUERY)]


def _places(
    pieces: Sequence[Piece], offsets: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Role of every token, and position of every label word's first sub-token.

    ``offsets``: first character of each token and the one after its last.
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
