"""The lasso, many problems at once, from their Gram matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError

SLACK = 1e-9  # how far a slope may miss its limit, relative to the largest slope at w = 0
TURNS = 50  # corners of a path, per dimension, before it is given up; d or so are usual


def lasso_from_moments(
    grams: Float[Tensor, "problem d d"],
    moments: Float[Tensor, "problem d"],
    limits: Float[Tensor, "problem"],
) -> Float[Tensor, "problem d"]:
    """The minima of w·Gw / 2 - c·w + limit |w|₁, for G in ``grams`` and c in ``moments``.

    The path of minima as the limit falls is made of straight lines (Osborne, Presnell and Turlach
    2000; Efron et al. 2004). It is followed from w = 0, from corner to corner, where a weight
    leaves 0 or returns to it, down to the limit asked for. At the end the conditions of the
    minimum are checked: the slope c - Gw is limit sign(w) where w is not 0, and within the limit
    where it is.
    """
    weights, sign = torch.zeros_like(moments), torch.zeros_like(moments)
    level = moments.abs().amax(-1, keepdim=True)
    target = limits[:, None]
    todo = (level > target).nonzero()[:, 0]
    for _ in range(TURNS * moments.shape[-1]):
        if not len(todo):
            break
        gram, state = grams[todo], (weights[todo], sign[todo], level[todo])
        slope = moments[todo] - (gram @ state[0][..., None])[..., 0]
        weights[todo], sign[todo], level[todo] = _corner(gram, slope, *state, target[todo])
        todo = todo[level[todo, 0] > target[todo, 0]]
    slope = moments - (grams @ weights[..., None])[..., 0]
    inside = (slope.abs() - target).clamp(min=0)
    miss = torch.where(weights == 0, inside, (slope - target * weights.sign()).abs())
    good = (miss <= SLACK * moments.abs().amax(-1, keepdim=True)).all(-1)  # never true of NaN
    if not bool(good.all()):
        raise IclError(
            f"The lasso was not solved in {int((~good).sum())} problems; take a larger penalty."
        )
    return weights


def _corner(
    gram: Tensor, slope: Tensor, weights: Tensor, sign: Tensor, level: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Move on to the next corner: the weights, their signs and the limit there.

    ``sign`` is 0 for the weights that stay 0 on the way. One that has just returned to 0 has a
    slope at its limit, which now falls faster than the limit: it is not steep, and stays.
    """
    first = (sign == 0).all(-1, keepdim=True)
    start = torch.nn.functional.one_hot(slope.abs().argmax(-1), slope.shape[-1]) * slope.sign()
    sign = torch.where(first, start, sign)
    within = sign[:, :, None] * sign[:, None] != 0
    matrix = torch.where(within, gram, torch.diag_embed((sign == 0).to(gram)))
    pace = torch.linalg.solve_ex(matrix, sign[..., None])[0][..., 0] * sign.abs()
    fall = (gram @ pace[..., None])[..., 0]  # of the slopes, while the limit falls by 1

    leave = torch.stack([(level - slope) / (1 - fall), (level + slope) / (1 + fall)])
    steep = torch.stack([1 - fall, 1 + fall]) > 1e-12
    leave = torch.where((sign == 0) & steep, leave.clamp(min=0), torch.inf)
    back = torch.where((sign != 0) & (weights * pace < 0), -weights / pace, torch.inf)
    events = torch.cat([leave[0], leave[1], back, level - target], -1)
    length, which = events.min(-1, keepdim=True)

    dim = slope.shape[-1]
    weights = weights + length * pace
    hit = torch.nn.functional.one_hot(which[:, 0], events.shape[-1]).bool()
    up, down, gone = hit[:, :dim], hit[:, dim : 2 * dim], hit[:, 2 * dim : 3 * dim]
    sign = torch.where(up, 1.0, torch.where(down, -1.0, torch.where(gone, 0.0, sign)))
    level = torch.where(hit[:, -1:], target, level - length)
    return weights.masked_fill(gone, 0), sign, level
