"""Training: one recipe per zoo model, one small loop for all.

Example:
    >>> from pathlib import Path
    >>> from iclutils import training
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from ..errors import unknown
from . import regression, solvers
from .anchors import deep, uncopied
from .anchors import recipe as classifying
from .induction import detour
from .induction import recipe as copying
from .loop import Recipe
from .loop import train as train_recipe

_LANGUAGE = (
    {f"induction-{seed}": (copying, seed) for seed in range(3)}
    | {"detour": (detour, 2)}
    | {f"anchors-{seed}": (classifying, seed) for seed in range(3)}
    | {"anchors-deep": (deep, 0), "anchors-uncopied": (uncopied, 0)}
)


def names() -> list[str]:
    """Names of the shipped models, each of which can be trained again.

    Example:
        >>> "induction-0" in training.names()
        True
    """
    return [*_LANGUAGE, *regression.SHIPPED, *solvers.SHIPPED]


def all_names() -> list[str]:
    """Names of all recipes: the shipped models, and those of paper size, which need a GPU."""
    return [*names(), *regression.PAPER, *solvers.PAPER]


def matching(pattern: str) -> list[str]:
    """The recipes whose names match, such as ``regression-one-L*``.

    Example:
        >>> training.matching("induction-*")
        ['induction-0', 'induction-1', 'induction-2']
    """
    found = [name for name in all_names() if fnmatch(name, pattern)]
    if not found:
        raise unknown("recipe", pattern, all_names())
    return found


def recipe(name: str, device: str = "cpu") -> Recipe:
    """The recipe of that name; ``device`` is for regressions, the rest use the CPU.

    Example:
        >>> training.recipe("induction-0").seed
        0
    """
    for kind in (regression, solvers):
        if name in kind.SHIPPED | kind.PAPER:
            return kind.recipe(name, device)
    if name not in _LANGUAGE:
        raise unknown("recipe", name, all_names())
    build, seed = _LANGUAGE[name]
    return build(seed)


def train(name: str, work: Path, progress: bool = True, device: str = "cpu") -> Path:
    """Train, or go on training, the named model in the folder ``work``.

    Example:
        >>> try:
        ...     training.train("induction-9", Path("anywhere"))
        ... except ValueError as error:
        ...     print(str(error)[:28])
        Unknown recipe 'induction-9'
    """
    return train_recipe(recipe(name, device), work, progress)
