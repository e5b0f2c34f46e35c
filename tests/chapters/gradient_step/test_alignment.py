"""Alignment with algorithms: finite differences, networks with known answers, weights by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from
from random_layers import TIGHT, random, some

from iclutils.chapters.gradient_step.alignment import (
    alignment,
    answers,
    off_pattern,
    products,
    responses,
    step_matrix,
)
from iclutils.chapters.gradient_step.construction import construct
from iclutils.chapters.gradient_step.descent import descend, predictor
from iclutils.models.lsa import Shape


def gd(*rates):
    return predictor(list(rates))


@settings(max_examples=15)
@given(integers(0, 10_000), integers(1, 4), sampled_from(["linear", "softmax"]), integers(1, 2))
def test_sensitivity_is_the_change_per_change_of_the_query(seed, dim, kind, steps):
    """By central differences, for networks of an ensemble and any function."""
    xs, ys = some(seed, (3, 6, dim), (3, 6))
    network = random(Shape(dim, 5, layers=steps, heads=2, attention=(kind,), sees_query=True))
    found = responses(network, xs, ys).sensitivity
    assert found.shape == (2, 3, dim)
    alone = responses(lambda xs, ys: network(xs, ys)[1], xs, ys).sensitivity
    torch.testing.assert_close(alone, found[1:], **TIGHT)
    for channel in range(dim):
        step = torch.zeros_like(xs)
        step[:, -1, channel] = 1e-5
        change = (answers(network, xs + step, ys) - answers(network, xs - step, ys)) / 2e-5
        torch.testing.assert_close(found[..., channel], change, atol=1e-6, rtol=1e-6)


def test_alignment_of_known_pairs():
    """The same; the same times 3 and times -1, whose numbers follow from the weights."""
    xs, ys = some(1, (50, 8, 4), (50, 8))
    weights = descend(xs, ys, [0.2]).weights[-1]
    answer = (weights * xs[:, -1]).sum(-1)
    network = construct(Shape(4, 7), [0.2], dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(responses(network, xs, ys).sensitivity[0], weights, **TIGHT)
    for factor, cosine in ((1, 1.0), (3, 1.0), (-1, -1.0)):
        found = alignment(gd(0.2 * factor), network, xs, ys)
        gap = abs(factor - 1)
        wrong, right = (0.5 * (f * answer - ys[:, -1]).square().mean() for f in (factor, 1))
        size, length = answer.abs().mean(), weights.norm(dim=-1).mean()
        expected = [cosine, gap * length, gap * size, wrong, right]
        assert [float(v) for v in found] == pytest.approx([*map(float, expected)], abs=1e-10)


def test_products_are_what_a_layer_does():
    """Scores e_j KQ e_iᵀ and writes e_i PV, summed by hand over heads and keys."""
    xs, ys = some(0, (4, 6, 3), (4, 6))
    network = random(Shape(3, 5, heads=2))
    e, after = (tokens.numpy() for tokens in network.resid(xs, ys))
    kq, pv = (part.numpy() for part in products(network))
    expected = np.einsum("mbjc,mhcd,mbid,mbie,mhef->mbjf", e, kq, e[:, :, :5], e[:, :, :5], pv)
    np.testing.assert_allclose(after, e + expected, rtol=1e-9, atol=1e-9)


def test_the_matrix_of_a_step_and_what_is_off_its_pattern():
    """The nearest multiple of the pattern, by least squares; a step of GD has 0.2 I."""
    network, off = random(Shape(3, 5, heads=2)), []
    for matrices, pattern in zip(products(network), ([1, 1, 1, 0], [0, 0, 0, 1]), strict=True):
        pattern = torch.tensor(pattern).double().diag()
        scale = (matrices * pattern).sum((-2, -1), keepdim=True) / pattern.sum()
        left = (matrices - scale * pattern).square().sum((-2, -1))
        off.append(left / matrices.square().sum((-2, -1)))
    torch.testing.assert_close(off_pattern(network), tuple(off), **TIGHT)
    made = construct(Shape(3, 5), [0.2], dtype=torch.float64)
    torch.testing.assert_close(step_matrix(made)[0], 0.2 * torch.eye(3).double(), **TIGHT)
    kq, pv = products(network)
    parts = [-5 * pv[:, h, 3, 3, None, None] * kq[:, h, :3, :3] for h in range(2)]
    torch.testing.assert_close(step_matrix(network), parts[0] + parts[1], **TIGHT)
