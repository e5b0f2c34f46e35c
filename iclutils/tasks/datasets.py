"""Rows of the four text classification data sets of Wang et al. 2023 (arXiv 2305.14160, §2.1).

``load("trec", "train")`` gives ``(text, class)`` pairs, from the hub at a pinned commit (plain
parquet files; no loading script is ever run), or from a folder of ``NAME.SPLIT.jsonl`` files that
an argument or the environment variable ``ICLUTILS_DATA`` names.

The split ``test`` is the one the paper evaluates on; for SST-2 that is the validation split,
because GLUE keeps the classes of its test split to itself. The paper reads SST-2 from GLUE; the
repository pinned here was made from the same archive, so its rows are the same.

TREC is a trap. An older loading script called its column ``label-coarse`` and numbered the
classes DESC ENTY ABBR HUM NUM LOC, the newer ``coarse_label`` ABBR ENTY DESC HUM LOC NUM; label
words given in one order are wrong in the other, and nothing fails. So the old column is refused,
and class names and class counts are checked.

Example:
    >>> import json
    >>> import tempfile
    >>> from pathlib import Path
    >>> from iclutils.tasks import datasets
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow.parquet as parquet
from huggingface_hub import hf_hub_download

from ..errors import IclError, unknown
from ..files import sha256

Row = tuple[str, int]
Split = Literal["train", "test"]

OLD_TREC = "label-coarse"


@dataclass(frozen=True)
class File:
    """One split's parquet file on the hub.

    Attributes:
        path: where it lies in the repository.
        digest: its SHA-256; None where only the commit is pinned.
        counts: rows of each class in the whole split; () if not known.
    """

    path: str
    digest: str | None = None
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and how it is written.

    Attributes:
        text: column of the text.
        label: column of the class.
        classes: the data set's own names of its classes, by class id.
        repo: data set repository on the hub; None if there is none that could be pinned.
        revision: full commit of that repository.
        files: the parquet file of each split.
    """

    text: str
    label: str
    classes: tuple[str, ...]
    repo: str | None = None
    revision: str = ""
    files: Mapping[str, File] = field(default_factory=dict)


