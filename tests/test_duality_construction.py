"""Weights of linear attention that take steps of gradient descent, and the note's that stray."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iclutils import IclError
from iclutils.chapters.gradient_descent.construction import (
    constructed,
    gradient_layer,
    note_layer,
    note_layer_as_written,
    plus_layer,
    readout,
    run,
    stacked,
    tokens,
)
from iclutils.chapters.gradient_descent.descent import descend
from iclutils.models.lsa import Shape, Solvers

TIGHT = {"atol": 1e-10, "rtol": 1e-10}


def some(seed: int, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=source, dtype=torch.float64) for size in sizes]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dim=st.integers(1, 6),
    pairs=st.integers(1, 12),
    outputs=st.integers(1, 3),
    steps=st.integers(1, 10),
    started=st.booleans(),
    plus=st.booleans(),
)
def test_layers_are_steps(
    seed: int, dim: int, pairs: int, outputs: int, steps: int, started: bool, plus: bool
) -> None:
    """To 1e-10 for K = 1 .. 10; a sign of P, W_V or the query's slot would show at once."""
    xs, ys, first = some(seed, (2, 2, pairs + 1, dim), (2, 2, pairs + 1, outputs), (outputs, dim))
    xs = xs / dim**0.5  # so that ten steps neither explode nor vanish
    start = first if started else None
    rates = torch.linspace(0.05, 0.4, steps).double()
    gammas = torch.linspace(0.002, 0.02, steps).double() if plus else None
    expected = descend(xs, ys, rates, gammas, start)
    torch.testing.assert_close(stacked(xs, ys, rates, gammas, start), expected.predictions, **TIGHT)
    build = [
        plus_layer(dim, float(rate), pairs, float(gamma), start, outputs)
        if plus
        else gradient_layer(dim, float(rate), pairs, start, outputs)
        for rate, gamma in zip(rates, rates if gammas is None else gammas, strict=True)
    ]
    stream = run(tokens(xs, ys, start), build)
    torch.testing.assert_close(readout(stream, dim), expected.predictions, **TIGHT)
    if not plus:  # labels become what is left of them, and inputs stay
        learnt = expected.weights - expected.weights[:1]
        left = ys - torch.einsum("kabod,abnd->kabno", learnt, xs)
        torch.testing.assert_close(stream[..., :-1, dim:], left[..., :-1, :], **TIGHT)
        assert torch.equal(stream[..., :dim], xs.expand(steps + 1, -1, -1, -1, -1))


