"""The best rates of several steps of GD, and gammas of GD++, found numerically.

In the axes of Σ x_i x_iᵀ a step of either is one of numbers. With λ the eigenvalues of Σ x_i x_iᵀ/N
and b those of Σ x_i y_i/N, both as they were, W += η t² (b - λ W), and t, what the steps have made
of x, becomes t (1 - γ N λ t²). So a trial costs little.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import descent, tuning
    >>> from iclutils.tasks import regression
    >>> drawn = regression.sample(regression.Task(2), 50, 5, torch.Generator().manual_seed(0))
    >>> xs, ys = drawn.xs.double(), drawn.ys.double()
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...progress import bar
from .descent import checked


class Tuned(NamedTuple):
    """The best settings found, and half the mean squared error of the query's answer."""

    rates: Float[Tensor, "step"]
    gammas: Float[Tensor, "step"] | None
    loss: float


def tune(
    steps: int,
    xs: Float[Tensor, "batch n d"],
    ys: Float[Tensor, "label_batch label_n"],
    plus: bool = False,
    shared: bool = True,
) -> Tuned:
    """The positive rates, and with ``plus`` gammas, that answer these queries best, in float64.

    L-BFGS starts from the best settings of one step less. With shared settings, many other starts
    led to the same optimum. With settings of their own, GD++ has many local optima: of several
    starts on a part of the contexts, the best is taken. The last gamma of GD++ does nothing to
    the answer; it is 0 if it is not shared.

    Args:
        steps: how many. At most 5 for GD++ with settings of their own: its answer is a polynomial
            of degree 3^steps in Σ x_i x_iᵀ, and fits some contexts to harm others.
        xs: inputs, the query's last; thousands of contexts, or the result fits these alone.
        ys: labels; here the last is needed, to judge the answer.
        plus: GD++.
        shared: one rate, and one gamma, for all steps.

    Example:
        >>> found = tuning.tune(1, xs, ys)
        >>> wrong = (descent.predictor(2 * found.rates)(xs, ys) - ys[:, -1]).square().mean() / 2
        >>> bool(found.loss < wrong)
        True
    """
    if steps < 1:
        raise IclError(f"Gradient descent takes at least one step; got {steps}.")
    if plus and not shared and steps > 5:
        raise IclError(f"Tune GD++ for at most 5 steps, or with shared settings; got {steps}.")
    given = _in_axes(xs.double(), ys.double())
    point = torch.stack([given.first_rate().log(), torch.tensor(0.13).double().log()])[: 1 + plus]
    own = point[:1]
    for k in bar(range(1, steps + 1), "steps"):
        point = _descended(given, point, k, plus, True)
        if not shared:
            part = given.part(1000)
            tried = [_descended(part, s, k, plus, False) for s in _starts(point, own, k, plus)]
            losses = torch.stack([part.loss(one, k, plus, False) for one in tried])
            own = _descended(given, tried[int(losses.argmin())], k, plus, False)
    found = point if shared else own
    etas, gammas = _spread_out(found, steps, plus, shared)
    loss = float(given.loss(found, steps, plus, shared))
    squeezes = gammas / given.unit / (xs.shape[-2] - 1) if plus else None
    return Tuned(etas / given.unit, squeezes, loss)


class _InAxes(NamedTuple):
    """Contexts in the axes of Σ x_i x_iᵀ / N, where a step of GD or GD++ is one of numbers."""

    values: Tensor  # eigenvalues, in units of their mean
    pull: Tensor  # Σ x_i y_i / N, in the same units
    query: Tensor
    wanted: Tensor
    unit: float

    def part(self, count: int) -> _InAxes:
        first = slice(count)
        values, pull = self.values[first], self.pull[first]
        return _InAxes(values, pull, self.query[first], self.wanted[first], self.unit)

    def first_rate(self) -> Tensor:
        answer = (self.query * self.pull).sum(-1)
        rate = (answer * self.wanted).sum() / answer.square().sum()
        if not float(rate) > 0:
            raise IclError("Even a small step of gradient descent does harm to these contexts.")
        return rate

    def loss(self, point: Tensor, steps: int, plus: bool, shared: bool) -> Tensor:
        weights, size = torch.zeros_like(self.pull), torch.ones_like(self.pull)  # size: of x
        for eta, gamma in zip(*_spread_out(point, steps, plus, shared), strict=True):
            weights = weights + eta * size.square() * (self.pull - self.values * weights)
            size = size * (1 - gamma * self.values * size.square())
        return 0.5 * ((self.query * weights).sum(-1) - self.wanted).square().mean()


def _in_axes(xs: Tensor, ys: Tensor) -> _InAxes:
    pairs, query, y = checked(xs, ys)
    if not bool(ys.isfinite().all()):
        raise IclError("Tuning needs the labels of the queries too; some are NaN or infinite.")
    count = pairs.shape[-2]
    values, axes = torch.linalg.eigh(pairs.mT @ pairs / count)
    unit = float(values.mean())
    if unit <= 0:
        raise IclError("All inputs are zero, so every rate gives the same answer.")
    pull = (axes.mT @ (pairs.mT @ y))[..., 0] / count
    query = (axes.mT @ query[..., None])[..., 0]
    return _InAxes(values / unit, pull / unit, query, ys[..., -1], unit)


def _spread_out(point: Tensor, steps: int, plus: bool, shared: bool) -> tuple[Tensor, Tensor]:
    """Rates and gammas of each step, from the logarithms of those that are free."""
    free = point.exp()
    none = torch.zeros(steps, dtype=point.dtype)
    if shared:
        return free[0].expand(steps), free[1].expand(steps) if plus else none
    return free[:steps], torch.cat([free[steps:], none[:1]]) if plus else none


def _starts(point: Tensor, own: Tensor, steps: int, plus: bool) -> list[Tensor]:
    """Where to look for settings of each step: near the shared ones, and one step further.

    λ (1 - γ λ)² takes [0, 4/(3γ)] to a ninth of it, so gammas nine times as large follow.
    """
    tilts = [torch.linspace(-t, t, steps, dtype=point.dtype) for t in (0.3, 0.8)]
    near = [torch.cat([point[0] + tilt, point[1:].expand(plus * (steps - 1))]) for tilt in tilts]
    if steps == 1:
        return near[:1]
    rates, gammas = own[: steps - 1], own[steps - 1 :]
    for growth in (0.0, 1.0, 2.2):
        more = (gammas[-1:] + 2.2 if steps > 2 else point[1:]) if plus else gammas
        near.append(torch.cat([rates, rates[-1:] + growth, gammas, more]))
    return near


def _descended(given: _InAxes, start: Tensor, steps: int, plus: bool, shared: bool) -> Tensor:
    point = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [point],
        max_iter=300,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        search.zero_grad()
        value = given.loss(point, steps, plus, shared).clamp(min=1e-300).log()
        value.backward()
        if not (value.isfinite() and point.grad is not None and point.grad.isfinite().all()):
            point.grad = torch.zeros_like(point)
            return torch.full_like(value, 1e3)  # a trial too far: the search comes back
        return value

    search.step(closure)
    return point.detach() if bool(point.isfinite().all()) else start
