"""Training: one recipe per zoo model, one small loop for all."""

from __future__ import annotations

from pathlib import Path

from ..errors import unknown
from .anchors import deep, uncopied
from .anchors import recipe as classifying
from .induction import detour
from .induction import recipe as copying
from .loop import Recipe
from .loop import train as train_recipe

_RECIPES = (
    {f"induction-{seed}": (copying, seed) for seed in range(3)}
    | {"detour": (detour, 2)}
    | {f"anchors-{seed}": (classifying, seed) for seed in range(3)}
    | {"anchors-deep": (deep, 0), "anchors-uncopied": (uncopied, 0)}
)


def names() -> list[str]:
    """Names of the models that can be trained."""
    return list(_RECIPES)


def recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        IclError: if there is none.
    """
    if name not in _RECIPES:
        raise unknown("recipe", name, _RECIPES)
    build, seed = _RECIPES[name]
    return build(seed)


def train(name: str, work: Path, progress: bool = True) -> Path:
    """Train, or go on training, the named model in the folder ``work``.

    Raises:
        IclError: if there is no such recipe, or training fails (see ``loop.train``).
    """
    return train_recipe(recipe(name), work, progress)
