"""Linear self-attention: loops in numpy, torch's own attention, symmetries, ensembles, files."""

import math
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import TIGHT, some
from scipy.special import erf, softmax

from iclutils.models.lsa import LinearSelfAttention as LSA
from iclutils.models.lsa import Shape

SOFTMAX = Shape(3, 5, heads=2, attention=("softmax",), sees_query=True)
SHAPES = {
    "linear": Shape(3, 5),
    "deep": Shape(3, 5, layers=3, heads=2, attention=("linear", "softmax", "linear")),
    "recurrent": Shape(3, 5, layers=3, heads=2, shared=True),
    "softmax": SOFTMAX,
    "separate": Shape(3, 5, layers=2, attention=("softmax", "linear"), separate=True),
    "norm": Shape(3, 5, layers=2, norm=True),
    "clip": Shape(3, 5, layers=3, clip=2.0),
    "mlp": Shape(3, 5, layers=2, hidden=7, width=6),
    "all": Shape(3, 5, layers=2, heads=2, shared=True, norm=True, hidden=7, width=6, separate=True),
    "regularised": replace(SOFTMAX, variant="regularised", strength=0.4),
    "negatives": replace(SOFTMAX, variant="negatives", strength=0.3),
    "values": replace(SOFTMAX, sees_query=False, variant="values"),
    "both": replace(SOFTMAX, variant="both"),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def random(shape, seeds=(0, 1), scale=1.0):
    """Large weights everywhere, LayerNorm's too, so that nothing hides."""
    network = LSA(shape, seeds, scale).double().requires_grad_(False)
    for name in ("gain", "shift"):
        if name in network.others:
            network.others[name] += torch.stack(
                [some(seed, network.others[name].shape[1:])[0] for seed in seeds]
            )
    return network


def gelu(x):
    return x * (1 + erf(x / math.sqrt(2))) / 2


def tokens_by_hand(xs, ys, separate):
    """Of one context, one by one."""
    pairs = list(zip(xs, [*ys[:-1], 0.0], strict=True))
    if not separate:
        return np.array([[*x, y] for x, y in pairs])
    rows = [row for x, y in pairs for row in ([*x, 0.0], [*(0 * x), y])][:-1]
    for place, row in enumerate(rows):
        for k in range(5):
            angle = place / 10000 ** (2 * k / 10)
            row += [math.sin(angle), math.cos(angle)]
    return np.array(rows)


def answer_by_hand(network, member, xs, ys):
    """The answer of one member for one context, head by head."""
    shape = network.shape
    part = {name: p[member].numpy() for name, p in network.attention.items()}
    other = {name: p[member].numpy() for name, p in network.others.items()}
    e = tokens_by_hand(xs, ys, shape.separate)
    e = e @ other["read_in"] if shape.width else e
    demos = len(e) - 1
    kinds = shape.attention if len(shape.attention) > 1 else shape.attention * shape.layers
    for number in range(shape.layers):
        at = 0 if shape.shared else number
        if shape.hidden:
            e = e + gelu(e @ other["up"][at] + other["bias"][at, 0]) @ other["down"][at]
        seen = e
        if shape.norm:
            seen = (e - e.mean(-1, keepdims=True)) / np.sqrt(e.var(-1, keepdims=True) + 1e-5)
            seen = seen * other["gain"][at] + other["shift"][at]
        added = np.zeros_like(e)
        for head in range(shape.heads):
            w = {name: p[at, head] for name, p in part.items()}
            key, value = ((seen @ w[n])[: demos + shape.sees_query] for n in ("key", "value"))
            if shape.variant in ("values", "both"):
                value = value + gelu(value @ other["values_up"]) @ other["values_down"]
            if shape.variant == "both":
                key = key + gelu(key @ other["keys_up"]) @ other["keys_down"]
            if shape.variant == "negatives":
                rest = [np.delete(value[:demos], i, 0).mean(0) for i in range(demos)]
                value[:demos] -= shape.strength * np.array(rest)
            if shape.variant == "regularised":
                value[demos] *= 1 - shape.strength
            scores = seen @ w["query"] @ key.T
            if kinds[number] == "softmax":
                scores = softmax(scores / math.sqrt(key.shape[1]), -1)
            added += scores @ value @ w["out"]
        e = e + added
        e = np.clip(e, -shape.clip, shape.clip) if shape.clip else e
    return float(e[-1] @ other["read_out"][:, 0]) if shape.width else -float(e[-1, shape.dim])


@every_shape
def test_answers_are_those_of_loops(name):
    network = random(SHAPES[name])
    close = 1e-5 if network.shape.separate else 1e-9  # positions are in single precision
    for size in (2, 6, 10) if name == "linear" else (6,):  # also of other lengths
        xs, ys = some(1, (2, 3, size, 3), (2, 3, size))
        found = network(xs, ys)
        assert found.shape == (2, 3)
        for at in np.ndindex(2, 3):
            expected = answer_by_hand(network, at[0], xs[at].numpy(), ys[at].numpy())
            assert float(found[at]) == pytest.approx(expected, rel=close, abs=close)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(SHAPES)))
def test_order_and_the_querys_label(seed, name):
    """The pairs are a set where x and y share a token, and not where positions are read."""
    xs, ys = some(seed, (1, 4, 6, 3), (1, 4, 6))
    network = random(SHAPES[name])
    found = network(xs, ys)
    order = [1, 2, 3, 4, 0, 5]
    turned = network(xs[:, :, order], ys[:, :, order])
    if network.shape.separate:
        assert (turned - found).abs().max() > 1e-6
    else:
        torch.testing.assert_close(turned, found, **TIGHT)
    for label in (0.0, 1e9, nan, inf):
        ys[..., -1] = label
        assert torch.equal(network(xs, ys), found)


def test_contexts_without_an_ensemble_axis_go_to_every_network():
    xs, ys = some(4, (1, 4, 6, 3), (1, 4, 6))
    whole = random(SHAPES["deep"], (0, 5, 1))
    assert torch.equal(whole(xs[0], ys[0]), whole(xs, ys))
    torch.testing.assert_close(whole(xs, ys)[1:2], random(SHAPES["deep"], (5,))(xs, ys), **TIGHT)
