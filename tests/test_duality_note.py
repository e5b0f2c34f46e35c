"""The note's formulas as written: each by loops in NumPy, and what its slip costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iclutils import IclError
from iclutils.chapters.gradient_descent.note import READINGS, errors


def data(
    seed: int, tokens: int = 6, dim: int = 3, batch: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    place = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    q, k, v = (torch.randn(*batch, tokens, width, **place) for width in (dim, dim, 2))
    chosen = torch.arange(tokens) < tokens - 2
    return q, k, v, chosen


def by_loops(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, c: np.ndarray) -> np.ndarray:
    root = math.sqrt(q.shape[-1])
    kernel = np.exp(q @ k.T / root)
    total = kernel.sum(-1)
    found = np.zeros((len(q), v.shape[-1]))
    for j in range(len(q)):
        for i in range(len(k)):
            weight = kernel[j, i] / total[j]
            match name:
                case "minimised":
                    weight *= -1 if c[i] else 1
                case "averaged":
                    weight /= c.sum() if c[i] else 1
                case "normalised twice":
                    weight /= total[j] if c[i] else 1
                case "as written":
                    weight *= -1 / (c.sum() * total[j]) if c[i] else 1
                case "wrong side":
                    weight = kernel[j, i] / total[i]
                case "gaussian":
                    near = [math.exp(-((key - q[j]) ** 2).sum() / (2 * root)) for key in k]
                    weight = near[i] / sum(near)
                case "mapped twice":
                    weight = math.exp(kernel[j, i] / root) / np.exp(kernel[j] / root).sum()
                case "start not mapped":
                    weight = kernel[j, i] / total[j] if c[i] else (q[j] @ k[i]) / root / total[j]
            found[j] += weight * v[i]
    return found


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 9999),
    name=st.sampled_from(list(READINGS)),
    tokens=st.integers(3, 6),
    batch=st.sampled_from([(), (2,)]),
)
def test_readings(seed: int, name: str, tokens: int, batch: tuple[int, ...]) -> None:
    q, k, v, chosen = data(seed, tokens, batch=batch)
    found = READINGS[name](q, k, v, chosen).reshape(-1, tokens, 2)
    flat = [part.reshape(-1, *part.shape[-2:]).numpy() for part in (q, k, v)]
    for b, context in enumerate(zip(*flat, strict=True)):
        expected = by_loops(name, *context, chosen.numpy())
        np.testing.assert_allclose(found[b], expected, atol=1e-10)


def test_every_slip_costs_something() -> None:
    q, k, v, chosen = data(0, batch=(3,))
    kernel = (q @ k.mT / math.sqrt(3)).exp()
    exact = (kernel / kernel.sum(-1, keepdim=True)) @ v
    found = errors(q, k, v, chosen)
    assert list(found) == list(READINGS)
    for name, error in found.items():
        assert error.shape == (3, 6)
        assert float(error.median()) > 0.02, name
        gap = (READINGS[name](q, k, v, chosen) - exact).norm(dim=-1) / exact.norm(dim=-1)
        torch.testing.assert_close(error, gap, atol=1e-10, rtol=1e-10)


def test_when_a_slip_costs_nothing() -> None:
    """The sign without a step, 1/n with n = 1, the Gaussian with keys of one length."""
    q, k, v, chosen = data(1)
    assert float(errors(q, k, v, ~chosen & chosen)["minimised"].max()) < 1e-12
    one = torch.arange(6) < 1
    assert float(errors(q, k, v, one)["averaged"].max()) < 1e-12
    same = k / k.norm(dim=-1, keepdim=True)
    assert float(errors(q, same, v, chosen)["gaussian"].max()) < 1e-10
    equal = q[:1].expand_as(q)  # one query six times: D is a multiple of the identity
    assert float(errors(equal, k, v, chosen)["wrong side"].max()) < 1e-12
    every = torch.ones(6).bool()
    assert float(errors(q, k, v, every)["start not mapped"].max()) < 1e-12


def test_bad_input_is_refused() -> None:
    q, k, v, chosen = data(0)
    with pytest.raises(IclError, match="as many queries as keys"):
        READINGS["wrong side"](q[:2], k, v, chosen)
    with pytest.raises(IclError, match="overflow"):
        READINGS["mapped twice"](100 * q, 100 * k, v, chosen)
    with pytest.raises(IclError, match="mask of demonstrations"):
        errors(q, k, v, chosen[:3])
