"""Products of GELUs against SciPy's; mov, mul, div and aff on random streams, against NumPy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import booleans, floats, integers, sampled_from
from random_layers import normal
from scipy.special import erf
from torch.testing import assert_close

from iclutils.chapters.ridge_ols.layout import Layout, Numerics, leading_error, stencil
from iclutils.chapters.ridge_ols.primitives import aff, assemble, div, mov, mul

FINE = Numerics.improved(torch.float64)
PLAIN = Numerics(0, 1e-5, 1e8, balanced=False)
FIELDS = {"a": 3, "b": 2, "c": 4}
seeds = integers(0, 999)


def layout(numerics=FINE, columns=6):
    return Layout(FIELDS, columns, numerics)


def filled(plan, seed, batch=4):
    """A stream whose fields are random, but 0 in the start token."""
    values = normal(batch, plan.columns, 9, seed=seed)
    values[:, 0] = 0
    rows = torch.cat([plan.pick(name) for name in FIELDS])
    return plan.places + plan.field_unit * values @ rows


def fields(plan, stream):
    return {name: plan.value(stream, name) for name in FIELDS}


@settings(max_examples=25)
@given(integers(3, 60), st.tuples(floats(0, 1), floats(0, 1)), seeds, booleans(), booleans())
def test_mov_copies_one_column(columns, place, seed, single, plain):
    """From s to t, or to every column from s on: whatever else there is stays as it was."""
    source, target = sorted(1 + int(part * (columns - 2)) for part in place)
    plan = layout(PLAIN if plain else FINE, columns)
    stream = filled(plan, seed)
    head = mov(plan, plan.pick("a"), plan.pick("c")[:3], source, target if single else None)
    before, after = fields(plan, stream), fields(plan, assemble(plan, head)(stream))
    expected = before["c"].clone()
    reached = slice(target, target + 1) if single else slice(source, None)
    expected[:, reached, :3] += before["a"][:, source : source + 1]
    for name, wanted in (before | {"c": expected}).items():
        assert_close(after[name], wanted, atol=1e-6 if plain else 1e-9, rtol=0)


@settings(max_examples=25)
@given(a=integers(1, 3), b=integers(1, 3), c=integers(1, 3), seed=seeds, plain=booleans())
def test_mul_multiplies_matrices(a, b, c, seed, plain):
    sizes = {"left": a * b, "right": b * c, "out": a * c}
    plan = Layout(sizes, 4, PLAIN if plain else FINE)
    left, right = normal(3, a, b, seed=seed), normal(3, b, c, seed=seed + 1)
    rows = torch.cat([plan.pick("left"), plan.pick("right")])
    values = torch.cat([left.flatten(1), right.flatten(1)], 1)
    stream = plan.places[1:] + plan.field_unit * values @ rows
    factors = plan.pick("left").view(a, b, -1), plan.pick("right").view(b, c, -1)
    neurons = mul(plan, *factors, plan.pick("out").view(a, c, -1))
    found = plan.value(assemble(plan, None, [neurons])(stream[None])[0], "out").view(3, a, c)
    expected = np.einsum("nab,nbc->nac", left.numpy(), right.numpy())
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-8 if plain else 1e-11)


@settings(max_examples=25)
@given(seed=seeds, gelu=sampled_from(["gelu", "gelu_new"]), plain=booleans())
def test_aff_is_a_linear_map(seed, gelu, plain):
    plan = layout(replace(PLAIN if plain else FINE, gelu=gelu))
    w1, w2 = normal(4, 3, seed=seed), normal(4, 2, seed=seed + 1)
    stream = filled(plan, seed)
    before = fields(plan, stream)
    neurons = aff(plan, w1 @ plan.pick("a") + w2 @ plan.pick("b"), plan.pick("c"))
    after = fields(plan, assemble(plan, None, [neurons])(stream))
    wanted = before["a"] @ w1.T + before["b"] @ w2.T
    assert_close(after["c"] - before["c"], wanted, atol=1e-6 if plain else 1e-10, rtol=0)
    for name in ("a", "b"):
        assert_close(after[name], before[name])


@settings(max_examples=25)
@given(floats(0.3, 50), sampled_from([1, -1]), integers(1, 5), seeds, booleans())
def test_div_divides_by_the_absolute_value(by, sign, column, seed, plain):
    plan = layout(PLAIN if plain else FINE)
    stream, row = filled(plan, seed), plan.pick("b")[:1]
    stream[:, 1:] += (plan.field_unit * by * sign - stream[:, 1:] @ row.T) * row
    before = fields(plan, stream)
    read, write = plan.pick("a"), plan.pick("c")[:3]
    divide = assemble(plan, div(plan, plan.pick("b")[:1], column), [aff(plan, read, write)])
    divided = divide(stream)
    after = fields(plan, divided)
    wanted = before["c"].clone()
    wanted[..., :3] += before["a"]
    wanted[:, column, :3] += before["a"][:, column] * (1 / by - 1)
    # A LayerNorm's own epsilon shifts a quotient by 1e-5 width / (8 ratio), relatively.
    bound = 1e-6 if plain else 1e-9
    assert_close(after["c"], wanted, atol=bound, rtol=0)
    if sign > 0:  # the column is still found, and what is fetched from it is divided
        after = fields(plan, assemble(plan, mov(plan, read, write, column))(divided))
        wanted[:, column:, :3] += before["a"][:, column : column + 1] / by
        assert_close(after["c"], wanted, atol=bound, rtol=0)


def gelu(z):
    return z * (1 + erf(z / math.sqrt(2))) / 2


def by_stencil(order, eps, x, y):
    left, right, out = (part.numpy() for part in stencil(order, eps))
    return (out * gelu(left * x[..., None] + right * y[..., None])).sum(-1)


@pytest.mark.parametrize("order", range(5))
def test_the_leading_error(order):
    """The error is its first term up to two more powers, in the numbers and in ε alike."""
    x, y = np.random.default_rng(0).normal(size=(2, 50))
    wanted = leading_error(order, 0.2, torch.tensor(x), torch.tensor(y)).numpy()
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(by_stencil(order, 0.2, x, y) - x * y, wanted, atol=0.2 * scale)
    if order < 3:  # beyond that, rounding
        small = by_stencil(order, 0.02, x, y) - x * y
        np.testing.assert_allclose(small * 100 ** max(order, 1), wanted, atol=0.004 * scale)
