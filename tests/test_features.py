"""Features of the softmax kernel: NumPy in loops, the exponential series, laws of the draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from iclutils import IclError
from iclutils.chapters.gradient_descent.approximation import kernel_error
from iclutils.chapters.gradient_descent.features import (
    attention,
    directions,
    feature_attention,
    gaussian_attention,
    log_kernel,
    log_normaliser,
    needed_degree,
    positive_random,
    scaled,
    scores,
    taylor,
)

sizes = given(
    seed=st.integers(0, 9999),
    queries=st.integers(1, 5),
    keys=st.integers(1, 6),
    dim=st.integers(1, 4),
    batch=st.sampled_from([(), (2,), (2, 3)]),
)


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(
    seed: int, queries: int, keys: int, dim: int, batch: tuple[int, ...] = (), width: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    place = {"generator": source(seed), "dtype": torch.float64}
    shapes = (*batch, queries, dim), (*batch, keys, dim), (*batch, keys, width)
    q, k, v = (torch.randn(shape, **place) for shape in shapes)
    return q, k, v


def by_loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> np.ndarray:
    """Softmax attention of one context, term by term."""
    found = np.zeros((len(q), v.shape[-1]))
    for j, query in enumerate(q.numpy()):
        weights = [math.exp(key @ query / math.sqrt(len(key))) for key in k.numpy()]
        for weight, value in zip(weights, v.numpy(), strict=True):
            found[j] += weight * value / sum(weights)
    return found


@settings(deadline=None, max_examples=25)
@sizes
def test_attention_is_the_sum_over_keys(
    seed: int, queries: int, keys: int, dim: int, batch: tuple[int, ...]
) -> None:
    q, k, v = data(seed, queries, keys, dim, batch)
    found = attention(q, k, v).reshape(-1, queries, 3)
    flat = [part.reshape(-1, *part.shape[-2:]) for part in (q, k, v)]
    for b, context in enumerate(zip(*flat, strict=True)):
        np.testing.assert_allclose(found[b], by_loops(*context), atol=1e-12)
    kernel = scores(q, k).exp().sum(-1)
    torch.testing.assert_close(log_normaliser(q, k), kernel.log(), atol=1e-12, rtol=0)


def test_attention_with_a_mask_is_pytorchs() -> None:
    q, k, v = data(0, 5, 5, 4, (2, 3))
    mask = torch.ones(5, 5).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(attention(q, k, v, mask), expected, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 9999), dim=st.integers(1, 5), degree=st.integers(0, 7))
def test_taylor_features_have_the_truncated_series_as_inner_product(
    seed: int, dim: int, degree: int
) -> None:
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
def test_needed_degree_is_enough_and_not_much_more(largest: float, tolerance: float) -> None:
    def error(degree: int, x: float) -> float:
        return abs(math.fsum(x**r / math.factorial(r) for r in range(degree + 1)) / math.exp(x) - 1)

    degree = needed_degree(largest, tolerance)
    rounding = 1e-16 * math.exp(2 * largest)
    assert max(error(degree, x) for x in (largest, -largest)) <= tolerance + rounding
    if degree > 2:
        assert error(degree - 2, -largest) > tolerance


def test_attention_by_taylor_features_at_the_needed_degree() -> None:
    q, k, v = data(1, 4, 6, 3, (2,))
    exact = attention(q, k, v)
    degree = needed_degree(float(scores(q, k).abs().max()), 1e-13)
    features = taylor(scaled(q), degree), taylor(scaled(k), degree)
    for total in (None, log_normaliser(q, k)):
        found = feature_attention(*features, v, normaliser=total)
        torch.testing.assert_close(found, exact, atol=1e-11, rtol=0)
    low = taylor(scaled(q), degree // 2), taylor(scaled(k), degree // 2)
    assert float((feature_attention(*low, v) - exact).abs().max()) > 1e-8


@pytest.mark.parametrize("orthogonal", [False, True])
def test_positive_random_features_are_right_on_average(orthogonal: bool) -> None:
    """Within 4 standard errors. Orthogonal ones without the signs are off by dozens of them."""
    a, b, _ = data(3, 2, 3, 3)
    a, b = a / 2, b / 2

    def misses(signed: bool) -> torch.Tensor:
        drawn = directions(6, 3, source(0), orthogonal, draws=20_000, signed=signed)
        kernel = log_kernel(positive_random(a, drawn), positive_random(b, drawn)).exp()
        error = kernel.std(0) / len(kernel) ** 0.5
        return (kernel.mean(0) - (a @ b.mT).exp()).abs() / error

    assert float(misses(True).max()) < 4
    if orthogonal:
        assert float(misses(False).max()) > 12


def test_orthogonal_directions() -> None:
    """Right angles in blocks, lengths as of normal vectors, and no preferred direction."""
    drawn = directions(7, 3, source(1), True, draws=4000)
    assert drawn.shape == (4000, 7, 3)
    unit = drawn / drawn.norm(dim=-1, keepdim=True)
    for first in (0, 3):
        block = unit[:, first : first + 3]
        expected = torch.eye(3, dtype=torch.float64).expand_as(block)
        torch.testing.assert_close(block @ block.mT, expected, atol=1e-12, rtol=0)
    assert stats.kstest(drawn[:, 4].norm(dim=-1).numpy(), stats.chi(3).cdf).pvalue > 0.01
    for channel in range(3):  # a coordinate of a uniform point of the sphere is uniform
        for row in range(7):
            law = stats.kstest(unit[:, row, channel].numpy(), stats.uniform(-1, 2).cdf)
            assert law.pvalue > 1e-3
    wrong = directions(7, 3, source(1), True, draws=4000, signed=False)
    assert bool((wrong[:, [0, 3, 6], 0] <= 0).all())
    assert directions(7, 3, source(1), True).shape == (7, 3)


def test_iid_directions_are_normal() -> None:
    drawn = directions(50, 4, source(2), draws=100).flatten().numpy()
    assert stats.kstest(drawn, stats.norm.cdf).pvalue > 0.01


@pytest.mark.parametrize("length", [1.0, 30.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_overflows(length: float, dtype: torch.dtype) -> None:
    """|z| = 100 before scaling: the features themselves are beyond all numbers, or below."""
    q, k, v = (part.to(dtype) for part in data(4, 3, 8, 16))
    q = length * q / q.norm(dim=-1, keepdim=True)
    k = length * k / k.norm(dim=-1, keepdim=True)
    drawn = directions(64, 16, source(0), dtype=dtype)
    features = positive_random(scaled(q), drawn), positive_random(scaled(k), drawn)
    each = features[0].double().numpy()[:, None] + features[1].double().numpy()[None]
    expected = special.logsumexp(each, -1)
    size = np.abs(expected).max()
    precision = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(log_kernel(*features), expected, atol=precision * max(size, 1))
    for found in (attention(q, k, v), feature_attention(*features, v, logarithms=True)):
        assert bool(found.isfinite().all())
        assert float(found.abs().max()) <= float(v.abs().max()) * (1 + precision)
    if length >= 100:
        assert not bool(features[0].exp().all())  # as numbers they are lost
    weights = special.softmax(q.double().numpy() @ k.double().numpy().T / 4, -1)
    expected = weights @ v.double().numpy()
    loose = precision * max(1, length**2)
    np.testing.assert_allclose(attention(q, k, v), expected, atol=min(loose, 1e-1))


def test_the_slow_kernel_is_the_fast_one() -> None:
    """Features that are large for one token each: the product of matrices has nothing left."""
    q = torch.zeros(1, 1500, dtype=torch.float64)
    k = torch.zeros(2, 1500, dtype=torch.float64)
    q[0, 3], k[0, 1400], k[1, 3] = 2000.0, 3000.0, 1.0
    each = q.numpy()[:, None] + k.numpy()[None]
    np.testing.assert_allclose(log_kernel(q, k), special.logsumexp(each, -1), rtol=1e-14)


@settings(deadline=None, max_examples=25)
@sizes
def test_gaussian_attention_differs_by_the_norms_of_keys(
    seed: int, queries: int, keys: int, dim: int, batch: tuple[int, ...]
) -> None:
    q, k, v = data(seed, queries, keys, dim, batch)
    apart = torch.cdist(scaled(q), scaled(k), compute_mode="donot_use_mm_for_euclid_dist")
    expected = (-apart.square() / 2).softmax(-1) @ v
    torch.testing.assert_close(gaussian_attention(q, k, v), expected, atol=1e-11, rtol=0)
    same = k / k.norm(dim=-1, keepdim=True)
    expected = attention(q, same, v)
    torch.testing.assert_close(gaussian_attention(q, same, v), expected, atol=1e-12, rtol=0)
    if keys > 1:
        same[..., 0, :] *= 1.5  # one key of another norm
        gap = (gaussian_attention(q, same, v) - attention(q, same, v)).abs().amax()
        assert float(gap) > 1e-6


def test_kernel_error_falls_with_features_and_grows_with_norms() -> None:
    """As the root of their number; without the signs of the QR it stops falling.

    Both are plain for short tokens. For long ones the draws have heavy tails, which hide them.
    """
    q, k, v = data(3, 10, 8, 3)
    settings = {"sizes": [32, 512, 4096], "scales": [0.5, 1.0], "draws": 60}
    rows = {
        method: kernel_error(q, k, v, **settings, method=method, generator=source(0))
        for method in ("iid", "orthogonal", "unsigned")
    }
    for name in ("iid", "orthogonal"):
        median = rows[name].median
        assert float(median[0, 0] / median[0, 2]) == pytest.approx(128**0.5, rel=0.2)
        assert bool((median[0] < median[1]).all())
        assert bool((rows[name].high > 1.5 * median).all())
    floor = rows["unsigned"].median[0]
    assert float(floor[2]) > 0.9 * float(floor[1])
    assert float(floor[2]) > 5 * float(rows["orthogonal"].median[0, 2])
    exact = kernel_error(
        q, k, v, [512], method="iid", exact_normaliser=True, draws=100, generator=source(0)
    )
    assert float(exact.median) != float(rows["iid"].median[1, 1])


def test_kernel_error_of_taylor_features() -> None:
    q, k, v = data(5, 3, 6, 3)
    found = kernel_error(q, k, v, [0, 1, 30], [0.5, 1.0], method="taylor")
    assert found.median.shape == found.high.shape == (2, 3)
    assert float(found.high[:, 2].max()) < 1e-12
    uniform = v.mean(0) - attention(q, k, v)  # degree 0 weighs all keys alike
    expected = uniform.norm(dim=-1) / attention(q, k, v).norm(dim=-1)
    assert float(found.median[1, 0]) == pytest.approx(float(expected.median()))


def test_draws_do_not_depend_on_how_many_fit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = data(6, 1, 4, 2)
    call = {"sizes": [16], "draws": 30}
    whole = kernel_error(q, k, v, **call, generator=source(0))
    again = kernel_error(q, k, v, **call, generator=source(0))
    assert torch.equal(whole.median, again.median)
    monkeypatch.setattr("iclutils.chapters.gradient_descent.approximation.AT_ONCE", 500)
    parts = kernel_error(q, k, v, **call, generator=source(0))
    assert float(parts.high) == pytest.approx(float(whole.high))


def test_bad_input_is_refused() -> None:
    q, k, v = data(0, 2, 3, 4)
    for bad in (k[:, :3], k[None]):
        with pytest.raises(IclError, match="one batch and width"):
            attention(q, bad, v)
    with pytest.raises(IclError, match="one value for each key"):
        attention(q, k, v[:2])
    with pytest.raises(IclError, match="no key at all"):
        attention(q, k[:0], v[:0])
    with pytest.raises(IclError, match="finite"):
        attention(q * math.nan, k, v)
    with pytest.raises(IclError, match="finite"):
        attention(q * 1e200, k * 1e200, v)
    with pytest.raises(IclError, match="Values are NaN"):
        attention(q, k, v / 0)
    with pytest.raises(IclError, match="no key that it may look at"):
        attention(q, k, v, torch.tensor([[True, False, True], [False] * 3]))
    with pytest.raises(IclError, match="Need `allowed`"):
        attention(q, k, v, torch.ones(5, 3).bool())
    with pytest.raises(IclError, match="at least 0"):
        taylor(q, -1)
    with pytest.raises(IclError, match="features, more than"):
        taylor(q, 100)
    with pytest.raises(IclError, match="No degree"):
        needed_degree(1e4)
    with pytest.raises(IclError, match="finite largest"):
        needed_degree(math.inf)
    with pytest.raises(IclError, match="at least 1"):
        directions(0, 3, source(0))
    with pytest.raises(IclError, match="come from a QR"):
        directions(4, 3, source(0), signed=False)
    with pytest.raises(IclError, match="do not fit"):
        positive_random(q, directions(4, 3, source(0)))
    with pytest.raises(IclError, match="Did you mean 'iid'"):
        kernel_error(q, k, v, [4], method="iids")
    with pytest.raises(IclError, match="generator"):
        kernel_error(q, k, v, [4])
    with pytest.raises(IclError, match="at least one size"):
        kernel_error(q, k, v, [], method="taylor")
