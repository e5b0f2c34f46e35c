"""Few-shot text classification as in Wang et al. 2023 (arXiv 2305.14160, section 2.1, app. A).

``load`` gives the rows of a data set, ``demonstrations`` chooses among them as the released code
does, and ``build`` writes prompts: ``cue text, newline, answer cue, label word`` for each
demonstration, the same without a label word for the query.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
from ..models import encode as encode_text
from ..models import start_tokens
from .prompts import Prompts, Role

Row = tuple[str, int]  # a text and its class
Piece = tuple[str, Role]  # a part of a prompt, and what it is there for
Split = Literal["train", "test"]
LABELS = ("own", "swapped", "meaningless")  # kinds of label words

OWN = Path(__file__).parent / "data" / "texts"  # our own sets, a tab-separated file each
MEANINGLESS = (" foo", " bar", " lum", " vel", " mur", " tam")  # after Wei et al. 2023 (2303.03846)
CONTEXT = 1024  # of GPT-2, to which most_shots refers


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
    repo: str = ""  # where on the hub it lies, pinned to a commit
    revision: str = ""
    train: str = ""  # parquet files there
    test: str = ""


def _task(fields: dict[str, Any]) -> TextTask:
    """Make a task of its fields in ``tasks.yml``."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return TextTask(**values)


_FIELDS = yaml.safe_load((OWN / "tasks.yml").read_text(encoding="utf-8"))
TASKS = {name: _task(fields) for name, fields in _FIELDS.items()}


# Rows


def load(name: str, split: Split) -> list[Row]:
    """Load all rows of one split of a task's data set, in their order; those that do not fit raise.
    Of our own sets every other row of a class is there to be shown, the rest to be asked about.
    Others are read from ``$ICLUTILS_DATA/NAME.SPLIT.jsonl``, or else from the hub."""
    if name not in TASKS:
        raise unknown("data set", name, TASKS)
    if (own := OWN / f"{name}.tsv").is_file():
        lines = [line.split("\t") for line in own.read_text(encoding="utf-8").splitlines()[1:]]
        rows, seen = [], Counter[str]()
        for label, text in lines:
            if (seen[label] % 2 == 0) == (split == "train"):
                rows.append((text, TASKS[name].classes.index(label)))
            seen[label] += 1
        return rows
    folder = os.environ.get("ICLUTILS_DATA")
    local = Path(folder) / f"{name}.{split}.jsonl" if folder else None
    return _rows(name, local if local and local.is_file() else _fetch(name, split))


def with_labels(task: TextTask, labels: str) -> TextTask:
    """Return the task with its ``own`` label words, with them ``swapped`` (each class has the next
    one's) or with ``meaningless`` words."""
    own = task.label_words
    kinds = {"own": own, "swapped": (*own[1:], own[0]), "meaningless": MEANINGLESS[: len(own)]}
    if labels not in kinds:
        raise unknown("kind of labels", labels, LABELS)
    return replace(task, label_words=kinds[labels])


def _fetch(name: str, split: Split) -> Path:
    """Download one split, or take it from the cache; refuse a set of which no copy is pinned."""
    data = TASKS[name]
    try:
        path = hf_hub_download(
            data.repo, getattr(data, split), repo_type="dataset", revision=data.revision
        )
    except Exception as error:  # the hub client raises many unrelated types
        raise IclError(
            f"Could not fetch {name!r} from {data.repo or 'the hub: no copy is pinned'} "
            f"({type(error).__name__}). Connect to the network, or put {name}.{split}.jsonl, one "
            f"object a line with {data.text!r} and {data.label!r} (0 to {len(data.classes) - 1}: "
            f"{', '.join(data.classes)}), in a folder and name it in ICLUTILS_DATA."
        ) from error
    return Path(path)


def _rows(name: str, path: Path) -> list[Row]:
    """Read rows of a JSON-lines or parquet file; refuse those that are of another task."""
    data, classes = TASKS[name], range(len(TASKS[name].classes))
    read = parquet.read_table if path.suffix == ".parquet" else pyarrow_json.read_json
    try:
        table = read(path)
        rows = list(zip(*(table[c].to_pylist() for c in (data.text, data.label)), strict=True))
        if wrong := [row for row in rows if not isinstance(row[0], str) or row[1] not in classes]:
            raise ValueError(f"got {wrong[0]}")
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise IclError(
            f"{path} needs the columns {data.text!r}, a text, and {data.label!r}, a class id in "
            f"0..{len(classes) - 1}: {error}."
        ) from error
    return rows


