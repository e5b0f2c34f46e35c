"""The dual model: against explicit gradient steps, on features that are exact, and PyTorch.

The features of the tests are rows of a root of the kernel matrix exp(k·q/√d) of all tokens at
hand. They have the right inner products to rounding, and share nothing with the package's.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from iclutils import IclError
from iclutils.chapters.gradient_descent.contrastive import (
    alignment,
    borrowed_normaliser,
    dual_step,
    info_nce_loss,
    info_nce_values,
    path,
    start,
)
from iclutils.chapters.gradient_descent.explicit import descend, learnt
from iclutils.chapters.gradient_descent.features import needed_degree, scores

seeds = st.integers(0, 9999)
EXACT = {"atol": 1e-10, "rtol": 0.0}


def data(
    seed: int, keys: int = 6, dim: int = 3, batch: tuple[int, ...] = (), width: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One query for each context, keys, values and which keys are demonstrations."""
    place = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    shapes = (*batch, dim), (*batch, keys, dim), (*batch, keys, width)
    q, k, v = (torch.randn(shape, **place) for shape in shapes)
    chosen = torch.rand(*batch, keys, **place) < 0.6
    chosen[..., 0], chosen[..., -1] = True, False
    return q, k, v, chosen


class Explicit:
    """Rows of a root of the kernel, and the loss -(1/(η D_q)) Σ_D v_i · W φ(k_i), for one query."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor):
        tokens = np.concatenate([k.numpy(), q.numpy()[None]])
        kernel = np.exp(tokens @ tokens.T / math.sqrt(tokens.shape[-1]))
        values, vectors = np.linalg.eigh(kernel)
        root = torch.from_numpy(vectors * np.sqrt(values.clip(min=0)))
        self.keys, self.query = root[:-1], root[-1]
        self.v, self.chosen = v, chosen
        self.total = float(kernel[-1, :-1].sum())
        self.start = sum(
            torch.outer(v[j], self.keys[j]) / self.total for j in range(len(k)) if not chosen[j]
        ) + torch.zeros(v.shape[-1], len(kernel), dtype=torch.float64)

    def loss(self, matrix: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
        pairs = [self.v[i] @ matrix @ self.keys[i] for i in range(len(self.v)) if self.chosen[i]]
        return -sum(pairs, torch.zeros((), dtype=torch.float64)) / (rate * self.total)

    def stepped(self, rate: float = 1.0, size: float = 1.0) -> torch.Tensor:
        at = self.start.clone().requires_grad_()
        loss = self.loss(at, rate) + 0 * at.sum()  # a gradient even without demonstrations
        (slope,) = torch.autograd.grad(loss, at)
        return self.start - size * rate * slope


@settings(deadline=None, max_examples=25)
@given(
    seed=seeds,
    keys=st.integers(2, 7),
    dim=st.integers(1, 4),
    rate=st.sampled_from([0.1, 1.0, 7.0]),
)
def test_one_gradient_step_is_softmax_attention(
    seed: int, keys: int, dim: int, rate: float
) -> None:
    """Autograd on exact features. Fails with the other sign, another D, or a 1/n in the loss."""
    q, k, v, chosen = data(seed, keys, dim)
    by_hand = Explicit(q, k, v, chosen)
    first, step, _ = dual_step(q[None], k, v, chosen)
    torch.testing.assert_close(first[0], by_hand.start @ by_hand.query, **EXACT)
    after = by_hand.stepped(rate) @ by_hand.query
    torch.testing.assert_close((first + step)[0], after, **EXACT)
    expected = scaled_dot_product_attention(q[None], k, v)[0]
    torch.testing.assert_close(after, expected, **EXACT)


@settings(deadline=None, max_examples=25)
@given(
    seed=seeds,
    batch=st.sampled_from([(), (2,), (2, 3)]),
    keys=st.integers(1, 8),
    dim=st.integers(1, 5),
    causal=st.booleans(),
)
def test_start_and_step_add_up_to_attention(
    seed: int, batch: tuple[int, ...], keys: int, dim: int, causal: bool
) -> None:
    """All queries and heads at once, and each part is attention to its own keys."""
    _, k, v, _ = data(seed, keys, dim, batch)
    q = torch.randn(k.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=k.dtype)
    chosen = torch.rand(keys, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = torch.ones(keys, keys).tril().bool() if causal else None
    first, step, total = dual_step(q, k, v, chosen, mask)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(first + step, expected, **EXACT)
    kernel = np.exp((q @ k.mT).numpy() / math.sqrt(dim)) * (1 if mask is None else mask.numpy())
    np.testing.assert_allclose(total.exp(), kernel.sum(-1), rtol=1e-10)
    part = (kernel * chosen.numpy()) @ v.numpy() / kernel.sum(-1, keepdims=True)
    np.testing.assert_allclose(step, part, atol=1e-10)


def test_taylor_features_with_autograd_take_the_same_step() -> None:
    """The package's explicit step, for a batch; a degree too low is seen."""
    q, k, v, chosen = data(0, batch=(2, 3))
    q, k = q / 2, k / 2
    first, step, _ = dual_step(q[..., None, :], k, v, chosen)
    largest = max(float(scores(q[..., None, :], k).abs().max()), float(scores(k, k).max()))
    degree = needed_degree(largest, 1e-13)
    for rate in (0.3, 1.0):
        found = learnt(q, k, v, chosen, degree, rate=rate)
        torch.testing.assert_close(found, (first + step)[..., 0, :], **EXACT)
    rough = learnt(q, k, v, chosen, 2)
    assert float((rough - (first + step)[..., 0, :]).abs().max()) > 1e-4


