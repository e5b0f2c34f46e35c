"""Features of the softmax kernel: NumPy in loops, the exponential series, laws of the draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded, some
from scipy import special

from iclutils.chapters.contrastive_kernel.features import (
    attention,
    directions,
    feature_attention,
    gram,
    kernel_error,
    log_kernel,
    positive_random,
    rescale,
)

seeds = st.integers(0, 9999)


def data(seed, queries, keys, dim, batch=(), width=3):
    return some(seed, (*batch, queries, dim), (*batch, keys, dim), (*batch, keys, width))


def test_positive_random_features_are_right_on_average():
    """Within 4 standard errors."""
    a, b, _ = data(3, 2, 3, 3)
    a, b = a / 2, b / 2
    drawn = directions(6, 3, seeded(0), draws=20_000)
    kernel = log_kernel(positive_random(a, drawn), positive_random(b, drawn)).exp()
    error = kernel.std(0) / len(kernel) ** 0.5
    assert ((kernel.mean(0) - (a @ b.mT).exp()).abs() / error).max() < 4


@pytest.mark.parametrize("length", [1.0, 30.0, 1000.0])
def test_nothing_overflows(length):
    """At |z| = 1000 before scaling the features themselves are beyond all numbers, or below."""
    q, k, v = data(4, 3, 8, 16)
    q, k = (length * part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    drawn = directions(64, 16, seeded(0))[0]
    logs = positive_random(rescale(q), drawn), positive_random(rescale(k), drawn)
    expected = special.logsumexp(logs[0].numpy()[:, None] + logs[1].numpy()[None], -1)
    close = 1e-12 * max(np.abs(expected).max(), 1)
    np.testing.assert_allclose(log_kernel(*logs), expected, atol=close)
    for mixed in (attention(q, k, v), feature_attention(*logs, v)):
        assert float(mixed.abs().max()) <= float(v.abs().max()) * (1 + 1e-12)
    assert length < 1000 or not bool(logs[0].exp().all())  # as numbers they are lost


@settings(max_examples=20)
@given(
    seed=seeds, dim=st.integers(1, 6), keys=st.integers(1, 9), size=st.sampled_from([0.1, 1.0, 4.0])
)
def test_gram_features_have_the_kernels_products(seed, dim, keys, size):
    """exp(a·b / sqrt(d)) by numpy. With the query the relative error is small at any size."""
    q, k, _ = data(seed, 1, keys, dim)
    q, k = size * q[0], size * k
    phi_q, phi_k = gram(q, k)
    assert phi_k.shape == (keys, keys + 1)
    half_q, half_k = (((x**2).sum(-1) / 2 / dim**0.5).numpy() for x in (q, k))
    product = np.exp(k.numpy() @ q.numpy() / dim**0.5 - half_q - half_k.max())
    np.testing.assert_allclose((phi_k @ phi_q).numpy(), product, rtol=1e-11)
    pairs = np.exp(k.numpy() @ k.numpy().T / dim**0.5 - 2 * half_k.max())
    length = np.exp(half_k - half_k.max())
    gap = np.abs((phi_k @ phi_k.T).numpy() - pairs) / (length[:, None] * length)
    assert gap.max() < 1e-12 * keys + 1e-13


def test_the_error_of_random_features():
    """The median over draws and queries, and one over the square root of their number."""
    q, k, v = data(4, 2, 5, 2)
    found = kernel_error(q, k, v, [16], [0.5], 3, seeded(1))
    exact, errors = attention(q / 2, k / 2, v), []
    a, b = rescale(q / 2), rescale(k / 2)
    for omega in directions(16, 2, seeded(1), 3):
        phi = [(z @ omega.T - z.square().sum(-1)[:, None] / 2).exp() for z in (a, b)]
        weights = phi[0] @ phi[1].T
        missed = weights @ v / weights.sum(-1, keepdim=True) - exact
        errors.append(missed.norm(dim=-1) / exact.norm(dim=-1))
    torch.testing.assert_close(found[0, 0], torch.cat(errors).quantile(0.5))
    few, many = kernel_error(q, k, v, [32, 8192], [0.35], 100, seeded(1))[0]
    assert -0.6 < math.log(many / few) / math.log(8192 / 32) < -0.4
