"""Functions to learn in context: links, scales, noise, waves."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from scipy import stats

from iclutils.tasks.functions import Problem, Waves
from iclutils.tasks.regression import Task, sample


def straight(contexts):
    return np.einsum("bnd,bd->bn", contexts.xs.double().numpy(), contexts.weights.double().numpy())


BENT = {"linear": lambda z: z, "sine": np.sin, "exponential": lambda z: np.exp(z / 2)}


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from(sorted(BENT)), st.booleans())
def test_labels_are_the_link_of_w_x(seed, dim, link, stretched):
    """Recomputed from the inputs as given: scales come before the link, sqrt(d) only with one."""
    scales = tuple(1.5**k for k in range(dim)) if stretched else ()
    found = Problem(Task(dim), link, scales).sample(5, 7, seeded(seed))
    z = straight(found)
    expected = z if link == "linear" else BENT[link](z / math.sqrt(dim))
    np.testing.assert_allclose(found.ys.numpy(), expected, rtol=1e-4, atol=1e-5)
    plain = sample(Task(dim), 5, 7, seeded(seed))
    assert torch.equal(found.weights, plain.weights)
    torch.testing.assert_close(found.xs, plain.xs * torch.tensor(scales or (1.0,) * dim))
    if link == "linear" and not stretched:  # networks trained on it saw the stream of ``sample``
        assert torch.equal(found.ys, plain.ys)


@pytest.mark.parametrize("link", sorted(BENT))
def test_noise_is_added_after_the_link(link):
    found = Problem(Task(4, noise=0.3), link, (0.5, 1.0, 1.5, 2.0)).sample(3000, 6, seeded())
    z = straight(found)
    noise = found.ys.numpy() - (z if link == "linear" else BENT[link](z / 2))
    assert stats.kstest(noise.ravel(), stats.norm(0, 0.3).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(noise.ravel(), z.ravel())[0, 1]) < 0.03


def test_waves():
    found = Waves().sample(4000, 12, seeded())
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
    assert abs(np.corrcoef(turns, amplitude)[0, 1]) < 0.06  # the released code ties them