SOURCES = {
    "sst2": Source(
        text="sentence",
        label="label",
        classes=("negative", "positive"),
        repo="stanfordnlp/sst2",
        revision="8d51e7e4887a4caaa95b3fbebbf53c0490b58bbb",
        files={
            "train": File(
                "data/train-00000-of-00001.parquet",
                "c7921283b75a42e685f50edecb96798607ea0fcbfd0739ee8975f22c12d55f09",
            ),
            "test": File(
                "data/validation-00000-of-00001.parquet",
                "fb00fe008f6828f86ba2beda8415a4cf5da0c884f21c5f238c87131b5aa19529",
            ),
        },
    ),
    "trec": Source(
        text="text",
        label="coarse_label",
        classes=("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        repo="CogComp/trec",
        # The hub's own conversion to parquet. Its files' SHA-256 are not published anywhere we
        # could read, so commit and class counts stand in for them.
        revision="65752bf53af25bc935a0dce92fb5b6c930728450",
        files={
            "train": File("default/train/0000.parquet", counts=(86, 1250, 1162, 1223, 835, 896)),
            "test": File("default/test/0000.parquet", counts=(9, 94, 138, 65, 81, 113)),
        },
    ),
    "ag_news": Source(
        text="text",
        label="label",
        classes=("World", "Sports", "Business", "Sci/Tech"),
        repo="fancyzhx/ag_news",
        revision="eb185aade064a813bc0b7f42de02595523103ca4",
        files={
            "train": File(
                "data/train-00000-of-00001.parquet",
                "fc508d6d9868594e3da960a8cfeb63ab5a4746598b93428c224397080c1f52ee",
            ),
            "test": File(
                "data/test-00000-of-00001.parquet",
                "71de87ec66bc5737752a2502204dfa6d7fe9856ade3ea444dc6317789a4f13fb",
            ),
        },
    ),
    "emoc": Source(text="text", label="label", classes=("others", "happy", "sad", "angry")),
}


def load(name: str, split: Split, folder: str | Path | None = None) -> list[Row]:
    r"""All rows of one split, in the order of the data set.

    Args:
        name: a name in ``SOURCES``.
        split: ``"train"``, from which demonstrations are taken, or ``"test"``.
        folder: where ``NAME.SPLIT.jsonl`` lies, one JSON object a line; if omitted, the folder
            that the environment variable ``ICLUTILS_DATA`` names; without either, the hub.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> lines = [{"sentence": "dull", "label": 0}, {"sentence": "great", "label": 1}]
        >>> _ = (folder / "sst2.test.jsonl").write_text("\n".join(map(json.dumps, lines)))
        >>> datasets.load("sst2", "test", folder)
        [('dull', 0), ('great', 1)]
    """
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    local = folder or os.environ.get("ICLUTILS_DATA")
    if local:
        return _read_lines(name, split, Path(local))
    return _read_parquet(name, split, _fetch(name, split))


def _how_local(name: str, split: str) -> str:
    """How to give the rows as a file."""
    source = SOURCES[name]
    ids = ", ".join(f"{i} {word}" for i, word in enumerate(source.classes))
    return (
        f"put {name}.{split}.jsonl, one object a line with {source.text!r} and {source.label!r} "
        f"({ids}), in a folder and name it in ICLUTILS_DATA"
    )


def _fetch(name: str, split: Split) -> Path:
    """Download one split, or find it in the cache, and verify it."""
    source = SOURCES[name]
    if source.repo is None:
        raise IclError(
            f"{name!r} is not fetched from the hub: no copy of it in a plain format is pinned, "
            f"and loading scripts are not run. Instead, {_how_local(name, split)}."
        )
    file = source.files[split]
    try:
        path = Path(
            hf_hub_download(source.repo, file.path, repo_type="dataset", revision=source.revision)
        )
    except Exception as error:  # the hub client raises many unrelated types
        raise IclError(
            f"Could not fetch {file.path} of the data set {source.repo} at "
            f"{source.revision[:12]} ({type(error).__name__}). Connect to the network and run "
            f"again, or {_how_local(name, split)}, or stay with the mini tier."
        ) from error
    if file.digest is not None and sha256(path) != file.digest:
        raise IclError(
            f"{path} does not match its pinned SHA-256. Delete that file and run again to "
            "download it anew."
        )
    return path


def _read_parquet(name: str, split: Split, path: Path) -> list[Row]:
    source = SOURCES[name]
    try:
        table = parquet.read_table(path)
    except Exception as error:  # damaged files raise many unrelated types
        raise IclError(
            f"{path} is not a readable parquet file ({type(error).__name__}). Delete it and run "
            "again to download it anew."
        ) from error
    _check_columns(name, table.column_names, path)
    names = _class_names(table.schema.metadata, source.label)
    if names is not None and names != source.classes:
        raise IclError(
            f"{path} numbers its classes {' '.join(names)}; expected "
            f"{' '.join(source.classes)}. With another order every label word would be wrong."
        )
    texts, labels = (table.column(c).to_pylist() for c in (source.text, source.label))
    rows = [
        _row(source, text, label, f"{path}, row {i}")
        for i, (text, label) in enumerate(zip(texts, labels, strict=True))
    ]
    _check_counts(name, split, rows, path, whole=True)
    return rows


def _class_names(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...] | None:
    """Names of the classes that the hub writes into a parquet file's header; None if it did not."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(features[column]["names"])
    except (KeyError, TypeError, ValueError):
        return None


def _read_lines(name: str, split: Split, folder: Path) -> list[Row]:
    path = folder / f"{name}.{split}.jsonl"
    if not path.is_file():
        raise IclError(
            f"There is no {path}. To read rows from a folder, {_how_local(name, split)}; "
            "to fetch them from the hub, name no folder and unset ICLUTILS_DATA."
        )
    source, rows = SOURCES[name], []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise IclError(f"{path} is not UTF-8 text. Write it again as UTF-8.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise IclError(f"{where} is not valid JSON ({error}). Correct that line.") from error
        if not isinstance(value, dict):
            raise IclError(f"{where} is not a JSON object with two columns. Correct that line.")
        _check_columns(name, value, where)
        rows.append(_row(source, value[source.text], value[source.label], where))
    if not rows:
        raise IclError(f"{path} holds no rows. Write it again.")
    _check_counts(name, split, rows, path, whole=False)
    return rows


def _row(source: Source, text: object, label: object, where: str) -> Row:
    classes = len(source.classes)
    if not isinstance(text, str):
        raise IclError(f"{where}: {source.text!r} must be text, not {text!r}.")
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < classes:
        raise IclError(
            f"{where}: {source.label!r} must be a class id in 0..{classes - 1}, not {label!r}."
        )
    return text, label


def _check_columns(name: str, columns: Iterable[str], where: str | Path) -> None:
    source, present = SOURCES[name], list(columns)
    if name == "trec" and source.label not in present and OLD_TREC in present:
        raise IclError(
            f"{where} has the column {OLD_TREC!r}, which numbers TREC's classes in an older "
            "order (DESC ENTY ABBR HUM NUM LOC). The label words would be wrong without any "
            f"sign of it. Give {source.label!r}: {' '.join(source.classes)}, counted from 0."
        )
    for column in (source.text, source.label):
        if column not in present:
            raise IclError(
                f"{where} has no column {column!r}; it has {', '.join(map(repr, present))}."
            )


def _check_counts(
    name: str, split: Split, rows: Sequence[Row], where: Path, *, whole: bool
) -> None:
    """The whole of a split must have the known number of rows in each class.

    Rows that are not said to be the whole split are taken for it only if they are as many.
    """
    source = SOURCES[name]
    file = source.files.get(split)
    if file is None or not file.counts or not (whole or len(rows) == sum(file.counts)):
        return
    counted = tuple(sum(label == c for _, label in rows) for c in range(len(source.classes)))
    if counted != file.counts:
        raise IclError(
            f"{where} has {counted} rows of the classes {' '.join(source.classes)}; that split "
            f"has {file.counts}. Its classes are numbered in another order, or rows are missing "
            f"or changed. Get it again, or {_how_local(name, split)}."
        )
