"""Presets: the sizes of all that a chapter does, by tier. ``presets.toml`` explains them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .errors import unknown
from .zoo import has

Names = tuple[str, ...]
SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Tier:
    """One tier: a name, a device and the sizes of each chapter."""

    name: str
    column: str  # where its results belong: its name, or that of a part of it
    device: str
    induction: Any  # sizes of chapter 01
    label_words: Any  # 02
    regression: Any  # 03
    gradient_descent: Any  # 04 and 05
    circuits: Any  # 06
    lenses: Any  # 07

    def models(self, chapter: str) -> Names:
        """Return the names of the models that a chapter (by number) looks at."""
        reader: str = self.regression.reader
        looked: dict[str, Names] = {
            "01": self.induction.models,
            "02": self.label_words.models,
            "03": (reader,) if reader else self.regression.models,
            "04": tuple(filter(has, self.gradient_descent.depth + self.gradient_descent.shared)),
            "05": self.gradient_descent.transformers,
            "06": self.circuits.models,
            "07": self.lenses.models,
        }
        return looked[chapter]


def _tier(name: str, device: str, part: str = "") -> Tier:
    """Make a tier, or a part of it, which does the same with fewer of everything."""
    layers = [SIZES["mini"], SIZES[name], SIZES.get(part, {})]
    chapters = {}
    for chapter in SIZES["mini"]:
        sizes = {key: size for layer in layers for key, size in layer.get(chapter, {}).items()}
        chapters[chapter] = SimpleNamespace(**{key: _plain(x) for key, x in sizes.items()})
    return Tier(name, part or name, device, **chapters)


def _plain(size: Any) -> Any:
    """Return lists as tuples, wherever they stand, and ``"all"`` as no bound."""
    if isinstance(size, list):
        return tuple(map(_plain, size))
    return None if size == "all" else size


TIERS = {
    "mini": _tier("mini", "cpu"),
    "real": _tier("real", "auto"),
    "paper": _tier("paper", "auto"),
}
PART = _tier("real", "cpu", "real-part")  # to see in minutes that code gives what it gave


def get(name: str) -> Tier:
    """Return the tier of that name, or the part of one."""
    known = TIERS | {PART.column: PART}
    if name not in known:
        raise unknown("tier", name, known)
    return known[name]
