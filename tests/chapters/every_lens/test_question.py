"""The prompt of chapter 07: against prompts written out by hand."""

import pytest
import torch
from random_layers import seeded

from iclutils.chapters.every_lens import question
from iclutils.tasks import topics


def spoken(model, tokens):
    return model.tokenizer.decode(tokens)


def asked(model, count=4, seed=0, function="past"):
    return question.of_words(model, function, count, 3, seeded(seed))


def test_no_word_stands_in_two_lists():
    lists = [{w for r in question.rows(f) for w in r[0].split(", ")} for f in question.FUNCTIONS]
    assert sum(map(len, lists)) == len(set().union(*lists))


@pytest.mark.parametrize("function", question.FUNCTIONS)
def test_lines_are_pairs_of_the_list_and_no_word_comes_twice(reader, function):
    here, rows = asked(reader, 30, function=function), question.rows(function)
    held, shown = rows[2::3], [row for i, row in enumerate(rows) if i % 3 < 2]
    for n in range(30):
        for side, column in ((here.task.clean, 1), (here.task.corrupt, 2)):
            *lines, last = spoken(reader, side[n]).split("\n")
            pairs = [tuple(line.strip().split(" -> ")) for line in lines]
            assert set(pairs) <= {(row[0], row[column]) for row in shown}
            query = last.strip().removesuffix(" ->")
            answer = spoken(reader, here.task.choices[n, column - 1]).strip()
            assert (query, answer) in {(row[0], row[column]) for row in held}
            said = [w for pair in pairs for w in ", ".join(dict.fromkeys(pair)).split(", ")]
            if function != "first of three":
                assert len({*said, query, answer}) == len(said) + len({query, answer})
    moved = here.task.clean != here.task.corrupt  # the answers, and nothing else
    assert torch.equal(moved.nonzero()[:, 1].view_as(here.answers), here.answers)
    wrong = here.shuffle(seeded(1))
    for side in ("clean", "corrupt"):
        one, other = (getattr(x.task, side).gather(1, here.answers) for x in (here, wrong))
        assert torch.equal(one.sort(1).values, other.sort(1).values)
        assert not (one == other).any()


def test_an_example_goes_with_the_newline_before_it(reader):
    here = asked(reader)
    lines = spoken(reader, here.task.clean[0]).split("\n")
    for gone in ([1], [0, 2], [0, 1, 2]):
        tokens, target = here.without(gone)
        left = "\n".join(line for i, line in enumerate(lines) if i not in gone)
        text = spoken(reader, tokens[0, : target[0] + 1])
        assert text == ("\n" if 0 in gone else "") + left  # the newline of the next stays


def test_the_margin_is_the_right_logit_less_the_others():
    here = question.of_prompts(topics.sample(6, seeded(0)))
    logits = torch.randn(6, topics.VOCAB)
    for row, margin in enumerate(here.margin(logits)):
        right = int(here.task.answer[row, 0])
        others = [int(x) for x in here.task.choices[row] if int(x) != right]
        assert torch.isclose(margin, logits[row, right] - logits[row, others].mean(), atol=1e-5)


def test_texts_lose_an_example_and_keep_their_first_token():
    prompts = topics.sample(5, seeded(0))
    here = question.of_prompts(prompts)
    tokens, target = here.without([1])
    for row in range(5):
        start, end = (int(prompts.label_pos[row, i]) + 1 for i in (0, 1))
        whole = prompts.tokens[row, : int(prompts.target[row]) + 1].tolist()
        assert tokens[row, : int(target[row]) + 1].tolist() == whole[:start] + whole[end:]
