"""How far two predictors are apart, and which algorithm an in-context regressor is nearest to.

- SPD, squared prediction difference: the mean over contexts of (f - g)² for the predictions f and
  g of two predictors, for each number of pairs seen. MSPD: its mean over 1 .. d - 1 pairs, where
  the pairs leave w open.
- ILWD, implicit linear weight difference: the mean of |w_f - w_g|², w_f the linear function
  nearest to what a predictor answers to fresh queries after a context.

{cite}`akyurek2023` defines them so, and plots them divided by d (figures 1 and 2): ``spd`` and
``ilwd`` divide by their argument ``dim``; what is averaged over a region of n is divided by d.

Means need care where labels are noisy: the error of OLS has no finite mean at n = d - 1, d and
d + 1 pairs, so the mean SPD to OLS there is whatever the worst contexts of the sample are.

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

from ...errors import IclError
from ...tasks.regression import Contexts
from .algorithms import Predictor

Predicted = Float[Tensor, "*ensemble batch n"]
Other = Float[Tensor, "*other_ensemble other_batch other_n"]  # a mismatch is refused with a cure


class Spread(NamedTuple):
    """A mean over contexts, and the standard error of that mean."""

    mean: Float[Tensor, "*shape"]
    error: Float[Tensor, "*shape"]


def spread(values: Float[Tensor, "*ensemble batch"]) -> Spread:
    """Mean and standard error (NaN for a single context) over the last axis."""
    count = values.shape[-1]
    error = values.std(-1) / count**0.5 if count > 1 else torch.full_like(values[..., 0], torch.nan)
    return Spread(values.mean(-1), error)


def predict(predictor: Predictor, xs: Tensor, ys: Tensor) -> Tensor:
    """The predictions (*ensemble, batch, n) of any predictor for contexts (batch, n, d), float64.

    Example:
        >>> bool((distances.predict(algorithms.ols, xs, ys) == ols[0]).all())
        True
    """
    with torch.no_grad():
        found = predictor(xs, ys).double()
    if found.shape[-2:] != ys.shape[-2:]:
        raise IclError(
            f"A predictor must give one prediction for each of {tuple(ys.shape)} labels; got "
            f"{tuple(found.shape)}."
        )
    return _finite(found)


def concatenate(predictors: Sequence[Predictor]) -> Predictor:
    """One predictor with the networks of all ensembles, in order.

    Example:
        >>> both = distances.concatenate([algorithms.ols, algorithms.knn])
        >>> distances.predict(both, xs, ys).shape
        torch.Size([2, 64, 6])
    """

    def predictor(xs: Tensor, ys: Tensor) -> Tensor:
        found = [predict(each, xs, ys) for each in predictors]
        return torch.cat([f if f.ndim > ys.ndim else f[None] for f in found])

    return predictor


def spd(first: Predicted, second: Other, dim: int = 1) -> Spread:
    """SPD over ``dim`` for each number of pairs seen, n = 0, 1, ...

    Both are predictions for the same contexts; leading axes are broadcast. With ``dim=1`` it is
    the definition, with ``dim=d`` what the paper plots.

    Example:
        >>> distances.spd(ols, ys, dim=3).mean[0, -1] < 1e-6
        tensor(True)
    """
    return spread(_squares(first, second, dim).mT)


def under_determined(dim: int) -> slice:
    """Numbers of pairs that leave w open: n = 1 .. d - 1 (the paper leaves the ends unsaid)."""
    if dim < 2:
        raise IclError("With one dimension a single pair decides; there is no such region.")
    return slice(1, dim)


def mspd(first: Predicted, second: Other, dim: int, region: slice | None = None) -> Spread:
    """SPD / d averaged over a region of n, ``under_determined`` unless another is given.

    The average over n comes first, so the error is over contexts.
    """
    return spread(_mean_squares(first, second, dim, region))


def margin(
    regressor: Predicted, near: Other, far: Other, dim: int, region: slice | None = None
) -> Spread:
    """By how much ``near`` is nearer to a regressor than ``far``: MSPD of far minus MSPD of near.

    The difference is taken context by context, so that its error is that of a difference.
    """
    gap = _squares(regressor, far, dim) - _squares(regressor, near, dim)
    return spread(_in_region(gap, dim, region).mean(-1))


class Fit(NamedTuple):
    """The linear function nearest to what a predictor answers after each context.

    ``residual`` and ``total`` are sums of squares over the queries: what the linear function
    misses of the predictions, and what there is about their mean.
    """

    weights: Float[Tensor, "*ensemble batch d"]
    residual: Float[Tensor, "*ensemble batch"]
    total: Float[Tensor, "*ensemble batch"]

    @property
    def r2(self) -> Float[Tensor, "*ensemble"]:
        """R² of the fit, all contexts together: 1 if the predictor is linear in the query.

        It is NaN if the predictions do not vary. A fit of d weights to q queries explains d / q
        of anything at all, so take many more queries than d.
        """
        return 1 - self.residual.sum(-1) / self.total.sum(-1)


def implicit_weights(
    predictor: Predictor,
    contexts: Contexts,
    queries: Float[Tensor, "batch query d"],
    intercept: bool = False,
) -> Fit:
    """The implicit linear weights of a predictor after each context ({cite}`akyurek2023`).

    Every query in turn is the x that follows the n pairs of its context; take more than d of them,
    and cut the contexts for another n, which may be 0. The released code fits an intercept as well,
    and drops it.
    """
    batch, count, dim = queries.shape
    if count <= dim + intercept:
        raise IclError(f"A fit of {dim + intercept} numbers needs more queries; got {count}.")
    if contexts.xs.shape[::2] != (batch, dim):
        raise IclError(
            f"Need contexts (batch, n, d) for queries {tuple(queries.shape)}; got "
            f"{tuple(contexts.xs.shape)}."
        )
    pairs = contexts.xs[:, None].expand(-1, count, -1, -1)
    xs = torch.cat([pairs, queries[:, :, None].to(pairs)], -2).flatten(0, 1)
    ys = torch.nn.functional.pad(contexts.ys, (0, 1))  # the last is never read
    wanted = predict(predictor, xs, ys.repeat_interleave(count, 0))[..., -1]
    wanted = wanted.unflatten(-1, (batch, count))
    design = queries.to(wanted)
    if intercept:
        design = torch.cat([design, torch.ones_like(design[..., :1])], -1)
    weights = (torch.linalg.pinv(design) @ wanted[..., None])[..., 0]
    residual = (wanted - (design @ weights[..., None])[..., 0]).square().sum(-1)
    total = (wanted - wanted.mean(-1, keepdim=True)).square().sum(-1)
    return Fit(weights[..., :dim], residual, total)


def ilwd(first: Float[Tensor, "*ensemble batch d"], second: Other, dim: int = 1) -> Spread:
    """ILWD over ``dim`` of two sets of weights for the same contexts; leading axes are broadcast.

    For an algorithm that has weights, take those; for a regressor, ``implicit_weights``. With
    ``dim=1`` it is the definition, with ``dim=d`` what the paper plots.
    """
    return spread(_squares(first, second, dim).sum(-1))


def released_r2(
    found: Float[Tensor, "*batch query"], labels: Float[Tensor, "*batch query"]
) -> float:
    """What the released code calls r2: of the true labels, with the predictions as their model.

    It tells how good the predictions are, not how linear: a perfectly linear predictor that has
    not found w scores low. All entries count as one sample.
    """
    total = (labels - labels.mean()).square().sum()
    return float(1 - (labels - found).square().sum() / total)


@dataclass(frozen=True)
class Nearest:
    """MSPD of a regressor to each baseline."""

    names: tuple[str, ...]
    by_context: Float[Tensor, "*ensemble algorithm batch"]

    @property
    def distances(self) -> Float[Tensor, "*ensemble algorithm"]:
        """Mean over the contexts."""
        return self.by_context.mean(-1)

    @property
    def winners(self) -> list[str]:
        """The nearest baseline of each network; one name if there is no ensemble axis."""
        return [self.names[i] for i in self.distances.argmin(-1).flatten().tolist()]

    def share(
        self, generator: torch.Generator, resamples: int = 1000
    ) -> Float[Tensor, "*ensemble algorithm"]:
        """In what share of bootstrap resamples of the contexts each baseline is the nearest."""
        batch = self.by_context.shape[-1]
        device = generator.device
        chosen = torch.randint(batch, (resamples, batch), generator=generator, device=device)
        chosen = chosen.to(self.by_context.device)
        counts = torch.zeros_like(chosen).scatter_add_(1, chosen, torch.ones_like(chosen))
        best = (self.by_context @ counts.mT.to(self.by_context)).argmin(-2)
        return torch.nn.functional.one_hot(best, len(self.names)).double().mean(-2)


def nearest(
    regressor: Predicted,
    baselines: Mapping[str, Float[Tensor, "batch n"]],
    dim: int,
    region: slice | None = None,
) -> Nearest:
    """Which algorithm's predictions are nearest to a regressor's, by MSPD.

    Example:
        >>> distances.nearest(ols, {"ols": ols[0], "ridge": ridge}, dim=3).winners
        ['ols']
    """
    if not baselines:
        raise IclError("Need at least one algorithm to compare with.")
    rows = [_mean_squares(regressor, row, dim, region) for row in baselines.values()]
    return Nearest(tuple(baselines), torch.stack(rows, -2))


def _mean_squares(first: Tensor, second: Tensor, dim: int, region: slice | None) -> Tensor:
    return _in_region(_squares(first, second, dim), dim, region).mean(-1)


def _squares(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """(first - second)² / dim."""
    if first.ndim < 2 or second.ndim < 2 or first.shape[-2:] != second.shape[-2:]:
        raise IclError(
            f"Need two tables for the same contexts; got {tuple(first.shape)} and "
            f"{tuple(second.shape)}."
        )
    return (_finite(first.double()) - _finite(second.double())).square() / dim


def _in_region(values: Tensor, dim: int, region: slice | None) -> Tensor:
    region = under_determined(dim) if region is None else region
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
