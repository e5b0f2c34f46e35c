"""Means and their errors, and what chance alone would give.

p-values from draws count the observation itself among them, ``(1 + draws as extreme) / (1 +
draws)``, so none is ever 0. Sources: Efron 1979 (bootstrap); Benjamini and Hochberg 1995;
Westfall and Young 1993 (the largest of many as null).

Example:
    >>> import torch
    >>> from iclutils.interp import statistics
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping

import torch
from jaxtyping import Bool, Float
from scipy.stats import false_discovery_control
from torch import Generator, Tensor

from ..errors import IclError

MAD = 1.4826  # of a normal distribution: its standard deviation over its median absolute deviation


def mean_se(values: Float[Tensor, "sample"]) -> tuple[float, float]:
    """Mean and standard error over independent samples.

    Example:
        >>> statistics.mean_se(torch.tensor([1.0, 3.0]))
        (2.0, 1.0)
    """
    if len(values) < 2:
        return values.mean().item(), 0.0
    return values.mean().item(), (values.std() / len(values) ** 0.5).item()


def bootstrap(
    samples: Float[Tensor, "sample *rest"],
    of: Callable[[Float[Tensor, "*rest"]], Float[Tensor, ""]],
    generator: Generator,
    draws: int = 200,
) -> tuple[float, float]:
    """A function of the mean over samples, such as a ratio of means, and its standard error.

    Example:
        >>> samples = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> ratio = lambda mean: mean[0] / mean[1]
        >>> value, spread = statistics.bootstrap(samples, ratio, torch.Generator().manual_seed(0))
        >>> round(value, 3), 0 < spread < 0.2
        (0.667, True)
    """
    count = len(samples)
    pick = torch.randint(0, count, (draws, count), generator=generator)
    again = torch.stack([of(samples[rows].mean(0)) for rows in pick])
    return of(samples.mean(0)).item(), again.std().item()


def worst(
    cases: Mapping[Hashable, tuple[float, float]], high_is_good: bool = True
) -> tuple[float, float]:
    """(value, error) of the least favourable of several cases; NaN only if there is nothing else.

    Example:
        >>> statistics.worst({"seed 0": (0.9, 0.01), "seed 1": (0.7, 0.02)})
        (0.7, 0.02)
    """
    pick = min if high_is_good else max
    defined = [pair for pair in cases.values() if not math.isnan(pair[0])]
    return pick(defined or cases.values(), key=lambda pair: pair[0])


def empirical_p(
    observed: Float[Tensor, "*item"], null: Float[Tensor, "draw *item"]
) -> Float[Tensor, "*item"]:
    """One-sided p-value of large values against draws from the null."""
    return (1 + (null >= observed).sum(0)) / (1 + len(null))


def benjamini_hochberg(p: Float[Tensor, "*item"], rate: float = 0.05) -> Bool[Tensor, "*item"]:
    """Which p-values are findings at this false-discovery rate.

    Example:
        >>> statistics.benjamini_hochberg(torch.tensor([0.001, 0.02, 0.9]))
        tensor([ True,  True, False])
    """
    if not 0 < rate < 1:
        raise IclError(f"The false-discovery rate must lie between 0 and 1; got {rate}.")
    adjusted = false_discovery_control(p.double().cpu().numpy(), axis=None)
    return torch.as_tensor(adjusted, device=p.device).reshape(p.shape) <= rate


def sign_flip_p(
    effects: Float[Tensor, "*item sample"], generator: Generator, draws: int = 2000
) -> Float[Tensor, "*item"]:
    """Two-sided p-value that a mean over samples is zero: the signs of samples are exchangeable.

    Example:
        >>> effects = torch.stack([torch.ones(8), torch.tensor([1.0, -1.0] * 4)])
        >>> statistics.sign_flip_p(effects, torch.Generator().manual_seed(0), draws=500) < 0.05
        tensor([ True, False])
    """
    return empirical_p(effects.mean(-1).abs(), _flipped(effects, generator, draws).abs())


def single_step_threshold(
    effects: Float[Tensor, "*item sample"],
    generator: Generator,
    alpha: float = 0.05,
    draws: int = 2000,
) -> float:
    """The |mean| that sign flips make the largest of all items exceed with probability ``alpha``.

    The signs of a draw are shared by all items, so that dependence between items is kept.
    """
    flipped = _flipped(effects, generator, draws).abs().reshape(draws, -1)
    return float(flipped.amax(1).quantile(1 - alpha))


def step_down_threshold(effects: Float[Tensor, "item sample"], generator: Generator) -> float:
    """``single_step_threshold`` of the items that are left when those above it are set aside.

    In a single step one strong item, flipped, hides all others. Here chance is asked again about
    the rest until nothing more is found; the chance of any false finding stays at five per cent
    (Westfall and Young 1993).
    """
    while True:
        threshold = single_step_threshold(effects, generator)
        below = effects.mean(-1).abs() <= threshold
        if bool(below.all()) or not bool(below.any()):
            return threshold
        effects = effects[below]


def _flipped(effects: Tensor, generator: Generator, draws: int) -> Float[Tensor, "draw *item"]:
    """Means over samples under random signs, one for each sample and draw."""
    count = effects.shape[-1]
    if count < 6:
        raise IclError(f"Sign flips need at least six samples; got {count}.")
    signs = (torch.randint(0, 2, (draws, count), generator=generator) * 2.0 - 1.0).to(effects)
    return torch.einsum("...s,ds->d...", effects, signs) / count
