r"""Few-shot text classification as in Wang et al. 2023 (arXiv 2305.14160, section 2.1, app. A).

``load`` gives the rows of a data set, ``demonstrations`` and its kin choose among them as the
released code does, number for number, and ``build`` writes the prompts and says where in them
everything stands: ``cue text, newline, answer cue, label word`` for each demonstration and the
same without a label word for the query. Nothing is prepended (the code runs GPT-2 without BOS)
and nothing is ever cut off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow
import torch
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
Split = Literal["train", "test"]
OLD_TREC = "label-coarse"  # numbered DESC ENTY ABBR HUM NUM LOC by an older loading script


@dataclass(frozen=True)
class File:
    """One split's parquet file on the hub, by its SHA-256 or by its rows of each class."""

    path: str
    digest: str | None = None
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextTask:
    """The template of a task, and the data set that it is written for, if there is one.

    Attributes:
        title: its name in print.
        cue, answer_cue: what stands before a text and before a label word.
        label_words: one word per class, by class id, with the space before it.
        most_shots: demonstrations per class that fit the context (Wang et al. 2023, table 1).
        text, label: columns of the data set.
        classes: its own names of its classes, by class id.
        repo, revision: where on the hub it lies, at a full commit.
        train, test: its files; ``test`` is what the paper evaluates on.
    """

    title: str
    cue: str
    answer_cue: str
    label_words: tuple[str, ...]
    most_shots: int = 5
    text: str = "text"
    label: str = "label"
    classes: tuple[str, ...] = ()
    repo: str = ""
    revision: str = ""
    train: File | None = None
    test: File | None = None


_ONE = "00000-of-00001.parquet"
TASKS = {
    "sst2": TextTask(
        title="SST-2",
        cue="Review:",
        answer_cue="Sentiment:",
        label_words=(" Negative", " Positive"),
        text="sentence",
        classes=("negative", "positive"),
        repo="stanfordnlp/sst2",  # made from the same archive as the GLUE that the paper reads
        revision="8d51e7e4887a4caaa95b3fbebbf53c0490b58bbb",
        train=File(
            f"data/train-{_ONE}", "c7921283b75a42e685f50edecb96798607ea0fcbfd0739ee8975f22c12d55f09"
        ),
        test=File(  # GLUE keeps the classes of its test split to itself
            f"data/validation-{_ONE}",
            "fb00fe008f6828f86ba2beda8415a4cf5da0c884f21c5f238c87131b5aa19529",
        ),
    ),
    "trec": TextTask(
        title="TREC",
        cue="Question:",
        answer_cue="Answer Type:",
        label_words=(" Abbreviation", " Entity", " Description", " Person", " Location", " Number"),
        label="coarse_label",
        classes=("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        repo="CogComp/trec",
        # The hub's own conversion to parquet. Its files' SHA-256 are not published anywhere we
        # could read, so commit and class counts stand in for them.
        revision="65752bf53af25bc935a0dce92fb5b6c930728450",
        train=File("default/train/0000.parquet", counts=(86, 1250, 1162, 1223, 835, 896)),
        test=File("default/test/0000.parquet", counts=(9, 94, 138, 65, 81, 113)),
    ),
    "ag_news": TextTask(
        title="AG News",
        cue="Article:",
        answer_cue="Answer:",
        label_words=(" World", " Sports", " Business", " Technology"),
        most_shots=3,
        classes=("World", "Sports", "Business", "Sci/Tech"),
        repo="fancyzhx/ag_news",
        revision="eb185aade064a813bc0b7f42de02595523103ca4",
        train=File(
            f"data/train-{_ONE}", "fc508d6d9868594e3da960a8cfeb63ab5a4746598b93428c224397080c1f52ee"
        ),
        test=File(
            f"data/test-{_ONE}", "71de87ec66bc5737752a2502204dfa6d7fe9856ade3ea444dc6317789a4f13fb"
        ),
    ),
    "emoc": TextTask(  # no copy in a plain format could be pinned
        title="EmoC",
        cue="Dialogue:",
        answer_cue="Emotion:",
        label_words=(" Others", " Happy", " Sad", " Angry"),
        classes=("others", "happy", "sad", "angry"),
    ),
}


# Rows


def load(name: str, split: Split, folder: str | Path | None = None) -> list[Row]:
    """All rows of one split of a task's data set, in their order.

    Args:
        name: a name in ``TASKS``.
        split: ``"train"``, from which demonstrations are taken, or ``"test"``.
        folder: where ``NAME.SPLIT.jsonl`` lies, one JSON object a line. If omitted, the folder
            that the environment variable ``ICLUTILS_DATA_NAME`` (as ``ICLUTILS_DATA_EMOC``) or
            ``ICLUTILS_DATA`` names, if the file is there; otherwise the hub, at one commit.
    """
    if name not in TASKS:
        raise unknown("data set", name, TASKS)
    file = f"{name}.{split}.jsonl"
    if folder is not None:
        return _rows(name, split, Path(folder) / file)
    named = (os.environ.get(key) for key in (f"ICLUTILS_DATA_{name.upper()}", "ICLUTILS_DATA"))
    for path in (Path(one) / file for one in named if one):
        if path.is_file():
            return _rows(name, split, path)
    return _rows(name, split, _fetch(name, split))


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
            f"{name!r} is not fetched from the hub: no copy of it in a plain format is pinned, "
            f"and loading scripts are not run. Instead, {_how_local(name, split)}, or leave "
            f"{name!r} out of the tasks."
        )
    try:
        path = Path(
            hf_hub_download(data.repo, file.path, repo_type="dataset", revision=data.revision)
        )
    except Exception as error:  # the hub client raises many unrelated types
        raise IclError(
            f"Could not fetch {file.path} of the data set {data.repo} at "
            f"{data.revision[:12]} ({type(error).__name__}). Connect to the network and run "
            f"again, or {_how_local(name, split)}, or stay with the mini tier."
        ) from error
    if file.digest is not None and sha256(path) != file.digest:
        raise IclError(
            f"{path} does not match its pinned SHA-256. Delete that file and run again to "
            "download it anew."
        )
    return path


