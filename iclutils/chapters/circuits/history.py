"""History of a circuit: when it stays and when it changes, from checkpoint to checkpoint.

Each checkpoint has a value for every item (a wire's or a head's effect) on every sequence. Two
checkpoints are alike if the same items are best and all come in the same order. Even one and the
same checkpoint is not quite like itself on other sequences: that likeness is the *floor*, and a
change is one only below it. Where a model does not show the behaviour there is no circuit, and
nothing that could be stable: such intervals are *absent*.

Sources: seed note 004, section 7.2 (phases, without floor or absence); Tigges et al. 2024.

Example:
    >>> import torch
    >>> from iclutils.chapters.circuits import history
    >>> values = torch.tensor([[3.0, 3.0], [2.0, 2.0], [0.0, 0.0]])
    >>> similar, floors = torch.tensor([0.2, 0.9, 0.9]), torch.tensor([0.5, 0.5, 0.5])
    >>> present = torch.tensor([True, True, True, True])
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from scipy.stats import spearmanr
from torch import Generator, Tensor

from ...errors import IclError
from .overlap import jaccard, top


class Likeness(NamedTuple):
    """Of two extractions: Jaccard similarity of the best items, rank correlation of all.

    The correlation is NaN if either does not vary.
    """

    jaccard: float
    rank: float


class Phase(NamedTuple):
    """A run of intervals of one kind, ``stable``, ``unstable`` or ``absent``.

    Interval i lies between checkpoints i and i + 1; first and last are both in the run.
    """

    kind: str
    first: int
    last: int


class Rise(NamedTuple):
    """Which intervals hold a part of a rise, and which come after it."""

    within: Bool[Tensor, "interval"]
    after: Bool[Tensor, "interval"]


def similarity(
    first: Float[Tensor, "item batch"], second: Float[Tensor, "other_item other_batch"], size: int
) -> Likeness:
    """How alike two checkpoints are: the ``size`` items best by |mean|, and all by their mean.

    Example:
        >>> history.similarity(values, values, size=2)
        Likeness(jaccard=1.0, rank=1.0)
    """
    if len(first) != len(second) or len(first) < 2:
        raise IclError(f"Need the same items, two at least; got {len(first)} and {len(second)}.")
    a, b = (values.detach().cpu().double().mean(-1) for values in (first, second))
    constant = bool((a == a[0]).all() or (b == b[0]).all())
    rank = float("nan") if constant else float(spearmanr(a, b).statistic)
    return Likeness(jaccard(top(a.abs(), size), top(b.abs(), size)), rank)


def floor(
    values: Float[Tensor, "item batch"],
    size: int,
    generator: Generator,
    draws: int = 200,
    alpha: float = 0.05,
) -> float:
    """The Jaccard similarity that re-extraction from one checkpoint undercuts with ``alpha``.

    Every draw splits the sequences into two halves and compares the best items of each. Halves
    are noisier than the whole and hold different sequences, so the floor is low and checkpoints
    compared on all of the same sequences pass it the more easily; compare ``first[:, :half]``
    with ``second[:, half:]`` to treat both alike.

    Example:
        >>> history.floor(values, 2, torch.Generator().manual_seed(0), draws=20)
        1.0
    """
    count = values.shape[1]
    if count < 2:
        raise IclError("Two extractions need at least two sequences.")
    values, found = values.detach().cpu().double(), []
    for _ in range(draws):
        order = torch.randperm(count, generator=generator)
        halves = [values[:, part].mean(-1).abs() for part in order.split((count + 1) // 2)]
        found.append(jaccard(top(halves[0], size), top(halves[1], size)))
    return float(torch.tensor(found, dtype=torch.float64).quantile(alpha))


def kinds(
    similar: Float[Tensor, "interval"],
    floors: Float[Tensor, "floor"],
    present: Bool[Tensor, "checkpoint"],
    shortest: int = 2,
) -> list[str]:
    """What each interval is: ``stable``, ``unstable`` or ``absent``.

    Args:
        similar: likeness of each checkpoint to the next.
        floors: floor of each interval, that of its later checkpoint.
        present: whether a checkpoint shows the behaviour at all.
        shortest: intervals at or above the floor in a row that make a stable phase.

    Example:
        >>> history.kinds(similar, floors, present)
        ['unstable', 'stable', 'stable']
    """
    if not len(similar) == len(floors) == len(present) - 1:
        raise IclError(
            f"Got {len(similar)} similarities, {len(floors)} floors and {len(present)} "
            "checkpoints: there is one interval less than checkpoints."
        )
    there = (present[:-1] & present[1:]).tolist()
    alike = (similar >= floors).tolist()
    raw = [
        "absent" if not t else "stable" if s else "unstable"
        for t, s in zip(there, alike, strict=True)
    ]
    out: list[str] = []
    for kind, run in groupby(raw):
        count = len(list(run))
        out += ["unstable" if kind == "stable" and count < shortest else kind] * count
    return out


def phases(
    similar: Float[Tensor, "interval"],
    floors: Float[Tensor, "floor"],
    present: Bool[Tensor, "checkpoint"],
    shortest: int = 2,
) -> list[Phase]:
    """The runs of intervals of one kind, in order; arguments and errors as in ``kinds``.

    Example:
        >>> found = history.phases(similar, floors, present)
        >>> [(phase.kind, phase.first, phase.last) for phase in found]
        [('unstable', 0, 0), ('stable', 1, 2)]
    """
    out, start = [], 0
    for kind, run in groupby(kinds(similar, floors, present, shortest)):
        count = len(list(run))
        out.append(Phase(kind, start, start + count - 1))
        start += count
    return out


def rise(values: Sequence[float], low: float = 0.1, high: float = 0.8) -> Rise:
    """The intervals in which a value rises from ``low`` to ``high`` times its final one.

    The rise begins in the interval that ends with the first checkpoint at or above ``low``, and
    ends in the one that ends with the first at or above ``high``. For the positive control: a
    phase change must come out unstable.

    Example:
        >>> history.rise([0.0, 0.05, 0.9, 1.0]).within
        tensor([False,  True, False])
    """
    if len(values) < 2 or not values[-1] > 0:
        raise IclError("A rise needs two checkpoints at least and a final value above 0.")
    reached = [next(i for i, v in enumerate(values) if v >= s * values[-1]) for s in (low, high)]
    interval = torch.arange(len(values) - 1)
    within = (interval >= reached[0] - 1) & (interval < reached[1])
    return Rise(within, interval >= reached[1])
