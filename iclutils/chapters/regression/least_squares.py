"""Least squares at every prefix of a context at once, without a loop over the prefixes.

Ridge. Let K = X Xᵀ + λI for the n rows of a context and K = L Lᵀ its Cholesky factor. The leading
rows of L⁻¹X and L⁻¹y depend on the leading pairs alone, and w_n = Xₙᵀ Kₙ⁻¹ yₙ is the sum of
(L⁻¹X)ᵢ (L⁻¹y)ᵢ over i < n: one factor serves all prefixes, and the weights are a running sum. K
is never formed. A thin QR of the matrix that has X beside sqrt(λ) I, transposed, gives L⁻¹X and
L⁻¹ sqrt(λ) as the two parts of its orthonormal factor, at the square root of K's condition.

OLS. The first d pairs X_d = L Qᵀ (a thin QR of X_dᵀ) give the min-norm weights of the prefixes up
to d in the same way, the rows of Qᵀ now in the place of L⁻¹X. Later prefixes are a ridge problem
with λ = 1 in other coordinates: with v = X_d w the first d pairs say v ≈ y_d, and the others are
the rows of X_rest X_d⁻¹. Where the first d pairs are nearly dependent this loses digits; those
contexts are first turned into the space they span, and if that does not help, solved prefix by
prefix with a singular value decomposition.

Example:
    >>> import torch
    >>> from iclutils.chapters.regression import least_squares
    >>> xs = torch.tensor([[[1.0], [2.0], [3.0]]], dtype=torch.float64)
    >>> ys = torch.tensor([[2.0, 4.0, 9.0]], dtype=torch.float64)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import qr, solve_triangular

WORST = 1e5  # condition of the first d pairs beyond which a context takes the slow road


def ridge_at_every_prefix(
    xs: Float[Tensor, "batch n d"], ys: Float[Tensor, "batch n"], penalty: float
) -> Float[Tensor, "batch n d"]:
    """Entry n: (XᵀX + penalty I)⁻¹ Xᵀy of the pairs 0 .. n-1; ``penalty`` must be positive.

    Both tensors in float64. Time grows with the cube of n and not with d.
    """
    root = penalty**0.5
    pairs, dim = xs.shape[-2:]
    beside = (root * torch.eye(pairs, dtype=xs.dtype, device=xs.device)).expand(len(xs), -1, -1)
    basis = qr(torch.cat([xs, beside], -1).mT).Q
    surprise = basis[:, dim:].mT @ ys[..., None] / root
    return before(basis[:, :dim].mT * surprise)


def ols_at_every_prefix(
    xs: Float[Tensor, "batch n d"], ys: Float[Tensor, "batch n"], cut: float
) -> Float[Tensor, "batch n d"]:
    """Entry n: the min-norm least-squares weights of the pairs 0 .. n-1.

    Args:
        xs: in float64.
        ys: in float64.
        cut: singular values of at most ``cut`` times the largest count as 0.
    """
    weights, well = _well_conditioned(xs, ys, cut)
    if bool(well.all()):
        return weights
    weights[~well] = _ill_conditioned(xs[~well], ys[~well], cut)
    return weights


def before(terms: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
    """Entry n: the sum of the entries 0 .. n-1.

    Example:
        >>> least_squares.before(xs)[0, :, 0]
        tensor([0., 1., 3.], dtype=torch.float64)
    """
    return torch.cat([torch.zeros_like(terms[..., :1, :]), terms[..., :-1, :].cumsum(-2)], -2)


def _well_conditioned(xs: Tensor, ys: Tensor, cut: float) -> tuple[Tensor, Tensor]:
    """Weights, and in which contexts they can be trusted."""
    pairs, dim = xs.shape[-2:]
    first = min(pairs, dim)
    basis, upper = qr(xs[:, :first].mT)
    eye = torch.eye(first, dtype=xs.dtype, device=xs.device)
    inverse = solve_triangular(upper, eye.expand_as(upper), upper=True)
    condition = torch.linalg.matrix_norm(xs) * torch.linalg.matrix_norm(inverse)
    well = condition < min(WORST, 1 / cut)
    lower = torch.where(well[:, None, None], upper, eye).mT
    start = solve_triangular(lower, ys[:, :first, None], upper=False)
    terms = basis.mT * start
    weights = before(terms)
    if pairs == first:
        return weights, well
    whole = terms.sum(-2)
    turned = solve_triangular(lower, xs[:, first:] @ basis, upper=False, left=False)
    left = ys[:, first:] - (xs[:, first:] @ whole[..., None])[..., 0]
    change = ridge_at_every_prefix(turned, left, 1.0)
    later = solve_triangular(lower, change.mT, upper=False).mT @ basis.mT
    return torch.cat([weights, whole[:, None] + later], -2), well


def _ill_conditioned(xs: Tensor, ys: Tensor, cut: float) -> Tensor:
    """The same for contexts of low rank, or that come close to it."""
    _, sizes, axes = torch.linalg.svd(xs, full_matrices=False)
    ranks = (sizes > cut * sizes[:, :1]).sum(-1)
    weights = torch.zeros_like(xs)
    for rank in ranks.unique().tolist():
        rows = (ranks == rank).nonzero()[:, 0]
        if rank == 0:
            continue
        axis = axes[rows, :rank].mT
        inner, well = _well_conditioned(xs[rows] @ axis, ys[rows], cut)
        weights[rows] = inner @ axis.mT
        for row in rows[~well].tolist():
            weights[row] = _one_by_one(xs[row], ys[row], cut)
    return weights


def _one_by_one(xs: Tensor, ys: Tensor, cut: float) -> Tensor:
    """One context, a singular value decomposition for each prefix."""
    seen = torch.ones(len(xs), len(xs), dtype=xs.dtype, device=xs.device).tril(-1)
    left, sizes, axes = torch.linalg.svd(xs * seen[..., None], full_matrices=False)
    along = (left.mT @ ys[:, None])[..., 0]
    share = torch.where(sizes > cut * sizes[:, :1], along / sizes, 0)
    return (share[:, None] @ axes)[:, 0]
