"""Features of the softmax kernel: their products, by NumPy."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import some

from iclutils.chapters.contrastive_kernel.features import gram


@settings(max_examples=20)
@given(
    seed=st.integers(0, 9999),
    dim=st.integers(1, 6),
    keys=st.integers(1, 9),
    size=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_gram_features_have_the_kernels_products(seed, dim, keys, size):
    """exp(a·b / sqrt(d)) by numpy. With the query the relative error is small at any size."""
    q, k = some(seed, (1, dim), (keys, dim))
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
