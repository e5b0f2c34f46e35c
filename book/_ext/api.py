"""The reference of the package: which modules there are comes from its folders, what they say
from their docstrings.

``{api}`` takes names of packages or modules, one a line, and shows each with all it contains:
text, then every public function and class with signature, text and example. ``iclutils`` itself
stands for the entry points in its ``__all__``. ``{modules}`` is a table of the same modules.
Docstrings are plain prose with ``code``, *emphasis*, citations and Google's sections; what else
reStructuredText would take for markup is escaped here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re

from sphinx.application import Sphinx

import iclutils

from .markdown import Generated, table

EMPHASIS = r"(?<![\w*`])\*[A-Za-z](?:[A-Za-z ,\n'-]*[A-Za-z])?\*(?![\w*])"
MARKED = re.compile(rf"(``.+?``|{EMPHASIS})", re.DOTALL)  # is shown as what it says it is
CITED = re.compile(r"\{(cite(?::\w)?)\}(?=`)")  # as in the pages; here it is reStructuredText
FUNCTION = re.compile(r"<function (\w+) at \w+>")
LONG = re.compile(r"~(?:\w+\.)*(\w+)")
MARKUP = re.compile(r"[*|]|(?<=\w)_(?!\w)")


def connect(app: Sphinx) -> None:
    """Set up the extensions behind the directives."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", _escape, priority=100)  # before napoleon
    app.setup_extension("sphinx.ext.napoleon")
    app.connect("autodoc-process-signature", _plain)
    app.config.napoleon_use_ivar = True
    app.config.napoleon_attr_annotations = False
    app.config.napoleon_numpy_docstring = False
    app.config.autodoc_typehints_format = "short"
    app.config.autodoc_member_order = "bysource"
    app.config.add_module_names = False  # a heading says which module it is
    app.config.nitpick_ignore_regex.append(("py:.*", ".*"))  # types of other libraries


def modules(name: str) -> list[str]:
    """A module and all public ones inside it; of ``iclutils`` itself only the entry points."""
    module = importlib.import_module(name)
    found = [name] if inspect.getdoc(module) or not hasattr(module, "__path__") else []
    if name != iclutils.__name__:
        for inside in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
            if "._" not in inside.name:
                found += modules(inside.name)
    return found


class Modules(Generated):
    """``{modules}``: a table of modules, each with the first sentence of its docstring."""

    has_content = True

    def names(self) -> list[str]:
        """All modules that the lines of the content stand for."""
        named = filter(None, map(str.strip, self.content))
        return [module for name in named for module in modules(name)]

    def markdown(self) -> list[str]:
        body = []
        for name in self.names():
            text = " ".join((inspect.getdoc(importlib.import_module(name)) or "").split())
            sentence = re.split(r"(?<=\.) (?=[A-Z`])", text)[0]
            body.append([f"{{py:mod}}`{name.removeprefix('iclutils.')} <{name}>`", sentence])
        return table(["Module", "Holds"], body, "modules")


class Api(Modules):
    """``{api}``: a section for each module."""

    def markdown(self) -> list[str]:
        lines = []
        for name in self.names():
            lines += [f"## `{name.removeprefix('iclutils.')}`", "", "```{eval-rst}"]
            lines += [f".. automodule:: {name}", "   :members:", "   :ignore-module-all:", ""]
            if name == iclutils.__name__:
                for entry in iclutils.__all__:
                    kind = "class" if inspect.isclass(getattr(iclutils, entry)) else "function"
                    lines += [f".. auto{kind}:: {name}.{entry}", ""]
            lines += ["```", ""]
        return lines


def _escape(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Escape markup but code and emphasis, and leave examples as they are."""
    pieces = MARKED.split(CITED.sub(r":\1:", "\n".join(lines)))
    pieces[::2] = [
        "\n".join(
            line if re.match(r"\s*(>>>|\.\.\. )", line) else MARKUP.sub(r"\\\g<0>", line)
            for line in piece.split("\n")
        )
        for piece in pieces[::2]
    ]
    lines[:] = "".join(pieces).split("\n")


def _plain(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    sign: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Make a signature that is no Python readable: a default that has no literal spoils it all."""
    try:
        ast.parse(f"def f{sign or '()'}: pass")
    except SyntaxError:
        sign = LONG.sub(r"\1", FUNCTION.sub(r"\1", sign or ""))
    return sign, returns
