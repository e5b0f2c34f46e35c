"""Rows of the text classification data sets: from a folder, from parquet, and refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iclutils import IclError
from iclutils.files import sha256
from iclutils.tasks import datasets
from iclutils.tasks.datasets import SOURCES, File, Source, load

MESSAGES = ["hello there", "so happy", "so sad", "grr"]


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ICLUTILS_DATA", raising=False)


def write_lines(folder: Path, name: str, *lines: object) -> Path:
    path = folder / f"{name}.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def write_parquet(
    path: Path, columns: dict[str, list], label: str, names: list[str] | None
) -> Path:
    """A parquet file with the header in which the hub names the classes."""
    table = pa.table(columns)
    if names is not None:
        features = {label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
    pq.write_table(table, path)
    return path


def test_every_repository_is_pinned() -> None:
    assert set(SOURCES) == {"sst2", "trec", "ag_news", "emoc"}
    for name, source in SOURCES.items():
        if source.repo is None:
            assert name == "emoc"
            continue
        assert len(source.revision) == 40
        assert set(source.revision) <= set("0123456789abcdef")
        assert set(source.files) == {"train", "test"}
        for file in source.files.values():
            assert file.path.endswith(".parquet")
            assert file.digest is not None or len(file.counts) == len(source.classes)
            assert file.digest is None or len(file.digest) == 64
    assert "validation" in SOURCES["sst2"].files["test"].path


@pytest.mark.shared
def test_the_real_rows(shared: Path) -> None:
    folder = shared / "datasets"
    assert load("sst2", "test", folder)[0] == ("no movement , no yuks , not much of anything .", 0)
    trec = load("trec", "train", folder)
    assert len(trec) == 5452
    assert trec[0] == ("How did serfdom develop in and then leave Russia ?", 2)
    assert len(load("trec", "test", folder)) == 500
    assert load("ag_news", "test", folder)[1][1] == 3
    assert {label for _, label in load("ag_news", "train", folder)} == {0, 1, 2, 3}


@pytest.mark.shared
def test_trec_counted_in_the_old_order_is_refused(shared: Path, tmp_path: Path) -> None:
    """DESC ENTY ABBR HUM NUM LOC, under the new column's name."""
    old = [2, 1, 0, 3, 5, 4]
    for split in ("train", "test"):
        rows = load("trec", split, shared / "datasets")
        lines = [{"text": text, "coarse_label": old[label]} for text, label in rows]
        write_lines(tmp_path, f"trec.{split}", *lines)
        with pytest.raises(IclError, match="numbered in another order"):
            load("trec", split, tmp_path)
        write_lines(tmp_path, f"trec.{split}", *lines[:-1])
        assert len(load("trec", split, tmp_path)) == len(rows) - 1  # a part is not judged


