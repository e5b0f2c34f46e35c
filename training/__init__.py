"""How the shipped networks were trained: one loop, and a recipe for each kind of network."""

from __future__ import annotations

import fnmatch

from iclutils.errors import unknown
from iclutils.zoo import HELD_OUT

from . import lsa, regression
from .loop import Recipe

SEEDS = (0, *HELD_OUT)
LANGUAGE = [f"{kind}-{seed}" for kind in ("induction", "anchors") for seed in SEEDS]
LANGUAGE += ["detour", *(f"anchors-narrow-{seed}" for seed in HELD_OUT[:2])]


def names() -> list[str]:
    """List the shipped models, each of which can be trained again."""
    return [*LANGUAGE, *regression.SHIPPED, *lsa.SHIPPED]


def all_names() -> list[str]:
    """List all recipes: of shipped models, of those whose curves ship, and of paper size."""
    from . import phase_change  # imports transformers, for seconds

    return [*names(), *phase_change.names(), *regression.MAP, *regression.PAPER]


def matching(pattern: str) -> list[str]:
    """List the recipes whose names match, such as ``regression-two-L*``; none raises."""
    if names := fnmatch.filter(all_names(), pattern):
        return names
    raise unknown("recipe", pattern, all_names())


def recipe(name: str, device: str = "cpu") -> Recipe:
    """Make the recipe of that name; ``device`` is for regressors, language models use the CPU."""
    if name in lsa.SHIPPED:
        return lsa.recipe(name, device)
    if name in regression.SHIPPED | regression.MAP | regression.PAPER:
        return regression.recipe(name, device)
    from . import induction, label_words, phase_change

    if name in phase_change.names():
        return phase_change.recipe(name)
    if name not in LANGUAGE:
        raise unknown("recipe", name, all_names())
    if name == "detour":
        return induction.offset_induction(seed=2)
    kind, _, seed = name.rpartition("-")
    if kind == "induction":
        return induction.recipe(int(seed))
    return label_words.recipe(int(seed), heads=8 if kind == "anchors-narrow" else 4)
