"""How the shipped networks were trained: one loop, and a recipe for each kind of network."""

from __future__ import annotations

import fnmatch
from importlib import import_module
from typing import Any

from iclutils.errors import unknown
from iclutils.zoo import HELD_OUT

from . import lsa, regression
from .loop import Recipe

# Shipped language models: module, function and arguments of each recipe. Their modules import
# transformers, for seconds: when one is asked for.
_LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = (
    {f"induction-{seed}": ("induction", "recipe", {"seed": seed}) for seed in (0, *HELD_OUT)}
    | {"detour": ("induction", "offset_induction", {"seed": 2})}
    | {f"anchors-{seed}": ("label_words", "recipe", {"seed": seed}) for seed in (0, *HELD_OUT)}
    | {
        f"anchors-narrow-{seed}": ("label_words", "recipe", {"seed": seed, "heads": 8})
        for seed in HELD_OUT[:2]
    }
)


def names() -> list[str]:
    """List the shipped models, each of which can be trained again."""
    return [*_LANGUAGE, *regression.SHIPPED, *lsa.SHIPPED]


def all_names() -> list[str]:
    """List all recipes: of shipped models, of those whose curves ship, and of paper size."""
    from . import phase_change

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
    if name in _LANGUAGE:
        module, function, arguments = _LANGUAGE[name]
        return getattr(import_module(f".{module}", __name__), function)(**arguments)
    from . import phase_change

    if name in phase_change.names():
        return phase_change.recipe(name)
    raise unknown("recipe", name, all_names())
