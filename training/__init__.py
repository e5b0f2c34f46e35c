"""How the shipped networks were trained: one loop, and a recipe for each kind of network."""

from __future__ import annotations

import fnmatch
from functools import partial

from iclutils.errors import unknown
from iclutils.zoo import HELD_OUT

from . import induction, label_words, lsa, phase_change, regression
from .loop import Recipe

_LANGUAGE = (
    {f"induction-{seed}": partial(induction.recipe, seed) for seed in (0, *HELD_OUT)}
    | {"detour": partial(induction.offset_induction, 2)}
    | {f"anchors-{seed}": partial(label_words.recipe, seed) for seed in (0, *HELD_OUT)}
    | {
        f"anchors-uncopied-{seed}": partial(label_words.recipe, seed, copying=False)
        for seed in HELD_OUT[:3]
    }
    | {f"anchors-narrow-{s}": partial(label_words.recipe, s, heads=8) for s in HELD_OUT[:2]}
)


def names() -> list[str]:
    """List the shipped models, each of which can be trained again."""
    return [*_LANGUAGE, *regression.SHIPPED, *lsa.SHIPPED]


def all_names() -> list[str]:
    """List all recipes: of shipped models, of those whose curves ship, and of paper size."""
    return [*names(), *phase_change.names(), *regression.MAP, *regression.PAPER]


def matching(pattern: str) -> list[str]:
    """List the recipes whose names match, such as ``regression-two-L*``; none raises."""
    if names := fnmatch.filter(all_names(), pattern):
        return names
    raise unknown("recipe", pattern, all_names())


def recipe(name: str, device: str = "cpu") -> Recipe:
    """Make the recipe of that name; ``device`` is for regressions, language models use the CPU."""
    if name in lsa.SHIPPED:
        return lsa.recipe(name, device)
    if name in regression.SHIPPED | regression.MAP | regression.PAPER:
        return regression.recipe(name, device)
    if name in phase_change.names():
        return phase_change.recipe(name)
    if name not in _LANGUAGE:
        raise unknown("recipe", name, all_names())
    return _LANGUAGE[name]()
