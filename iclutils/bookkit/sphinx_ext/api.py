"""The reference of the package, from its docstrings.

``{api}`` takes names of modules, one a line, and shows for each its text, then every public
function and class with signature, text and example. Docstrings are plain prose with ``code``,
citations and Google's sections; what else reStructuredText would take for markup is escaped here.
"""

from __future__ import annotations

import ast
import re

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

CODE = re.compile(r"(``.+?``)", re.DOTALL)
CITED = re.compile(r"\{(cite(?::\w)?)\}(?=`)")  # as in the pages; here it is reStructuredText
FUNCTION = re.compile(r"<function (\w+) at \w+>")
LONG = re.compile(r"~(?:\w+\.)*(\w+)")
MARKUP = re.compile(r"[*|]|(?<=\w)_(?!\w)")


def connect(app: Sphinx) -> None:
    """Register the directive, and the extensions behind it."""
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
    app.add_directive("api", Api)


class Api(SphinxDirective):
    """``{api}``: a section for each module named in its content."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Let autodoc fill the sections."""
        lines = []
        for module in filter(None, map(str.strip, self.content)):
            title = module.removeprefix("iclutils.")
            lines += [f"## `{title}`", "", "```{eval-rst}", f".. automodule:: {module}"]
            lines += ["   :members:", "   :ignore-module-all:", "```", ""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines), 0, container, match_titles=True)
        return container.children


def _escape(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Escape markup outside code, and leave examples as they are."""
    pieces = CODE.split(CITED.sub(r":\1:", "\n".join(lines)))
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
