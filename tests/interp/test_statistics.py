"""Predictions against cross-entropy; statistics against the textbook, scipy and enumeration."""

import statistics as textbook

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layers import seeded
from scipy.stats import false_discovery_control
from tiny import tokens
from torch.nn import functional

from iclutils.interp import readout, statistics


def test_predictions_are_those_of_cross_entropy(gpt2):
    x = tokens(3, 12)
    scores = gpt2(x)
    log_p, right = readout.predictions(gpt2, x)
    loss = functional.cross_entropy(scores[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    assert -log_p.mean().item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(right, scores[:, :-1].argmax(-1) == x[:, 1:])


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20))
def test_mean_and_standard_error(values):
    mean, se = statistics.mean_se(torch.tensor(values, dtype=torch.float64))
    assert mean == pytest.approx(textbook.fmean(values), abs=1e-9)
    assert se == pytest.approx(textbook.stdev(values) / len(values) ** 0.5, abs=1e-9)


def test_pseudo_values_of_a_mean_are_the_data_and_those_of_a_ratio_give_its_error():
    x, y = [1.0, 4.0, 2.0, 7.0], [2.0, 2.5, 4.0, 3.0]
    assert statistics.pseudo_values(textbook.fmean, x) == pytest.approx(x)
    found = statistics.pseudo_values(lambda a, b: sum(a) / sum(b), x, y)
    left = [(sum(x) - a) / (sum(y) - b) for a, b in zip(x, y, strict=True)]
    spread = sum((one - textbook.fmean(left)) ** 2 for one in left) * 3 / 4  # Efron's formula
    assert textbook.variance(found) / 4 == pytest.approx(spread)


def test_significance_by_enumeration():
    """All 2^8 flips of eight samples, and Benjamini-Hochberg by scipy."""
    values = torch.randn(5, 8, generator=seeded(), dtype=torch.float64)
    values[0] += 2
    flips = np.array(np.meshgrid(*[[-1, 1]] * 8)).reshape(8, -1)
    means = np.abs(values.numpy() @ flips) / 8
    exact = (means >= np.abs(values.numpy().mean(1))[:, None] - 1e-12).mean(1)
    expected = torch.from_numpy(false_discovery_control(exact) <= 0.05)
    assert torch.equal(statistics.benjamini_hochberg(torch.from_numpy(exact)), expected)
    left = np.ones(5, dtype=bool)
    while True:
        expected = np.quantile(means[left].max(0), 0.95)
        found = left & (np.abs(values.numpy().mean(1)) > expected)
        if not found.any():
            break
        left &= ~found
    assert 0 < left.sum() < 5
    threshold = statistics.step_down_threshold(values, seeded(2), draws=20_000)
    assert threshold == pytest.approx(expected, abs=0.03)


def test_models_are_repeated_and_of_a_single_one_fifths_of_its_rows():
    def mean(case, rows):
        return rows.float().mean() + (case[1] == "b") / 2

    one = {("m", "a"): range(10), ("m", "b"): range(10)}
    assert statistics.by_model(mean, one).tolist() == [0.75, 2.75, 4.75, 6.75, 8.75]
    two = {("m", "a"): range(10), ("n", "a"): range(4)}
    assert statistics.by_model(mean, two).tolist() == [4.5, 1.5]
