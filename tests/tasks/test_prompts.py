"""The common shape of classification prompts."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from random_prompts import prompts_strategy, random_prompts

from iclutils.errors import IclError
from iclutils.tasks.prompts import class_logits, correct, join


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("label_words", lambda x: x[:, :1].expand_as(x)),
        ("demo_class", torch.zeros_like),
        ("label_pos", lambda x: x - 1),
        ("target", lambda x: x - 1),
    ],
)
def test_parts_that_contradict_each_other_are_refused(field, spoil):
    prompts = random_prompts()
    prompts.check()
    with pytest.raises(IclError):
        replace(prompts, **{field: spoil(getattr(prompts, field))}).check()


def test_a_slice_loses_the_padding_that_all_have():
    prompts = random_prompts(count=8, longest=9)
    order = prompts.target.argsort()
    short = prompts[order[:2]]
    assert short.tokens.shape[1] == int(prompts.target[order[1]]) + 1
    assert len(short) == 2
    short.check()
    assert torch.equal(prompts[3].tokens, prompts[3:4].tokens)
    assert torch.equal(prompts[-1].gold, prompts.gold[-1:])


@given(prompts_strategy())
def test_class_order_and_prompt_order(prompts):
    generator = torch.Generator().manual_seed(0)
    classes, demos = prompts.classes, prompts.label_pos.shape[1]
    of_demos = torch.rand(len(prompts), 2, demos, generator=generator)
    of_classes = torch.rand(len(prompts), 2, classes, generator=generator)
    summed, dealt = prompts.by_class(of_demos), prompts.by_demonstration(of_classes)
    expected = torch.zeros_like(summed)
    for row, order in enumerate(prompts.demo_class.tolist()):
        for demo, c in enumerate(order):
            expected[row, :, c] += of_demos[row, :, demo]
            assert torch.equal(dealt[row, :, demo], of_classes[row, :, c])
    torch.testing.assert_close(summed, expected)
    if demos == classes:  # one demonstration of each class: the two are inverse
        places = prompts.label_pos
        assert torch.equal(prompts.by_demonstration(prompts.by_class(places)), places)


def test_probabilities_are_over_the_classes_alone():
    prompts = random_prompts(count=2, classes=3)
    logits = torch.zeros(2, 40)
    logits[:, 0] = 100.0  # a word that is no label
    logits[0, prompts.label_words[0, 1]] = 3.0
    logits[1, prompts.label_words[1, 2]] = 3.0
    assert class_logits(prompts, logits).argmax(-1).tolist() == [1, 2]
    assert torch.equal(correct(prompts, logits), prompts.gold == torch.tensor([1, 2]))


def test_joined_prompts_are_the_same_prompts():
    parts = [random_prompts(seed, count=2, longest=longest) for seed, longest in ((0, 2), (1, 9))]
    whole = join(parts)
    whole.check()
    assert len(whole) == 4
    for part, rows in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
        again = whole[rows]
        kept = part.real[:, : again.tokens.shape[1]]
        assert torch.equal(again.roles, part.roles[:, : kept.shape[1]])
        assert torch.equal(again.tokens[kept], part.tokens[:, : kept.shape[1]][kept])
        assert torch.equal(again.target, part.target)
