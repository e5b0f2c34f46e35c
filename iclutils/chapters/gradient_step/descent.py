"""Gradient descent on the least-squares loss of a context, explicit, and its best settings.

A context is N pairs and, last, the query, whose y is never read. With the loss 1/(2N) Σ_i |W
x_i - y_i|² a step of GD is W -= (η/N) Σ_i (W x_i - y_i) x_iᵀ; GD++ ({cite}`vonoswald2023`) also
maps every x by I - γ Σ_i x_i x_iᵀ. A setting costs half the mean squared error of the query's
answer."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...progress import bar

Labels = Float[Tensor, "*batch n"]
Settings = Sequence[float] | Float[Tensor, "_"]
Spectra = tuple[Tensor, ...]  # of contexts: λ over their mean, b and query (batch, d), y (batch)


class Descent(NamedTuple):
    """The answers after 0 .. K steps, and the weights W behind them: an answer is W x_q."""

    predictions: Float[Tensor, "step *batch"]
    weights: Float[Tensor, "step *batch d"]


def descend(
    xs: Float[Tensor, "*batch n d"], ys: Labels, rates: Settings, gammas: Settings | None = None
) -> Descent:
    """Take steps of GD, or GD++ if there are gammas: a step for each rate, from W = 0. All of a
    step reads what was there before it, as in a layer of attention."""
    pairs, y = xs[..., :-1, :], ys.to(xs)[..., :-1, None]  # (*batch, N, d), (*batch, N, 1)
    weights = torch.zeros_like(xs[..., :1, :])  # (*batch, 1, d)
    mapped = torch.eye(xs.shape[-1]).to(xs)  # what GD++ has done to x so far, (*batch, d, d)
    steps = [weights]
    squeezes = [0.0] * len(rates) if gammas is None else gammas
    for rate, gamma in zip(map(float, rates), map(float, squeezes), strict=True):
        change = rate / pairs.shape[-2] * y.mT @ pairs  # (*batch, 1, d)
        y = y - pairs @ change.mT  # what is left of the labels
        weights = weights + change @ mapped
        steps.append(weights)
        if gamma:
            moment = pairs.mT @ pairs
            mapped = mapped - gamma * moment @ mapped
            pairs = pairs - gamma * pairs @ moment
    path = torch.stack(steps)  # (step, *batch, 1, d)
    return Descent((path @ xs[..., -1, :, None])[..., 0, 0], path[..., 0, :])


def predictor(
    rates: Settings, gammas: Settings | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the answers of the last step from 0, as a function of (xs, ys)."""
    return lambda xs, ys: descend(xs, ys, rates, gammas).predictions[-1]


class BestStep(NamedTuple):
    """The best matrix A in the place of the rate; the best rate, and its expected loss."""

    matrix: Float[Tensor, "d d"]
    rate: float
    rate_loss: float


def best_step(
    dim: int,
    pairs: int,
    variances: float | Float[Tensor, "dim"],
    fourths: float | Float[Tensor, "dim"],
) -> BestStep:
    """Return the best single step from 0, in closed form, for independent centred inputs, w ~ N(0,
    I). It answers x_qᵀ A (1/N) Σ_i x_i y_i; half its expected squared error is ½ tr[S A M Aᵀ - 2 A
    S² + S], with S the variances s_i, and M = E[Ŝ²] for Ŝ = (1/N) Σ x_i x_iᵀ diagonal,
    M_ii = (m_i + s_i Σ_{k≠i} s_k)/N + (1 - 1/N) s_i² for fourth moments m_i. So A = S M⁻¹ is best
    ({cite}`ahn2023`, {cite}`mahankali2023`)."""
    s, m = (torch.as_tensor(x, dtype=torch.float64).expand(dim) for x in (variances, fourths))
    moment = (m + s * (s.sum() - s)) / pairs + (1 - 1 / pairs) * s.square()
    gain = s.square().sum()
    rate = gain / (s * moment).sum()
    return BestStep((s / moment).diag(), float(rate), float(s.sum() - rate * gain) / 2)


def best_rates(steps: int, xs: Float[Tensor, "batch n d"]) -> Float[Tensor, "step"]:
    """Return the rates, one for each step from 0, of the least loss over w ~ N(0, I) and isotropic
    queries, in float64, smallest first (their order changes no answer). Along an axis of Ŝ = (1/N)
    Σ x_i x_iᵀ, of eigenvalue λ, the steps leave Π_k (1 - η_k λ) of w. This is a polynomial of value
    1 at 0, so least squares over all axes of all contexts find the best; its roots are the 1/η_k.
    They are real: such polynomials are orthogonal. For one rate for all steps see ``tune``."""
    pairs = xs[:, :-1].double()
    values = torch.linalg.eigvalsh(pairs.mT @ pairs / pairs.shape[-2]).flatten()
    unit = values.mean()
    powers = (values / unit)[:, None] ** torch.arange(1, steps + 1).to(values)
    taken = torch.linalg.lstsq(powers, torch.ones_like(powers[:, :1])).solution[:, 0]
    turned = torch.eye(steps).to(values).roll(1, 0)  # its eigenvalues are the η_k, times ``unit``
    turned[:, -1] = taken.flip(0)
    return torch.linalg.eigvals(turned).real.sort().values / unit


