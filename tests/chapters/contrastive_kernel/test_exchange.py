"""Exchanges of updates between functions, against counts made by hand."""

from types import SimpleNamespace

import pytest
import torch
from tiny import whole_words

from iclutils.chapters.contrastive_kernel import exchange
from iclutils.chapters.contrastive_kernel.heads import Case, DualHeads
from iclutils.tasks import words

VERBS = ("past", "gerund")


def test_a_mean_is_over_prompts_that_ask_another_word():
    parts = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 6.0]])
    found = exchange.mean_elsewhere(parts, ["play", "sing", "play"], ["play", "sing", "cat"])
    assert found.tolist() == [[3.0, 0.0], [3.0, 3.0], [3.0, 2.0]]


def test_answers_are_counted_where_they_differ_and_exist():
    """Of four prompts, the last two do not count for b: one answer begins alike, one is missing."""
    right = {"a": torch.tensor([1, 2, 3, 4]), "b": torch.tensor([11, 12, 3, -1])}
    said = {"b": torch.tensor([11, 2, 3, -1]), "c": torch.tensor([1, 12, 9, 9])}
    said["d"] = torch.tensor([7, 7, 7, 7])
    (row,) = exchange.count_answers(said, "a", right, torch.tensor([1, 12, 3, 4]))
    assert row == {
        "prompts": "a", "update": "b", "of": 2, "exchanged": 1, "unchanged": 1, "third": 0.5,
    }  # fmt: skip
    rows = [row, row | {"third": 1.5}]
    sums = dict.fromkeys(("exchanged_in_all", "unchanged_in_all", "third_in_all"), "2 of 4")
    told = exchange.told(rows, "exchanged", "unchanged", "third")
    assert told == {"exchanged": rows} | sums


def read_as_words(monkeypatch, names, count):
    """Draw prompts of functions, by key, in which each word is a token; hooks are their vectors."""
    every = {name: dict(words.load(name)) for name in names}
    known = {x for pairs in every.values() for pair in pairs.items() for x in pair}
    tokenizer = whole_words(["?", "->", "\n", *sorted(known)], unk_token="?")
    monkeypatch.setattr(exchange, "text_tokenizer", lambda model: tokenizer)
    monkeypatch.setattr(exchange, "replace_part", lambda query, demos, part, vectors: vectors)
    prompts = {}
    for name in every:
        draw = torch.Generator().manual_seed(0)
        prompts["net", name] = words.ask(name, tokenizer, count, 2, draw).prompts
    return every, tokenizer, prompts


def test_the_update_of_the_asked_word_is_left_out(monkeypatch):
    """Here an update is a logit of its own function's answers, lower for the word that was asked:
    the answer is found only in the mean over prompts that ask another word."""
    every, tokenizer, prompts = read_as_words(monkeypatch, (*VERBS, "plural"), 3)
    cases, duals = {}, {}
    for name, pairs in every.items():
        key = "net", name
        said = words.asked(prompts[key], tokenizer)
        assert len(set(said)) == 3
        theirs = words.answers(name, said, tokenizer)
        own = torch.nn.functional.one_hot(theirs, len(tokenizer)).float()
        update = torch.zeros(3, len(tokenizer)).index_fill(1, theirs, 10.0) - 10.0 * own
        first = words.answers(name, list(pairs)[:1], tokenizer)
        update[:, first] += 7.0  # would win if the asked word's own were in the mean
        duals[key] = DualHeads(None, update[:, None, None], None)
        query = SimpleNamespace(
            model=None, at=torch.zeros(3, dtype=torch.long), logits=own,
            reread=lambda vectors: vectors[:, 0, 0],
        )  # fmt: skip
        cases[key] = Case(query, prompts[key].tokens > 0, theirs)
    rows = exchange.exchange_updates(cases, duals, prompts)
    assert [(row["prompts"], row["update"]) for row in rows] == [VERBS, VERBS[::-1]]
    for row in rows:
        assert (row["of"], row["exchanged"], row["unchanged"], row["third"]) == (3, 3, 0, 0)


@pytest.mark.parametrize("brings", ["word", "both"])
def test_a_start_brings_the_word_or_the_whole_answer(monkeypatch, brings):
    """A start that holds the asked word is answered in the form of the examples; one that holds
    the answer brings it as it is. No prompt gets a start that asks its own word."""
    every, tokenizer, prompts = read_as_words(monkeypatch, VERBS, 4)
    cases, duals = {}, {}
    for name, pairs in every.items():
        key = "net", name
        said = words.asked(prompts[key], tokenizer)
        right = words.answers(name, said, tokenizer)
        ids = torch.tensor(tokenizer.convert_tokens_to_ids(said)) if brings == "word" else right
        start = torch.nn.functional.one_hot(ids, len(tokenizer)).double()
        duals[key] = DualHeads(start[:, None, None], None, None)
        turned = {a: b for a, b in pairs.items() if brings == "word"}

        def reread(vectors, turned=turned, own=ids):
            given = vectors[:, 0, 0].argmax(-1)
            assert not (given == own).any() or brings == "both"
            forms = [turned.get(w, w) for w in tokenizer.convert_ids_to_tokens(given.tolist())]
            said = torch.tensor(tokenizer.convert_tokens_to_ids(forms))
            return torch.nn.functional.one_hot(said, len(tokenizer)).double()

        logits = torch.nn.functional.one_hot(right, len(tokenizer)).double()
        query = SimpleNamespace(model=None, at=right * 0, logits=logits, reread=reread)
        cases[key] = Case(query, prompts[key].tokens > 0, right)
    rows = exchange.exchange_starts(cases, duals, prompts)
    assert [(row["prompts"], row["start"]) for row in rows] == [VERBS, VERBS[::-1]]
    for row in rows:
        assert row["of"] == row[brings] > 2
        assert row["unchanged"] == row[{"word": "both", "both": "word"}[brings]] == row["kept"] == 0
