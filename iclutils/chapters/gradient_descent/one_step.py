"""The best single step of gradient descent in context, in closed form: a rate, or a matrix.

Contexts of N pairs, their inputs centred with covariance S; w ~ N(0, W), y = w·x + N(0, noise²).
One step from 0, with a matrix A in the place of the rate, answers x_qᵀ A (1/N) Σ_i x_i y_i. Half
its expected squared error is ½ [tr(S A M Aᵀ) - 2 tr(A S W S) + tr(S W) + noise²], where M is
E[Ŝ W Ŝ] + (noise²/N) S and Ŝ = (1/N) Σ_i x_i x_iᵀ. So A = W S M⁻¹ is best.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import one_step
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError


class OneStep(NamedTuple):
    """The best rate of one step from 0, its loss, and the loss of answering 0."""

    rate: float
    loss: float
    zero: float


def one_step_optimum(
    dim: int, pairs: int, variance: float, fourth: float, noise: float = 0.0
) -> OneStep:
    """Of independent coordinates of one law, and W = I: η = s²/a, where s² is the variance.

    a = E[(Ŝ²)_ii] + noise² s²/N = (m + (d - 1) s⁴ + (N - 1) s⁴ + noise² s²) / N, for the fourth
    moment m. The loss is ½ d s² (1 - s⁴/a) + noise²/2 ({cite}`mahankali2023`, the optimal step).

    Example:
        >>> best = one_step.one_step_optimum(dim=1, pairs=1, variance=1.0, fourth=3.0)
        >>> round(best.rate, 4)
        0.3333
    """
    if dim < 1:
        raise IclError(f"x needs a dimension of at least 1; got {dim}.")
    moments = torch.tensor([[variance], [fourth]], dtype=torch.float64)
    _checked_moments(moments[0], moments[1], pairs, noise)
    square = variance**2
    a = (fourth + (dim + pairs - 2) * square + noise**2 * variance) / pairs
    own = noise**2 / 2
    loss = dim * variance * (1 - square / a) / 2 + own
    return OneStep(variance / a, loss, dim * variance / 2 + own)


class Preconditioner(NamedTuple):
    """The best matrix A of one step, beside the best rate; each with its expected loss."""

    matrix: Float[Tensor, "d d"]
    loss: float
    rate: float
    rate_loss: float
    zero: float  # the loss of answering 0


def preconditioner(
    variances: Float[Tensor, "d"],
    fourths: Float[Tensor, "d_fourth"],
    pairs: int,
    prior: Float[Tensor, "d_prior d_prior"] | None = None,
    noise: float = 0.0,
) -> Preconditioner:
    """Of independent coordinates with variances and fourth moments of their own; W = I if omitted.

    M_ij = (1 + 1/N) s_i s_j W_ij off the diagonal, and on it (W_ii m_i + s_i Σ_{k≠i} W_kk s_k)/N +
    (1 - 1/N) W_ii s_i². For W = I, A is diagonal ({cite}`ahn2023`, {cite}`mahankali2023`).

    Example:
        >>> even = one_step.preconditioner(torch.ones(2), torch.full((2,), 3.0), pairs=10)
        >>> best = one_step.one_step_optimum(dim=2, pairs=10, variance=1.0, fourth=3.0)
        >>> torch.allclose(even.matrix, best.rate * torch.eye(2, dtype=even.matrix.dtype))
        True
    """
    s, m = variances.double(), fourths.double()
    if s.shape != m.shape:
        raise IclError(f"Need a fourth moment for each of {len(s)} variances; got {len(m)}.")
    _checked_moments(s, m, pairs, noise)
    weights = _prior(prior, s)
    spread = weights.diagonal() * s
    moment = (1 + 1 / pairs) * s[:, None] * weights * s
    own = (weights.diagonal() * m + s * (spread.sum() - spread)) / pairs
    own = own + (1 - 1 / pairs) * spread * s
    moment = moment - moment.diagonal().diag() + own.diag()
    return _best(s.diag(), weights, moment, pairs, noise)


def gaussian_preconditioner(
    covariance: Float[Tensor, "d d"],
    pairs: int,
    prior: Float[Tensor, "d_prior d_prior"] | None = None,
    noise: float = 0.0,
) -> Preconditioner:
    """Of x ~ N(0, S): M = (1 + 1/N) S W S + tr(W S) S / N.

    For W = I without noise, A = ((1 + 1/N) S + tr(S)/N I)⁻¹ ({cite}`ahn2023`, theorem 1;
    {cite}`zhang2024`).
    """
    s = covariance.double()
    _positive(s, "covariance")
    _checked_moments(s.diagonal(), 3 * s.diagonal().square(), pairs, noise)
    weights = _prior(prior, s.diagonal())
    moment = (1 + 1 / pairs) * s @ weights @ s + (weights @ s).trace() / pairs * s
    return _best(s, weights, moment, pairs, noise)


def _best(s: Tensor, weights: Tensor, moment: Tensor, pairs: int, noise: float) -> Preconditioner:
    moment = moment + noise**2 / pairs * s
    matrix = torch.linalg.solve(moment, s @ weights).mT
    zero = (s @ weights).trace() + noise**2
    gain = s @ weights @ s
    loss = zero - (matrix @ gain).trace()
    cost = (s @ moment).trace()
    rate = gain.trace() / cost
    rate_loss = zero - rate * gain.trace()
    return Preconditioner(
        matrix, float(loss) / 2, float(rate), float(rate_loss) / 2, float(zero) / 2
    )


def _prior(prior: Tensor | None, like: Tensor) -> Tensor:
    if prior is None:
        return torch.eye(len(like), dtype=like.dtype, device=like.device)
    if prior.shape != (len(like), len(like)):
        raise IclError(f"The prior of w must be {len(like)} x {len(like)}; got {prior.shape}.")
    _positive(prior, "prior")
    return prior.to(like)


def _positive(matrix: Tensor, name: str) -> None:
    symmetric = bool(torch.isfinite(matrix).all()) and torch.allclose(matrix, matrix.mT)
    if not symmetric or bool((torch.linalg.eigvalsh(matrix) <= 0).any()):
        raise IclError(f"The {name} must be symmetric and positive definite.")


def _checked_moments(variances: Tensor, fourths: Tensor, pairs: int, noise: float) -> None:
    if pairs < 1 or not 0 <= noise < math.inf:
        raise IclError(f"Need at least 1 pair and noise >= 0; got {pairs} and {noise}.")
    sound = (variances > 0) & (fourths >= variances.square() * (1 - 1e-9)) & fourths.isfinite()
    if not bool(sound.all()):
        raise IclError(
            "Variances must be above 0 and fourth moments finite and at least their squares; got "
            f"{variances.tolist()} and {fourths.tolist()}."
        )
