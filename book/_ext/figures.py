"""Figures that a page takes from elsewhere: from a chapter, or from the examples of a module."""

from __future__ import annotations

import base64
import doctest
import importlib
import inspect
import os
import re
from io import BytesIO
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from iclutils.errors import IclError, unknown

from .markdown import cells

LABEL = re.compile(r"^\((\d\d-[\w-]+)\)=$", re.MULTILINE)
EXAMPLES = doctest.DocTestParser()


class ChapterFigure(SphinxDirective):
    """``{chapterfigure} NN-section``: a figure of that section, its caption the content.

    The option ``name`` takes the figure of that name, which its cell's metadata give it; ``number``
    counts the figures of the section, from 1.
    """

    required_arguments = 1
    has_content = True
    option_spec = {"name": directives.unchanged, "number": directives.positive_int}  # noqa: RUF012 - docutils' own form

    def run(self) -> list[nodes.Node]:
        label, number = self.arguments[0], self.options.get("number", 1)
        name = self.options.get("name", "")
        try:
            picture, alt = figure(self.env, label, number, name)
        except IclError as error:
            raise self.error(str(error)) from error
        said: list[nodes.Node] = []
        if self.content:
            said, _ = self.state.inline_text(" ".join(self.content), self.lineno)
        return [_shown(self.env, f"{label}-{name or number}", picture, alt, *said)]


class Gallery(SphinxDirective):
    """``{gallery} module``: the ``figure`` that each example in that module's docstrings draws."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        setting, found = _run(module, {}), []
        for name, function in vars(module).items():
            if not inspect.isfunction(function) or name.startswith("_"):
                continue
            drawn, picture = _run(function, setting).get("figure"), BytesIO()
            if drawn is not None:
                drawn.savefig(picture, format="png")
                first = (inspect.getdoc(function) or "").partition("\n\n")[0]
                said = re.sub("[`*]", "", " ".join(first.split()))
                caption = nodes.literal("", name), nodes.Text(f": {said}")
                found.append(_shown(self.env, name, picture.getvalue(), said, *caption))
        return found


def figure(env: BuildEnvironment, label: str, number: int, name: str = "") -> tuple[bytes, str]:
    """PNG and alternative text of the ``number``-th figure of a chapter after ``(label)=``, or of
    the one of that name."""
    inside, found, labels = False, [], []
    paths, every = cells(env, label.split("-")[0])
    for path in paths:
        env.note_dependency(str(path))
    for cell in every:
        if cell["cell_type"] == "markdown" and (named := LABEL.findall("".join(cell["source"]))):
            labels += named
            inside = named[-1] == label
        given = cell["metadata"].get("mystnb", {})
        alt = given.get("image", {}).get("alt") or given.get("figure", {}).get("caption", "")
        wanted = inside and name in ("", given.get("figure", {}).get("name"))
        pictures = [o.get("data", {}).get("image/png") for o in cell.get("outputs", [])]
        found += [(picture, alt) for picture in pictures if wanted and picture]
    if label not in labels:
        raise unknown("label", label, labels)
    if not 1 <= number <= len(found):
        raise IclError(f"Section {label} has {len(found)} figures, and no figure {number}.")
    picture, alt = found[number - 1]
    return base64.b64decode(picture), alt


def _shown(
    env: BuildEnvironment, name: str, picture: bytes, alt: str, *caption: nodes.Node
) -> nodes.Node:
    """A figure whose file is beside the stored pages: the sources must stay as they are."""
    path = Path(env.doctreedir, "figures", f"{name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    uri = f"/{os.path.relpath(path, env.srcdir)}".replace(os.sep, "/")
    made = nodes.figure("", nodes.image(uri=uri, alt=alt), classes=["chapterfigure"])
    if caption:
        made += nodes.caption("", "", *caption)
    return made


def _run(documented: object, setting: dict[str, Any]) -> dict[str, Any]:
    """The names that the examples of a docstring leave behind."""
    names = dict(setting)
    for example in EXAMPLES.get_examples(inspect.getdoc(documented) or ""):
        exec(example.source, names)  # the package's own text
    return names