# Choice


def demonstrations(
    rows: Sequence[Row], classes: int, shots: int, seed: int, more: int = 0
) -> tuple[list[Row], list[Row]]:
    """Choose one set of demonstrations for all queries, and rows to train the re-weighting on: of
    the shuffled rows the first ``shots`` of each class, and the ``more`` next ones (released code,
    section 2.1 and app. G)."""
    order = list(range(len(rows)))
    np.random.RandomState(seed).shuffle(order)
    taken = [0] * classes
    examples, others = list[Row](), list[Row]()
    for row in (rows[i] for i in order):
        if taken[row[1]] < shots + more:
            (examples if taken[row[1]] < shots else others).append(row)
            taken[row[1]] += 1
    if min(taken) < shots + more:
        raise IclError(f"A class has {min(taken)} rows; {shots + more} are needed: take fewer.")
    return examples, others


def demonstrations_per_query(
    rows: Sequence[Row], classes: int, shots: int, seed: int, queries: int
) -> list[list[Row]]:
    """Choose another set of demonstrations for every query, as for saliency in the released code:
    each class gives ``shots`` rows, drawn with replacement, in one order of the labels for all."""
    labels = np.array([label for _, label in rows])
    of_class = [np.flatnonzero(labels == c) for c in range(classes)]
    order = np.random.default_rng(seed).permutation(classes * shots)
    generator = np.random.RandomState(seed)
    sets = []
    for _ in range(queries):
        drawn = np.concatenate([generator.choice(ids, shots) for ids in of_class])
        sets.append([rows[i] for i in drawn[order]])
    return sets


def evaluation_rows(rows: Sequence[Row], seed: int, limit: int) -> list[Row]:
    """Return the first ``limit`` rows in the order of Hugging Face's ``Dataset.shuffle(seed)``."""
    return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[:limit]]


# Prompts


def pieces_in_place(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[str]]
) -> list[list[list[int]]]:
    """Return the token ids of each piece of each text, read where the pieces stand: alone they can
    become other tokens. A token belongs to the piece of its last character."""
    return [[[token for token, _ in piece] for piece in row] for row in _split(tokenizer, texts)]


def _split(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[str]]
) -> list[list[list[tuple[int, bool]]]]:
    """Return the tokens of each piece of each text, and whether each begins in its piece."""
    if not getattr(tokenizer, "is_fast", False):
        raise IclError("This tokenizer is no fast one of transformers: give a tokenizer.json.")
    joined = ["".join(pieces) for pieces in texts]
    encoded = encode_text(tokenizer, joined, return_offsets_mapping=True)
    rows = []
    columns = texts, encoded["input_ids"], encoded["offset_mapping"]
    for pieces, ids, offsets in zip(*columns, strict=True):
        ends = np.cumsum([len(piece) for piece in pieces])
        owners = np.searchsorted(ends, [max(end - 1, 0) for _, end in offsets], side="right")
        row = [list[tuple[int, bool]]() for _ in pieces]
        for token, owner, (first, _) in zip(ids, owners, offsets, strict=True):
            row[owner].append((token, bool(first >= ends[owner] - len(pieces[owner]))))
        rows.append(row)
    return rows


def first_tokens(
    words: Sequence[str], tokenizer: PreTrainedTokenizerBase, before: str
) -> list[int]:
    """Return the id of the first sub-token of each word, with the space before, as it stands after
    ``before``; a word that the vocabulary lacks, or of which that is a space, raises."""
    core = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    missing = {tokenizer.unk_token, getattr(core, "unk_token", None), None}
    split = pieces_in_place(tokenizer, [(before, word) for word in words])
    for word, (_, ids) in zip(words, split, strict=True):
        if not ids or tokenizer.convert_ids_to_tokens(ids[0]) in missing:
            raise IclError(f"The label word {word!r} is not in the vocabulary of this tokenizer.")
        if not str(tokenizer.decode(ids[:1])).strip():
            raise IclError(
                f"The first token of the label word {word!r} is a space alone: use another word, "
                "which is no number, or another model."
            )
    return [ids[0] for _, ids in split]


