"""Overlap of circuits: how much two sets of components share, and how much by chance.

Sets of names mean something only where the names do: within one model, or as the question whether
names carry over from one model to another. Two sets drawn at random share something as well, the
more the larger they are, so every overlap comes with its null: the hypergeometric distribution.

Example:
    >>> import torch
    >>> from iclutils.chapters.circuits import overlap
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from scipy.stats import hypergeom
from torch import Tensor

from ...errors import IclError

Item = TypeVar("Item")


def top(values: Float[Tensor, "item"], size: int) -> frozenset[int]:
    """The ``size`` items of the largest values; of equal ones the first. NaN counts as smallest.

    Example:
        >>> overlap.top(torch.tensor([0.1, 0.9, 0.5]), 2)
        frozenset({1, 2})
    """
    if not 1 <= size <= len(values):
        raise IclError(f"Cannot take the best {size} of {len(values)} items.")
    order = torch.nan_to_num(values, nan=-torch.inf).sort(descending=True, stable=True).indices
    return frozenset(order[:size].tolist())


def jaccard(a: Set[Item], b: Set[Item]) -> float:
    """Items in both over items in either: 0 none shared, 1 the same set.

    Example:
        >>> overlap.jaccard({1, 2}, {2, 3}) == 1 / 3
        True
    """
    _check(len(a), len(b))
    return len(a & b) / len(a | b)


def expected_jaccard(size: int, of: int, other: int | None = None) -> float:
    """Mean Jaccard similarity of two sets drawn at random from ``of`` items, exactly.

    The second has ``other`` items, as many as the first if None. For two sets of k of N items,
    k / (2 N - k) is the value at the mean number of shared items, near it and below it.
    """
    other = size if other is None else other
    _check(size, other, of)
    shared = range(max(0, size + other - of), min(size, other) + 1)
    return float(sum(hypergeom.pmf(x, of, size, other) * x / (size + other - x) for x in shared))


def overlap_p(a: Set[Item], b: Set[Item], of: int) -> float:
    """Probability that sets of these sizes, drawn at random, share at least as many items.

    Example:
        >>> overlap.overlap_p({0}, {0}, of=4)
        0.25
    """
    _check(len(a), len(b), of)
    return float(hypergeom.sf(len(a & b) - 1, of, len(a), len(b)))


class Recurring(NamedTuple):
    """Items of several sets: those in enough of them, and all others."""

    stable: frozenset
    variable: frozenset


def recurring(sets: Sequence[Set[Item]], least: int) -> Recurring:
    """Which items are in at least ``least`` of the sets, and which in fewer."""
    if not 1 <= least <= len(sets):
        raise IclError(f"Nothing can be in {least} of {len(sets)} sets.")
    seen = Counter(item for one in sets for item in one)
    stable = frozenset(item for item, count in seen.items() if count >= least)
    return Recurring(stable, frozenset(seen) - stable)


def _check(first: int, second: int, of: int | None = None) -> None:
    if not (first and second):
        raise IclError("A circuit of size zero overlaps with nothing: give each set an item.")
    if of is not None and not 1 <= min(first, second) <= max(first, second) <= of:
        raise IclError(f"Sets of {first} and {second} items do not fit into {of}.")
