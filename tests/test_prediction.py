"""Predictions against torch's own cross-entropy; small statistics against the textbook."""

from __future__ import annotations

import statistics as textbook
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_gpt2, tokens
from torch.nn import functional

from iclutils.interp import readout, statistics


def test_log_prob_is_minus_cross_entropy(tmp_path: Path) -> None:
    model, x = tiny_gpt2(tmp_path), tokens(3, 12)
    scores = model(x)
    log_p, right = readout.predictions(model, x)
    loss = functional.cross_entropy(scores[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    assert -log_p.mean().item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(right, scores[:, :-1].argmax(-1) == x[:, 1:])
    assert log_p.shape == (3, 11)


def test_the_icl_score_is_late_loss_minus_early_loss() -> None:
    log_p = torch.tensor([[-3.0, -2.0, -0.5]])
    assert readout.icl_score(log_p, early=0, late=2).item() == pytest.approx(0.5 - 3.0)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20))
def test_mean_and_standard_error(values: list[float]) -> None:
    mean, se = statistics.mean_se(torch.tensor(values, dtype=torch.float64))
    assert mean == pytest.approx(textbook.fmean(values), abs=1e-9)
    assert se == pytest.approx(textbook.stdev(values) / len(values) ** 0.5, abs=1e-9)


def test_the_worst_seed_depends_on_what_is_good() -> None:
    seeds = {"a": (0.9, 0.1), "b": (0.7, 0.2), "c": (0.8, 0.3)}
    assert statistics.worst(seeds) == (0.7, 0.2)
    assert statistics.worst(seeds, high_is_good=False) == (0.9, 0.1)


DRAWS = 4000  # the bootstrap's own relative error is 1 / sqrt(2 DRAWS), 1.1 %


def test_the_bootstrap_of_a_mean_has_the_textbooks_error() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).exp()
    generator = torch.Generator().manual_seed(1)
    value, se = statistics.bootstrap(values, lambda mean: mean, generator, DRAWS)
    assert value == pytest.approx(textbook.fmean(values.tolist()), rel=1e-6)
    expected = textbook.pstdev(values.tolist()) / 50**0.5
    assert se == pytest.approx(expected, rel=0.06)


def test_the_bootstrap_of_a_ratio_has_the_error_of_the_delta_method() -> None:
    """The parts of a ratio are drawn together: with correlated parts that matters."""
    draw = torch.randn(400, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    top = 3 + draw[:, 0]
    pair = torch.stack([top, 2 + 0.5 * draw[:, 0] + 0.1 * draw[:, 1]], 1)
    generator = torch.Generator().manual_seed(1)
    value, se = statistics.bootstrap(pair, lambda mean: mean[0] / mean[1], generator, DRAWS)
    (a, b), n = pair.mean(0).tolist(), len(pair)
    (aa, ab), (_, bb) = torch.cov(pair.T).tolist()
    ratio = a / b
    assert value == pytest.approx(ratio)
    expected = ((aa - 2 * ratio * ab + ratio**2 * bb) / n) ** 0.5 / b
    apart = ((aa + ratio**2 * bb) / n) ** 0.5 / b
    assert apart > 1.5 * expected
    assert se == pytest.approx(expected, rel=0.06)


def test_the_bootstrap_depends_on_its_generator_alone() -> None:
    values = torch.rand(20, generator=torch.Generator().manual_seed(0))

    def ask(seed: int) -> tuple[float, float]:
        generator = torch.Generator().manual_seed(seed)
        return statistics.bootstrap(values, lambda mean: mean.square(), generator)

    state = torch.get_rng_state()
    assert ask(3) == ask(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert ask(3)[1] != ask(4)[1]


def test_the_worst_passes_over_what_is_undefined() -> None:
    seeds = {"a": (0.5, 0.1), "b": (float("nan"), 0.0), "c": (0.2, 0.3)}
    assert statistics.worst(seeds) == (0.2, 0.3)
    assert statistics.worst(seeds, high_is_good=False) == (0.5, 0.1)
    value, _ = statistics.worst({"b": seeds["b"]})
    assert value != value
