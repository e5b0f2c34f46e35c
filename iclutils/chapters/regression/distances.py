"""How far two learners of regressions are apart, and which algorithm a learner is nearest to.

- SPD, squared prediction difference: the mean over contexts of (f - g)² for the predictions f and
  g of two learners, for each number of pairs seen. MSPD: its mean over 1 .. d - 1 pairs, where
  the pairs leave w open.
- ILWD, implicit linear weight difference: the mean of |w_f - w_g|², w_f the linear function
  nearest to what the learner predicts for fresh queries after a context.

All are divided by d, as the paper plots them ({cite}`akyurek2023`, figures 1 and 2).

Means need care where labels are noisy: the error of OLS has no finite mean at n = d - 1, d and
d + 1 pairs, so the mean SPD to OLS there is whatever the worst contexts of the sample are. Each
result carries a median beside the mean. It measures the typical context: to compare algorithms
with each other, not with means.

Example:
    >>> import torch
    >>> from iclutils.chapters.regression import algorithms, distances
    >>> from iclutils.tasks import regression
    >>> drawn = regression.sample(regression.Task(3), 64, 6, torch.Generator().manual_seed(0))
    >>> xs, ys = drawn.xs.double(), drawn.ys.double()
    >>> ols = algorithms.ols(xs, ys)[None]
    >>> ridge = algorithms.ridge(xs, ys, penalty=1.0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError, unknown
from ...models.regressors import Learners
from ...progress import bar
from ...tasks.regression import Contexts, Queried
from .algorithms import Linear, Predictor, predictions

Rows = Float[Tensor, "*other_member other_batch other_n"]  # a mismatch is refused with a cure


class Spread(NamedTuple):
    """A mean over contexts, the standard error of that mean, and the median over contexts."""

    mean: Float[Tensor, "*shape"]
    error: Float[Tensor, "*shape"]
    median: Float[Tensor, "*shape"]


def spread(values: Float[Tensor, "*member batch"]) -> Spread:
    """Mean, standard error (NaN for a single context) and median over the last axis.

    Example:
        >>> distances.spread(torch.tensor([[1.0, 2.0, 6.0]])).median
        tensor([2.])
    """
    count = values.shape[-1]
    error = values.std(-1) / count**0.5 if count > 1 else torch.full_like(values[..., 0], torch.nan)
    return Spread(values.mean(-1), error, values.quantile(0.5, -1))


def ask(predictor: Predictor, xs: Tensor, ys: Tensor) -> Tensor:
    """The predictions (*member, batch, n) of any learner for contexts (batch, n, d), in float64.

    ``Learners`` may be given contexts without a member axis: all members then read the same.

    Example:
        >>> bool((distances.ask(algorithms.ols, xs, ys) == ols[0]).all())
        True
    """
    if isinstance(predictor, Learners):
        xs, ys = xs.to(predictor.positions), ys.to(predictor.positions)
        if xs.ndim == 3:
            xs, ys = xs[None], ys[None]
    with torch.no_grad():
        found = predictor(xs, ys).double()
    if found.shape[-2:] != ys.shape[-2:]:
        raise IclError(
            f"A learner must give one prediction for each of {tuple(ys.shape)} labels; got "
            f"{tuple(found.shape)}."
        )
    return _finite(found)


def together(learners: Sequence[Predictor]) -> Predictor:
    """One predictor with the members of all of them, in order.

    Example:
        >>> from iclutils.models import regressors
        >>> net = regressors.load("regression-d8")
        >>> twice = distances.together([net, net])
        >>> len(twice(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2))) == 2 * len(net.seeds)
        False
    """

    def predictor(xs: Tensor, ys: Tensor) -> Tensor:
        found = [ask(learner, xs, ys) for learner in learners]
        return torch.cat([f if f.ndim > ys.ndim else f[None] for f in found])

    return predictor


def ask_queries(predictor: Predictor, queried: Queried) -> Tensor:
    """Predictions (*member, batch, n) for own queries: entry n after the pairs 0 .. n-1."""
    contexts, queries = queried
    if isinstance(predictor, Linear):
        return predictions(predictor.weights(contexts.xs, contexts.ys), queries)
    rows = []
    for n in bar(range(queries.shape[-2]), "prefixes"):
        at = queried.at(n)
        rows.append(ask(predictor, at.xs, at.ys)[..., -1])
    return torch.stack(rows, -1)


def spd(first: Float[Tensor, "*member batch n"], second: Rows, dim: int) -> Spread:
    """SPD / d for each number of pairs seen, n = 0, 1, ...

    Args:
        first: predictions of one learner.
        second: of another, for the same contexts; leading axes are broadcast.
        dim: d.

    Example:
        >>> distances.spd(ols, ys, dim=3).mean[0, -1] < 1e-6
        tensor(True)
    """
    return spread(_squares(first, second, dim).mT)


def under_determined(dim: int) -> slice:
    """Numbers of pairs that leave w open: n = 1 .. d - 1 (the paper leaves the ends unsaid).

    Example:
        >>> distances.under_determined(3)
        slice(1, 3, None)
    """
    if dim < 2:
        raise IclError("With one dimension a single pair decides; there is no such region.")
    return slice(1, dim)


def mspd(
    first: Float[Tensor, "*member batch n"], second: Rows, dim: int, region: slice | None = None
) -> Spread:
    """SPD / d averaged over a region of n, ``under_determined`` unless another is given.

    The average over n comes first, so the error and the median are over contexts.

    Example:
        >>> distances.mspd(ols, ridge, dim=3).mean > distances.mspd(ols, ols[0], dim=3).mean
        tensor([True])
    """
    region = under_determined(dim) if region is None else region
    return spread(_in_region(_squares(first, second, dim), region).mean(-1))


def margin(
    learner: Float[Tensor, "*member batch n"],
    near: Rows,
    far: Rows,
    dim: int,
    region: slice | None = None,
) -> Spread:
    """By how much ``near`` is nearer to a learner than ``far``: MSPD of far minus MSPD of near.

    The difference is taken context by context, so that its error is that of a difference.

    Example:
        >>> distances.margin(ols, near=ols[0], far=ridge, dim=3).mean > 0
        tensor([True])
    """
    region = under_determined(dim) if region is None else region
    gap = _squares(learner, far, dim) - _squares(learner, near, dim)
    return spread(_in_region(gap, region).mean(-1))


class Fit(NamedTuple):
    """The linear function nearest to what a learner predicts after each context.

    ``residual`` and ``total`` are sums of squares over the queries: what the linear function
    misses of the learner's own predictions, and what there is about their mean.
    """

    weights: Float[Tensor, "*member batch d"]
    residual: Float[Tensor, "*member batch"]
    total: Float[Tensor, "*member batch"]

    @property
    def r2(self) -> Float[Tensor, "*member"]:
        """R² of the fit, all contexts together: 1 if the learner is linear in the query.

        It is NaN if the predictions do not vary. A fit of d weights to q queries explains d / q
        of anything at all, so take many more queries than d.
        """
        return 1 - self.residual.sum(-1) / self.total.sum(-1)


def implicit_weights(
    predictor: Predictor,
    contexts: Contexts,
    queries: Float[Tensor, "batch query d"],
    intercept: bool = False,
    at_once: int | None = None,
) -> Fit:
    """The implicit linear weights of a learner after each context ({cite}`akyurek2023`).

    Every query in turn is the x that follows the n pairs of its context.

    Args:
        predictor: the learner.
        contexts: (batch, n, d) and (batch, n); cut them for another n, which may be 0.
        queries: fresh inputs, more than d for each context.
        intercept: fit one as well and drop it, as the released code does.
        at_once: contexts per call of the learner; all if omitted.

    Example:
        >>> queries = torch.randn(64, 8, 3, generator=torch.Generator().manual_seed(1))
        >>> found = distances.implicit_weights(algorithms.ols, drawn, queries)
        >>> bool((found.weights - drawn.weights).abs().max() < 1e-3)
        True
    """
    batch, count, dim = queries.shape
    if count <= dim + intercept:
        raise IclError(f"A fit of {dim + intercept} numbers needs more queries; got {count}.")
    if contexts.xs.shape[::2] != (batch, dim) or (at_once or 1) < 1:
        raise IclError(
            f"Need contexts (batch, n, d) for queries {tuple(queries.shape)}, and at least one at "
            f"once; got {tuple(contexts.xs.shape)} and {at_once}."
        )
    rows = []
    for some in bar(torch.arange(batch).split(at_once or batch), "contexts"):
        pairs = contexts.xs[some, None].expand(-1, count, -1, -1)
        xs = torch.cat([pairs, queries[some, :, None].to(pairs)], -2).flatten(0, 1)
        ys = torch.nn.functional.pad(contexts.ys[some], (0, 1))  # the last is never read
        found = ask(predictor, xs, ys.repeat_interleave(count, 0))[..., -1]
        rows.append(found.unflatten(-1, (len(some), count)))
    wanted = torch.cat(rows, -2)
    design = queries.to(wanted)
    if intercept:
        design = torch.cat([design, torch.ones_like(design[..., :1])], -1)
    weights = (torch.linalg.pinv(design) @ wanted[..., None])[..., 0]
    residual = (wanted - (design @ weights[..., None])[..., 0]).square().sum(-1)
    total = (wanted - wanted.mean(-1, keepdim=True)).square().sum(-1)
    return Fit(weights[..., :dim], residual, total)


def ilwd(first: Float[Tensor, "*member batch d"], second: Rows) -> Spread:
    """ILWD / d of two sets of weights for the same contexts; leading axes are broadcast.

    For an algorithm that has weights, take those; for a learner, ``implicit_weights``.

    Example:
        >>> distances.ilwd(drawn.weights[None], drawn.weights + 1).mean
        tensor([1.0000], dtype=torch.float64)
    """
    return spread(_squares(first, second, first.shape[-1]).sum(-1))


def released_r2(
    found: Float[Tensor, "*batch query"], labels: Float[Tensor, "*batch query"]
) -> float:
    """What the released code calls r2: of the true labels, with the predictions as their model.

    It tells how good the predictions are, not how linear: a perfectly linear learner that has
    not found w scores low. All entries count as one sample.

    Example:
        >>> distances.released_r2(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
        1.0
    """
    total = (labels - labels.mean()).square().sum()
    return float(1 - (labels - found).square().sum() / total)


@dataclass(frozen=True)
class Nearest:
    """Distances of learners to the algorithms of a bank."""

    names: tuple[str, ...]
    distances: Float[Tensor, "*member algorithm"]
    share: Float[Tensor, "*member algorithm"]  # of the resamples in which it is the nearest

    @property
    def winners(self) -> list[str]:
        """The nearest algorithm of each member; one name if there is no member axis."""
        return [self.names[i] for i in self.distances.argmin(-1).flatten().tolist()]


def nearest(
    learner: Float[Tensor, "*member batch n"],
    bank: Mapping[str, Float[Tensor, "batch n"]],
    dim: int,
    generator: torch.Generator,
    region: slice | None = None,
    statistic: str = "mean",
    resamples: int = 1000,
) -> Nearest:
    """Which algorithm's predictions are nearest to a learner's: the least MSPD.

    Args:
        learner: its predictions.
        bank: those of the algorithms, by name, for the same contexts.
        dim: d.
        generator: chooses the contexts of each bootstrap resample.
        region: numbers of pairs that count; ``under_determined`` if omitted.
        statistic: "mean" or "median" over contexts; the second where noise spoils means.
        resamples: of the contexts with replacement, to see how sure the answer is.

    Example:
        >>> bank, generator = {"ols": ols[0], "ridge": ridge}, torch.Generator().manual_seed(0)
        >>> distances.nearest(ols, bank, dim=3, generator=generator, resamples=20).winners
        ['ols']
    """
    if not bank or resamples < 1:
        raise IclError("Need at least one algorithm and one resample.")
    if statistic not in ("mean", "median"):
        raise unknown("statistic", statistic, ["mean", "median"])
    region = under_determined(dim) if region is None else region
    rows = bar(bank.values(), "algorithms")
    each = [_in_region(_squares(learner, row, dim), region).mean(-1) for row in rows]
    table = torch.stack(each, -2)  # (*member, algorithm, batch)
    batch = table.shape[-1]

    def over(values: Tensor) -> Tensor:
        return values.mean(-1) if statistic == "mean" else values.quantile(0.5, -1)

    wins = torch.zeros_like(table[..., 0])
    for _ in range(resamples):
        chosen = torch.randint(batch, (batch,), generator=generator, device=generator.device)
        best = over(table[..., chosen.to(table.device)]).argmin(-1)
        wins += torch.nn.functional.one_hot(best, len(bank))
    return Nearest(tuple(bank), over(table), wins / resamples)


def _squares(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """(first - second)² / d."""
    if first.ndim < 2 or second.ndim < 2 or first.shape[-2:] != second.shape[-2:]:
        raise IclError(
            f"Need two tables for the same contexts; got {tuple(first.shape)} and "
            f"{tuple(second.shape)}."
        )
    return (_finite(first.double()) - _finite(second.double())).square() / dim


def _in_region(values: Tensor, region: slice) -> Tensor:
    inside = range(region.start or 0, region.stop or values.shape[-1], region.step or 1)
    if not len(inside) or not 0 <= min(inside) <= max(inside) < values.shape[-1]:
        raise IclError(
            f"The region n = {region.start} .. {region.stop} is not covered by contexts of "
            f"{values.shape[-1]} pairs, which have n = 0 .. {values.shape[-1] - 1}."
        )
    return values[..., region]


def _finite(values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise IclError("A prediction or weight is NaN or infinite; leave such contexts out.")
    return values
