"""Textbook algorithms, each at every prefix of a context, in float64.

From the pairs (xs, ys) each y_n is predicted from x_n and the pairs 0 .. n-1; the first prediction
is 0. ``ols`` and ``ridge`` predict w·x, ``ols_weights`` is that w, and so for each name.
Gradients are of summed squares, so that rates are absolute."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import qr, solve_triangular

from ...errors import IclError, unknown

Xs = Float[Tensor, "*batch n d"]
Labels = Float[Tensor, "*label_batch label_n"]  # one for each x; a mismatch is refused with a cure
Weights = Float[Tensor, "*batch n d"]
Predictor = Callable[[Tensor, Tensor], Tensor]
WORST = 1e5  # condition of the first d pairs beyond which OLS takes another way
PENALTIES = (  # of ridge, in the wide baselines
    *("1/64", "1/32", "1/16", "1/10", "1/9", "1/8", "1/4", "4/9", "1/2"),
    *("1", "2", "4", "8", "16"),
)


@dataclass(frozen=True)
class Linear:
    """An algorithm that learns weights: call it for its predictions."""

    weights: Callable[..., Tensor]

    def __call__(self, xs: Xs, ys: Labels, *settings: object, **named: object) -> Tensor:
        return predictions(self.weights(xs, ys, *settings, **named), xs)


def predictions(weights: Weights, xs: Xs) -> Float[Tensor, "*batch n"]:
    """Return w_n · x_n for the weights of every prefix."""
    return (weights * xs.double()).sum(-1)


def ols_weights(xs: Xs, ys: Labels) -> Weights:
    """Return min-norm ordinary least squares, X⁺y. Singular values below max(n, d) times the
    machine epsilon of the data, relative to the largest, count as 0."""
    x, y = _check(xs, ys)
    cut = torch.finfo(xs.dtype).eps * max(xs.shape[-2:], default=1)
    flat = x.reshape(-1, *x.shape[-2:]), y.reshape(-1, y.shape[-1])
    weights, well = _well_conditioned(*flat, cut)
    if not bool(well.all()):
        weights[~well] = _one_by_one(flat[0][~well], flat[1][~well], cut)
    return weights.reshape(x.shape)


def ridge_weights(xs: Xs, ys: Labels, penalty: float) -> Weights:
    """Return ridge regression, (XᵀX + penalty I)⁻¹ Xᵀy; without a penalty, min-norm least squares.
    With noise and w ~ N(0, prior² I), the penalty (noise/prior)² gives the posterior mean."""
    return _ridge(*_check(xs, ys), penalty) if penalty else ols_weights(xs, ys)


def gd_weights(xs: Xs, ys: Labels, rate: float | Float[Tensor, "rate"], steps: int = 1) -> Weights:
    """Take steps of full-batch gradient descent from 0 on each prefix: w -= 2 rate (XᵀXw - Xᵀy).
    ``rate`` is one for all prefixes, or has entry n for the prefix of n pairs (``tuned_rate``)."""
    x, y = _check(xs, ys)
    rates = torch.as_tensor(rate, dtype=y.dtype, device=y.device)
    pace = 2 * rates.expand(y.shape[-1:])[:, None]
    moments = _before(x * y[..., None])
    weights = pace * moments
    if steps > 1:  # XᵀX of the pairs 0 .. n-1, for every n
        outer = x[..., :, None] * x[..., None, :]
        grams = _before(outer.flatten(-2)).reshape(outer.shape)
    for _ in range(steps - 1):
        weights = weights - pace * ((grams @ weights[..., None])[..., 0] - moments)
    return weights


def tuned_rate(pairs: int, dim: int, ratio: float = 0.0) -> Float[Tensor, "n"]:
    """Return the rates 1 / (2 (n + d + 1 + ``ratio``)), at which one step of GD has the least risk:
    x ~ N(0, I), w ~ N(0, prior² I), ``ratio`` noise²/prior², E tr((XᵀX)²) = n d (n + d + 1)."""
    return 0.5 / (torch.arange(pairs, dtype=torch.float64) + dim + 1 + ratio)


def sgd_weights(xs: Xs, ys: Labels, rate: float) -> Weights:
    """Take one pass of stochastic gradient descent, a pair a step: w -= 2 rate (x(x·w) - xy). No
    loop: the errors e_n = y_n - w_n·x_n solve the triangular system e_n + 2 rate Σ_{i<n} (x_n·x_i)
    e_i = y_n, and the weights are sums of 2 rate x_i e_i."""
    x, y = _check(xs, ys)
    eye = torch.eye(y.shape[-1], dtype=x.dtype, device=x.device)
    system = (2 * rate * (x @ x.mT)).tril(-1) + eye
    errors = solve_triangular(system, y[..., None], upper=False, unitriangular=True)
    return 2 * rate * _before(x * errors)


def averaging_weights(xs: Xs, ys: Labels) -> Weights:
    """Return the mean of x y ({cite}`garg2022`): one step of GD at the rate 1 / (2n)."""
    x, y = _check(xs, ys)
    count = torch.arange(y.shape[-1], dtype=x.dtype, device=x.device).clamp(min=1)
    return _before(x * y[..., None]) / count[:, None]


ols, ridge = Linear(ols_weights), Linear(ridge_weights)
gd, sgd = Linear(gd_weights), Linear(sgd_weights)


def knn(xs: Xs, ys: Labels, k: int = 3, power: float = 0.0) -> Float[Tensor, "*batch n"]:
    """Return the mean label of the k nearest pairs before, weighted by distance to the power of
    ``-power`` (the paper: 0 and 2); with a power, pairs at the query itself count alone."""
    x, y = _check(xs, ys)
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    later = torch.ones_like(apart).triu().bool()
    near, index = apart.masked_fill(later, torch.inf).topk(min(k, y.shape[-1]), largest=False)
    label = y[..., None, :].expand_as(apart).gather(-1, index)
    far = near.clamp(min=1e-300).log().mul(power).masked_fill(torch.isinf(near), torch.inf)
    weight = (far.amin(-1, keepdim=True) - far).exp().nan_to_num(0)  # no pair yet: inf - inf
    return (weight * label).sum(-1) / weight.sum(-1).clamp(min=torch.finfo(x.dtype).tiny)


def baselines(which: str = "wide", ratio: float = 0.0) -> dict[str, Predictor]:
    """Return algorithms to compare a regressor with, by name; those with weights are ``Linear``.

    ``which``: ``paper``, those of {cite}`akyurek2023`; ``wide``, more ridge penalties and rates,
    averaging, GD of several steps, and the best rates for ``ratio``, the task's noise²/prior²
    (SGD: 1 / (2 (d + 2)), at which |w - w_n|² shrinks fastest)."""
    if which not in ("wide", "paper"):
        raise unknown("set of baselines", which, ["wide", "paper"])
    wide = which == "wide"
    more = (0.05, 0.1) if wide else ()
    linear: dict[str, Callable[..., Tensor]] = {"OLS": ols_weights}
    for penalty in PENALTIES if wide else ("1/10", "1/2"):
        linear[f"ridge {penalty}"] = partial(ridge_weights, penalty=float(Fraction(penalty)))
    linear |= {f"GD {rate}": partial(gd_weights, rate=rate) for rate in (0.01, 0.02, *more)}
    linear |= {f"SGD {rate}": partial(sgd_weights, rate=rate) for rate in (0.01, 0.03, *more)}
    if wide:
        for steps in (1, 2, 4, 8):
            name = "GD best" if steps == 1 else f"GD best, {steps} steps"
            linear[name] = lambda xs, ys, steps=steps: gd_weights(
                xs, ys, tuned_rate(xs.shape[-2], xs.shape[-1], ratio), steps
            )
        linear["SGD best"] = lambda xs, ys: sgd_weights(xs, ys, 0.5 / (xs.shape[-1] + 2))
        linear["averaging"] = averaging_weights
    neighbours = {"3-NN": partial(knn, k=3), "3-NN 1/r²": partial(knn, k=3, power=2.0)}
    return {**{name: Linear(weights) for name, weights in linear.items()}, **neighbours}


# Least squares at every prefix at once.
# Ridge: let X Xᵀ + λI = L Lᵀ (Cholesky) for the n rows of a context. The leading rows of L⁻¹X and
# L⁻¹y depend on the leading pairs alone, and w_n = Σ_{i<n} (L⁻¹X)ᵢ (L⁻¹y)ᵢ. A thin QR of
# [X, sqrt(λ) I]ᵀ gives L⁻¹X and L⁻¹ sqrt(λ), at the square root of the condition.
# OLS: up to d pairs from the thin QR of X_dᵀ. Later prefixes are a ridge problem with λ = 1 for
# v = X_d w: the first d pairs say v ≈ y_d, the others are the rows of X_rest X_d⁻¹. Contexts whose
# first d pairs are nearly dependent are solved prefix by prefix.


def _ridge(xs: Tensor, ys: Tensor, penalty: float) -> Tensor:
    root, (pairs, dim) = penalty**0.5, xs.shape[-2:]
    beside = root * torch.eye(pairs, dtype=xs.dtype, device=xs.device)
    basis = qr(torch.cat([xs, beside.expand(*xs.shape[:-1], pairs)], -1).mT).Q
    surprise = basis[..., dim:, :].mT @ ys[..., None] / root
    return _before(basis[..., :dim, :].mT * surprise)


def _well_conditioned(xs: Tensor, ys: Tensor, cut: float) -> tuple[Tensor, Tensor]:
    """Return weights, and in which contexts they can be trusted."""
    pairs, dim = xs.shape[-2:]
    first = min(pairs, dim)
    basis, upper = qr(xs[:, :first].mT)
    eye = torch.eye(first, dtype=xs.dtype, device=xs.device)
    inverse = solve_triangular(upper, eye.expand_as(upper), upper=True)
    condition = torch.linalg.matrix_norm(xs) * torch.linalg.matrix_norm(inverse)
    well = condition < min(WORST, 1 / cut)
    lower = torch.where(well[:, None, None], upper, eye).mT
    terms = basis.mT * solve_triangular(lower, ys[:, :first, None], upper=False)
    weights = _before(terms)
    if pairs == first:
        return weights, well
    whole = terms.sum(-2)
    turned = solve_triangular(lower, xs[:, first:] @ basis, upper=False, left=False)
    left = ys[:, first:] - (xs[:, first:] @ whole[..., None])[..., 0]
    change = _ridge(turned, left, 1.0)
    later = solve_triangular(lower, change.mT, upper=False).mT @ basis.mT
    return torch.cat([weights, whole[:, None] + later], -2), well


def _one_by_one(xs: Tensor, ys: Tensor, cut: float) -> Tensor:
    """Return weights by a singular value decomposition for each context and prefix."""
    seen = torch.ones(*[xs.shape[-2]] * 2, dtype=xs.dtype, device=xs.device).tril(-1)
    prefixes = xs[:, None] * seen[..., None]  # (context, prefix, pair, d), 0 from the prefix on
    left, sizes, axes = torch.linalg.svd(prefixes, full_matrices=False)
    along = (left.mT @ ys[:, None, :, None])[..., 0]  # (context, prefix, rank)
    share = torch.where(sizes > cut * sizes[..., :1], along / sizes, 0)
    return (share[..., None, :] @ axes)[..., 0, :]


def _before(terms: Tensor) -> Tensor:
    """Return as entry n the sum of the entries 0 .. n-1."""
    return torch.cat([torch.zeros_like(terms[..., :1, :]), terms[..., :-1, :].cumsum(-2)], -2)


def _check(xs: Xs, ys: Labels) -> tuple[Tensor, Tensor]:
    if xs.shape[:-1] != ys.shape or not bool(xs.isfinite().all() and ys.isfinite().all()):
        shapes = f"{tuple(xs.shape)} and {tuple(ys.shape)}, or NaN or infinity"
        raise IclError(f"Need finite xs of (*batch, n, d) and ys of (*batch, n); got {shapes}.")
    return xs.double(), ys.double()
