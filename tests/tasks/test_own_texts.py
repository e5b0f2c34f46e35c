"""Our own labelled sentences, and those of a reader's file."""

import re
from collections import Counter

import pytest

from iclutils.tasks import text
from iclutils.tasks.prompts import Role

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
@pytest.mark.parametrize("labels", ["own", "swapped", "meaningless"])
def test_prompts_come_back_from_their_tokens(name, labels, tokenizer):
    own = text.TASKS[name]
    task = text.with_labels(own, labels)
    train, test = text.load(name, "train"), text.load(name, "test")
    shown, _ = text.demonstrations(train, len(own.classes), own.most_shots, 0)
    test = sorted(test, key=lambda row: len(row[0]))[-3:]
    prompts = text.build(task, tokenizer, [shown] * 3, test, context=text.CONTEXT)
    for n in range(3):
        lines = (f"{task.cue} {t}\n{task.answer_cue}{task.label_words[c]}\n" for t, c in shown)
        demos = "".join(lines)
        tokens = prompts.tokens[n][prompts.real[n]].tolist()
        assert tokenizer.decode(tokens) == f"{demos}{task.cue} {test[n][0]}\n{task.answer_cue}"
    assert ((prompts.roles == Role.LABEL).sum(1) == len(shown)).all(), "labels are single tokens"
