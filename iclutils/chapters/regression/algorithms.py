"""Textbook algorithms, each at every prefix of a context, in float64.

Every algorithm is a function of the pairs (xs, ys) that returns predictions: entry n predicts y_n
from x_n and the pairs 0 .. n-1; entry 0 has seen no pair and is 0. A trained learner has the same
form. Those whose predictions are w·x have a function ``..._weights`` too: entry n holds the
weights learnt from the pairs 0 .. n-1.

Squared errors are summed over the pairs, not averaged, and gradients carry the factor 2 that
comes with squares; so learning rates are absolute and depend on n and d. Where the paper
({cite}`akyurek2023`) and its released code differ, the paper has the plain name and the code the
name ``released_...``. An ``IclError`` is raised by all of them if ys does not fit xs, there is no
pair, or a number is not finite; and if a penalty, rate or count is out of range.

Example:
    >>> import torch
    >>> from iclutils.chapters.regression import algorithms
    >>> xs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> ys = torch.tensor([2.0, 3.0, 5.0])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from .lasso import lasso_from_moments
from .least_squares import before, ols_at_every_prefix, ridge_at_every_prefix

Labels = Float[Tensor, "*label_batch label_n"]  # one for each x; a mismatch is refused with a cure
Predictor = Callable[[Tensor, Tensor], Tensor]
CLIP = 20.0  # the released code keeps every entry of a gradient within this


def predictions(
    weights: Float[Tensor, "*batch n d"], xs: Float[Tensor, "*batch n d"]
) -> Float[Tensor, "*batch n"]:
    """w_n · x_n for the weights of every prefix.

    Example:
        >>> algorithms.predictions(torch.ones(3, 2), xs)
        tensor([1., 1., 2.], dtype=torch.float64)
    """
    return (weights * xs.double()).sum(-1)


def checked(xs: Float[Tensor, "*batch n d"], ys: Labels) -> tuple[Tensor, Tensor]:
    """Both in float64.

    Example:
        >>> algorithms.checked(xs, ys)[0].dtype
        torch.float64
    """
    if xs.ndim < 2 or xs.shape[:-1] != ys.shape:
        raise IclError(
            f"Need xs of (*batch, n, d) and ys of (*batch, n); got {tuple(xs.shape)} and "
            f"{tuple(ys.shape)}."
        )
    if min(xs.shape[-2:]) < 1:
        raise IclError("A context needs at least one pair of at least one dimension.")
    if not (bool(torch.isfinite(xs).all()) and bool(torch.isfinite(ys).all())):
        raise IclError("Pairs must be finite; these hold NaN or infinity. Leave such contexts out.")
    return xs.double(), ys.double()


def ols_weights(xs: Float[Tensor, "*batch n d"], ys: Labels) -> Float[Tensor, "*batch n d"]:
    """Min-norm ordinary least squares, X⁺y.

    The rank is decided at the precision of the data as given: singular values below max(n, d)
    times the machine epsilon of their type, relative to the largest, count as 0. So repeated
    pairs, zero inputs and inputs of a subspace have a defined answer.

    Example:
        >>> algorithms.ols_weights(xs, ys)
        tensor([[0., 0.],
                [2., 0.],
                [2., 3.]], dtype=torch.float64)
    """
    cut = torch.finfo(xs.dtype).eps * max(xs.shape[-2:], default=1)
    x, y = checked(xs, ys)
    flat = ols_at_every_prefix(x.reshape(-1, *x.shape[-2:]), y.reshape(-1, y.shape[-1]), cut)
    return flat.reshape(x.shape)


def ridge_weights(
    xs: Float[Tensor, "*batch n d"], ys: Labels, penalty: float
) -> Float[Tensor, "*batch n d"]:
    """Ridge regression, (XᵀX + penalty I)⁻¹ Xᵀy; without a penalty, min-norm least squares.

    Example:
        >>> algorithms.ridge_weights(xs, ys, penalty=1.0)
        tensor([[0.0000, 0.0000],
                [1.0000, 0.0000],
                [1.0000, 1.5000]], dtype=torch.float64)
    """
    _at_least(penalty, 0.0, "A ridge penalty")
    if penalty == 0:
        return ols_weights(xs, ys)
    x, y = checked(xs, ys)
    flat = x.reshape(-1, *x.shape[-2:]), y.reshape(-1, y.shape[-1])
    return ridge_at_every_prefix(*flat, penalty).reshape(x.shape)


def bayes_weights(
    xs: Float[Tensor, "*batch n d"], ys: Labels, noise: float, prior: float
) -> Float[Tensor, "*batch n d"]:
    """Posterior mean of w ~ N(0, prior² I) given y = w·x + N(0, noise²): ridge (noise/prior)².

    No predictor has a smaller expected squared error, if the noise and the prior are these.

    Example:
        >>> bayes = algorithms.bayes_weights(xs, ys, noise=1.0, prior=2.0)
        >>> torch.allclose(bayes, algorithms.ridge_weights(xs, ys, penalty=0.25))
        True
    """
    _at_least(noise, 0.0, "Noise")
    _above(prior, "A prior")
    return ridge_weights(xs, ys, (noise / prior) ** 2)


def gd_weights(
    xs: Float[Tensor, "*batch n d"],
    ys: Labels,
    rate: float | Float[Tensor, "rate"],
    steps: int = 1,
    penalty: float = 0.0,
) -> Float[Tensor, "*batch n d"]:
    """Full-batch gradient descent from 0 on the pairs of each prefix: w -= 2 rate (Gw - c + λw).

    Here G = XᵀX and c = Xᵀy of the pairs 0 .. n-1. With one step, the paper's GD, w = 2 rate Xᵀy.

    Args:
        xs: inputs.
        ys: labels.
        rate: one for all prefixes, or entry n for the prefix of n pairs (``tuned_rate``).
        steps: how many.
        penalty: λ.

    Example:
        >>> algorithms.gd_weights(xs, ys, rate=0.25)
        tensor([[0.0000, 0.0000],
                [1.0000, 0.0000],
                [1.0000, 1.5000]], dtype=torch.float64)
    """
    if steps < 1:
        raise IclError(f"Gradient descent takes at least one step; got {steps}.")
    _at_least(penalty, 0.0, "A penalty")
    x, y = checked(xs, ys)
    pace = 2 * _rates(rate, y)[:, None]
    moment = before(x * y[..., None])
    weights = pace * moment
    if steps == 1:
        return weights
    gram = _grams(x)
    for _ in range(steps - 1):
        pull = (gram @ weights[..., None])[..., 0] - moment + penalty * weights
        weights = weights - pace * pull
    return weights


def tuned_rate(pairs: int, dim: int, ratio: float = 0.0) -> Float[Tensor, "n"]:
    """The rates at which one step of GD has the least risk, for n = 0 .. pairs - 1.

    They are 1 / (2 (n + d + 1 + noise²/prior²)) for x ~ N(0, I) and w ~ N(0, prior² I): with
    a = 2 rate, E|aXᵀy - w|² is a parabola in a, and E tr(G²) = n d (n + d + 1).

    Example:
        >>> [round(1 / rate.item()) for rate in algorithms.tuned_rate(3, dim=2)]
        [6, 8, 10]
    """
    return 0.5 / (torch.arange(pairs, dtype=torch.float64) + dim + 1 + ratio)


def sgd_weights(
    xs: Float[Tensor, "*batch n d"], ys: Labels, rate: float, penalty: float = 0.0
) -> Float[Tensor, "*batch n d"]:
    """One pass of stochastic gradient descent, a pair a step: w -= 2 rate (x(x·w) - xy + λw).

    No loop: with q = 1 - 2 rate λ the errors e_n = y_n - w_n·x_n solve the triangular system
    e_n + 2 rate Σ_{i<n} q^(n-1-i) (x_n·x_i) e_i = y_n, and the weights are sums of x_i e_i.

    Example:
        >>> algorithms.sgd_weights(xs, ys, rate=0.25)
        tensor([[0.0000, 0.0000],
                [1.0000, 0.0000],
                [1.0000, 1.5000]], dtype=torch.float64)
    """
    _above(rate, "A learning rate")
    _at_least(penalty, 0.0, "A penalty")
    x, y = checked(xs, ys)
    place = torch.arange(y.shape[-1], device=x.device)
    age = (place[:, None] - place - 1).clamp(min=0)
    decay = torch.pow(torch.full_like(age, 1 - 2 * rate * penalty, dtype=x.dtype), age)
    decay = 2 * rate * decay.tril(-1)
    system = decay * (x @ x.mT) + torch.eye(len(age), dtype=x.dtype, device=x.device)
    errors = torch.linalg.solve_triangular(system, y[..., None], upper=False, unitriangular=True)
    return decay @ (x * errors)


def released_sgd_weights(
    xs: Float[Tensor, "*batch n d"], ys: Labels, rate: float, penalty: float = 0.0
) -> Float[Tensor, "*batch n d"]:
    """As ``sgd_weights``, with every entry of a gradient kept within ±20.

    Example:
        >>> algorithms.released_sgd_weights(xs, ys, rate=0.25)
        tensor([[0.0000, 0.0000],
                [1.0000, 0.0000],
                [1.0000, 1.5000]], dtype=torch.float64)
    """
    return _released(xs, ys, rate, penalty, growing=False)


def released_gd_weights(
    xs: Float[Tensor, "*batch n d"], ys: Labels, rate: float, penalty: float = 0.0
) -> Float[Tensor, "*batch n d"]:
    """What the released code runs as GD: n steps, step i on the first i + 1 pairs, within ±20.

    It starts from 0 for each prefix, and as a step never sees later pairs, one run serves all.

    Example:
        >>> algorithms.released_gd_weights(xs, ys, rate=0.25)
        tensor([[0.0000, 0.0000],
                [1.0000, 0.0000],
                [1.5000, 1.5000]], dtype=torch.float64)
    """
    return _released(xs, ys, rate, penalty, growing=True)


def _released(xs: Tensor, ys: Tensor, rate: float, penalty: float, growing: bool) -> Tensor:
    _above(rate, "A learning rate")
    _at_least(penalty, 0.0, "A penalty")
    x, y = checked(xs, ys)
    weights = torch.zeros_like(x)
    for n in range(x.shape[-2] - 1):
        rows = slice(0 if growing else n, n + 1)
        w = weights[..., n, :, None]
        error = x[..., rows, :] @ w - y[..., rows, None]
        gradient = 2 * (x[..., rows, :].mT @ error + penalty * w)
        weights[..., n + 1, :] = (w - rate * gradient.clamp(-CLIP, CLIP))[..., 0]
    return weights


def averaging_weights(xs: Float[Tensor, "*batch n d"], ys: Labels) -> Float[Tensor, "*batch n d"]:
    """The mean of x y ({cite}`garg2022`): one step of GD at the rate 1 / (2n)."""
    x, y = checked(xs, ys)
    count = torch.arange(y.shape[-1], dtype=x.dtype, device=x.device).clamp(min=1)
    return before(x * y[..., None]) / count[:, None]


def lasso_weights(
    xs: Float[Tensor, "*batch n d"], ys: Labels, penalty: float
) -> Float[Tensor, "*batch n d"]:
    """The minimum of |y - Xw|² / (2n) + penalty |w|₁: scikit-learn's lasso ({cite}`garg2022`).

    Example:
        >>> algorithms.lasso_weights(xs, ys, penalty=0.5)
        tensor([[0.0000, 0.0000],
                [1.5000, 0.0000],
                [1.0000, 2.0000]], dtype=torch.float64)
    """
    _above(penalty, "The lasso's penalty")
    x, y = checked(xs, ys)
    dim = x.shape[-1]
    count = torch.arange(y.shape[-1], dtype=x.dtype, device=x.device)
    limits = (count * penalty).expand(y.shape).reshape(-1)
    moments = before(x * y[..., None]).reshape(-1, dim)
    return lasso_from_moments(_grams(x).reshape(-1, dim, dim), moments, limits).reshape(x.shape)


def knn(
    xs: Float[Tensor, "*batch n d"], ys: Labels, k: int = 3, power: float = 0.0
) -> Float[Tensor, "*batch n"]:
    """Mean label of the k nearest pairs before, weighted by distance to the power of -``power``.

    With fewer than k pairs, all of them count; where a pair lies at the query itself and power is
    above 0, such pairs alone. The paper takes k = 3 with powers 0 and 2, the released code k = 5
    with powers 0 and 1.

    Example:
        >>> algorithms.knn(xs, ys, k=1)
        tensor([0., 2., 2.], dtype=torch.float64)
    """
    if k < 1:
        raise IclError(f"k-NN needs at least one neighbour; got k={k}.")
    _at_least(power, 0.0, "The power of the distance")
    x, y = checked(xs, ys)
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    later = torch.ones_like(apart).triu().bool()
    near, index = apart.masked_fill(later, torch.inf).topk(min(k, y.shape[-1]), largest=False)
    label = y[..., None, :].expand_as(apart).gather(-1, index)
    far = near.clamp(min=1e-300).log().mul(power).masked_fill(torch.isinf(near), torch.inf)
    weight = (far.amin(-1, keepdim=True) - far).exp().nan_to_num(0)  # no pair yet: inf - inf
    return (weight * label).sum(-1) / weight.sum(-1).clamp(min=torch.finfo(x.dtype).tiny)


def ols(xs: Float[Tensor, "*batch n d"], ys: Labels) -> Float[Tensor, "*batch n"]:
    """Predictions of ``ols_weights``.

    Example:
        >>> algorithms.ols(xs, ys)
        tensor([0., 0., 5.], dtype=torch.float64)
    """
    return predictions(ols_weights(xs, ys), xs)


def ridge(xs: Float[Tensor, "*batch n d"], ys: Labels, penalty: float) -> Float[Tensor, "*batch n"]:
    """Predictions of ``ridge_weights``.

    Example:
        >>> algorithms.ridge(xs, ys, penalty=1.0).round(decimals=2)
        tensor([0.0000, 0.0000, 2.5000], dtype=torch.float64)
    """
    return predictions(ridge_weights(xs, ys, penalty), xs)


@dataclass(frozen=True)
class Linear:
    """A predictor that has weights: call it for predictions."""

    weights: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, xs: Float[Tensor, "*batch n d"], ys: Labels) -> Float[Tensor, "*batch n"]:
        return predictions(self.weights(xs, ys), xs)


def _grams(xs: Tensor) -> Tensor:
    """XᵀX of the pairs 0 .. n-1, for every n: (*batch, n, d, d)."""
    outer = xs[..., :, None] * xs[..., None, :]
    return before(outer.flatten(-2)).reshape(outer.shape)


def _rates(rate: float | Tensor, ys: Tensor) -> Tensor:
    """One learning rate for each prefix."""
    rates = torch.as_tensor(rate, dtype=ys.dtype, device=ys.device)
    if rates.ndim and rates.shape != ys.shape[-1:]:
        raise IclError(f"Need one rate, or {ys.shape[-1]}, one for each prefix; got {len(rates)}.")
    _above(float(rates.min()), "A learning rate")
    _above(float(rates.max()), "A learning rate")
    return rates.expand(ys.shape[-1:])


def _at_least(value: float, least: float, name: str) -> None:
    if not least <= value < math.inf:
        raise IclError(f"{name} must be finite and at least {least}; got {value}.")


def _above(value: float, name: str) -> None:
    if not 0 < value < math.inf:
        raise IclError(f"{name} must be finite and above 0; got {value}.")
