"""Features of the softmax kernel: NumPy in loops, the exponential series, laws of the draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded, some
from scipy import special, stats

from iclutils import IclError
from iclutils.chapters.contrastive_kernel.features import (
    attention,
    directions,
    feature_attention,
    gram,
    kernel_error,
    log_kernel,
    needed_degree,
    positive_random,
    scaled,
    taylor,
)

seeds = st.integers(0, 9999)


def data(seed, queries, keys, dim, batch=(), width=3):
    return some(seed, (*batch, queries, dim), (*batch, keys, dim), (*batch, keys, width))


@settings(max_examples=25)
@given(seed=seeds, dim=st.integers(1, 5), degree=st.integers(0, 7))
def test_taylor_features_have_the_truncated_series_as_inner_product(seed, dim, degree):
    """Fails if a monomial is missing, counted twice, or divided by a! instead of its root."""
    a, b, _ = data(seed, 3, 4, dim)
    found = taylor(a, degree) @ taylor(b, degree).mT
    assert taylor(a, degree).shape[-1] == math.comb(degree + dim, dim)
    inner = (a @ b.mT).numpy()
    expected = sum(inner**r / math.factorial(r) for r in range(degree + 1))
    size = sum(np.abs(inner) ** r / math.factorial(r) for r in range(degree + 1)).max()
    np.testing.assert_allclose(found, expected, atol=1e-12 * size)


@pytest.mark.parametrize("largest", [0.0, 0.3, 1.0, 4.0, 9.0])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-8, 1e-12])
def test_needed_degree_is_enough_and_not_much_more(largest, tolerance):
    def error(degree, x):
        return abs(math.fsum(x**r / math.factorial(r) for r in range(degree + 1)) / math.exp(x) - 1)

    degree = needed_degree(largest, tolerance)
    rounding = 1e-16 * math.exp(2 * largest)
    assert max(error(degree, x) for x in (largest, -largest)) <= tolerance + rounding
    assert degree <= 2 or error(degree - 2, -largest) > tolerance


def test_positive_random_features_are_right_on_average():
    """Within 4 standard errors. Orthogonal ones without the signs are off by dozens of them."""
    a, b, _ = data(3, 2, 3, 3)
    a, b = a / 2, b / 2
    for method, least, most in (("iid", 0, 4), ("orthogonal", 0, 4), ("unsigned", 12, math.inf)):
        drawn = directions(6, 3, seeded(0), method, draws=20_000)
        kernel = log_kernel(positive_random(a, drawn), positive_random(b, drawn)).exp()
        error = kernel.std(0) / len(kernel) ** 0.5
        misses = (kernel.mean(0) - (a @ b.mT).exp()).abs() / error
        assert least < float(misses.max()) < most


def test_directions():
    """Right angles in blocks, lengths as of normal vectors, and no preferred direction."""
    plain = directions(50, 4, seeded(2), draws=100).flatten().numpy()
    assert stats.kstest(plain, stats.norm.cdf).pvalue > 0.01
    drawn = directions(7, 3, seeded(1), "orthogonal", draws=4000)
    assert drawn.shape == (4000, 7, 3)
    unit = drawn / drawn.norm(dim=-1, keepdim=True)
    for block in (unit[:, :3], unit[:, 3:6]):
        expected = torch.eye(3, dtype=torch.float64).expand_as(block)
        torch.testing.assert_close(block @ block.mT, expected, atol=1e-12, rtol=0)
    assert stats.kstest(drawn[:, 4].norm(dim=-1).numpy(), stats.chi(3).cdf).pvalue > 0.01
    for channel in unit.flatten(1).T:  # a coordinate of a uniform point of the sphere is uniform
        assert stats.kstest(channel.numpy(), stats.uniform(-1, 2).cdf).pvalue > 1e-3
    wrong = directions(7, 3, seeded(1), "unsigned", draws=4000)
    assert bool((wrong[:, [0, 3, 6], 0] <= 0).all())


@pytest.mark.parametrize("length", [1.0, 30.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_overflows(length, dtype):
    """|z| = 100 before scaling: the features themselves are beyond all numbers, or below."""
    q, k, v = (part.to(dtype) for part in data(4, 3, 8, 16))
    q, k = (length * part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    drawn = directions(64, 16, seeded(0), dtype=dtype)[0]
    features = positive_random(scaled(q), drawn), positive_random(scaled(k), drawn)
    each = features[0].double().numpy()[:, None] + features[1].double().numpy()[None]
    expected = special.logsumexp(each, -1)
    precision = 1e-12 if dtype == torch.float64 else 1e-5
    close = precision * max(np.abs(expected).max(), 1)
    np.testing.assert_allclose(log_kernel(*features), expected, atol=close)
    for found in (attention(q, k, v), feature_attention(*features, v, logarithms=True)):
        assert float(found.abs().max()) <= float(v.abs().max()) * (1 + precision)
    assert length < 100 or not bool(features[0].exp().all())  # as numbers they are lost


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


def test_the_error_of_a_method_is_that_of_its_features():
    q, k, v = data(4, 2, 5, 2)
    exact = attention(q, k, v)
    found = kernel_error(q, k, v, [0, 2, 30], [0.5, 1.0], method="taylor")
    missed = feature_attention(taylor(scaled(q), 2), taylor(scaled(k), 2), v) - exact
    expected = (missed.norm(dim=-1) / exact.norm(dim=-1)).mean()  # of two queries the median
    torch.testing.assert_close(found[1, 1], expected)
    assert bool((found[:, 0] > 1e-3).all() and (found[:, 2] < 1e-10).all())
    few, many = kernel_error(q, k, v, [4, 1024], generator=seeded(1))[0]
    assert many < few / 4
    with pytest.raises(IclError, match="Unknown method 'tailor'"):
        kernel_error(q, k, v, [2], method="tailor")
