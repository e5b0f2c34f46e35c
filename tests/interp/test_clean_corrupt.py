"""Clean/corrupt tasks and graphs by counting and by numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded

from iclutils import models
from iclutils.interp import clean_corrupt, graph
from iclutils.tasks import topics


def test_copying_differs_in_the_first_copy_alone(gpt2):
    task = clean_corrupt.copying(gpt2, 4, 11, seeded())
    differs = (task.clean != task.corrupt).any(0)
    assert differs[1:12].any()
    assert not differs[[0, *range(12, 23)]].any()
    rows = torch.arange(4)[:, None]
    assert torch.equal(task.clean[rows, task.at + 1], task.answer)
    assert torch.equal(task.clean[rows, task.source], task.answer)


def test_classification_swaps_labels_alone():
    prompts = topics.sample(6, seeded())
    task = clean_corrupt.classification(prompts)
    differs = task.clean != task.corrupt
    assert torch.equal(differs.nonzero()[:, 1].view(6, -1), prompts.label_pos.sort(1).values)
    assert torch.equal(task.clean[torch.arange(6)[:, None], task.source], task.answer)


@pytest.mark.parametrize("narrow", [False, True])
def test_scores_are_log_probabilities(gpt2, narrow):
    """By numpy, over the vocabulary and over choices; fails if choices are ignored."""
    task = clean_corrupt.copying(gpt2, 3, 11, seeded(), narrow=narrow)
    logits = clean_corrupt.scored_logits(gpt2, task)
    whole = models.logits(gpt2, task.clean)
    torch.testing.assert_close(logits, whole[torch.arange(3)[:, None], task.at])
    for row, values in enumerate(logits.double().numpy()):
        known = values[:, task.choices[row]] if narrow else values
        answer = np.take_along_axis(values, task.answer[row, :, None].numpy(), 1)[:, 0]
        expected = np.mean(answer - np.log(np.exp(known).sum(1)))
        assert task.score(logits)[row].item() == pytest.approx(expected, abs=1e-5)
        assert task.is_correct(logits)[row].tolist() == (answer == known.max(1)).tolist()


@settings(max_examples=15)
@given(layers=st.integers(1, 4), heads=st.integers(1, 4), parallel=st.booleans())
def test_the_graph_has_every_later_reader(layers, heads, parallel):
    shape = graph.Graph(layers, heads, parallel)
    per_layer = 3 * heads + 1
    count = sum(
        (1 + layer * (heads + 1)) * per_layer + (0 if parallel else heads)
        for layer in range(layers)
    )
    assert int(shape.exists.sum()) == count + len(shape.writers) == len(shape.edges())
    assert torch.equal(shape.mask(shape.edges()), shape.exists)
    assert [shape.index(e) for e in shape.edges()] == [*map(tuple, shape.exists.nonzero().tolist())]
