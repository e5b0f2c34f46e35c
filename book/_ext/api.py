"""The reference of the package: which modules there are comes from its folders, what they say
from their docstrings.

``{api}`` takes names of packages or modules, one a line, and shows each with all it contains:
text, then every public function and class with signature, text and example. ``iclutils`` itself
stands for the entry points in its ``__all__``. ``{modules}`` is a table of the same modules;
``{packages}`` draws from the imports which part of the package uses which.
Docstrings are plain prose with ``code``, citations and Google's sections; what else
reStructuredText would take for markup is escaped here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

from sphinx.application import Sphinx

import iclutils
from iclutils.files import PACKAGE

from .markdown import Generated, table

CODE = re.compile(r"(``.+?``)", re.DOTALL)
CITED = re.compile(r"\{(cite(?::\w)?)\}(?=`)")  # as in the pages; here it is reStructuredText
FUNCTION = re.compile(r"<function (\w+) at \w+>")
LONG = re.compile(r"~(?:\w+\.)*(\w+)")
MARKUP = re.compile(r"[*|]|(?<=\w)_(?!\w)")
HOLDS = {  # in the order of dependence
    "models": "language models, linear self-attention, networks that read pairs",
    "tasks": "repeated tokens, prompts, topics, regression",
    "interp": "hooks, head scores, patching, attribution, statistics",
    "chapters": "what one chapter measures",
    "zoo/recipes": "recipes of the shipped models",
    "plots": "figures, tables, explorers",
    "session": "with which every notebook starts",
}
ROW, BOX, WIDTH = 58, 420, 640  # pixels: from row to row, width of a box, of the picture


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


def uses(part: str, package: Path = PACKAGE) -> set[str]:
    """The other parts that the modules of a part import."""
    found = set()
    for path in [package / f"{part}.py", *(package / part).rglob("*.py")]:
        if not path.is_file():
            continue
        above = path.relative_to(package).parent.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level > len(above):
                named = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
                found |= {other for other in HOLDS if any(_inside(name, other) for name in named)}
    return found - {part}


def _inside(module: str, part: str) -> bool:
    return f"{module}.".startswith(part.replace("/", ".") + ".")


def drawing() -> str:
    """The picture as SVG, in the ink of the page: a curve for each part that uses another."""
    rows = {part: number * ROW for number, part in enumerate(HOLDS)}
    lines = []
    for part, top in rows.items():
        lines.append(f'<rect x="1" y="{top + 1}" width="{BOX}" height="{ROW - 14}" rx="6"/>')
        lines.append(f'<text x="14" y="{top + 20}" font-weight="bold">{part}</text>')
        lines.append(f'<text x="14" y="{top + 37}" font-size="12">{HOLDS[part]}</text>')
        for other in sorted(uses(part), key=list(HOLDS).index):
            start, end = rows[other] + 26, top + 18
            bend = BOX + 24 + 26 * abs(end - start) // ROW
            curve = f"M{BOX + 1},{start} C{bend},{start} {bend},{end} {BOX + 4},{end}"
            lines.append(f'<path d="{curve}" marker-end="url(#tip)"><title>{part} uses {other}')
            lines.append("</title></path>")
    said = "; ".join(f"{part} uses {', '.join(sorted(uses(part))) or 'none'}" for part in HOLDS)
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    return "".join(
        [
            f'<svg class="packages" role="img" aria-label="{said}" viewBox="0 0 {WIDTH} '
            f'{ROW * len(HOLDS)}" fill="none" stroke="currentColor" font-family="inherit" '
            'font-size="15" style="max-width: 100%">',
            f'<defs>{tip} orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="currentColor"/></marker>',
            "</defs><style>.packages text { fill: currentColor; stroke: none }</style>",
            *lines,
            "</svg>",
        ]
    )


class Packages(Generated):
    """``{packages}``: the picture."""

    def markdown(self) -> list[str]:
        return ["```{raw} html", drawing(), "```"]
