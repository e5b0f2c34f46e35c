"""Tiers: the sizes of all that a chapter does, on a laptop (``mini``), on a GPU (``paper``)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import unknown


@dataclass(frozen=True)
class Induction:
    """Sizes of chapter 01."""

    models: tuple[str, ...]  # the first is the one the figures show
    length: int  # L, tokens in one copy
    sequences: int  # doubled sequences behind every mean
    sweeps: int  # sequences behind the position sweep
    pairs: int  # random head pairs in the null of the QK-matching circuit


@dataclass(frozen=True)
class Tier:
    """One tier: a name and the sizes of each chapter."""

    name: str
    device: str
    induction: Induction

    def models(self, chapter: str) -> tuple[str, ...]:
        """Names of the models that a chapter (by number) looks at."""
        return {"01": self.induction.models}[chapter]


TIERS = {
    "mini": Tier(
        name="mini",
        device="cpu",
        induction=Induction(
            models=("induction-0", "induction-1", "induction-2"),
            length=30,
            sequences=64,
            sweeps=16,
            pairs=100,
        ),
    ),
    "paper": Tier(
        name="paper",
        device="auto",
        induction=Induction(models=("gpt2",), length=50, sequences=32, sweeps=4, pairs=200),
    ),
}


def get(name: str) -> Tier:
    """The tier of that name.

    Raises:
        IclError: if there is none.
    """
    if name not in TIERS:
        raise unknown("tier", name, TIERS)
    return TIERS[name]