def _rows(name: str, split: Split, path: Path) -> list[Row]:
    """Rows of a JSON-lines or parquet file, with columns, classes and counts checked."""
    data = TASKS[name]
    if not path.is_file():
        raise IclError(f"There is no {path}. To read rows from a folder, {_how_local(name, split)}")
    try:
        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        else:
            table = pyarrow_json.read_json(path)
        present = table.column_names
        values = {c: table[c].to_pylist() for c in present if c in (data.text, data.label)}
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise IclError(
            f"{path} cannot be read ({error}). Correct it, or delete it to download it anew."
        ) from error
    if name == "trec" and data.label not in present and OLD_TREC in present:
        raise IclError(
            f"{path} has the column {OLD_TREC!r}, which numbers TREC's classes in an older "
            "order (DESC ENTY ABBR HUM NUM LOC). The label words would be wrong without any "
            f"sign of it. Give {data.label!r}: {' '.join(data.classes)}, counted from 0."
        )
    for column in (data.text, data.label):
        if column not in present:
            raise IclError(
                f"{path} has no column {column!r}; it has {', '.join(map(repr, present))}."
            )
    names = _class_names(table.schema.metadata, data.label)
    if names not in (None, data.classes):
        raise IclError(
            f"{path} numbers its classes {' '.join(names)}; expected "
            f"{' '.join(data.classes)}. With another order every label word would be wrong."
        )
    rows = list(zip(values[data.text], values[data.label], strict=True))
    for i, (text, label) in enumerate(rows):
        if not isinstance(text, str):
            raise IclError(f"{path}, row {i}: {data.text!r} must be text, not {text!r}.")
        if type(label) is not int or not 0 <= label < len(data.classes):
            raise IclError(
                f"{path}, row {i}: {data.label!r} must be a class id in "
                f"0..{len(data.classes) - 1}, not {label!r}."
            )
    file = getattr(data, split)
    known = file.counts if file else ()
    counted = tuple(sum(label == c for _, label in rows) for c in range(len(data.classes)))
    whole = path.suffix == ".parquet" or len(rows) == sum(known)
    if known and whole and counted != known:
        raise IclError(
            f"{path} has {counted} rows of the classes {' '.join(data.classes)}; that split "
            f"has {known}. Its classes are numbered in another order, or rows are missing "
            f"or changed. Get it again, or {_how_local(name, split)}."
        )
    return rows