def build(
    task: TextTask,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Sequence[Row]],
    queries: Sequence[Row],
    *,
    context: int,
    over_long: Literal["error", "drop"] = "error",
) -> Prompts:
    """Write prompts of queries, each with its demonstrations, tokenised as one string
    (``pieces_in_place``); ``"drop"`` leaves over-long ones out. Nothing is cut off at ``context``
    tokens, unlike in most experiments of the released code, which so lose the query."""
    words = torch.tensor(first_tokens(task.label_words, tokenizer, task.answer_cue))
    for text, label in chain(*examples, queries):
        if not text.strip() or not 0 <= label < len(words):
            raise IclError(
                f"The row {text!r} of class {label} cannot be shown: texts must not be blank, and "
                f"the classes of {task.title} are 0..{len(words) - 1}."
            )
    return encode(
        tokenizer,
        [_pieces(task, d, text) for d, (text, _) in zip(examples, queries, strict=True)],
        [[label for _, label in demos] for demos in examples],
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
    """Tokenise prompts of pieces that, joined, are their text, after BOS where the tokenizer gives
    it to every text; for texts and labels use ``build``. Prompts that are too long or contradict
    themselves (``Prompts.check``) raise."""
    start = start_tokens(tokenizer)
    split = _split(tokenizer, [[piece for piece, _ in pieces] for pieces in parts])
    ids = [start + [token for piece in row for token, _ in piece] for row in split]
    fitting = [n for n in range(len(ids)) if len(ids[n]) <= context]
    if len(fitting) < len(ids) and (over_long == "error" or not fitting):
        raise IclError(
            f"{len(ids) - len(fitting)} of {len(ids)} prompts are longer than the {context} tokens "
            f"that the model reads: with {len(demo_class[0])} demonstrations the longest has "
            f"{max(map(len, ids))}. Show fewer demonstrations, use a model with a longer context, "
            'or leave those queries out with over_long="drop".'
        )
    places = [_places(parts[n], split[n], len(start)) for n in fitting]
    longest = max(len(ids[n]) for n in fitting)
    shape = len(fitting), len(demo_class[0])
    label_pos = torch.tensor([at for _, at in places], dtype=torch.long).view(shape)
    prompts = Prompts(  # padded with token 0: a tokenizer's pad token may be none of the model's
        tokens=torch.tensor([ids[n] + [0] * (longest - len(ids[n])) for n in fitting]),
        roles=torch.tensor([roles + [Role.PAD] * (longest - len(roles)) for roles, _ in places]),
        target=torch.tensor([len(roles) - 1 for roles, _ in places]),
        label_pos=label_pos,
        cue_pos=label_pos - 1,
        demo_class=torch.tensor([demo_class[n] for n in fitting], dtype=torch.long).view(shape),
        gold=torch.tensor([gold[n] for n in fitting]),
        label_words=label_words[fitting],
    )
    prompts.check(unseen)
    return prompts


def _pieces(task: TextTask, examples: Sequence[Row], query: str) -> list[Piece]:
    """Cut the prompt where roles change: joined, the pieces are the prompt."""
    roles, words = (Role.FORMAT, Role.TEXT, Role.FORMAT, Role.LABEL, Role.FORMAT), task.label_words
    lines = ((task.cue, f" {text}", f"\n{task.answer_cue}", words[c], "\n") for text, c in examples)
    pieces = [piece for line in lines for piece in zip(line, roles, strict=True)]
    return [*pieces, (f"{task.cue} {query}\n{task.answer_cue}", Role.QUERY)]


def _places(
    pieces: Sequence[Piece], split: Sequence[Sequence[tuple[int, bool]]], start: int
) -> tuple[list[int], list[int]]:
    """Return the role of every token, and the position of each label word's first sub-token; before
    them come ``start`` others that belong to no piece."""
    roles, labels = [int(Role.FORMAT)] * start, list[int]()
    for (word, role), tokens in zip(pieces, split, strict=True):
        if role == Role.LABEL:
            if not tokens or not tokens[0][1]:
                raise IclError(
                    f"This tokenizer merges the label word {word!r} with what stands beside it: "
                    "use other label words."
                )
            labels.append(len(roles))
        roles += [int(role)] * len(tokens)
    return roles, labels
