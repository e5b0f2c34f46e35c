"""Sources of prompts: which rows, which demonstrations, read off the tokens alone."""

import numpy as np
import pytest
from tiny import real_tokenizer, save_gpt2, whole_words

import iclutils
from iclutils import models
from iclutils.tasks import text, words
from iclutils.tasks.sources import compatible_tasks, open_source

TRAIN, TEST, LONG = 60, 30, 7  # rows; test row LONG is longer than the context
LABELS = {
    "sst2": ["Negative", "Positive"],
    "ag_news": ["World", "Sports", "Business", "Technology"],
}
WORDS = ["Review", "Sentiment", "Article", "Answer", ":", "\n", *LABELS["sst2"], *LABELS["ag_news"]]
WORDS += [f"train{i}" for i in range(TRAIN)] + [f"test{i}" for i in range(TEST)]


def generator(purpose, draw):
    return iclutils.begin(seed=3).generator(purpose, draw)


def rows(name, split):
    """Row 4 of the training split has the text ``train4``, so a prompt says which rows it shows."""
    classes = len(LABELS[name])
    if split == "train":
        return [(f"train{i}", (i + i * i // 5) % classes) for i in range(TRAIN)]
    return [(f"test{i} " * (200 if i == LONG else 1), i % classes) for i in range(TEST)]


def demonstrations(name, seed, shots, more=0):
    """As the released code chooses them: shuffle all rows, walk once, take the first of each."""
    order = list(range(TRAIN))
    np.random.RandomState(seed).shuffle(order)
    label = [c for _, c in rows(name, "train")]
    place = {i: [j for j in order if label[j] == label[i]].index(i) for i in order}
    first = [i for i in order if place[i] < shots]
    return first, [i for i in order if shots <= place[i] < shots + more]


def queries(seed, count):
    """As Hugging Face's ``shuffle(seed)``; the row that is too long is left out."""
    return [i for i in np.random.default_rng(seed).permutation(TEST)[:count] if i != LONG]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    size, end = len(WORDS) + 1, len(WORDS)
    save_gpt2(
        folder, vocab_size=size, n_positions=128, n_layer=1, bos_token_id=end, eos_token_id=end
    )
    words = whole_words([*WORDS, "?"], unk_token="?", eos_token="?")
    words.save_pretrained(folder)
    return models.load(folder)


@pytest.fixture
def hand_made(monkeypatch):
    monkeypatch.setattr(text, "load", rows)


def read(prompts):
    """(texts shown, label words shown, text asked) of every prompt, from its tokens."""
    prompts.check()
    found = []
    for ids, q, places in zip(
        prompts.tokens.tolist(), prompts.target, prompts.label_pos, strict=True
    ):
        words = [WORDS[i] for i in ids[: int(q) + 1]]
        texts = [word for word in words if word.startswith(("train", "test"))]
        found.append((texts[:-1], [words[p] for p in places.tolist()], texts[-1]))
    return found


def names(split, ids):
    return [f"{split}{i}" for i in ids]


@pytest.mark.usefixtures("hand_made")
@pytest.mark.parametrize(("seed", "first"), [(0, 42), (1, 47)])
def test_five_demonstration_sets_of_the_paper_are_evaluated(model, seed, first):
    source = open_source("sst2", model, generator, seed)
    found = read(source.evaluation(38, shots=2))
    expected = []
    for s in range(first, first + 5):
        shown, _ = demonstrations("sst2", s, 2)
        labels = [LABELS["sst2"][rows("sst2", "train")[i][1]] for i in shown]
        expected += [(names("train", shown), labels, text) for text in names("test", queries(s, 8))]
    assert found == expected
    assert 38 <= len(found) <= 40
    gold = [rows("sst2", "test")[int(text[4:])][1] for *_, text in found]
    assert source.evaluation(38, shots=2).gold.tolist() == gold
    (shown, _, _), *_ = read(open_source("ag_news", model, generator).evaluation(5, shots=5))
    assert shown == names("train", demonstrations("ag_news", 42, 3)[0]), "no more shots than fit"


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A small random model with GPT-2's tokenizer."""
    folder = tmp_path_factory.mktemp("reader")
    save_gpt2(folder, vocab_size=50257, n_positions=1024, n_layer=1, n_embd=8)
    return models.load(folder, tokenizer=real_tokenizer("gpt2"))


def lines(prompts, reader):
    whole = zip(prompts.tokens, prompts.real, strict=True)
    return [reader.tokenizer.decode(row[kept].tolist()).split("\n") for row, kept in whole]


def test_words_shown_are_training_words_and_those_asked_held_out(reader):
    source = open_source("gerund", reader, generator)
    shown = {f"{word} -> {answer}" for word, answer in words.load("gerund", "train")}
    asked = {f"{word} ->" for word, _ in words.load("gerund", "test")}
    for prompts, examples in ((source.evaluation(6, shots=2), 10), (source.varied(6), 5)):
        for *demos, query in lines(prompts, reader):
            assert len(demos) == examples
            assert shown.issuperset(demos)
            assert query in asked
    held, trained = source.fixed(0, 4, train_per_class=2)
    assert trained is not None
    assert (len(held), len(trained)) == (4, 12)
    (common,) = {tuple(demos) for part in (held, trained) for *demos, _ in lines(part, reader)}
    trained_on = {query for *_, query in lines(trained, reader)}
    assert not trained_on & asked
    assert not trained_on & {line.split("->")[0] + "->" for line in common}
    assert source.fixed(0, 4)[1] is None
    several = lines(source.shared(3, 2), reader)
    assert [demos for *demos, _ in several[::2]] == [demos for *demos, _ in several[1::2]]
    assert len({(*demos,) for *demos, _ in several}) == 3


def test_other_labels(reader):
    assert compatible_tasks(reader, "tenses, gerund", ("topics",)) == ("tenses", "gerund")
    classes = dict(text.load("tenses", "train") + text.load("tenses", "test"))
    prompts = open_source("tenses", reader, labels="swapped").varied(20)
    for row, gold in zip(lines(prompts, reader), prompts.gold.tolist(), strict=True):
        for text_line, label_line in zip(row[:-2:2], row[1:-2:2], strict=True):
            past = classes[text_line.removeprefix("Sentence: ")] == 0
            assert label_line == f"Tense: {'Future' if past else 'Past'}"
        assert row[-1] == "Tense:"
        assert gold == classes[row[-2].removeprefix("Sentence: ")]
