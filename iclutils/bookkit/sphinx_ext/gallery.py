"""``{gallery}``: pictures of diagrams, drawn by the examples in their docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

EXAMPLES = doctest.DocTestParser()


class Gallery(SphinxDirective):
    """``{gallery} module`` shows ``figure`` of every example in that module's docstrings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Draw, and build one figure each."""
        module = importlib.import_module(self.arguments[0])
        setting, found = _run(module, {}), []
        for name, function in vars(module).items():
            if not inspect.isfunction(function) or name.startswith("_"):
                continue
            figure = _run(function, setting).get("figure")
            if figure is None:
                continue
            path = Path(self.env.doctreedir, "figures", f"{name}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
            first = (inspect.getdoc(function) or "").partition("\n\n")[0]
            said = re.sub("[`*]", "", " ".join(first.split()))
            uri = f"/{os.path.relpath(path, self.env.srcdir)}".replace(os.sep, "/")
            shown = nodes.figure("", nodes.image(uri=uri, alt=said), classes=["chapterfigure"])
            shown += nodes.caption("", "", nodes.literal("", name), nodes.Text(f": {said}"))
            found.append(shown)
        return found


def _run(documented: object, setting: dict[str, Any]) -> dict[str, Any]:
    """The names that the examples of a docstring leave behind."""
    names = dict(setting)
    for example in EXAMPLES.get_examples(inspect.getdoc(documented) or ""):
        exec(example.source, names)  # the package's own text
    return names