def test_rows_from_a_folder_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"text": text, "label": label, "id": 7} for label, text in enumerate(MESSAGES)]
    write_lines(tmp_path, "emoc.test", *lines[:2], "", *lines[2:])
    expected = list(zip(MESSAGES, range(4), strict=True))
    assert load("emoc", "test", tmp_path) == expected
    monkeypatch.setenv("ICLUTILS_DATA", str(tmp_path))
    assert load("emoc", "test") == expected
    with pytest.raises(IclError, match=r"There is no .*emoc.train.jsonl.*unset ICLUTILS_DATA"):
        load("emoc", "train")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("trec", {"text": "a", "label-coarse": 0}, r"line 1 .*'label-coarse'.*older order"),
        ("trec", {"text": "a", "label": 0}, "no column 'coarse_label'; it has 'text', 'label'"),
        ("sst2", {"text": "a", "label": 0}, "no column 'sentence'"),
        ("sst2", {"sentence": "a", "label": 2}, r"class id in 0..1, not 2"),
        ("sst2", {"sentence": "a", "label": -1}, r"class id in 0..1, not -1"),
        ("sst2", {"sentence": "a", "label": True}, "class id"),
        ("sst2", {"sentence": "a", "label": "1"}, "class id"),
        ("sst2", {"sentence": None, "label": 1}, "must be text, not None"),
        ("sst2", "{'sentence'", "is not valid JSON"),
        ("sst2", "[1, 2]", "not a JSON object"),
        ("sst2", "", "holds no rows"),
    ],
)
def test_bad_lines_say_where_and_what(
    tmp_path: Path, name: str, line: object, message: str
) -> None:
    write_lines(tmp_path, f"{name}.train", line)
    with pytest.raises(IclError, match=message):
        load(name, "train", tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "sst2.train.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(IclError, match="is not UTF-8"):
        load("sst2", "train", tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A hub with one parquet file, ``file``, for every question; ``asked`` keeps the last one."""
    state: dict[str, object] = {"file": tmp_path / "file.parquet"}

    def download(repo: str, path: str, **options: object) -> str:
        state["asked"] = {"repo": repo, "path": path, **options}
        return str(state["file"])

    monkeypatch.setattr(datasets, "hf_hub_download", download)
    return state


def pin(monkeypatch: pytest.MonkeyPatch, name: str, file: File, **changes: object) -> None:
    """Pin another file for a data set's splits."""
    old = vars(SOURCES[name])
    source = Source(**{**old, "files": {"train": file, "test": file}, **changes})
    monkeypatch.setitem(datasets.SOURCES, name, source)


def test_rows_from_the_hub(hub: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"idx": [0, 1, 2], "sentence": ["bad ", "good", "fine"], "label": [0, 1, 1]}
    path = write_parquet(hub["file"], columns, "label", ["negative", "positive"])
    with pytest.raises(IclError, match=r"file.parquet does not match its pinned SHA-256. Delete"):
        load("sst2", "test")
    assert hub["asked"] == {
        "repo": "stanfordnlp/sst2",
        "path": "data/validation-00000-of-00001.parquet",
        "repo_type": "dataset",
        "revision": "8d51e7e4887a4caaa95b3fbebbf53c0490b58bbb",
    }
    pin(monkeypatch, "sst2", File("data.parquet", sha256(path)))
    assert load("sst2", "train") == [("bad ", 0), ("good", 1), ("fine", 1)]


def test_trec_from_the_hub_is_checked_by_content(
    hub: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def columns(name: str, labels: list[int]) -> dict[str, list]:
        return {"text": [f"question {i}" for i in range(len(labels))], name: labels}

    right, old = (
        ["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"],
        ["DESC", "ENTY", "ABBR", "HUM", "NUM", "LOC"],
    )
    pin(monkeypatch, "trec", File("data.parquet", counts=(1, 2, 1, 1, 1, 1)))
    labels = [1, 0, 1, 2, 3, 4, 5]
    write_parquet(hub["file"], columns("coarse_label", labels), "coarse_label", right)
    assert [label for _, label in load("trec", "train")] == labels
    write_parquet(hub["file"], columns("coarse_label", labels), "coarse_label", None)
    assert len(load("trec", "train")) == 7
    write_parquet(hub["file"], columns("coarse_label", labels), "coarse_label", old)
    with pytest.raises(IclError, match="numbers its classes DESC ENTY ABBR HUM NUM LOC; expected"):
        load("trec", "train")
    write_parquet(hub["file"], columns("label-coarse", labels), "label-coarse", old)
    with pytest.raises(IclError, match="column 'label-coarse'"):
        load("trec", "train")
    for wrong in ([1, 0, 1, 2, 3, 4, 4], labels[:-1]):
        write_parquet(hub["file"], columns("coarse_label", wrong), "coarse_label", right)
        with pytest.raises(IclError, match="in another order, or rows are missing"):
            load("trec", "train")


@pytest.mark.shared
def test_the_known_counts_are_those_of_the_rows(shared: Path) -> None:
    for split in ("train", "test"):
        counted = Counter(label for _, label in load("trec", split, shared / "datasets"))
        assert tuple(counted[c] for c in range(6)) == SOURCES["trec"].files[split].counts


def test_a_damaged_file_and_a_missing_network_are_one_clear_error(
    hub: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub["file"].write_bytes(b"PAR1 nothing more")
    with pytest.raises(IclError, match="not a readable parquet file"):
        load("trec", "test")

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(datasets, "hf_hub_download", unreachable)
    with pytest.raises(
        IclError, match=r"Could not fetch .* of the data set CogComp/trec .*ICLUTILS_DATA.*mini"
    ):
        load("trec", "test")


def test_an_offline_cache_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(IclError, match=r"Could not fetch data/train-00000-of-00001.parquet"):
        load("ag_news", "train")


def test_what_is_not_pinned_is_not_fetched(hub: dict) -> None:
    with pytest.raises(IclError, match=r"'emoc' is not fetched.*emoc.test.jsonl.*3 angry"):
        load("emoc", "test")
    assert "asked" not in hub
    with pytest.raises(IclError, match=r"Unknown data set 'agnews'. Did you mean 'ag_news'"):
        load("agnews", "test")
