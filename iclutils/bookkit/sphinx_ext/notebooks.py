"""Chapters as the book's sources hold them: titles, and figures with their texts."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from sphinx.environment import BuildEnvironment

from ...errors import IclError, unknown
from ...files import read_json

LABEL = re.compile(r"^\((\d\d-[\w-]+)\)=$", re.MULTILINE)


def read(env: BuildEnvironment, chapter: str) -> tuple[str, list[dict[str, Any]]]:
    """Page name and cells of the notebook of a chapter, given as its number."""
    folder = Path(env.srcdir, "notebooks")
    known = {path.stem[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    if chapter not in known:
        raise unknown("chapter", chapter, known)
    return f"notebooks/{known[chapter].stem}", read_json(known[chapter])["cells"]


def title(env: BuildEnvironment, chapter: str) -> str:
    """Number and title of a chapter, or its number alone where the book has no notebook of it."""
    try:
        _, cells = read(env, chapter)
    except IclError:
        return chapter
    heading = re.search(r"^# (.+)$", "".join(cells[0]["source"]), re.MULTILINE)
    return f"{chapter} {heading[1]}" if heading else chapter


def figure(cells: list[dict[str, Any]], label: str, number: int) -> tuple[bytes, str]:
    """PNG and alternative text of the ``number``-th figure after ``(label)=``."""
    inside, found, labels = False, [], []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and (named := LABEL.findall(source)):
            labels += named
            inside = named[-1] == label
        alt = cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")
        pictures = [o.get("data", {}).get("image/png") for o in cell.get("outputs", [])]
        found += [(picture, alt) for picture in pictures if inside and picture]
    if label not in labels:
        raise unknown("label", label, labels)
    if not 1 <= number <= len(found):
        raise IclError(f"Section {label} has {len(found)} figures, and no figure {number}.")
    picture, alt = found[number - 1]
    if not alt:
        raise IclError(f"Figure {number} of section {label} has no alternative text.")
    return base64.b64decode(picture), alt
