"""Functions to learn in context: links, scales, moments, tied waves, bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from iclutils import IclError
from iclutils.tasks.functions import LINKS, Problem, Waves
from iclutils.tasks.regression import Contexts, Task, sample


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def straight(contexts: Contexts) -> np.ndarray:
    return np.einsum("bnd,bd->bn", contexts.xs.double().numpy(), contexts.weights.double().numpy())


BENT = {"linear": lambda z: z, "sine": np.sin, "exponential": lambda z: np.exp(z / 2)}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dim=st.integers(1, 6),
    link=st.sampled_from(sorted(BENT)),
    stretched=st.booleans(),
)
def test_labels_are_the_link_of_w_x(seed: int, dim: int, link: str, stretched: bool) -> None:
    """Recomputed from the inputs as given: scales come before the link, sqrt(d) only with one."""
    scales = tuple(1.5**k for k in range(dim)) if stretched else ()
    found = Problem(Task(dim), link, scales).sample(5, 7, source(seed))
    z = straight(found)
    expected = z if link == "linear" else BENT[link](z / math.sqrt(dim))
    np.testing.assert_allclose(found.ys.numpy(), expected, rtol=1e-4, atol=1e-5)
    plain = sample(Task(dim), 5, 7, source(seed))
    assert torch.equal(found.weights, plain.weights)
    stretch = torch.tensor(scales or (1.0,) * dim)
    torch.testing.assert_close(found.xs, plain.xs * stretch)
    assert (found.xs.shape, found.ys.shape) == ((5, 7, dim), (5, 7))
    assert found.xs.dtype == found.ys.dtype == torch.float32


def test_a_plain_problem_is_its_task() -> None:
    """Bit by bit: networks trained on it saw the stream of ``regression.sample``."""
    task = Task(3, 0.5, inputs="uniform")
    for found, expected in zip(
        Problem(task).sample(9, 4, source(5)), sample(task, 9, 4, source(5)), strict=True
    ):
        assert torch.equal(found, expected)
    assert set(LINKS) == set(BENT)
    assert Problem(task).dim == 3


@pytest.mark.parametrize("link", sorted(BENT))
def test_noise_is_added_after_the_link(link: str) -> None:
    found = Problem(Task(4, noise=0.3), link, (0.5, 1.0, 1.5, 2.0)).sample(3000, 6, source())
    z = straight(found)
    noise = found.ys.numpy() - (z if link == "linear" else BENT[link](z / 2))
    assert stats.kstest(noise.ravel(), stats.norm(0, 0.3).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(noise.ravel(), z.ravel())[0, 1]) < 0.03


def test_moments() -> None:
    """z ~ N(0, 1) given w of length sqrt(d), nearly so for large d: what sin and exp make of it."""
    found = Problem(Task(400), "sine").sample(4000, 2, source()).ys.double()
    assert float(found.mean()) == pytest.approx(0, abs=0.03)
    assert float(found.square().mean()) == pytest.approx((1 - math.exp(-2)) / 2, rel=0.04)
    found = Problem(Task(400), "exponential").sample(4000, 2, source()).ys.double()
    assert float(found.mean()) == pytest.approx(math.exp(1 / 8), rel=0.03)
    assert float(found.square().mean()) == pytest.approx(math.exp(1 / 2), rel=0.05)
    xs = Problem(Task(3, inputs="uniform"), scales=(0.5, 1.0, 3.0)).sample(20_000, 3, source()).xs
    covariance = torch.cov(xs.flatten(0, 1).T)
    torch.testing.assert_close(covariance, torch.tensor([0.25, 1, 9]).diag(), atol=0.1, rtol=0.03)


def test_waves() -> None:
    found = Waves().sample(4000, 12, source())
    x, y = found.xs[..., 0].double(), found.ys.double()
    amplitude = found.weights[:, 0].double().numpy()
    assert stats.kstest(x.flatten().numpy(), stats.uniform(-5, 10).cdf).pvalue > 1e-3
    assert stats.kstest(amplitude, stats.uniform(0.1, 0.4).cdf).pvalue > 1e-3
    # y = p sin x + q cos x: least squares find the wave, whatever drew it
    parts = torch.linalg.lstsq(torch.stack([x.sin(), x.cos()], -1), y[..., None]).solution[..., 0]
    np.testing.assert_allclose(parts.norm(dim=-1), amplitude, rtol=1e-3)
    phase = torch.atan2(parts[:, 1], parts[:, 0]).numpy()
    turns = (phase + 1e-3) % (2 * math.pi) - 1e-3
    assert stats.kstest(turns, stats.uniform(0, math.pi).cdf).pvalue > 1e-3
    linked = (amplitude - 0.1) / 0.4 * math.pi
    assert abs(np.corrcoef(turns, linked)[0, 1]) < 0.06  # the released code ties them
    assert (found.xs.shape, found.ys.shape, Waves().dim) == ((4000, 12, 1), (4000, 12), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": "sin"}, "Did you mean 'sine'"),
        ({"scales": (1.0,)}, "2 positive scales"),
        ({"scales": (1.0, -1.0)}, "2 positive scales"),
        ({"scales": (1.0, math.inf)}, "2 positive scales"),
    ],
)
def test_problems_that_cannot_be(options: dict, message: str) -> None:
    with pytest.raises(IclError, match=message):
        Problem(Task(2), **options)
