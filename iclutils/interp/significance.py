"""Significance: what chance alone would give, and how many findings one may believe.

p-values from draws count the observation itself among them, ``(1 + draws as extreme) / (1 +
draws)``, so none is ever 0. Sources: Benjamini and Hochberg 1995; Westfall and Young 1993 (the
largest of many as null); Iglewicz and Hoaglin 1993 (robust z).

Example:
    >>> import torch
    >>> from iclutils.interp import significance
    >>> generator = torch.Generator().manual_seed(0)
    >>> effects = torch.stack([torch.ones(8), torch.tensor([1.0, -1.0] * 4)])
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from scipy.stats import false_discovery_control
from torch import Generator, Tensor

from ..errors import IclError

MAD = 1.4826  # of a normal distribution: its standard deviation over its median absolute deviation


def empirical_p(
    observed: Float[Tensor, "*item"], null: Float[Tensor, "draw *item"]
) -> Float[Tensor, "*item"]:
    """One-sided p-value of large values against draws from the null."""
    if not len(null):
        raise IclError("A null needs at least one draw.")
    return (1 + (null >= observed).sum(0)) / (1 + len(null))


def discoveries(p: Float[Tensor, "*item"], rate: float = 0.05) -> Bool[Tensor, "*item"]:
    """Which p-values are findings at this false-discovery rate (Benjamini and Hochberg).

    Example:
        >>> significance.discoveries(torch.tensor([0.001, 0.02, 0.9]))
        tensor([ True,  True, False])
    """
    if not 0 < rate < 1:
        raise IclError(f"The false-discovery rate must lie between 0 and 1; got {rate}.")
    adjusted = false_discovery_control(p.double().cpu().numpy(), axis=None)
    return torch.as_tensor(adjusted, device=p.device).reshape(p.shape) <= rate


def signs(count: int, draws: int, generator: Generator) -> Float[Tensor, "draw sample"]:
    """Random signs, one for each sample and draw.

    Example:
        >>> significance.signs(3, 10, generator).abs().unique()
        tensor([1.])
    """
    return torch.randint(0, 2, (draws, count), generator=generator) * 2.0 - 1.0


def sign_flip_p(
    effects: Float[Tensor, "*item sample"], generator: Generator, draws: int = 2000
) -> Float[Tensor, "*item"]:
    """Two-sided p-value that a mean over samples is zero: the signs of samples are exchangeable.

    Example:
        >>> significance.sign_flip_p(effects, generator, draws=500) < 0.05
        tensor([ True, False])
    """
    flipped = _flipped(effects, generator, draws)
    return empirical_p(effects.mean(-1).abs(), flipped.abs())


def largest_by_chance(
    effects: Float[Tensor, "*item sample"],
    generator: Generator,
    alpha: float = 0.05,
    draws: int = 2000,
) -> float:
    """The largest |mean| of all items that sign flips reach with probability ``alpha``.

    Above it, no item is a chance find among all of them (family-wise). The signs of a draw are
    shared by all items, so that dependence between items is kept.
    """
    flipped = _flipped(effects, generator, draws).abs().reshape(draws, -1)
    return float(flipped.amax(1).quantile(1 - alpha))


def _flipped(effects: Tensor, generator: Generator, draws: int) -> Tensor:
    count = effects.shape[-1]
    if count < 6:
        raise IclError(f"Sign flips need at least six samples; got {count}.")
    turned = signs(count, draws, generator).to(effects)
    return torch.einsum("...s,ds->d...", effects, turned) / count


def stepwise(effects: Float[Tensor, "item sample"], generator: Generator) -> float:
    """``largest_by_chance`` of the items that are left when those above it are set aside.

    In a single step one strong item, flipped, hides all others. What is above is set aside and
    chance is asked again about the rest, until nothing more is found (Westfall and Young 1993):
    the chance of any false finding stays at five per cent.
    """
    while True:
        bar = largest_by_chance(effects, generator)
        below = effects.mean(-1).abs() <= bar
        if bool(below.all()) or not bool(below.any()):
            return bar
        effects = effects[below]


def robust_z(
    values: Float[Tensor, "sample *item"], reference: Float[Tensor, "healthy *item"]
) -> Float[Tensor, "sample *item"]:
    """(x - median) / (1.4826 MAD) of the reference."""
    if len(reference) < 8:
        raise IclError(f"A reference needs at least eight samples; got {len(reference)}.")
    middle = reference.median(0).values
    spread = MAD * (reference - middle).abs().median(0).values
    return torch.nan_to_num((values - middle) / spread, nan=0.0)
