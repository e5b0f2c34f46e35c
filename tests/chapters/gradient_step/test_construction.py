"""Weights of linear attention that take steps of gradient descent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import TIGHT, some
from torch.testing import assert_close

from iclutils.chapters.gradient_step import construction
from iclutils.chapters.gradient_step.descent import descend
from iclutils.models.lsa import Shape


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    dim=st.integers(1, 6),
    pairs=st.integers(1, 12),
    steps=st.integers(1, 10),
)
def test_layers_are_steps(seed, dim, pairs, steps):
    """To 1e-10 for K = 1 .. 10; a sign of P, W_V or the query's slot would show at once."""
    xs, ys = some(seed, (2, 2, pairs + 1, dim), (2, 2, pairs + 1))
    xs = xs / dim**0.5  # so that ten steps neither explode nor vanish
    rates = torch.linspace(0.05, 0.4, steps).double()
    expected = descend(xs, ys, rates).predictions
    assert_close(construction.stack_layers(xs, ys, rates), expected, **TIGHT)


def test_weights_are_those_of_the_proposition():
    """By hand, d = 2, N = 4, η = 0.8; rows are channels in, columns out."""
    layer = construction.gradient_layer(2, 0.8, 4)
    assert layer.query[0].tolist() == layer.key[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert layer.value[0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, -1]]
    assert_close(layer.out[0].float(), torch.tensor([0.0, 0, 0.2]).diag())


@pytest.mark.parametrize("shared", [False, True])
def test_constructed_networks(shared):
    xs, ys = some(3, (30, 8, 4), (30, 8))
    rates = [0.2, 0.2, 0.2] if shared else [0.1, 0.2, 0.3]
    shape = Shape(4, 7, layers=3, shared=shared, clip=1e6)
    network = construction.construct(shape, rates, torch.float64)
    expected = descend(xs, ys, rates).predictions
    assert_close(network(xs, ys)[0], expected[-1], **TIGHT)
    rows = torch.stack([-tokens[0, :, -1, 4] for tokens in network.resid(xs, ys)])
    assert_close(rows, expected, **TIGHT)
