"""Stencils: products out of GELUs.

The second derivative of the GELU at 0 is sqrt(2/π), so a second difference of GELUs around 0
gives a square, and squares give a product. The paper takes the shortest one,
``sqrt(π/2) (G(x + y) - G(x) - G(y))``, where G is the GELU, which is ``xy`` up to terms of fourth
order. With x and y scaled by ε and the result by 1/ε², the error falls as ε², but the output
weights grow as 1/ε², and what rounding leaves of the linear half of G grows as u/ε, for a machine
precision u. At the best ε, about 10⁻⁶ in double precision, the weights are near 10¹² and half of
the digits are lost. The longer central differences of the textbooks (error of order ε^2J on J
steps) lose few, with an ε of a twentieth.

Source: Akyurek et al. 2023 {cite}`akyurek2023`, lemma 1, for the first; finite differences.

Example:
    >>> import torch
    >>> from iclutils.chapters.constructions import stencils
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError


class Stencil(NamedTuple):
    """``xy ≈ Σ out_k G(left_k x + right_k y)``."""

    left: Float[Tensor, "neurons"]
    right: Float[Tensor, "neurons"]
    out: Float[Tensor, "neurons"]


def stencil(order: int, eps: float) -> Stencil:
    """The GELUs that multiply two numbers, in float64.

    Args:
        order: 0 for the three GELUs of the paper; J ≥ 1 for 4 J GELUs on a grid of J steps on
            either side of 0, whose error is of order ε^2J.
        eps: ε, the farthest scale at which the GELU is used; any unit of the numbers.

    Example:
        >>> [len(stencils.stencil(order, 0.1).out) for order in (0, 1, 2)]
        [3, 4, 8]
    """
    if order < 0:
        raise IclError(f"The order of a stencil is 0 (the paper's) or more, not {order}.")
    if not (math.isfinite(eps) and eps > 0):
        raise IclError(f"The scale ε of a multiplication must be positive, not {eps}.")
    bend = math.sqrt(math.pi / 2)
    if order == 0:
        rows = [(eps, eps, bend / eps**2), (eps, 0, -bend / eps**2), (0, eps, -bend / eps**2)]
        return Stencil(*torch.tensor(rows, dtype=torch.float64).T)
    rows = []
    for step in range(1, order + 1):
        scale = step * eps / order
        out = bend * _share(order, step) / (4 * scale**2)
        rows += [(scale, scale, out), (-scale, -scale, out)]
        rows += [(scale, -scale, -out), (-scale, scale, -out)]
    return Stencil(*torch.tensor(rows, dtype=torch.float64).T)


def _share(order: int, step: int) -> float:
    """Weight of the second difference over ``step`` steps in the central one of order 2J."""
    ways = math.factorial(order - step) * math.factorial(order + step)
    return (-1) ** (step + 1) * 2 * math.factorial(order) ** 2 / ways


def leading_error(
    order: int, eps: float, x: Float[Tensor, "*shape"], y: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """First term of (what the stencil gives - xy) in powers of ε, for the exact GELU.

    For the paper's it is -ε² ((x+y)⁴ - x⁴ - y⁴) / 12, of fourth order in the numbers, not of
    third, as the paper's O(x³ + y³) might be read.
    """
    stencil(order, eps)
    if order == 0:
        return -(eps**2) * ((x + y) ** 4 - x**4 - y**4) / 12
    power = 2 * order
    factor = math.factorial(order) / (2**order * (power + 1)) * (eps / order) ** power
    return -factor * ((x + y) ** (power + 2) - (x - y) ** (power + 2)) / 4


def best_eps(order: int, dtype: torch.dtype) -> float:
    """The ε at which truncation and rounding are about equal, for factors as large as four.

    Truncation is ``leading_error``, which grows as ε^2J (ε² for the paper's). Rounding is u times
    the linear halves z/2 of the GELUs, which the stencil makes cancel, weighted as it weights
    them and added up as independent errors of u/2 each: it falls as 1/ε.
    """
    large = torch.tensor(4.0, dtype=torch.float64)
    points = stencil(order, 1.0)
    halves = points.out * (points.left + points.right) * large / 2
    rounding = float(halves.norm()) * torch.finfo(dtype).eps / 2
    truncation = abs(float(leading_error(order, 1.0, large, large)))
    return (rounding / truncation) ** (1 / (2 * max(order, 1) + 1))
