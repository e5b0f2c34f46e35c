"""Our own labelled sentences, and those of a reader's file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny import real_tokenizer

from iclutils import IclError
from iclutils.tasks import text
from iclutils.tasks.prompts import Role

NAMES = ("sentiment", "questions", "subjects")


def test_passages_begin_with_bos_and_are_cut_where_asked(tokenizer: Any) -> None:
    kinds, tokens = text.passages(tokenizer, 190, bos=5)
    assert len(set(kinds)) == len(kinds) == len(tokens) == 12
    assert tokens.shape[1] == 191
    assert set(tokens[:, 0].tolist()) == {5}
    first = text.PASSAGES.read_text(encoding="utf-8").split("\n")[0].split("\t")
    assert first[0] == kinds[0]
    assert first[1].startswith(tokenizer.decode(tokens[0, 1:]))
    with pytest.raises(IclError, match="tokens and more; got length=2000"):
        text.passages(tokenizer, 2000, bos=5)


@pytest.mark.parametrize("name", NAMES)
def test_sets_are_balanced_and_repeat_nothing(name: str) -> None:
    task, parts = text.TASKS[name], {split: text.load(name, split) for split in ("train", "test")}
    counted = {split: Counter(label for _, label in rows) for split, rows in parts.items()}
    assert counted["train"] == counted["test"]
    assert set(counted["train"]) == set(range(len(task.label_words)))
    assert len(set(counted["train"].values())) == 1
    assert counted["train"][0] >= 20
    every = [words for rows in parts.values() for words, _ in rows]
    plain = [re.sub(r"[^a-z ]", "", words.lower()) for words in every]
    assert len(set(plain)) == len(plain)
    named = {word.strip().lower() for word in task.label_words}
    assert not any(named & set(words.split()) for words in plain), "a text names a class"
    assert max(map(len, every)) < 80
    assert task.classes == tuple(word.strip() for word in task.label_words)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("labels", ["own", "swapped", "meaningless"])
def test_prompts_come_back_from_their_tokens(name: str, labels: Any, tokenizer: Any) -> None:
    own = text.TASKS[name]
    task = text.with_labels(own, labels)
    train, test = text.load(name, "train"), text.load(name, "test")
    shown, _ = text.demonstrations(train, len(own.classes), own.most_shots, 0)
    test = sorted(test, key=lambda row: len(row[0]))[-3:]
    prompts = text.build(task, tokenizer, [shown] * 3, test, context=text.CONTEXT)
    for n in range(3):
        demos = "".join(
            f"{task.cue} {t}\n{task.answer_cue}{task.label_words[c]}\n" for t, c in shown
        )
        tokens = prompts.tokens[n][prompts.kept[n]].tolist()
        assert tokenizer.decode(tokens) == f"{demos}{task.cue} {test[n][0]}\n{task.answer_cue}"
    assert ((prompts.roles == Role.LABEL).sum(1) == len(shown)).all(), "labels are single tokens"


def test_other_labels() -> None:
    task = text.TASKS["questions"]
    swapped = text.with_labels(task, "swapped").label_words
    assert sorted(swapped) == sorted(task.label_words)
    assert all(a != b for a, b in zip(swapped, task.label_words, strict=True))
    assert not set(text.with_labels(task, "meaningless").label_words) & set(task.label_words)
    assert text.with_labels(task, "own") is task
    with pytest.raises(IclError, match="Did you mean 'swapped'"):
        text.with_labels(task, "swaped")


def test_a_set_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "mood.tsv"
    lines = [f"{'up' if i % 2 else 'down'}\ttext number {i}" for i in range(10)]
    path.write_text("label\ttext\n" + "\n".join(lines) + "\n")
    task, rows = text.read(path)
    assert (task.title, task.classes, task.label_words) == (
        "mood",
        ("down", "up"),
        (" down", " up"),
    )
    assert rows == [(f"text number {i}", i % 2) for i in range(10)]
    assert text.part(rows, "train") == [rows[i] for i in (0, 1, 4, 5, 8, 9)]
    assert text.part(rows, "test") == [rows[i] for i in (2, 3, 6, 7)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("good\ta\ngood\tb\nbad\tc\n", "1 texts of the class 'bad': every class needs two"),
        ("good\ta\n\tb\n", "line 3 has no label: mend it"),
        ("good\ta\n\nbad\tb\n", "line 3 has no label"),
        ("good\ta\nbad\n", "line 3 has no text"),
        ("good\ta\nbad\ta\n", "line 3 has a text that stood there before"),
        ("good\ta\ngood\tb\n", "has 1 classes"),
        ("", "has 0 classes"),
    ],
)
def test_bad_sets_say_what_to_do(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text(f"label\ttext\n{lines}")
    with pytest.raises(IclError, match=message):
        text.read(path)
    path.write_text(f"text\tlabel\n{lines}")
    with pytest.raises(IclError, match="must begin with the line label, tab, text"):
        text.read(path)
    path.unlink()
    with pytest.raises(IclError, match="cannot be read as text"):
        text.read(path)


def test_a_label_of_several_tokens_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text("label\ttext\nindescribable joy\ta\nsad\tb\nindescribable joy\tc\nsad\td\n")
    task, rows = text.read(path)
    with pytest.raises(IclError, match=r"' indescribable joy' of mine is \d tokens .* short"):
        text.build(task, tokenizer, [rows], rows[:1], context=99)


def test_labels_that_begin_with_a_bare_space_are_refused() -> None:
    with pytest.raises(IclError, match="makes a space and the rest"):
        text.first_tokens([" 5"], real_tokenizer("smollm2"))
