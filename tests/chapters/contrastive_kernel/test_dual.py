"""The dual model: against explicit gradient steps, on features that are exact, and PyTorch."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, sampled_from
from torch.nn.functional import scaled_dot_product_attention

from iclutils.chapters.contrastive_kernel import ablation, dual
from iclutils.chapters.contrastive_kernel.features import gram
from iclutils.interp.at_query import scores

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


class Explicit:
    """Rows of a root of the kernel, and the loss -(1/(η D_q)) Σ_D v_i · W φ(k_i), for one query."""

    def __init__(self, q, k, v, chosen):
        tokens = np.concatenate([k.numpy(), q.numpy()[None]])
        kernel = np.exp(tokens @ tokens.T / math.sqrt(tokens.shape[-1]))
        values, vectors = np.linalg.eigh(kernel)
        root = torch.from_numpy(vectors * np.sqrt(values.clip(min=0)))
        self.keys, self.query = root[:-1], root[-1]
        self.v, self.chosen = v, chosen
        self.total = float(kernel[-1, :-1].sum())
        terms = (torch.outer(v[j], self.keys[j]) for j in range(len(k)) if not chosen[j])
        self.start = sum(terms) / self.total

    def loss(self, matrix, rate=1.0):
        pairs = [self.v[i] @ matrix @ self.keys[i] for i in range(len(self.v)) if self.chosen[i]]
        return -sum(pairs) / (rate * self.total)

    def stepped(self, rate=1.0, size=1.0):
        at = self.start.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.loss(at, rate), at)
        return self.start - size * rate * slope


@settings(max_examples=25)
@given(seed=seeds, keys=integers(2, 7), dim=integers(1, 4), rate=sampled_from([0.1, 1.0, 7.0]))
def test_one_gradient_step_is_softmax_attention(seed, keys, dim, rate):
    """Autograd on exact features. Fails with the other sign, another D, or a 1/n in the loss."""
    q, k, v, chosen = data(seed, keys, dim)
    by_hand = Explicit(q, k, v, chosen)
    start, step = dual.dual_form(q[None], k, v, chosen)
    torch.testing.assert_close(start[0], by_hand.start @ by_hand.query, **EXACT)
    after = by_hand.stepped(rate) @ by_hand.query
    torch.testing.assert_close((start + step)[0], after, **EXACT)
    expected = scaled_dot_product_attention(q[None], k, v)[0]
    torch.testing.assert_close(after, expected, **EXACT)


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


def test_a_step_lowers_a_loss_that_has_no_minimum():
    """It is linear in W, so ten steps lower it ten times as much; similarities rise in sum, since
    the entrywise product of two positive matrices is positive (Schur)."""
    for seed in range(50):
        by_hand = Explicit(*data(seed))
        slopes = [
            by_hand.loss(by_hand.stepped(size=n)) - by_hand.loss(by_hand.start) for n in (1, 10)
        ]
        assert slopes[0] < 0
        torch.testing.assert_close(slopes[1], 10 * slopes[0], **CLOSE)


@settings(max_examples=25)
@given(seed=seeds, keys=integers(2, 6), batch=sampled_from([(), (2,)]))
def test_the_trajectory_is_a_gradient_at_a_time(seed, keys, batch):
    """Entry n is the step on the demonstrations among the first n keys."""
    q, k, v, chosen = data(seed, keys, batch=batch)
    found = dual.trajectory(q, k, v, chosen)
    assert found.shape == (*batch, keys + 1, 2)
    start, _ = dual.dual_form(q[..., None, :], k, v, chosen)
    for n in range(keys + 1):
        some = chosen & (torch.arange(keys) < n)
        _, step = dual.dual_form(q[..., None, :], k, v, some)
        torch.testing.assert_close(found[..., n, :], (start + step)[..., 0, :], **EXACT)
    seen = torch.arange(keys) < keys - 1
    cut = dual.trajectory(q, k, v, chosen, seen)[..., :-1, :]
    part = dual.trajectory(q, k[..., :-1, :], v[..., :-1, :], chosen[..., :-1])
    torch.testing.assert_close(cut, part, **EXACT)


@settings(max_examples=10)
@given(seed=seeds, alpha=sampled_from([-0.2, 0.0, 0.3, 1.0]), beta=sampled_from([-0.3, 0.2, 1.0]))
def test_variants_are_steps_on_the_changed_losses(seed, alpha, beta):
    q, k, v, chosen = data(seed)
    weights = scores(q[None], k).softmax(-1)
    for changed, change in (
        (ablation.regularised(weights, chosen, alpha), {"alpha": alpha}),
        (ablation.negative_samples(weights, chosen, beta), {"beta": beta}),
    ):
        _, expected = dual.explicit_steps(*gram(q, k), v, chosen, **change)
        torch.testing.assert_close((changed @ v)[0], expected, **CLOSE)
