"""Extraction: attention by hand, AUC against scikit-learn, undefined cases."""

from math import isnan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prompts import random_prompts
from sklearn.metrics import roc_auc_score

from iclutils.chapters.label_anchors.extraction import (
    auc,
    auc_by_layer,
    correlation_within_layers,
    label_attention,
    label_reading,
)
from iclutils.interp.readout import target_logits
from iclutils.tasks.prompts import class_logits


@pytest.mark.parametrize("shots", [1, 2])
def test_attention_is_summed_over_demonstrations_and_heads_or_prompts(model, shots):
    prompts = random_prompts(count=5, classes=3, shots=shots, longest=3)
    found, predicted = label_attention(model, prompts, batch_size=2)
    layers, heads = range(model.cfg.n_layers), model.cfg.n_heads
    _, cache = model.run_with_cache(prompts.tokens)
    expected = torch.zeros(5, len(layers), heads, 3)
    for row, q in enumerate(prompts.target.tolist()):
        for layer in layers:
            for p, c in zip(prompts.label_pos[row], prompts.demo_class[row], strict=True):
                expected[row, layer, :, c] += cache["pattern", layer][row, :, q, p]
    torch.testing.assert_close(found, expected.sum(2), atol=1e-5, rtol=1e-4)
    choice = class_logits(prompts, target_logits(model, prompts)).argmax(-1)
    assert torch.equal(predicted, choice)
    own = expected[torch.arange(5), :, :, predicted].mean(0)
    torch.testing.assert_close(label_reading(model, prompts), own, atol=1e-5, rtol=1e-4)
    whole = expected.sum(-1).mean(0)
    torch.testing.assert_close(label_reading(model, prompts, True), whole, atol=1e-5, rtol=1e-4)


@settings(max_examples=60)
@given(st.integers(2, 5), st.integers(4, 30), st.integers(0, 1000), st.booleans())
def test_auc_is_scikit_learns(classes, rows, seed, coarse):
    """One-vs-one as in the paper's code, over the classes that are predicted at all."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, classes, generator=generator, dtype=torch.float64) + 0.1
    if coarse:  # ties; integers, so that shares tie exactly too
        scores = torch.randint(1, 3, (rows, classes), generator=generator).double()
    predicted = torch.randint(0, classes, (rows,), generator=generator)
    present = predicted.unique()
    shares = scores[:, present] / scores[:, present].sum(1, keepdim=True)
    if len(present) == 1:
        assert isnan(auc(scores, predicted))
    elif len(present) == 2:
        expected = roc_auc_score(predicted == present[1], scores[:, present[1]])
        assert auc(scores, predicted) == pytest.approx(expected, abs=1e-12)
    else:
        expected = roc_auc_score(predicted, shares, multi_class="ovo", labels=present)
        assert auc(scores, predicted) == pytest.approx(expected, abs=1e-12)


def test_no_attention_counts_as_even_and_undefined_areas_are_nan():
    assert auc(torch.zeros(3, 3), torch.arange(3)) == 0.5
    scores = torch.rand(5, 3)
    layers = auc_by_layer(scores[:, None].expand(5, 4, 3), torch.zeros(5, dtype=torch.long))
    assert bool(layers.isnan().all())


def test_depth_alone_is_no_correlation():
    """Two scores that both rise from layer to layer, and are at odds within each."""
    rise, within = 10.0 * torch.arange(3)[:, None], torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    found = correlation_within_layers(rise + within, rise + within.flip(1))
    assert found == pytest.approx(-1)
