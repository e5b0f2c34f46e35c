"""Our own labelled sentences, and those of a reader's file."""

import re
from collections import Counter

import pytest

from iclutils.tasks import text

NAMES = ("sentiment", "questions", "subjects", "feelings", "tenses", "places")


@pytest.mark.parametrize("name", NAMES)
def test_sets_are_balanced_and_repeat_nothing(name):
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
@pytest.mark.parametrize("labels", text.LABELS)
def test_label_words_are_single_tokens_of_their_own(name, labels, tokenizer):
    task = text.with_labels(text.TASKS[name], labels)
    lines = [(task.answer_cue, word, "\n") for word in task.label_words]
    assert {len(ids) for _, ids, _ in text.pieces_in_place(tokenizer, lines)} == {1}
    assert len(set(text.first_tokens(task.label_words, tokenizer, task.answer_cue))) == len(lines)
