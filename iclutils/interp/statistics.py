"""Means and their errors, and what chance alone would give.

Sources: Benjamini and Hochberg 1995; Westfall and Young 1993 (the largest of many as null).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import SupportsFloat

import torch
from jaxtyping import Bool, Float, Int
from scipy.stats import false_discovery_control
from torch import Generator, Tensor

from ..errors import IclError


def mean_se(values: Float[Tensor, "sample"]) -> tuple[float, float]:
    """Return mean and standard error over independent samples (0 of a single one)."""
    error = (values.std() / len(values) ** 0.5).item() if len(values) > 1 else 0.0
    return values.mean().item(), error


def area(
    higher: Sequence[float] | Float[Tensor, "one"], lower: Sequence[float] | Float[Tensor, "other"]
) -> float:
    """Return how often one value exceeds another, a tie counting half: the area under the ROC
    curve; NaN without a pair."""
    gap = torch.as_tensor(higher)[:, None] - torch.as_tensor(lower)
    return float(((gap > 0).double() + (gap == 0).double() / 2).mean())


def by_model(
    of: Callable[[tuple[str, str], Int[Tensor, "rows"]], SupportsFloat],
    among: Mapping[tuple[str, str], Sized],
) -> Float[Tensor, "_"]:
    """Measure ``of(case, rows)`` for every model, or for each fifth of the rows of a single one:
    the mean over its tasks. A case is a model and a task."""
    by_name = defaultdict[str, list[Tensor]](list)
    parts = 1 if len({model for model, _ in among}) > 1 else 5
    for case, prompts in among.items():
        rows = torch.arange(len(prompts)).tensor_split(min(parts, len(prompts)))
        by_name[case[0]].append(torch.tensor([float(of(case, some)) for some in rows]))
    return torch.cat([torch.stack(tasks).nanmean(0) for tasks in by_name.values()])


def pseudo_values(statistic: Callable[..., float], *columns: Sequence[float]) -> list[float]:
    """Return jackknife pseudo-values of a statistic of columns, a row left out at a time: their
    mean is the statistic less its bias, their standard error that of the statistic (Efron 1982)."""
    rows = list(zip(*columns, strict=True))
    whole = statistic(*columns)
    left = [statistic(*zip(*(rows[:i] + rows[i + 1 :]), strict=True)) for i in range(len(rows))]
    return [len(rows) * whole - (len(rows) - 1) * one for one in left]


def benjamini_hochberg(p: Float[Tensor, "*item"], rate: float = 0.05) -> Bool[Tensor, "*item"]:
    """Tell which p-values are findings at this false-discovery rate."""
    adjusted = false_discovery_control(p.double().cpu().numpy(), axis=None)
    return torch.as_tensor(adjusted, device=p.device).reshape(p.shape) <= rate


def step_down_threshold(
    effects: Float[Tensor, "item sample"], generator: Generator, draws: int = 2000
) -> float:
    """Return the |mean|, in the effects' unit, that five per cent of sign flips of chance items
    exceed anywhere (Westfall and Young 1993). The signs of a draw are shared by all items; items
    above the threshold are set aside and the rest is asked again, with new signs, until nothing
    more is found. Fewer than six samples raise ``IclError``. Where a few false findings among many
    do no harm: ``benjamini_hochberg``."""
    while True:
        threshold = float(_flipped(effects, generator, draws).abs().amax(1).quantile(0.95))
        below = effects.mean(-1).abs() <= threshold
        if bool(below.all()) or not bool(below.any()):
            return threshold
        effects = effects[below]


def _flipped(effects: Tensor, generator: Generator, draws: int) -> Float[Tensor, "draw *item"]:
    """Return means over samples under random signs, one for each sample and draw."""
    count = effects.shape[-1]
    if count < 6:
        raise IclError(f"Sign flips need at least six samples; got {count}.")
    signs = (torch.randint(0, 2, (draws, count), generator=generator) * 2.0 - 1.0).to(effects)
    return torch.einsum("...s,ds->d...", effects, signs) / count