class Tuned(NamedTuple):
    """The best settings of every step, and half the mean squared error of the query's answer."""

    rates: Float[Tensor, "step"]
    gammas: Float[Tensor, "step"] | None
    loss: float


def tune(
    steps: int, xs: Float[Tensor, "batch n d"], ys: Float[Tensor, "batch n"], plus: bool = False
) -> list[Tuned]:
    """Find, for 1, 2, .. ``steps``, the positive rate, and with ``plus`` the gamma, that answer
    best, the same for all steps: L-BFGS in float64 on all contexts (give thousands). For settings
    of each step see ``tune_each``."""
    unit, scale, point, spectra = _start(xs, ys, plus)
    results = []
    for k in bar(range(1, steps + 1), "steps"):
        point = _minimised(spectra, point, k)
        results.append(_tuned(spectra, point, k, unit, scale))
    return results


def tune_each(steps: int, xs: Float[Tensor, "batch n d"], ys: Float[Tensor, "batch n"]) -> Tuned:
    """Find a rate and a gamma for each of ``steps`` steps of GD++, by the search of ``tune``, which
    begins at the best settings for all steps. The loss has several minima for more than two steps:
    the one that is found need not be the lowest."""
    unit, scale, point, spectra = _start(xs, ys, plus=True)
    for k in range(1, steps + 1):
        point = _minimised(spectra, point, k)
    point = _minimised(spectra, point.repeat(1, steps), steps)
    return _tuned(spectra, point, steps, unit, scale)


def _start(
    xs: Float[Tensor, "batch n d"], ys: Float[Tensor, "batch n"], plus: bool
) -> tuple[float, float, Tensor, Spectra]:
    """Return the units of rates and gammas, the logarithms of the first ones, (setting, 1), and the
    contexts in the axes of Σ x_i x_iᵀ / N."""
    pairs, y = xs[:, :-1].double(), ys[:, :-1, None].double()  # (batch, N, d), (batch, N, 1)
    values, axes = torch.linalg.eigh(pairs.mT @ pairs / pairs.shape[-2])  # (batch, d, d)
    unit, wanted = float(values.mean()), ys[:, -1].double()
    pull = (axes.mT @ (pairs.mT @ y))[..., 0] / pairs.shape[-2] / unit  # (batch, d)
    query = (axes.mT @ xs[:, -1, :, None].double())[..., 0]
    answer = (query * pull).sum(-1)  # (batch)
    rate = (answer * wanted).sum() / answer.square().sum()  # the best of one step
    point = torch.stack([rate, torch.tensor(0.13).to(rate)])[: 1 + plus, None].log()
    return unit, unit * pairs.shape[-2], point, (values / unit, pull, query, wanted)


def _tuned(spectra: Spectra, point: Tensor, steps: int, unit: float, scale: float) -> Tuned:
    eta, *gamma = point.exp().expand(-1, steps)
    squeezes = gamma[0] / scale if gamma else None
    return Tuned(eta / unit, squeezes, float(_loss(spectra, point, steps)))


def _loss(spectra: Spectra, point: Tensor, steps: int) -> Tensor:
    """Return half the mean squared error, in the axes of Σ x_i x_iᵀ / N; ``point`` has the
    logarithms of η and, if there is one, γ, of each step or one for all. With eigenvalues λ and b
    of Σ x_i y_i / N, a step is W += η t² (b - λ W), and t, what steps made of x, becomes
    t (1 - γ N λ t²)."""
    values, pull, query, wanted = spectra
    eta, *gamma = point.exp().expand(-1, steps)
    weights, size = eta[0] * pull, torch.ones_like(pull)  # (batch, d) both
    for done in range(steps - 1):
        if gamma:
            size = size * (1 - gamma[0][done] * values * size.square())
        weights = weights + eta[done + 1] * size.square() * (pull - values * weights)
    return 0.5 * ((query * weights).sum(-1) - wanted).square().mean()


def _minimised(spectra: Spectra, start: Tensor, steps: int) -> Tensor:
    point = start.clone().requires_grad_()
    limits: dict[str, Any] = {"max_iter": 300, "tolerance_grad": 1e-9, "tolerance_change": 1e-12}
    search = torch.optim.LBFGS([point], **limits, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        value = _loss(spectra, point, steps).clamp(min=1e-300).log()
        (point.grad,) = torch.autograd.grad(value, point)
        if value.isfinite() and point.grad.isfinite().all():
            return value
        point.grad = torch.zeros_like(point)
        return torch.full_like(value, 1e3)  # a trial too far: the search comes back

    search.step(closure)
    return point.detach() if bool(point.isfinite().all()) else start