def _class_names(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...] | None:
    """Names of the classes that the hub writes into a parquet file's header; None if it did not."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(features[column]["names"])
    except (KeyError, TypeError, ValueError):
        return None


# Choice


def demonstrations(
    rows: Sequence[Row], classes: int, shots: int, seed: int, more: int = 0
) -> tuple[list[Row], list[Row]]:
    """One set of demonstrations for all queries, and rows to train the re-weighting on.

    All rows are shuffled by NumPy's legacy generator and walked once: the first ``shots`` of each
    class become demonstrations, the ``more`` next ones training rows, both in the order in which
    they are met. So the order of the labels is random, but fixed by the seed (released code; the
    paper uses one shot and seeds 42 to 46, section 2.1, and ``more=4`` for the re-weighting,
    app. G).
    """
    _check_supply(rows, classes, shots, shots + more)
    order = list(range(len(rows)))
    np.random.RandomState(seed).shuffle(order)
    taken = [0] * classes
    first: list[Row] = []
    second: list[Row] = []
    for text, label in (rows[i] for i in order):
        if taken[label] < shots + more:
            (first if taken[label] < shots else second).append((text, label))
            taken[label] += 1
    return first, second


def demonstrations_per_query(
    rows: Sequence[Row], classes: int, shots: int, seed: int, queries: int
) -> list[list[Row]]:
    """Demonstrations of the saliency experiment: another set for every query.

    Each class gives ``shots`` rows, drawn with replacement by one legacy generator that runs on
    from query to query; each set is then put into an order drawn by a new generator from the
    same seed. So the order of the labels is one and the same for all queries (released code).
    """
    _check_supply(rows, classes, shots, 1)
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
    """A random ``limit`` of the test rows, or all in new order.

    The order is that of ``Dataset.shuffle(seed)`` in Hugging Face's ``datasets``, which the
    released code calls.
    """
    return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[:limit]]


def _check_supply(rows: Sequence[Row], classes: int, shots: int, needed: int) -> None:
    if shots < 1 or any(not 0 <= label < classes for _, label in rows):
        raise IclError(
            f"Show at least one demonstration of each of the classes 0..{classes - 1}, from "
            f"rows of these classes; got shots={shots}."
        )
    for c in range(classes):
        count = sum(label == c for _, label in rows)
        if count < needed:
            raise IclError(
                f"Class {c} has {count} rows and {needed} are needed: take fewer demonstrations "
                "or training rows per class, or give more rows."
            )


# Prompts


def label_tokens(task: TextTask, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, "cls"]:
    """Vocabulary id of the first sub-token of each class's label word (section 2.1, footnote 2)."""
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


def write(task: TextTask, shown: Sequence[Row], query: str) -> str:
    """The prompt as text: demonstrations, then the query without a label word.

    Example:
        >>> from iclutils.tasks import text
        >>> print(text.write(text.TASKS["sst2"], [("dull", 0)], "great"))
        Review: dull
        Sentiment: Negative
        Review: great
        Sentiment:
    """
    return "".join(piece for piece, _ in _pieces(task, shown, query))


def build(
    task: TextTask,
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
        tokenizer: the model's (``iclutils.models.tokenizer``).
        shown: the demonstrations of each query, equally many; one set for all is
            ``[one] * len(queries)``.
        queries: text and class of each query.
        context: how many tokens the model reads (``model.cfg.n_ctx``).
        over_long: what to do with prompts that are longer: refuse them all, or leave those
            queries out, as the saliency experiment of the released code does. Its other
            experiments cut the end off, that is the query, which this function never does.

    Returns:
        The prompts, and which queries they are of: all, unless some were dropped.
    """
    if len(shown) != len(queries) or not queries or len({len(rows) for rows in shown}) > 1:
        raise IclError(
            f"Give one list of demonstrations per query, equally long, and at least one query; "
            f"got {len(shown)} lists for {len(queries)} queries."
        )
    if not getattr(tokenizer, "is_fast", False):
        raise IclError(
            "This tokenizer does not say which characters a token comes from. Save it with a "
            "tokenizer.json (in transformers: a fast tokenizer)."
        )
    words = label_tokens(task, tokenizer)
    for n, (demos, query) in enumerate(zip(shown, queries, strict=True)):
        for text, label in (*demos, query):
            if not text.strip() or not 0 <= label < len(words):
                raise IclError(
                    f"Prompt {n} has a row {text!r} of class {label}: texts must not be blank, "
                    f"and the classes of {task.title} are 0..{len(words) - 1}."
                )
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


def _pieces(task: TextTask, shown: Sequence[Row], query: str) -> list[tuple[str, Role]]:
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
