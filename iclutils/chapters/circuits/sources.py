"""Sources of a prediction: positions whose token it needs, beyond chance.

Positions are counted from where the answer can be read, so that different predictions can be
averaged: 0 is the source itself, -1 the token before it (the match). Many positions are tested, so
the rate of false discoveries is controlled (Benjamini and Hochberg 1995).

Example:
    >>> import torch
    >>> from iclutils.chapters.circuits import sources
    >>> signed = torch.zeros(16, 1, 5)
    >>> signed[:, 0, 3] = -1.0 - torch.rand(16, generator=torch.Generator().manual_seed(0))
    >>> at, source = torch.full((16, 1), 4), torch.full((16, 1), 2)
    >>> found = sources.helpful(signed, at, source, torch.Generator().manual_seed(0))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from ...errors import IclError
from ...interp.statistics import benjamini_hochberg, sign_flip_p

FEWEST = 6  # sequences; signs of fewer cannot reach 5 %


@dataclass(frozen=True)
class Sources:
    """What the token at each offset from the source is worth to the prediction.

    Attributes:
        offset: positions relative to the source, increasing.
        mean: nats that the prediction loses when the token is drawn anew; positive: it helps.
        p: two-sided p-value over sequences, by sign flips.
        found: helps, at the false-discovery rate asked for.
    """

    offset: Int[Tensor, "offset"]
    mean: Float[Tensor, "offset"]
    p: Float[Tensor, "offset"]
    found: Bool[Tensor, "offset"]


def helpful(
    signed: Float[Tensor, "batch entry pos"],
    at: Int[Tensor, "batch entry"],
    source: Int[Tensor, "batch entry"],
    generator: Generator,
    rate: float = 0.05,
) -> Sources:
    """Offsets at which tokens help, with false discoveries controlled at ``rate``.

    Entries are averaged within a sequence; sequences are the samples. Positions after the entry
    and undefined ones (NaN) are passed over, offsets with fewer than six sequences left out. With
    n sequences no p-value is below 2^(1-n): of m offsets fewer than ``m 2^(1-n) / rate`` can never
    be found, so give a dozen sequences or more.

    Args:
        signed: change of log p(answer) when the token is drawn anew (``influence``), in nats.
        at: positions of the entries.
        source: position that each answer can be read from.
        generator: source of randomness, on the CPU.
        rate: false-discovery rate.

    Example:
        >>> found.offset[found.found]
        tensor([1])
    """
    lost = -signed.double()
    place = torch.arange(signed.shape[-1], device=signed.device)
    known = (place <= at[..., None]) & ~lost.isnan()
    relative = place - source[..., None]
    offsets, worth = [], []
    for offset in relative[known].unique().tolist():
        here = known & (relative == offset)
        count = here.sum((1, 2))
        value = torch.where(here, lost, 0.0).sum((1, 2))[count > 0] / count[count > 0]
        if len(value) >= FEWEST:
            offsets.append(offset)
            worth.append(value)
    if not offsets:
        raise IclError(f"Sources need at least {FEWEST} sequences that show an offset.")
    p = torch.stack([sign_flip_p(value, generator) for value in worth])
    mean = torch.stack([value.mean() for value in worth])
    offset_tensor = torch.tensor(offsets, device=signed.device)
    return Sources(offset_tensor, mean, p, benjamini_hochberg(p, rate) & (mean > 0))


def precision(sources: Sources, structural: Iterable[int]) -> float:
    """Share of the found offsets that are structural; NaN if none is found.

    For a doubled sequence of length L: -1 (the match), 0 (what follows it) and L - 1 (the token
    itself).

    Example:
        >>> sources.precision(found, [1])
        1.0
    """
    found = sources.offset[sources.found].tolist()
    expected = set(structural)
    return sum(o in expected for o in found) / len(found) if found else float("nan")
