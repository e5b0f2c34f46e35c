"""The chapters as they are handed out: their exercises, without the solutions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from iclutils.errors import unknown
from iclutils.files import read_json, write_json

from . import run


def with_exercises() -> list[str]:
    """Names of the notebooks that have exercises, in order."""
    cells = {name: read_json(run.NOTEBOOKS / f"{name}.ipynb")["cells"] for name in run.chapters()}
    return [
        k for k, v in cells.items() if any("exercise" in c["metadata"].get("tags", []) for c in v)
    ]


def without_solutions(chapter: str | None, folder: Path) -> Iterator[Path]:
    """Write the notebooks with exercises of a chapter (``"01"``, or a full name; all if None) into
    ``folder``, without the cells tagged ``solution`` and without outputs; yield each file."""
    known = with_exercises()
    names = [name for name in known if chapter in (None, name, name[:2])]
    if not names:
        raise unknown("chapter", chapter, known)
    for name in names:
        notebook = read_json(run.NOTEBOOKS / f"{name}.ipynb")
        tagged = ((cell, cell["metadata"].get("tags", [])) for cell in notebook["cells"])
        notebook["cells"] = [cell for cell, tags in tagged if "solution" not in tags]
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell |= {"execution_count": None, "outputs": []}
        write_json(path := folder / f"{name}.ipynb", notebook)
        yield path
