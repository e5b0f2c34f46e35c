"""Made-up topics: texts follow their stated probabilities, prompts say where everything is."""

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import booleans, integers
from random_layers import seeded
from scipy.stats import chisquare

from iclutils.tasks import topics
from iclutils.tasks.prompts import Role


@given(integers(0, 10_000), integers(1, 4), integers(1, 4), integers(2, 5), booleans())
def test_prompts_are_what_they_say(seed, count, shots, classes, shared):
    asked = topics.sample(count, seeded(seed), shots=shots, classes=classes, shared=shared)
    asked.check()
    rows = torch.arange(count)
    assert (asked.tokens[rows, asked.target] == topics.CUE).all()
    assert (asked.tokens.gather(1, asked.cue_pos) == topics.CUE).all()
    assert (asked.of_class().sum(1) == shots).all()
    assert (asked.tokens[:, 0] == topics.BOS).all()
    words = asked.tokens < topics.FIRST_LABEL
    inside = torch.arange(asked.tokens.shape[1]) < asked.target[:, None]
    assert torch.equal(words, (asked.roles == Role.TEXT) | ((asked.roles == Role.QUERY) & inside))
    lengths = asked.cue_pos - torch.cat([rows[:, None] * 0, asked.label_pos[:, :-1]], 1) - 1
    assert int(lengths.min()) >= 4
    assert int(lengths.max()) <= 12
    if shared:
        head = int(asked.label_pos[0, -1]) + 1
        assert (asked.tokens[:, :head] == asked.tokens[:1, :head]).all()


def word_probabilities(texts):
    """Of every topic word, then every filler, in texts of each topic: (topic, word)."""
    topic = torch.arange(len(topics.TOPICS))
    word_topic = torch.arange(topics.FIRST_FILLER) // topics.PER_TOPIC
    same_topic = topic[:, None] == word_topic
    sibling = (topic[:, None] // topics.SIBLINGS == word_topic // topics.SIBLINGS) & ~same_topic
    anything = (1 - texts.own - texts.sibling) / topics.FIRST_FILLER
    head = (torch.arange(topics.FIRST_FILLER) % topics.PER_TOPIC == 0).float() * texts.same
    own = (head + (1 - texts.same) / topics.PER_TOPIC) * texts.own
    p = (
        same_topic * own
        + sibling * texts.sibling / (topics.SIBLINGS - 1) / topics.PER_TOPIC
        + anything
    )
    shape = len(topics.TOPICS), topics.FIRST_LABEL - topics.FIRST_FILLER
    return torch.cat([p * (1 - texts.filler), torch.full(shape, texts.filler / shape[1])], 1)


@pytest.mark.parametrize(
    "texts",
    [topics.FULL, topics.HARD, topics.FULL.with_difficulty(0.3), topics.FULL.with_difficulty(0.0)],
)
def test_words_come_as_often_as_their_stated_probability(texts):
    p = word_probabilities(texts)
    assert torch.allclose(p.sum(1), torch.ones(12))
    chosen, first = torch.full((3000, 1), 7), torch.zeros(3000, 1, dtype=torch.long)
    drawn, sizes = topics._draw(chosen, first, texts, seeded())
    words = drawn[:, 0][torch.arange(texts.longest) < sizes]
    counted = torch.bincount(words, minlength=topics.FIRST_LABEL).double()
    expected = p[7].double() / p[7].double().sum() * counted.sum()
    assert (counted[expected == 0] == 0).all()
    if (expected > 0).sum() > 1:  # else every word is the one there is, which line above shows
        assert chisquare(counted[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_training_streams_show_every_class_before_any_comes_again():
    tokens, cue = topics.stream(50, 7, seeded())
    labels = tokens.gather(1, cue + 1)
    assert (tokens.gather(1, cue) == topics.CUE).all()
    assert all(len(set(row[:4])) == 4 and set(row) == set(row[:4]) for row in labels.tolist())
