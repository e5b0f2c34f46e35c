"""Few-shot prompts: the published templates, selections and positions; our own sentences."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_layers import seeded
from tiny import real_tokenizer, whole_words

from iclutils import IclError
from iclutils.tasks import text, words
from iclutils.tasks.prompts import Role

WORDS = ["Review", "Sentiment", ":", "Negative", "Positive", "Neutral", "\n"]
WORDS += [f"w{i}" for i in range(9)]

READER = whole_words([*WORDS, "?"], unk_token="?", eos_token="END")
TASK = text.TextTask("words", "Review:", "Sentiment:", (" Negative", " Positive"))
SHOWN = [("w1 w2", 1), ("w3", 0)]


@pytest.fixture
def gpt2():
    return real_tokenizer("gpt2")


def written(task, shown, query):
    demos = [f"{task.cue} {t}\n{task.answer_cue}{task.label_words[c]}\n" for t, c in shown]
    return f"{''.join(demos)}{task.cue} {query}\n{task.answer_cue}"


def test_the_golden_prompt(gpt2):
    """Positions that the released code finds in this prompt."""
    shown = [("a great movie", 1), ("awful film", 0)]
    whole = (
        "Review: a great movie\nSentiment: Positive\nReview: awful film\nSentiment: Negative\n"
        "Review: fine work here\nSentiment:"
    )
    assert written(text.TASKS["sst2"], shown, "fine work here") == whole
    prompts = text.build(text.TASKS["sst2"], gpt2, [shown], [("fine work here", 1)], context=1024)
    assert prompts.tokens.tolist() == [gpt2(whole)["input_ids"]]
    assert prompts.label_pos.tolist() == [[9, 19]]
    assert prompts.cue_pos.tolist() == [[8, 18]]
    assert (prompts.demo_class.tolist(), prompts.gold.tolist()) == ([[1, 0]], [1])
    assert prompts.target.tolist() == [29]
    assert prompts.label_words.tolist() == [[36183, 33733]]
    roles = prompts.roles[0]
    assert (roles == Role.TEXT).nonzero()[:, 0].tolist() == [2, 3, 4, 13, 14]
    assert (roles == Role.QUERY).nonzero()[:, 0].tolist() == list(range(21, 30))
    assert (roles == Role.LABEL).nonzero()[:, 0].tolist() == [9, 19]


HARD = ["ends in a space ", "two  spaces , ends in three   ", "'s", "crème brûlée — 日本 🙂",
        ": punctuation first", "Sentiment: Positive", "a line\nbreak\n\n"]  # fmt: skip


@pytest.mark.parametrize("hard", HARD)
def test_hard_texts_are_tokenised_as_the_whole_string(gpt2, hard):
    shown = [(hard, 1), ("plain", 0), (hard, 0)]
    prompts = text.build(text.TASKS["sst2"], gpt2, [shown], [(hard, 0)], context=1024)
    assert prompts.tokens[0].tolist() == gpt2(written(text.TASKS["sst2"], shown, hard))["input_ids"]
    bodies = prompts.tokens[0][prompts.roles[0] == Role.TEXT]
    assert gpt2.decode(bodies.tolist()) == f" {hard} plain {hard}"
    shown = [(hard, c) for c in (3, 0, 5, 1, 4, 2)]
    prompts = text.build(text.TASKS["trec"], gpt2, [shown], [(hard, 3)], context=1024)
    labels = prompts.tokens[0][prompts.roles[0] == Role.LABEL]  # one has three sub-tokens
    words = "".join(text.TASKS["trec"].label_words[c] for _, c in shown)
    assert gpt2.decode(labels.tolist()) == words


def test_over_long_prompts_are_refused_or_dropped_never_cut():
    queries = [("w4", 0), ("w5 " * 20, 1), ("w6", 1)]
    shown = [SHOWN] * 3
    with pytest.raises(IclError, match=r"1 of 3 .*longer than the 30 .*2 demonstr.* has 42.*drop"):
        text.build(TASK, READER, shown, queries, context=30)
    prompts = text.build(TASK, READER, shown, queries, context=30, over_long="drop")
    assert prompts.gold.tolist() == [0, 1]
    assert prompts.tokens.shape == (2, 23)
    with pytest.raises(IclError, match="3 of 3 prompts are longer than the 10 tokens"):
        text.build(TASK, READER, shown, queries, context=10, over_long="drop")


def test_demonstrations_per_query_are_drawn_class_by_class():
    labels = [2, 0, 1, 0, 2, 1, 1, 0]
    rows = [(str(i), label) for i, label in enumerate(labels)]
    sets = text.demonstrations_per_query(rows, 3, 2, seed=43, queries=5)
    generator = np.random.RandomState(43)
    order = np.random.default_rng(43).permutation(6)
    for drawn in sets:
        # A choice with replacement is a draw of uniform places in the list of the class's rows.
        plain = [
            [i for i, label in enumerate(labels) if label == c][place]
            for c in range(3)
            for place in generator.randint(0, labels.count(c), 2)
        ]
        assert drawn == [rows[plain[i]] for i in order]
    assert len({tuple(label for _, label in drawn) for drawn in sets}) == 1
    assert len({tuple(drawn) for drawn in sets}) > 1


def test_test_rows_are_those_of_the_datasets_library():
    library = pytest.importorskip("datasets", reason="needs the library whose shuffle is compared")
    for count, seed in ((7, 42), (60, 46)):
        plain = library.Dataset.from_dict({"row": list(range(count))}).shuffle(seed=seed)
        rows = [(str(i), 0) for i in range(count)]
        assert text.evaluation_rows(rows, seed, 10) == [rows[i] for i in plain["row"]][:10]


MESSAGES = ["hello there", "so happy", "so sad", "grr"]


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch):
    monkeypatch.delenv("ICLUTILS_DATA", raising=False)


def write_lines(folder, name, *lines):
    path = folder / f"{name}.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def test_rows_from_a_folder_keep_their_order(tmp_path, monkeypatch):
    lines = [{"text": words, "label": label, "id": 7} for label, words in enumerate(MESSAGES)]
    write_lines(tmp_path, "emoc.test", *lines[:2], "", *lines[2:])
    monkeypatch.setenv("ICLUTILS_DATA", str(tmp_path))
    assert text.load("emoc", "test") == list(zip(MESSAGES, range(4), strict=True))
    with pytest.raises(IclError, match=r"fetch 'emoc' from the hub: no copy .*put emoc.train.json"):
        text.load("emoc", "train")  # not in that folder


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("trec", {"text": "a", "label-coarse": 0}, "'coarse_label', a class id in 0..5: "),
        ("sst2", {"sentence": None, "label": 1}, r"got \(None, 1\)"),
        ("sst2", "{'sentence'", "JSON"),
    ],
)
def test_bad_lines_say_where_and_what(tmp_path, monkeypatch, name, line, message):
    monkeypatch.setenv("ICLUTILS_DATA", str(tmp_path))
    write_lines(tmp_path, f"{name}.train", line)
    with pytest.raises(IclError, match=message):
        text.load(name, "train")


def test_rows_from_the_hub(tmp_path, monkeypatch):
    asked, file = {}, tmp_path / "file.parquet"

    def download(repo, path, **options):
        asked.update(options, repo=repo, path=path)
        return str(file)

    monkeypatch.setattr(text, "hf_hub_download", download)
    columns = {"idx": [0, 1, 2], "sentence": ["bad ", "good", "fine"], "label": [0, 1, 1]}
    pq.write_table(pa.table(columns), file)
    assert text.load("sst2", "test") == [("bad ", 0), ("good", 1), ("fine", 1)]
    assert (asked["repo"], len(asked["revision"])) == ("stanfordnlp/sst2", 40)


def built(query=("w1", 0), words=(" Negative", " Positive")):
    return text.build(replace(TASK, label_words=words), READER, [SHOWN], [query], context=99)


def asked(name, count, examples, **options):
    return words.ask(name, real_tokenizer("gpt2"), count, examples, seeded(), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: built(words=(" Negative", " Negative w1")), "begin with the same token"),
        (lambda: built(words=(" Negative", " Great")), "' Great' is not in the vocabulary"),
        (lambda: built(query=("w1", 2)), r"of class 2 .*the classes of words are 0..1"),
        (lambda: words.load("oposite"), r"Did you mean 'opposite'"),
        (lambda: asked("kind", 1, 99), r"'kind' has too few pairs for 99 examples: \d\d fit"),
    ],
)
def test_prompts_that_cannot_be_say_what_is_wrong(call, message):
    with pytest.raises(IclError, match=message):
        call()


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
