"""How far two predictors are apart, and which algorithm an in-context regressor is nearest to.

{cite}`akyurek2023` defines SPD, MSPD and ILWD, and plots them divided by d (figures 1 and 2). With
noise the error of OLS has no finite mean at n = d - 1, d and d + 1 pairs, nor has SPD to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ...errors import IclError
from ...tasks.regression import Contexts
from .algorithms import Predictor

AT_ONCE = 128  # contexts in a pass: what more of them need leaves the processor's cache

Predicted = Float[Tensor, "*ensemble batch n"]
Other = Float[Tensor, "*other_ensemble batch n"]


class Spread(NamedTuple):
    """A mean over contexts, and the standard error of that mean."""

    mean: Float[Tensor, "*shape"]
    error: Float[Tensor, "*shape"]


def spread(values: Float[Tensor, "*ensemble batch"]) -> Spread:
    """Return mean and standard error (NaN for a single context) over the last axis."""
    count = values.shape[-1]
    error = values.std(-1) / count**0.5 if count > 1 else torch.full_like(values[..., 0], torch.nan)
    return Spread(values.mean(-1), error)


def predict(predictor: Predictor, xs: Tensor, ys: Tensor) -> Tensor:
    """Return predictions (*ensemble, batch, n) for contexts (batch, n, d), in float64."""
    with torch.no_grad():
        batches = zip(xs.split(AT_ONCE, -3), ys.split(AT_ONCE, -2), strict=True)
        predicted = torch.cat([predictor(x, y).double() for x, y in batches], -2)
    if predicted.shape[-2:] != ys.shape[-2:] or not bool(predicted.isfinite().all()):
        shapes = f"{tuple(ys.shape)}; got {tuple(predicted.shape)}, or NaN or infinity"
        raise IclError(f"A predictor must give a finite answer for each of the labels {shapes}.")
    return predicted


def spd(first: Predicted, second: Other, dim: int) -> Spread:
    """Return the squared prediction difference for n = 0, 1, ... pairs seen: mean over contexts of
    (f - g)², divided by ``dim`` (1 is the definition, d what the paper plots)."""
    return spread(_squares(first, second, dim).mT)


def squared_distance(
    first: Predicted, second: Other, dim: int, region: slice | None = None
) -> Float[Tensor, "*ensemble batch"]:
    """Return SPD / d of each context, averaged over a region of n, or over 1 .. d - 1, where the
    pairs leave w open: its mean over contexts is MSPD / d."""
    return _squares(first, second, dim)[..., region or slice(1, dim)].mean(-1)


class Fit(NamedTuple):
    """The linear function nearest to what a predictor answers after each context. ``unexplained``:
    what each context adds to 1 - R². A fit of d weights to q queries explains d / q of noise."""

    weights: Float[Tensor, "*ensemble batch d"]
    unexplained: Float[Tensor, "*ensemble batch"]

    @property
    def r2(self) -> Float[Tensor, "*ensemble"]:
        """Return R² over all contexts: 1 if linear in the query, NaN if no prediction varies."""
        return 1 - self.unexplained.mean(-1)


def implicit_weights(
    predictor: Predictor, contexts: Contexts, queries: Float[Tensor, "batch query d"]
) -> Fit:
    """Return the implicit linear weights of a predictor after each context ({cite}`akyurek2023`):
    every query in turn is the x that follows its pairs."""
    batch, count, _ = queries.shape
    pairs = contexts.xs[:, None].expand(-1, count, -1, -1)
    xs = torch.cat([pairs, queries[:, :, None].to(pairs)], -2).flatten(0, 1)
    ys = functional.pad(contexts.ys, (0, 1))  # the last is never read
    wanted = predict(predictor, xs, ys.repeat_interleave(count, 0))[..., -1]
    return linear_fit(wanted.unflatten(-1, (batch, count)), queries)


def linear_fit(
    wanted: Float[Tensor, "*ensemble batch query"], queries: Float[Tensor, "batch query d"]
) -> Fit:
    """Fit the linear function of the queries, without intercept, nearest to the answers."""
    design = queries.to(wanted)
    weights = (torch.linalg.pinv(design) @ wanted[..., None])[..., 0]
    residual = (wanted - (design @ weights[..., None])[..., 0]).square().sum(-1)
    total = (wanted - wanted.mean(-1, keepdim=True)).square().sum(-1)
    return Fit(weights, residual / total.mean(-1, keepdim=True))


def ilwd(
    first: Float[Tensor, "*ensemble batch d"], second: Float[Tensor, "*other batch d"], dim: int
) -> Spread:
    """Return the implicit linear weight difference, the mean over contexts of |w - v|², over
    ``dim``. Weights are an algorithm's own, or a regressor's ``implicit_weights``."""
    return spread(_squares(first, second, dim).sum(-1))


@dataclass(frozen=True)
class Nearest:
    """MSPD of a regressor to each baseline."""

    names: tuple[str, ...]
    by_context: Float[Tensor, "*ensemble algorithm batch"]

    @property
    def distances(self) -> Float[Tensor, "*ensemble algorithm"]:
        """Return the means over the contexts."""
        return self.by_context.mean(-1)

    @property
    def winners(self) -> list[str]:
        """Return the nearest baseline of each network; one name if there is no ensemble axis."""
        return [self.names[i] for i in self.distances.argmin(-1).flatten().tolist()]

    def in_groups(self, count: int = 10) -> Int[Tensor, "*ensemble group"]:
        """Return the index of the nearest baseline in each of so many groups of contexts."""
        groups = self.by_context.tensor_split(count, -1)
        return torch.stack([group.mean(-1).argmin(-1) for group in groups], -1)


def nearest(
    regressor: Predicted,
    baselines: Mapping[str, Float[Tensor, "batch n"]],
    dim: int,
    region: slice | None = None,
) -> Nearest:
    """Rank algorithms by the MSPD of their predictions to a regressor's."""
    rows = [squared_distance(regressor, row, dim, region) for row in baselines.values()]
    return Nearest(tuple(baselines), torch.stack(rows, -2))


def nearer_by(
    regressor: Predicted,
    ours: Other,
    others: Sequence[Other],
    dim: int,
    region: slice | None = None,
) -> Float[Tensor, "member batch"]:
    """Return how much nearer ``ours`` is to each member than the nearest of ``others``, by MSPD,
    context by context; to rank all, see ``nearest``."""
    off = torch.stack([squared_distance(regressor, row, dim, region) for row in others])
    best = off.mean(-1).argmin(0)  # of each member: (algorithm, member, batch) to (member,)
    return off[best, torch.arange(len(best))] - squared_distance(regressor, ours, dim, region)


def _squares(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Return (first - second)² / dim, which broadcasting would also give of other contexts."""
    if first.shape[-2:] != second.shape[-2:]:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise IclError(f"Need predictions or weights for the same contexts; got {shapes}.")
    squares = (first.double() - second.double()).square() / dim
    if not bool(squares.isfinite().all()):
        raise IclError("A prediction or weight is NaN or infinite; leave such contexts out.")
    return squares
