"""``{packages}``: which part of the package uses which, drawn from the imports."""

from __future__ import annotations

import ast
from pathlib import Path

from ...files import PACKAGE
from .markdown import Generated

HOLDS = {  # in the order of dependence
    "models": "language models, linear self-attention, networks that read pairs",
    "tasks": "repeated tokens, prompts, topics, regression",
    "interp": "hooks, head scores, patching, attribution, statistics",
    "chapters": "what one chapter measures",
    "training": "recipes of the shipped models",
    "plots": "figures, tables, explorers",
    "bookkit": "session, claims, runs, pages, coursework",
}
ROW, BOX, WIDTH = 58, 420, 640  # pixels: from row to row, width of a box, of the picture


def uses(part: str, package: Path = PACKAGE) -> set[str]:
    """The other parts that the modules of a part import."""
    found = set()
    for path in (package / part).rglob("*.py"):
        above = path.relative_to(package).parent.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level > len(above):
                named = [node.module] if node.module else [alias.name for alias in node.names]
                found |= {name.split(".")[0] for name in named}
    return found & set(HOLDS) - {part}


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
        """The SVG, as it is."""
        return ["```{raw} html", drawing(), "```"]
