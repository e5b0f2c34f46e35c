"""The dual model: against explicit gradient steps, on features that are exact, and PyTorch."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, sampled_from
from random_layers import some
from torch.nn.functional import scaled_dot_product_attention

from iclutils.chapters.contrastive_kernel import dual

seeds = integers(0, 9999)
EXACT = {"atol": 1e-10, "rtol": 0.0}
CLOSE = {"atol": 1e-9, "rtol": 1e-9}


def data(seed, keys=6, dim=3, batch=(), width=2):
    """One query for each context, keys, values and which keys are demonstrations."""
    place = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    shapes = (*batch, dim), (*batch, keys, dim), (*batch, keys, width)
    q, k, v = (torch.randn(shape, **place) for shape in shapes)
    chosen = torch.rand(*batch, keys, **place) < 0.6
    chosen[..., 0], chosen[..., -1] = True, False
    return q, k, v, chosen


@settings(max_examples=25)
@given(seed=seeds, keys=integers(2, 7), dim=integers(1, 4))
def test_one_gradient_step_is_softmax_attention(seed, keys, dim):
    """Autograd on exact features. Fails with the other sign, another D, or a 1/n in the loss."""
    q, k, v, chosen = data(seed, keys, dim)
    before, after = dual.explicit_step(*dual.gram(q, k), v, chosen)
    start, update = (part[0] for part in dual.dual_form(q[None], k, v, chosen))
    torch.testing.assert_close(before, start, **EXACT)
    torch.testing.assert_close(after, start + update, **EXACT)
    torch.testing.assert_close(after, scaled_dot_product_attention(q[None], k, v)[0], **EXACT)


@settings(max_examples=25)
@given(seeds, sampled_from([(), (2,), (2, 3)]), integers(1, 8), integers(1, 5), booleans())
def test_start_and_update_add_up_to_attention(seed, batch, keys, dim, causal):
    """All queries and heads at once, and each part is attention to its own keys."""
    _, k, v, _ = data(seed, keys, dim, batch)
    _, q, _, _ = data(seed + 1, keys, dim, batch)
    chosen = torch.rand(keys, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = torch.ones(keys, keys).tril().bool() if causal else None
    start, step = dual.dual_form(q, k, v, chosen, mask)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(start + step, expected, **EXACT)
    kernel = np.exp((q @ k.mT).numpy() / math.sqrt(dim)) * (1 if mask is None else mask.numpy())
    part = (kernel * chosen.numpy()) @ v.numpy() / kernel.sum(-1, keepdims=True)
    np.testing.assert_allclose(step, part, atol=1e-10)


@settings(max_examples=10)
@given(seed=seeds, alpha=sampled_from([-0.2, 0.0, 0.3, 1.0]), beta=sampled_from([-0.3, 0.2, 1.0]))
def test_variants_are_steps_on_the_changed_losses(seed, alpha, beta):
    """With u_i = W φ(k_i): (1/D_q) Σ_D [-v_i·u_i + β mean_{j∈D, j≠i} v_j·u_i] + (α/2) |W|²."""
    q, k, v, chosen = data(seed)
    start, update = (part[0] for part in dual.dual_form(q[None], k, v, chosen))
    phi_q, phi_k = dual.gram(q, k)
    total, shown = (phi_k @ phi_q).sum(), v[chosen]
    # of a single demonstration there are no others
    others = torch.stack([shown[torch.arange(len(shown)) != i].mean(0) for i in range(len(shown))])
    others = others.nan_to_num()
    contrast = v.masked_scatter(chosen[:, None], shown - beta * others)
    negatives = scaled_dot_product_attention(q[None], k, contrast)[0]
    matrix = (v[~chosen].mT @ phi_k[~chosen] / total).requires_grad_()  # W_0
    towards = phi_k[chosen] @ matrix.mT  # u_i
    plain = -(towards * shown).sum() / total
    for changed, more in (
        ((1 - alpha) * start + update, alpha / 2 * matrix.square().sum()),
        (negatives, beta * (towards * others).sum() / total),
    ):
        (slope,) = torch.autograd.grad(plain + more, matrix, retain_graph=True)
        torch.testing.assert_close(changed, (matrix - slope) @ phi_q, **CLOSE)


@settings(max_examples=20)
@given(
    seed=integers(0, 9999),
    dim=integers(1, 6),
    keys=integers(1, 9),
    size=sampled_from([0.1, 1.0, 4.0]),
)
def test_gram_features_have_the_kernels_products(seed, dim, keys, size):
    """exp(a·b / sqrt(d)) by numpy. With the query the relative error is small at any size."""
    q, k = some(seed, (1, dim), (keys, dim))
    q, k = size * q[0], size * k
    phi_q, phi_k = dual.gram(q, k)
    assert phi_k.shape == (keys, keys + 1)
    half_q, half_k = (((x**2).sum(-1) / 2 / dim**0.5).numpy() for x in (q, k))
    product = np.exp(k.numpy() @ q.numpy() / dim**0.5 - half_q - half_k.max())
    np.testing.assert_allclose((phi_k @ phi_q).numpy(), product, rtol=1e-11)
    pairs = np.exp(k.numpy() @ k.numpy().T / dim**0.5 - 2 * half_k.max())
    length = np.exp(half_k - half_k.max())
    gap = np.abs((phi_k @ phi_k.T).numpy() - pairs) / (length[:, None] * length)
    assert gap.max() < 1e-12 * keys + 1e-13