def test_weights_are_those_of_the_proposition() -> None:
    """By hand, d = 2, o = 1, N = 4, η = 0.8, W_0 = (5, 7); rows are channels in, columns out."""
    layer = gradient_layer(2, 0.8, 4, torch.tensor([[5.0, 7.0]]))
    keep = [[1.0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert layer.query[0].tolist() == layer.key[0].tolist() == keep
    assert layer.value[0].tolist() == [[0, 0, 5], [0, 0, 7], [0, 0, -1]]
    torch.testing.assert_close(layer.out[0].float(), torch.tensor([0.0, 0, 0.2]).diag())
    torch.testing.assert_close(
        note_layer(2, 0.8, 4).out[0].float(), torch.tensor([0, 0, -0.2]).diag()
    )
    plus = plus_layer(2, 0.8, 4, 0.3)
    assert plus.value[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, -1]]
    torch.testing.assert_close(plus.out[0].float(), torch.tensor([-0.3, -0.3, 0.2]).diag())
    found = tokens(torch.ones(3, 2), torch.full((3,), 9.0), torch.tensor([[5.0, 7.0]]))
    assert found.tolist() == [[1, 1, 9], [1, 1, 9], [1, 1, -12]]
    note = tokens(torch.ones(3, 2), torch.full((3,), 9.0), torch.tensor([[5.0, 7.0]]), "note")
    assert note.tolist() == [[1, 1, 9], [1, 1, 9], [1, 1, 12]]


# The note ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True])
def test_the_notes_convention_does_not_stack(started: bool) -> None:
    """One layer is right; the second takes a step from the labels y_i + ΔW x_i, written out."""
    xs, weights, first = some(0, (400, 13, 5), (400, 1, 5), (1, 5))
    ys = xs @ weights.mT
    start = first * started
    found = stacked(xs, ys, [0.3, 0.3], start=start, convention="note")
    expected = descend(xs, ys, [0.3, 0.3], start=start)
    torch.testing.assert_close(found[:2], expected.predictions[:2], **TIGHT)
    assert (found[2] - expected.predictions[2]).abs().max() > 1
    change = expected.weights[1] - start
    spoilt = ys + xs @ change.mT
    errors = (xs @ start.T - spoilt)[:, :-1]
    second = expected.weights[1] - 0.3 / 12 * errors.mT @ xs[:, :-1]
    torch.testing.assert_close(found[2], (second @ xs[:, -1, :, None])[..., 0], **TIGHT)
    losses = [0.5 * (f[2] - ys[:, -1]).square().mean() for f in (found, expected.predictions)]
    assert losses[0] > 1.1 * losses[1]
    layers = [note_layer(5, 0.3, 12, start)] * 2
    by_hand = readout(run(tokens(xs, ys, start, "note"), layers), 5, "note")
    torch.testing.assert_close(by_hand, found, **TIGHT)


def test_the_notes_signs_in_the_stacking_convention_are_wrong_at_once() -> None:
    """P = -η/N with the query at -W_0 x, or P = η/N with +W_0 x: each slip alone is fatal."""
    xs, ys, start = some(1, (20, 9, 3), (20, 9, 1), (1, 3))
    right = descend(xs, ys, [0.3], start=start).predictions[1]
    cases = {
        "stacking": note_layer(3, 0.3, 8, start),
        "note": gradient_layer(3, 0.3, 8, start),
    }
    for convention, layer in cases.items():
        found = readout(run(tokens(xs, ys, start, convention), [layer]), 3, convention)
        assert (found[1] - right).abs().max() > 0.1


def test_the_notes_projection_has_the_wrong_size() -> None:
    with pytest.raises(IclError, match=r"is 12 x 12, but it multiplies .* d \+ o = 6 entries"):
        note_layer_as_written(5, 0.3, 12)
    xs, ys = some(2, (4, 7, 5), (4, 7))
    layer = note_layer_as_written(5, 0.3, 6)  # n = d + o by chance
    found = readout(run(tokens(xs, ys, convention="note"), [layer]), 5, "note")[1, :, 0]
    torch.testing.assert_close(found, descend(xs, ys, [0.3]).predictions[1], **TIGHT)


# As solvers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_constructed_solvers(shared: bool, plus: bool, heads: int) -> None:
    xs, ys = some(3, (30, 8, 4), (30, 8))
    rates = [0.2, 0.2, 0.2] if shared else [0.1, 0.2, 0.3]
    gammas = None if not plus else [0.01] * 3 if shared else [0.02, 0.01, 0.03]
    shape = Shape(4, 7, layers=3, heads=heads, shared=shared)
    network = constructed(shape, rates, gammas, torch.float64)
    expected = descend(xs, ys, rates, gammas).predictions[-1]
    torch.testing.assert_close(network(xs[None], ys[None])[0], expected, **TIGHT)
    stream = network.resid(xs[None], ys[None])
    rows = torch.stack([-tokens[0, :, -1, 4] for tokens in stream])
    torch.testing.assert_close(rows, descend(xs, ys, rates, gammas).predictions, **TIGHT)
    single = constructed(shape, rates, gammas)
    assert {p.dtype for p in single.parameters()} == {torch.float32}
    found = single(xs[None].float(), ys[None].float())[0]
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    assert not any(p.requires_grad for p in network.parameters())
    assert isinstance(network, Solvers)
    assert network.shape == shape
    bounded = constructed(replace(shape, clip=1e6), rates, gammas, torch.float64)
    torch.testing.assert_close(bounded(xs[None], ys[None])[0], expected, **TIGHT)


def test_what_the_construction_cannot_be() -> None:
    plain = Shape(4, 7, layers=2)
    for change in (
        {"attention": ("softmax",)},
        {"attention": ("linear", "softmax")},
        {"sees_query": True},
        {"separate": True},
        {"norm": True},
        {"hidden": 8},
        {"width": 5},
    ):
        with pytest.raises(IclError, match="needs linear attention over joint tokens"):
            constructed(replace(plain, **change), [0.1, 0.1])
    with pytest.raises(IclError, match="a rate for each of 2 layers; got 1"):
        constructed(plain, [0.1])
    with pytest.raises(IclError, match="same rate and gamma"):
        constructed(replace(plain, shared=True), [0.1, 0.2])
    with pytest.raises(IclError, match="same rate and gamma"):
        constructed(replace(plain, shared=True), [0.1, 0.1], [0.1, 0.2])


def test_bad_input() -> None:
    xs, ys = some(0, (3, 6, 4), (3, 6))
    cases = [
        (lambda: gradient_layer(0, 0.1, 3), "sizes of at least 1"),
        (lambda: gradient_layer(3, 0.1, 0), "sizes of at least 1"),
        (lambda: gradient_layer(3, float("nan"), 3), "finite"),
        (lambda: gradient_layer(3, 0.1, 3, torch.ones(2, 3)), "W_0 must be 1 x 3"),
        (lambda: tokens(xs, ys, convention="stacked"), "Did you mean 'stacking'"),
        (lambda: readout(xs, 3, "notes"), "Did you mean 'note'"),
        (lambda: run(tokens(xs, ys), [gradient_layer(3, 0.1, 5)]), "reads 4 channels"),
        (lambda: stacked(xs, ys, [0.1], [0.1], convention="note"), "has no GD"),
        (lambda: stacked(xs, ys[:, :4], [0.1]), "Need xs of"),
    ]
    for call, message in cases:
        with pytest.raises(IclError, match=message):
            call()
