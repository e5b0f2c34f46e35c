"""Many trainings at once, through joblib: the cores of one machine, or a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from joblib import Parallel, delayed, parallel_config

from iclutils.errors import IclError

from .loop import Recipe, train


def sweep(recipes: Sequence[Recipe], out: Path, jobs: int | None = None) -> list[Path]:
    """Train every recipe in the folder ``out / recipe.name``; return these folders.

    Runs on joblib's current backend (all cores of this machine if none is set), ``jobs`` at a
    time. A finished folder is left alone and an interrupted one continued, so that a sweep can be
    stopped and started again. On a cluster all workers must see the folder.
    """
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        raise IclError("Two recipes of a sweep have the same name, and so the same folder.")
    run = Parallel(n_jobs=-1 if jobs is None else jobs, batch_size=1, pre_dispatch="all")
    problems = run(delayed(_train)(recipe, out / recipe.name) for recipe in recipes)
    failures = list(filter(None, problems))
    if failures:
        raise IclError(
            f"{len(failures)} of {len(problems)} trainings failed: {'; '.join(failures)}"
        )
    return [out / name for name in names]


def on_cluster(scheduler: str) -> AbstractContextManager[object]:
    """Return joblib's Dask backend on the cluster of that address, if any, else this machine."""
    if not scheduler:
        return nullcontext()
    from distributed import Client  # of iclutils[cluster]

    Client(scheduler, timeout="10s", set_as_default=True)
    return parallel_config("dask")


def _train(recipe: Recipe, work: Path) -> str:
    """Train one; a mistake is reported instead of raised, so that the others go on."""
    try:
        train(recipe, work, progress=False)
    except IclError as error:
        return str(error)
    return ""
