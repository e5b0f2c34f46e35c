"""The reference: ``{api}`` shows all public modules of the packages that it names, ``{modelcards}``
the cards of the shipped models.

``automodule`` does the work. Docstrings are prose with ``code``, *emphasis* and citations as in the
pages; other marks of reStructuredText, such as the bars of \\|x\\|, stand for themselves.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

from sphinx.application import Sphinx

from iclutils import zoo

from .markdown import Generated

EMPHASIS = r"(?<![\w*`])\*[A-Za-z](?:[A-Za-z ,\n'-]*[A-Za-z])?\*(?![\w*])"
MARKED = re.compile(rf"(``[^`]+``|{EMPHASIS}|^ *(?:>>>|\.\.\. ).*$)", re.MULTILINE)


def connect(app: Sphinx) -> None:
    """Set up the extensions behind the directive."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", _escape, priority=100)  # before napoleon
    app.setup_extension("sphinx.ext.napoleon")


def modules(name: str) -> list[str]:
    """Return a package and all public modules inside it, those without a docstring left out."""
    package = importlib.import_module(name)
    inside = pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}.")
    names = [name, *(module.name for module in inside if "._" not in module.name)]
    return [module for module in names if importlib.import_module(module).__doc__]


class Api(Generated):
    """``{api}``: a section for each module of the packages in its content, one a line."""

    has_content = True

    def markdown(self) -> list[str]:
        lines = []
        for name in (module for line in self.content for module in modules(line.strip())):
            lines += [f"## `{name.removeprefix('iclutils.')}`", "", "```{eval-rst}"]
            lines += [f".. automodule:: {name}", "   :members:", "```", ""]
        return lines


class ModelCards(Generated):
    """The card of the first model of each kind, its title one level down, and the names of the
    others: models are of one kind if their names differ in the number at the end alone."""

    def markdown(self) -> list[str]:
        kinds = dict[str, list[str]]()
        for name in zoo.names():
            kinds.setdefault(re.sub(r"-\d+$", "", name), []).append(name)
        lines = []
        for first, *others in kinds.values():
            card = re.sub(r"\A---\n.*?\n---\n", "", zoo.read_card(first), flags=re.DOTALL)
            lines += re.sub(r"^(?=# )", "#", card, flags=re.MULTILINE).splitlines()
            lines += ["", f"- **Of the same kind**: {', '.join(others)}."] if others else []
            lines.append("")
        return lines or ["No model is shipped yet."]


def _escape(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    text = re.sub(r"\{(cite(?::\w)?)\}(?=`)", r":\1:", "\n".join(lines))
    pieces = MARKED.split(text)
    pieces[::2] = [re.sub(r"[*|]|(?<=\w)_(?!\w)", r"\\\g<0>", piece) for piece in pieces[::2]]
    lines[:] = "".join(pieces).split("\n")
