"""Predictions against torch's own cross-entropy; small statistics against the textbook."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_gpt2, tokens
from torch.nn import functional

from iclutils.lenses import prediction


def test_log_prob_is_minus_cross_entropy(tmp_path: Path) -> None:
    model, x = tiny_gpt2(tmp_path), tokens(3, 12)
    scores = model(x)
    log_p, right = prediction.predict(model, x)
    loss = functional.cross_entropy(scores[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    assert -log_p.mean().item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(right, scores[:, :-1].argmax(-1) == x[:, 1:])
    assert log_p.shape == (3, 11)


def test_the_icl_score_is_late_loss_minus_early_loss() -> None:
    log_p = torch.tensor([[-3.0, -2.0, -0.5]])
    assert prediction.icl_score(log_p, early=0, late=2).item() == pytest.approx(0.5 - 3.0)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20))
def test_mean_and_standard_error(values: list[float]) -> None:
    mean, se = prediction.mean_se(torch.tensor(values, dtype=torch.float64))
    assert mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert se == pytest.approx(statistics.stdev(values) / len(values) ** 0.5, abs=1e-9)


def test_the_worst_seed_depends_on_what_is_good() -> None:
    seeds = {"a": (0.9, 0.1), "b": (0.7, 0.2), "c": (0.8, 0.3)}
    assert prediction.worst(seeds) == (0.7, 0.2)
    assert prediction.worst(seeds, high_is_good=False) == (0.9, 0.1)
