"""Stencils: products of GELUs against SciPy's, their errors against the expansion."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.special import erf

from iclutils import IclError
from iclutils.chapters.constructions.reports import product_errors
from iclutils.chapters.constructions.stencils import best_eps, leading_error, stencil


def gelu(z: np.ndarray) -> np.ndarray:
    return z * (1 + erf(z / math.sqrt(2))) / 2


def by_stencil(order: int, eps: float, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    left, right, out = (part.numpy() for part in stencil(order, eps))
    return (out * gelu(left * x[..., None] + right * y[..., None])).sum(-1)


def test_the_papers_product_by_hand() -> None:
    x, y = np.array([0.1]), np.array([0.2])
    three = math.sqrt(math.pi / 2) * (gelu(x + y) - gelu(x) - gelu(y))
    np.testing.assert_allclose(by_stencil(0, 1.0, x, y), three, rtol=1e-12)
    assert float(three[0]) == pytest.approx(0.019475, abs=5e-7)


@pytest.mark.parametrize("order", range(5))
def test_the_leading_error(order: int) -> None:
    """The error is its first term up to two more powers, in the numbers and in ε alike."""
    source = np.random.default_rng(0)
    x, y = source.normal(size=(2, 50))
    terms = torch.tensor(x), torch.tensor(y)
    wanted = leading_error(order, 0.2, *terms).numpy()
    found = by_stencil(order, 0.2, x, y) - x * y
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, atol=0.2 * scale)
    power = max(order, 1) * 2
    if order < 3:  # beyond that, rounding
        small = by_stencil(order, 0.02, x, y) - x * y
        np.testing.assert_allclose(small * 10**power, wanted, atol=0.004 * scale)
    halved = leading_error(order, 0.2, terms[0] / 2, terms[1] / 2)
    torch.testing.assert_close(halved * 2 ** (power + 2), leading_error(order, 0.2, *terms))


def test_the_papers_error_is_of_fourth_order() -> None:
    x, y = np.array([0.3, -0.2, 0.1]), np.array([0.1, 0.25, 0.3])
    errors = [by_stencil(0, 1.0, x / k, y / k) - x * y / k**2 for k in (4, 8)]
    np.testing.assert_allclose(errors[0] / errors[1], 16, rtol=0.01)  # third order: 8
    fourth = -((x + y) ** 4 - x**4 - y**4) / 12 / 8**4
    np.testing.assert_allclose(errors[1], fourth, rtol=0.01)


def test_the_stencils_are_those_of_the_textbooks() -> None:
    """Central differences of second derivatives, of fourth and sixth order."""
    for order, known in (
        (2, [Fraction(4, 3), Fraction(-1, 12)]),
        (3, [Fraction(3, 2), Fraction(-3, 20), Fraction(1, 90)]),
    ):
        eps = 0.3
        out = stencil(order, eps).out.view(order, 4)
        unit = math.sqrt(math.pi / 2) / (4 * (eps / order) ** 2)
        wanted = [[float(share) * sign for sign in (1, 1, -1, -1)] for share in known]
        np.testing.assert_allclose(out / unit, wanted, rtol=1e-12)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_best_scale_is_best(precision: str) -> None:
    """On a wide grid no scale has a quarter of its error, run in a block."""
    dtype = getattr(torch, precision)
    for order in (0, 1, 2, 4):
        best = best_eps(order, dtype)
        errors = product_errors([order], [best * 2.0**k for k in range(-6, 7)], precision, 2000)[0]
        assert float(errors[6]) < 4 * float(errors.min())
        assert float(errors[0]) > 8 * float(errors[6])
        assert float(errors[12]) > 100 * float(errors[6])


def test_products_in_a_block_err_as_the_formula_says() -> None:
    found = product_errors([0, 1, 2], [0.1, 0.05], pairs=500)
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(500, 2, generator=source, dtype=torch.float64).T.numpy()
    for row, order in enumerate((0, 1, 2)):
        for column, eps in enumerate((0.1, 0.05)):
            wanted = np.abs(by_stencil(order, eps, x, y) - x * y).max()
            assert float(found[row, column]) == pytest.approx(wanted, rel=1e-3)


def test_wrong_stencils_are_refused() -> None:
    for eps in (0.0, -1.0, float("nan")):
        with pytest.raises(IclError, match="ε"):
            stencil(1, eps)
    with pytest.raises(IclError, match="order"):
        stencil(-1, 0.1)
    with pytest.raises(IclError, match="order"):
        best_eps(-1, torch.float64)
    for orders, scales in (([-1], [0.1]), ([1], [0.0])):
        with pytest.raises(IclError, match=r"order|ε"):
            product_errors(orders, scales)