def test_descend_is_gradient_descent() -> None:
    start_at = torch.tensor([3.0, -1.0], dtype=torch.float64)
    found = descend(lambda w: (w**2).sum() / 2, start_at, 0.1, 3)
    torch.testing.assert_close(found, start_at * 0.9**3, atol=1e-14, rtol=0)
    with torch.no_grad():
        again = descend(lambda w: (w**2).sum() / 2, start_at, 0.1, 3)
    assert torch.equal(found, again)
    with pytest.raises(IclError, match="at least one step"):
        descend(torch.sum, start_at, 0.1, 0)


@settings(deadline=None, max_examples=25)
@given(seed=seeds, keys=st.integers(2, 7), rate=st.sampled_from([0.2, 1.0]))
def test_the_dual_model_and_its_loss(seed: int, keys: int, rate: float) -> None:
    """Answers to keys and queries, and the loss, before and after steps of three sizes."""
    q, k, v, chosen = data(seed, keys)
    by_hand = Explicit(q, k, v, chosen)
    model = start(q, k, v, chosen)
    for size in (0.0, 1.0, 10.0):
        matrix = by_hand.stepped(rate, size)
        now = model.stepped(chosen, size)
        torch.testing.assert_close(now(k), by_hand.keys @ matrix.mT, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(now(q[None])[0], matrix @ by_hand.query, atol=1e-9, rtol=1e-9)
        expected = by_hand.loss(matrix, rate)
        torch.testing.assert_close(now.loss(chosen, rate), expected, atol=1e-9, rtol=1e-9)


@settings(deadline=None, max_examples=25)
@given(seed=seeds, size=st.floats(-50, 50))
def test_the_loss_is_linear_and_has_no_minimum(seed: int, size: float) -> None:
    q, k, v, chosen = data(seed, batch=(4,))
    model = start(q, k, v, chosen)
    zero, one = model.loss(chosen), model.stepped(chosen).loss(chosen)
    assert bool((one < zero).all())
    expected = zero + size * (one - zero)
    found = model.stepped(chosen, size).loss(chosen)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@settings(deadline=None, max_examples=25)
@given(seed=seeds, keys=st.integers(2, 6), batch=st.sampled_from([(), (2,)]))
def test_the_path_is_a_gradient_at_a_time(seed: int, keys: int, batch: tuple[int, ...]) -> None:
    """Entry n is the step on the demonstrations among the first n keys, its loss over all."""
    q, k, v, chosen = data(seed, keys, batch=batch)
    walked = path(q, k, v, chosen, 0.5)
    model = start(q, k, v, chosen)
    assert walked.predictions.shape == (*batch, keys + 1, 2)
    for n in range(keys + 1):
        early = chosen & (torch.arange(keys) < n)
        now = model.stepped(early)
        answer = now(q[..., None, :])[..., 0, :]
        torch.testing.assert_close(walked.predictions[..., n, :], answer, **EXACT)
        expected = now.loss(chosen, 0.5)
        torch.testing.assert_close(walked.losses[..., n], expected, atol=1e-9, rtol=1e-9)
    last = scaled_dot_product_attention(q[..., None, :], k, v)[..., 0, :]
    torch.testing.assert_close(walked.predictions[..., -1, :], last, **EXACT)


@settings(deadline=None, max_examples=25)
@given(seed=seeds, length=st.floats(0.1, 3))
def test_the_model_of_another_query_is_wrong_by_the_normaliser(seed: int, length: float) -> None:
    """One dual model for each query: built for q', it says D_q / D_q' times too much to q."""
    q, k, v, chosen = data(seed)
    other = -length * q.flip(0)
    right = start(q, k, v, chosen).stepped(chosen)(q[None])[0]
    wrong = start(other, k, v, chosen).stepped(chosen)(q[None])[0]
    found = borrowed_normaliser(torch.stack([q, other]), k)
    error = (wrong - right).norm() / right.norm()
    assert float(found[0, 1]) == pytest.approx(float(error), rel=1e-9, abs=1e-12)
    assert float(found.diagonal().abs().max()) == 0
    assert float(error) > 1e-9


def test_alignment_before_and_after() -> None:
    """Inner products by explicit features; a step raises their sum over demonstrations."""
    q, k, v, chosen = data(7)
    by_hand = Explicit(q, k, v, chosen)
    before, after = start(q, k, v, chosen), start(q, k, v, chosen).stepped(chosen)
    for model, matrix in ((before, by_hand.start), (after, by_hand.stepped())):
        answers = by_hand.keys @ matrix.mT
        inner = (answers * v).sum(-1)
        cosine = inner / answers.norm(dim=-1) / v.norm(dim=-1)
        torch.testing.assert_close(alignment(model).inner, inner, **EXACT)
        torch.testing.assert_close(alignment(model).cosine, cosine, **EXACT)
    gain = alignment(after).inner - alignment(before).inner
    assert float(gain[chosen].sum()) > 0
    alone = start(q, k, v, torch.ones(6).bool())
    assert not bool(alignment(alone).cosine.any())  # W_0 = 0


def test_one_vector_on_all_keys_changes_similarity_but_not_attention() -> None:
    q, k, v, chosen = data(8)
    moved = k + torch.tensor([0.5, -0.3, 0.2]).double()
    found = [start(q, keys, v, chosen).stepped(chosen) for keys in (k, moved)]
    torch.testing.assert_close(found[0](q[None]), found[1](q[None]), **EXACT)
    assert float((alignment(found[0]).inner - alignment(found[1]).inner).abs().max()) > 1e-3


@settings(deadline=None, max_examples=25)
@given(seed=seeds, temperature=st.sampled_from([0.1, 1.0, 5.0]))
def test_info_nce_is_a_step_with_other_values(seed: int, temperature: float) -> None:
    """Autograd on -(1/D) Σ_D τ log softmax; the step moves to v_i minus the expected value."""
    q, k, v, chosen = data(seed)
    by_hand = Explicit(q, k, v, chosen)
    index = chosen.nonzero()[:, 0]

    def loss(matrix: torch.Tensor) -> torch.Tensor:
        logits = by_hand.keys[index] @ matrix.mT @ v[index].mT / temperature
        return -temperature * logits.log_softmax(-1).diagonal().sum() / by_hand.total

    after = descend(loss, by_hand.start, 1.0)
    model = start(q, k, v, chosen)
    values = info_nce_values(model, chosen, temperature)
    found = sum(dual_step(q[None], k, values, chosen)[:2])[0]
    torch.testing.assert_close(found, after @ by_hand.query, **EXACT)
    assert torch.equal(values[~chosen], v[~chosen])
    before = info_nce_loss(model, chosen, temperature)
    torch.testing.assert_close(before, loss(by_hand.start), **EXACT)
    assert float(before) >= 0
    far = info_nce_loss(model.stepped(chosen, 100.0), chosen, temperature, rate=2.0)
    matrix = by_hand.stepped(size=100.0)
    torch.testing.assert_close(far, loss(matrix) / 2, atol=1e-8, rtol=1e-8)
    assert float(far) >= 0  # while the linear loss has no bound


def test_info_nce_from_nothing_subtracts_the_mean() -> None:
    """W_0 = 0: all values are equally likely. So β = 1 and all demonstrations as negatives."""
    q, k, v, _ = data(3)
    every = torch.ones(6).bool()
    found = info_nce_values(start(q, k, v, every), every, 0.3)
    torch.testing.assert_close(found, v - v.mean(-2), **EXACT)
    again = learnt(q / 2, k / 2, v, every, 14, temperature=0.3)
    expected = scaled_dot_product_attention(q[None] / 2, k / 2, v - v.mean(-2))[0]
    torch.testing.assert_close(again, expected, **EXACT)


def test_no_demonstration_no_step() -> None:
    q, k, v, _ = data(0, batch=(2,))
    none = torch.zeros(6).bool()
    first, step, _ = dual_step(q[:, None], k, v, none)
    assert not bool(step.any())
    torch.testing.assert_close(first, scaled_dot_product_attention(q[:, None], k, v), **EXACT)
    model = start(q, k, v, none)
    assert not bool(model.loss(none).any())
    assert not bool(info_nce_loss(model, none).any())
    assert torch.equal(info_nce_values(model, none), v)
    walked = path(q, k, v, none)
    expected = walked.predictions[:, :1].expand_as(walked.predictions)
    assert torch.equal(walked.predictions, expected)
    torch.testing.assert_close(learnt(q / 2, k / 2, v, none, 12), walked_half(q, k, v), **EXACT)


def walked_half(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q[:, None] / 2, k / 2, v)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_tokens_do_not_overflow(dtype: torch.dtype) -> None:
    """exp(k·q/√d) is beyond all numbers, attention is not; what keys are told may be."""
    q, k, v, chosen = (part if part.dtype == torch.bool else part.to(dtype) for part in data(0))
    q, k = 100 * q / q.norm(), 100 * k / k.norm(dim=-1, keepdim=True)
    assert bool((k @ k.mT / math.sqrt(3)).exp().isinf().any())
    first, step, total = dual_step(q[None], k, v, chosen)
    expected = scaled_dot_product_attention(q[None].double(), k.double(), v.double())
    precision = 1e-10 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close((first + step).double(), expected, atol=precision, rtol=0)
    assert bool(total.isfinite().all())
    model = start(q, k, v, chosen).stepped(chosen)
    torch.testing.assert_close(model(q[None]), first + step, atol=precision, rtol=0)
    assert bool(torch.isfinite(start(q, k, v, chosen)(q[None])).all())
    for call in (lambda: model(k), lambda: model.loss(chosen), lambda: path(q, k, v, chosen)):
        with pytest.raises(IclError, match="beyond the numbers"):
            call()


def test_the_type_is_kept() -> None:
    q, k, v, chosen = (part if part.dtype == torch.bool else part.float() for part in data(1))
    model = start(q, k, v, chosen).stepped(chosen)
    for found in (*dual_step(q[None], k, v, chosen), model(k), model.loss(chosen)):
        assert found.dtype == torch.float32
    assert path(q, k, v, chosen).losses.dtype == torch.float32


def test_bad_input_is_refused() -> None:
    q, k, v, chosen = data(0, batch=(2, 3))
    queries = q[..., None, :]
    with pytest.raises(IclError, match="mask of demonstrations"):
        dual_step(queries, k, v, chosen[..., :4])
    with pytest.raises(IclError, match="axis of length 1"):
        dual_step(queries, k, v, chosen[:, 0])
    with pytest.raises(IclError, match="no key at all"):
        dual_step(queries, k[..., :0, :], v[..., :0, :], chosen[..., :0])
    with pytest.raises(IclError, match="no key that it may look at"):
        dual_step(queries, k, v, chosen, torch.zeros(1, 6).bool())
    with pytest.raises(IclError, match="one value for each key"):
        dual_step(queries, k, v[..., :2, :], chosen)
    with pytest.raises(IclError, match="finite"):
        dual_step(queries * math.nan, k, v, chosen)
    with pytest.raises(IclError, match="one query"):
        start(q[0], k, v, chosen)
    with pytest.raises(IclError, match="temperature"):
        info_nce_loss(start(q, k, v, chosen), chosen, 0.0)
