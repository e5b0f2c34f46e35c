"""Formulas: what the constructions compute, written plainly, in the precision of the data.

They show what the precision alone costs. The measure of truth is ``regression.algorithms``.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def gradient_steps(
    xs: Float[Tensor, "*batch n d"], ys: Float[Tensor, "*batch n"], rate: float, penalty: float
) -> Float[Tensor, "*batch n"]:
    """Prediction of each y after a step on each pair before it: w - 2α (x (xᵀw - y) + λ w)."""
    weights = torch.zeros_like(xs[..., 0, :])
    out = []
    for x, y in zip(xs.unbind(-2), ys.unbind(-1), strict=True):
        out.append((x * weights).sum(-1))
        weights = weights - 2 * rate * (x * (out[-1] - y)[..., None] + penalty * weights)
    return torch.stack(out, -1)


def sherman_morrison(
    xs: Float[Tensor, "*batch n d"], ys: Float[Tensor, "*batch n"], penalty: float
) -> Float[Tensor, "*batch n"]:
    """Prediction of each y by A⁻¹b, with A⁻¹ updated by each pair before it from I/λ."""
    inverse = torch.eye(xs.shape[-1], dtype=xs.dtype, device=xs.device) / penalty
    moment = torch.zeros_like(xs[..., 0, :])
    out = []
    for x, y in zip(xs.unbind(-2), ys.unbind(-1), strict=True):
        out.append((x * (inverse @ moment[..., None])[..., 0]).sum(-1))
        u = (inverse @ x[..., None])[..., 0]
        q = 1 + (x * u).sum(-1)
        inverse = inverse - u[..., :, None] * u[..., None, :] / q[..., None, None]
        moment = moment + x * y[..., None]
    return torch.stack(out, -1)
