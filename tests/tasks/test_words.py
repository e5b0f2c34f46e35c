"""Functions between words: the lists, and prompts whose tokens say what they hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from tiny import real_tokenizer

from iclutils import models
from iclutils.interp.readout import is_answered, with_answers
from iclutils.tasks import words


@pytest.mark.parametrize("name", words.FUNCTIONS)
def test_lists_are_long_and_repeat_nothing(name):
    train, test = words.load(name, "train"), words.load(name, "test")
    everything = words.load(name)
    assert sorted(train + test) == sorted(everything)
    assert len(everything) >= 60
    assert len(test) >= 20
    queries = [word for word, _ in everything]
    assert len(set(queries)) == len(queries)
    for word, answer in everything:
        assert word != answer
        assert word.strip() == word != ""
        assert answer.strip() == answer != ""
    shares = [answer for _, answer in everything]
    assert max(map(shares.count, shares)) <= len(shares) / 3, "no answer is a good guess"


def check(asked, tokenizer, functions, true):
    """Lines and answers, from the decoded tokens; ``Prompts.check`` looks at the positions."""
    prompts, whole = asked
    prompts.check(unseen=prompts.classes)
    known = dict(functions)
    for n in range(len(prompts)):
        *lines, last = tokenizer.decode(prompts.tokens[n][prompts.real[n]].tolist()).split("\n")
        assert len(lines) == prompts.label_pos.shape[1]
        query = last.removesuffix(" ->")
        assert tokenizer.decode(whole[n][whole[n] >= 0].tolist()) == f" {known[query]}\n"
        assert int(prompts.label_words[n, prompts.gold[n]]) == int(whole[n, 0])
        pairs = [tuple(line.split(" -> ")) for line in lines]
        if true:
            assert all(known[word] == said for word, said in pairs)
            assert not {query, known[query]} & {word for word, _ in pairs}


@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(words.FUNCTIONS)),
    examples=st.integers(0, 5),
    seed=st.integers(0, 1000),
    split=st.sampled_from(["train", "test"]),
    shared=st.booleans(),
)
def test_prompts_come_back_from_their_tokens(tokenizer, name, examples, seed, split, shared):
    asked, again = (
        words.ask(name, tokenizer, 4, examples, seeded(seed), split=split, shared=shared)
        for _ in range(2)
    )
    check(asked, tokenizer, words.load(name), true=True)
    prompts = asked.prompts
    assert prompts.label_pos.shape == (4, examples)
    assert prompts.classes == examples + 1
    assert (prompts.demo_class == torch.arange(examples)).all(), "each answer once"
    if shared and examples:
        ends = prompts.label_pos[0, -1] + 1
        assert (prompts.tokens[:, :ends] == prompts.tokens[:1, :ends]).all()
    held = {word for word, _ in words.load(name, split)}
    for row, kept in zip(prompts.tokens, prompts.real, strict=True):
        assert tokenizer.decode(row[kept].tolist()).split("\n")[-1][:-3] in held
    assert torch.equal(again.prompts.tokens, prompts.tokens)


def test_shuffled_answers_are_the_same_words(tokenizer):
    true = words.ask("past", tokenizer, 6, 4, seeded(1)).prompts
    false = words.ask("past", tokenizer, 6, 4, seeded(1), shuffled=True)
    assert torch.equal(true.tokens.sort(1).values, false.prompts.tokens.sort(1).values)
    known = dict(words.load("past"))
    for row, kept in zip(false.prompts.tokens, false.prompts.real, strict=True):
        *lines, _ = tokenizer.decode(row[kept].tolist()).split("\n")
        assert not any(known[line.split(" -> ")[0]] == line.split(" -> ")[1] for line in lines)
    check(false, tokenizer, words.load("past"), true=False)


def test_asked_words_and_their_answers_are_those_of_the_prompts(tokenizer):
    prompts = words.ask("gerund", tokenizer, 5, 3, seeded(2)).prompts
    asked = words.asked(prompts, tokenizer)
    assert set(asked) <= {word for word, _ in words.load("gerund", "test")}
    gold = prompts.label_words.gather(1, prompts.gold[:, None])[:, 0]
    assert torch.equal(words.answers("gerund", asked, tokenizer), gold)
    assert words.answers("capital", ["walk", "France"], tokenizer).tolist() == [
        -1,
        tokenizer.encode(" Paris")[0],
    ]


def test_functions_of_a_list_are_one_repetition():
    values = {"past": 0.0, "plural": 0.5, "gerund": 1.0, "own": 0.25}
    assert words.by_list(values).tolist() == [0.5, 0.5, 0.25]


def test_whole_answers_are_what_greedy_decoding_writes(gpt2):
    """Against one token at a time, on a small random network."""
    from random_prompts import VOCAB, random_prompts

    prompts, rows = random_prompts(count=12, shots=2), torch.arange(12)
    written = torch.nn.functional.pad(prompts.tokens, (0, 3))
    answer = torch.full((12, 3), -1)
    for k in range(3):
        scores = models.logits(gpt2, written)[rows, prompts.target + k]
        answer[:, k] = written[rows, prompts.target + k + 1] = scores.argmax(-1)

    def right(whole):
        tokens, at = with_answers(prompts, whole)
        return is_answered(models.logits(gpt2, tokens)[rows[:, None], at], whole).tolist()

    assert all(right(answer))
    answer[6:, 2] = -1  # shorter answers
    assert all(right(answer))
    answer[:3, 1] = (answer[:3, 1] + 1) % VOCAB
    answer[6:8, 0] = (answer[6:8, 0] + 1) % VOCAB
    assert right(answer) == [n not in (0, 1, 2, 6, 7) for n in range(12)]


def test_answers_repeat_where_there_are_too_few(monkeypatch):
    """As many different ones as there are, all about as often, in no fixed order."""
    pairs = [(f"w{i}", ("on", "off", "up")[i // 5 % 3]) for i in range(40)]
    monkeypatch.setattr(words, "load", lambda name, split=None: words.half(pairs, split))
    tokenizer = real_tokenizer("gpt2")
    for examples, counts in ((2, [1, 1]), (5, [1, 2, 2])):
        drawn = words.ask("three", tokenizer, 8, examples, seeded(0))
        check(drawn, tokenizer, pairs, true=True)
        seen = drawn.prompts.of_class().sum(1).sort(1).values
        assert (seen[:, -len(counts) :] == torch.tensor(counts)).all()
    assert len({tuple(row) for row in drawn.prompts.demo_class.tolist()}) > 2
