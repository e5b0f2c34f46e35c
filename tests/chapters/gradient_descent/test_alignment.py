"""Alignment with algorithms: finite differences, networks with known answers, weights by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iclutils import IclError
from iclutils.chapters.gradient_descent.alignment import (
    alignment,
    answers,
    half_mse,
    interpolate,
    off_pattern,
    products,
    responses,
    step_matrix,
    under_shift,
    with_noise,
)
from iclutils.chapters.gradient_descent.construction import constructed
from iclutils.chapters.gradient_descent.descent import best_step, descend, predictor
from iclutils.models.lsa import LinearSelfAttention, Shape
from iclutils.tasks.regression import Contexts, Task, sample

TIGHT = {"atol": 1e-10, "rtol": 1e-10}


def some(seed: int, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=source, dtype=torch.float64) for size in sizes]


def random(
    shape: Shape, seeds: tuple[int, ...] = (0, 1), scale: float = 1.0
) -> LinearSelfAttention:
    return LinearSelfAttention(shape, seeds, scale).double().requires_grad_(False)


def sensitivity(
    predictor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    xs: torch.Tensor,
    ys: torch.Tensor,
) -> torch.Tensor:
    return responses(predictor, xs, ys).sensitivity


def gd(*rates: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return predictor(list(rates))


# Answers -----------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dim=st.integers(1, 4),
    kind=st.sampled_from(["linear", "softmax"]),
    steps=st.integers(1, 2),
)
def test_sensitivity_is_the_change_per_change_of_the_query(
    seed: int, dim: int, kind: str, steps: int
) -> None:
    """By central differences, for networks of an ensemble and any function."""
    xs, ys = some(seed, (3, 6, dim), (3, 6))
    network = random(Shape(dim, 5, layers=steps, heads=2, attention=(kind,), sees_query=True))

    def one(xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
        return network(xs, ys)[1]

    found = sensitivity(network, xs, ys)
    assert found.shape == (2, 3, dim)
    torch.testing.assert_close(sensitivity(one, xs, ys), found[1:], **TIGHT)
    for channel in range(dim):
        step = torch.zeros_like(xs)
        step[:, -1, channel] = 1e-5
        change = (answers(network, xs + step, ys) - answers(network, xs - step, ys)) / 2e-5
        torch.testing.assert_close(found[..., channel], change, atol=1e-6, rtol=1e-6)


def test_the_sensitivity_of_descent_is_its_weights() -> None:
    xs, ys = some(0, (20, 8, 4), (20, 8))
    weights = descend(xs, ys, [0.2, 0.3]).weights[-1, :, 0]
    torch.testing.assert_close(sensitivity(gd(0.2, 0.3), xs, ys)[0], weights, **TIGHT)
    network = constructed(Shape(4, 7, layers=2), [0.2, 0.3], dtype=torch.float64)
    torch.testing.assert_close(sensitivity(network, xs, ys)[0], weights, **TIGHT)
    with torch.no_grad():
        assert sensitivity(network, xs, ys).any()


def test_alignment_of_known_pairs() -> None:
    """The same; the same times 3 and times -1, whose numbers follow from the weights."""
    xs, ys = some(1, (50, 8, 4), (50, 8))
    weights = descend(xs, ys, [0.2]).weights[-1, :, 0]
    answer = (weights * xs[:, -1]).sum(-1)
    network = constructed(Shape(4, 7), [0.2], dtype=torch.float64)
    same = alignment(network, gd(0.2), xs, ys)
    expected = (1.0, 0.0, 0.0, float(0.5 * (answer - ys[:, -1]).square().mean()))
    assert [float(v) for v in same[:4]] == pytest.approx(expected, abs=1e-10)
    for factor, cosine in ((3, 1.0), (-1, -1.0)):
        found = alignment(gd(0.2 * factor), network, xs, ys)
        gap = abs(factor - 1)
        assert float(found.cosine) == pytest.approx(cosine)
        assert float(found.difference) == pytest.approx(gap * float(weights.norm(dim=-1).mean()))
        assert float(found.predictions) == pytest.approx(gap * float(answer.abs().mean()))
        wrong = 0.5 * (factor * answer - ys[:, -1]).square().mean()
        assert float(found.loss) == pytest.approx(float(wrong))
        assert float(found.reference_loss) == pytest.approx(expected[3])


def test_cosines_without_a_direction_are_zero() -> None:
    """Contexts without labels, a predictor that says 0, one that does not read the query."""
    xs, ys = some(2, (10, 6, 3), (10, 6))
    silent = {
        "zero": lambda xs, ys: 0 * xs[:, -1, 0],
        "constant": lambda xs, ys: torch.ones(len(xs)).double(),
        "labels": lambda xs, ys: xs[:, 0, 0] * ys[:, 0],
    }
    for one in silent.values():
        found = alignment(one, gd(0.3), xs, ys)
        assert float(found.cosine) == 0
        assert bool(torch.stack(list(found)).isfinite().all())
    half = ys * (torch.arange(10) % 2)[:, None]  # every other context has w = 0
    assert float(alignment(gd(0.3), gd(0.1), xs, half).cosine) == pytest.approx(0.5)


def test_networks_are_compared_one_by_one() -> None:
    xs, ys = some(3, (20, 6, 3), (20, 6))
    network = random(Shape(3, 5), (0, 1, 2))
    whole = alignment(network, gd(0.3), xs, ys)
    for member in range(3):

        def one(xs: torch.Tensor, ys: torch.Tensor, member: int = member) -> torch.Tensor:
            return network(xs, ys)[member]

        for all_of_them, alone in zip(whole, alignment(one, gd(0.3), xs, ys), strict=True):
            torch.testing.assert_close(all_of_them[member : member + 1], alone)
    turned = alignment(gd(0.3), network, xs, ys)
    torch.testing.assert_close(turned.cosine, whole.cosine)
    torch.testing.assert_close(turned.loss, whole.reference_loss)
    with pytest.raises(IclError, match="3 networks with 2"):
        alignment(network, random(Shape(3, 5)), xs, ys)


@pytest.mark.parametrize("predictor", [lambda xs, ys: ys[:2, 0], lambda xs, ys: ys[:, 0] / 0])
def test_bad_predictors_are_refused(predictor: Callable) -> None:
    xs, ys = some(0, (4, 6, 3), (4, 6))
    for ask in (answers, sensitivity):
        with pytest.raises(IclError, match="for each of 4 contexts"):
            ask(predictor, xs, ys)


# Shifts ------------------------------------------------------------------------------------------


def test_losses_under_shift() -> None:
    """Of one step of GD: flat when weights grow, the closed form when inputs do."""
    drawn = sample(Task(4), 40_000, 7, torch.Generator().manual_seed(0))
    drawn = Contexts(*(part.double() for part in drawn))
    table: dict = {"gd": gd(0.4), "zero": gd(0.0), "network": constructed(Shape(4, 6), [0.4])}
    for kind in ("inputs", "weights"):
        found = under_shift(table, drawn, [0.5, 1.0, 2.0], kind)
        assert {row.shape for row in found.values()} == {(1, 3)}
        torch.testing.assert_close(found["network"], found["gd"], atol=1e-4, rtol=1e-4)
        flat = float(0.5 * drawn.ys[:, -1].square().mean())
        assert found["zero"][0].tolist() == pytest.approx([flat] * 3)
        plain = half_mse(answers(gd(0.4), drawn.xs, drawn.ys), drawn.ys)
        assert float(found["gd"][0, 1]) == pytest.approx(float(plain))
        if kind == "weights":
            assert found["gd"][0].tolist() == pytest.approx([float(plain)] * 3)
            continue
        for factor, value in zip((0.5, 1.0, 2.0), found["gd"][0].tolist(), strict=True):
            best = best_step(4, 6, factor**2, 3 * factor**4)
            off = (0.4 / best.rate - 1) ** 2  # the loss is a parabola in the rate
            expected = best.rate_loss + off * (best.zero_loss - best.rate_loss)
            assert value * factor**2 == pytest.approx(expected, rel=0.05)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), pairs=st.integers(1, 8), data=st.data())
def test_labels_of_noise(seed: int, pairs: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, pairs))
    drawn = sample(Task(2), 20, pairs + 1, torch.Generator().manual_seed(seed))
    found = with_noise(drawn, count, torch.Generator().manual_seed(seed))
    changed = found.ys != drawn.ys
    assert (changed.sum(-1) == count).all()
    assert not changed[:, -1].any()
    assert torch.equal(found.xs, drawn.xs)
    assert torch.equal(found.weights, drawn.weights)
    again = with_noise(drawn, count, torch.Generator().manual_seed(seed))
    assert torch.equal(found.ys, again.ys)


def test_noise_is_normal_and_anywhere() -> None:
    drawn = sample(Task(2), 20_000, 6, torch.Generator().manual_seed(0))
    far = drawn._replace(ys=drawn.ys + 100)
    found = with_noise(far, 2, torch.Generator().manual_seed(0)).ys
    hit = found < 50
    torch.testing.assert_close(
        hit.float().mean(0), torch.tensor([0.4] * 5 + [0.0]), atol=0.02, rtol=0
    )
    assert float(found[hit].mean()) == pytest.approx(0, abs=0.02)
    assert float(found[hit].var()) == pytest.approx(1, abs=0.03)


# Weights -----------------------------------------------------------------------------------------


def test_products_are_what_a_layer_does() -> None:
    """Scores e_j KQ e_iᵀ and writes e_i PV, summed by hand over heads and keys."""
    xs, ys = some(0, (4, 6, 3), (4, 6))
    network = random(Shape(3, 5, layers=2, heads=2))
    stream = [tokens.numpy() for tokens in network.resid(xs, ys)]
    for number in range(2):
        kq, pv = (part.numpy() for part in products(network, number))
        e = stream[number]
        expected = e + np.einsum(
            "mbjc,mhcd,mbid,mbie,mhef->mbjf", e, kq, e[:, :, :5], e[:, :, :5], pv
        )
        np.testing.assert_allclose(stream[number + 1], expected, rtol=1e-9, atol=1e-9)


def test_off_pattern_of_constructions_and_of_known_dirt() -> None:
    shape = Shape(3, 5, heads=1)
    network = constructed(shape, [0.7], [0.2], torch.float64)
    assert off_pattern(network, pattern="plus") == (0, 0)
    yy, xx = (0.7 / 5) ** 2, 3 * 0.2**2
    kq, pv = off_pattern(network)
    assert (float(kq), float(pv)) == pytest.approx((0, xx / (xx + yy)))
    network.attention["query"][0, 0, 0] = torch.tensor(
        [[1.0, 0, 0, 2], [0, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 0]]
    )  # squares 1 + 4 + 9 + 4, of which the mean of the diagonal explains 3 · 2²
    network.attention["key"][0, 0, 0] = torch.eye(4)
    assert float(off_pattern(network)[0]) == pytest.approx(1 - 12 / 18)
    zero = constructed(shape, [0.0], dtype=torch.float64)
    assert float(off_pattern(zero)[1]) == 0
    wild = off_pattern(random(Shape(10, 5, layers=2, heads=2), (0, 1, 2)), 1)
    assert wild[0].shape == wild[1].shape == (3, 2)
    assert bool((wild[0] > 0.9).all())
    with pytest.raises(IclError, match=r"tokens \(x, y\)"):
        off_pattern(random(Shape(3, 5, separate=True)))


@pytest.mark.parametrize("heads", [1, 2])
def test_the_matrix_of_a_step(heads: int) -> None:
    """η I for the construction; for any x-block and y-channel, what the layer answers."""
    built = constructed(Shape(3, 5, heads=heads), [0.7], dtype=torch.float64)
    torch.testing.assert_close(step_matrix(built)[0], 0.7 * torch.eye(3).double(), **TIGHT)
    xs, ys = some(1, (20, 6, 3), (20, 6))
    network = random(Shape(3, 5, heads=heads))
    for name in ("query", "key"):
        network.attention[name][..., 3, :] = 0  # y is not compared
    network.attention["value"][..., :3, :] = 0  # x is not written
    mean = (xs[:, :-1] * ys[:, :-1, None]).mean(1)
    expected = torch.einsum("bc,mcd,bd->mb", xs[:, -1], step_matrix(network), mean)
    torch.testing.assert_close(answers(network, xs, ys), expected, **TIGHT)
    with pytest.raises(IclError, match="no matrix"):
        step_matrix(random(Shape(3, 5, attention=("softmax",))))


@pytest.mark.parametrize(("layers", "shared"), [(1, False), (3, True)])
def test_interpolation(layers: int, shared: bool) -> None:
    """Ends, averages and scale, against numpy; a rescaled twin stays where it is."""
    xs, ys = some(2, (20, 6, 3), (20, 6))
    shape = Shape(3, 5, layers=layers, shared=shared)
    built = constructed(shape, [0.3] * layers, dtype=torch.float64)
    network = random(shape, (0, 1, 2))
    for end, expected in ((0.0, network), (1.0, built)):
        found = answers(interpolate(network, built, end), xs, ys)
        torch.testing.assert_close(
            found, answers(expected, xs, ys).expand_as(found), atol=1e-8, rtol=1e-8
        )
    half = products(interpolate(network, built, 0.25))
    kq, pv = (part[:, 0].numpy() for part in products(network))
    target_kq, target_pv = (part[0, 0].numpy() for part in products(built))
    for member in range(3):
        scale = np.diag(kq[member])[:3].mean()
        expected = 0.75 * kq[member] / scale + 0.25 * target_kq
        np.testing.assert_allclose(half[0][member, 0], expected, rtol=1e-9)
        expected = 0.75 * pv[member] * scale + 0.25 * target_pv
        np.testing.assert_allclose(half[1][member, 0], expected, rtol=1e-9, atol=1e-12)
    twin = constructed(shape, [0.3] * layers, dtype=torch.float64)
    twin.attention["query"] *= -3
    twin.attention["out"] /= -3
    for share in (0.0, 0.5, 1.0):
        found = answers(interpolate(twin, built, share), xs, ys)
        torch.testing.assert_close(found, answers(built, xs, ys), **TIGHT)


@pytest.mark.parametrize(
    "change",
    [{"heads": 2}, {"layers": 2}, {"norm": True}, {"attention": ("softmax",)}, {"pairs": 6}],
)
def test_what_cannot_be_interpolated(change: dict) -> None:
    with pytest.raises(IclError, match="a single linear head"):
        interpolate(random(replace(Shape(3, 5), **change)), constructed(Shape(3, 5), [0.3]), 0.5)


def test_other_refusals() -> None:
    drawn = sample(Task(2), 4, 6, torch.Generator().manual_seed(0))
    empty = constructed(Shape(3, 5), [0.3])
    empty.attention["query"].zero_()
    cases = [
        (lambda: interpolate(empty, empty, 0.5), "mean 0"),
        (lambda: under_shift({"gd": gd(0.1)}, drawn, [1.0], "input"), "Did you mean 'inputs'"),
        (lambda: with_noise(drawn, 6, torch.Generator()), r"0 \.\. 5 pairs"),
        (lambda: off_pattern(empty, pattern="plu"), "Did you mean 'plus'"),
    ]
    for call, message in cases:
        with pytest.raises(IclError, match=message):
            call()
