"""Weights of linear attention that take steps of gradient descent, and the note's that stray."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import TIGHT, random, some
from torch.testing import assert_close

from iclutils.chapters.gradient_step import construction
from iclutils.chapters.gradient_step.descent import descend
from iclutils.models.lsa import Shape, attend


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    dim=st.integers(1, 6),
    pairs=st.integers(1, 12),
    outputs=st.integers(1, 3),
    steps=st.integers(1, 10),
    started=st.booleans(),
    plus=st.booleans(),
)
def test_layers_are_steps(seed, dim, pairs, outputs, steps, started, plus):
    """To 1e-10 for K = 1 .. 10; a sign of P, W_V or the query's slot would show at once."""
    xs, ys, first = some(seed, (2, 2, pairs + 1, dim), (2, 2, pairs + 1, outputs), (outputs, dim))
    xs = xs / dim**0.5  # so that ten steps neither explode nor vanish
    start = first if started else None
    rates = torch.linspace(0.05, 0.4, steps).double()
    gammas = torch.linspace(0.002, 0.02, steps).double() if plus else None
    expected = descend(xs, ys, rates, gammas, start).predictions
    assert_close(construction.stacked(xs, ys, rates, gammas, start), expected, **TIGHT)


def test_weights_are_those_of_the_proposition():
    """By hand, d = 2, o = 1, N = 4, η = 0.8, W_0 = (5, 7); rows are channels in, columns out."""
    start = torch.tensor([[5.0, 7.0]])
    layer = construction.gradient_layer(2, 0.8, 4, start)
    keep = [[1.0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert layer.query[0].tolist() == layer.key[0].tolist() == keep
    assert layer.value[0].tolist() == [[0, 0, 5], [0, 0, 7], [0, 0, -1]]
    assert_close(layer.out[0].float(), torch.tensor([0.0, 0, 0.2]).diag())
    plus = construction.gradient_layer(2, 0.8, 4, gamma=0.3)
    assert plus.value[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, -1]]
    assert_close(plus.out[0].float(), torch.tensor([-0.3, -0.3, 0.2]).diag())
    for convention, guess in (("stacking", -12), ("note", 12)):
        found = construction.tokens(torch.ones(3, 2), torch.full((3,), 9.0), start, convention)
        assert found.tolist() == [[1, 1, 9], [1, 1, 9], [1, 1, guess]]


@pytest.mark.parametrize("started", [False, True])
def test_the_notes_convention_does_not_stack(started):
    """One layer is right; the second takes a step from the labels y_i + ΔW x_i, written out."""
    xs, weights, first = some(0, (400, 13, 5), (400, 1, 5), (1, 5))
    ys = xs @ weights.mT
    start = first * started
    found = construction.stacked(xs, ys, [0.3, 0.3], start=start, convention="note")
    expected = descend(xs, ys, [0.3, 0.3], start=start)
    assert_close(found[:2], expected.predictions[:2], **TIGHT)
    spoilt = ys + xs @ (expected.weights[1] - start).mT
    errors = (xs @ start.T - spoilt)[:, :-1]
    second = expected.weights[1] - 0.3 / 12 * errors.mT @ xs[:, :-1]
    assert_close(found[2], (second @ xs[:, -1, :, None])[..., 0], **TIGHT)
    assert (found[2] - expected.predictions[2]).abs().max() > 1


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_constructed_networks(shared, plus, heads):
    xs, ys = some(3, (30, 8, 4), (30, 8))
    rates = [0.2, 0.2, 0.2] if shared else [0.1, 0.2, 0.3]
    gammas = None if not plus else [0.01] * 3 if shared else [0.02, 0.01, 0.03]
    shape = Shape(4, 7, layers=3, heads=heads, shared=shared, clip=1e6)
    network = construction.constructed(shape, rates, gammas, torch.float64)
    expected = descend(xs, ys, rates, gammas).predictions
    assert_close(network(xs, ys)[0], expected[-1], **TIGHT)
    rows = torch.stack([-tokens[0, :, -1, 4] for tokens in network.resid(xs, ys)])
    assert_close(rows, expected, **TIGHT)
    single = construction.constructed(shape, rates, gammas)
    assert {(p.dtype, p.requires_grad) for p in single.parameters()} == {(torch.float32, False)}


@pytest.mark.parametrize("sees_query", [False, True])
@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_dependence_is_the_jacobian_of_the_mean(kind, sees_query):
    """By autograd of the first layer, with all contexts shifted alike."""
    xs, ys = some(0, (3, 4, 2), (3, 4))
    shape = Shape(2, 3, layers=2, heads=2, attention=(kind, "linear"), separate=True)
    network = random(replace(shape, sees_query=sees_query))
    found, before = construction.copying(network, xs, ys), network.resid(xs, ys)[0]

    def mean_after(shift):
        moved = before + shift
        return (moved + attend(moved, network.layer(), 6 + sees_query, kind)).mean(1)

    jacobian = torch.autograd.functional.jacobian(mean_after, torch.zeros_like(before[0, 0]))
    squares = jacobian.square().sum((2, 4))
    assert_close(found.dependence, squares.sqrt(), **TIGHT)
    share = squares / squares.sum(-1, keepdim=True)
    for found_share, rows in ((found.x_on_y, (0, 2, 4)), (found.y_on_x, (1, 3, 5))):
        own = torch.stack([share[:, k, k] for k in rows]).mean(0)
        partner = torch.stack([share[:, k, k + 1 if k % 2 == 0 else k - 1] for k in rows]).mean(0)
        assert_close(found_share, partner / (1 - own), **TIGHT)
