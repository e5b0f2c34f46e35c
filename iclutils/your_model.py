"""``show``: a chapter's main figure for a model of the reader's own, from one call.

It runs that chapter's cells of ``notebooks/your_model.ipynb``, which the reader may open and edit.

Example:
    >>> import iclutils
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from . import models, zoo
from .errors import IclError, unknown
from .files import CHECKOUT, read_json, replacing
from .models import cost
from .progress import say
from .session import refuse, resolve_device

NOTEBOOK = "your_model.ipynb"
CHAPTERS = ("01", "02", "03", "04", "05", "06")
# Which chapter looks at networks without tokens.
NUMBERS = {"in-context regressors": "03", "solvers": "04"}


@dataclass(frozen=True, repr=False)
class Shown:
    """A figure, what is to be seen in it (``alt``), what was found, in words (``text``), and all
    that the cells named (``numbers``)."""

    chapter: str
    figure: Figure
    alt: str
    text: str
    numbers: dict[str, Any]

    def __repr__(self) -> str:
        return self.text

    def save(self, path: str | Path) -> Path:
        """Write the figure as PNG or SVG, with its description inside."""
        path = Path(path)
        form = ending(path)
        with replacing(path) as temporary:
            described = {"Description": f"{self.alt} {self.text}"}
            self.figure.savefig(temporary, format=form, metadata=described)
        return path


def show(
    chapter: str,
    model: str | Path = "",
    *,
    prompt: str = "",
    demonstrations: Sequence[tuple[str, str]] = (),
    query: str = "",
    answer: str = "",
    seed: int = 0,
    device: str = "auto",
) -> Shown:
    """A chapter's main figure for one model; what it will take is said before.

    Args:
        chapter: its number.
        model: a Hugging Face folder, a name that ``load`` knows, or a folder of in-context
            regressors (03) or of linear self-attention (04); the chapter's own model if omitted.
        prompt: chapter 01 only, for a model with a tokenizer: a text, which is shown twice.
        demonstrations, query, answer: chapter 02 only, for a model with a tokenizer: texts with
            their labels, the text to be labelled, and its right label if there is one.
        seed, device: as in ``begin``; ``"auto"`` is a CUDA GPU where there is one.

    Example:
        >>> made = iclutils.show("01", "induction-0")
        >>> made.numbers["layer"], made.numbers["head"]
        (1, 0)
    """
    if chapter not in CHAPTERS:
        raise unknown("chapter", chapter, CHAPTERS)
    if prompt and chapter != "01":
        raise IclError("A prompt of your own is for chapter 01; 02 takes demonstrations and query.")
    if (demonstrations or query or answer) and chapter != "02":
        raise IclError("Demonstrations and a query are for chapter 02.")
    name = str(model)
    refuse(name, seed)
    if name:
        _announce(chapter, name, zoo.kind(name))
    given = {"model": name, "seed": seed, "device": resolve_device(device), "prompt": prompt}
    given |= {"demonstrations": list(demonstrations), "query": query, "answer": answer}
    return _run(chapter, given)


def ending(path: Path) -> str:
    """The format that a figure's file is written in, by its name."""
    if path.suffix not in (".png", ".svg"):
        raise IclError(f"Figures are written as .png or .svg; got {path.name!r}.")
    return path.suffix[1:]


def _announce(chapter: str, name: str, kind: str) -> None:
    """Refuse a model that the chapter cannot look at; say how large another one is."""
    if NUMBERS.get(kind, chapter) != chapter:
        raise IclError(
            f"{name!r} holds {kind}, which read numbers and no tokens: ask for chapter "
            f"{NUMBERS[kind]}, or name a language model."
        )
    if chapter == "04" and kind == "transformer":
        raise IclError(
            f"Chapter 04 looks at networks that read numbers, such as 'lsa-1'; ask for chapter 05, "
            f"which takes the heads of {name!r} as steps of gradient descent."
        )
    if kind == "transformer":
        more = ", three times that while they are folded" if chapter == "01" else ""
        say(f"loading {name}: {cost.amount(models.size(name))} of weights in memory{more}")


def _run(chapter: str, given: dict[str, Any]) -> Shown:
    """Run the notebook's first cells, then those of the chapter, which it tags with its number."""
    cells = [cell for cell in read_json(_notebook())["cells"] if cell["cell_type"] == "code"]
    tags = [{*cell["metadata"].get("tags", [])} for cell in cells]
    space: dict[str, Any] = {}

    def run(cell: dict[str, Any]) -> None:
        exec(compile("".join(cell["source"]), NOTEBOOK, "exec"), space)

    with contextlib.redirect_stdout(io.StringIO()):  # the set-up cell tells of tiers
        for cell, its in zip(cells, tags, strict=True):
            if not its & set(CHAPTERS):
                run(cell)
            if "parameters" in its:
                space |= given
    printed, alt = list[str](), ""
    before = {*space, "print"}
    space["print"] = lambda *words: printed.append(" ".join(map(str, words)))
    for cell in (cell for cell, its in zip(cells, tags, strict=True) if chapter in its):
        drawn = space.get("figure")
        run(cell)
        if space.get("figure") is not drawn:  # the last that is drawn is shown
            alt = cell["metadata"]["mystnb"]["image"]["alt"]
    named = {name: value for name, value in space.items() if name not in before}
    return Shown(chapter, named["figure"], alt, " ".join(printed), named)


def _notebook() -> Path:
    """Of the checkout, or as it was installed with the package."""
    here = CHECKOUT / "notebooks" / NOTEBOOK
    with contextlib.suppress(metadata.PackageNotFoundError):
        if not here.is_file():
            files = (Path(str(path.locate())) for path in metadata.files("iclutils") or ())
            here = next((path for path in files if path.name == NOTEBOOK), here)
    if not here.is_file():
        raise IclError(
            f"{NOTEBOOK}, whose cells draw the figures, is neither in this folder's checkout nor "
            "installed: run this in a checkout of the book, or install the package with pip."
        )
    return here
