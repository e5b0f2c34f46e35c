"""The exercises of a chapter, read from its notebook.

An exercise is a markdown cell with its stub and its hint, followed by the cell of its solution;
an open one has a place to start instead of both.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from notebook_rules import source

from iclutils.files import read_json

LEVELS = ("Easy", "Medium", "Hard", "Open")
KINDS = ("Warm-up", "By hand", "Extend the method", "Break a claim", "Open question")
CELL = re.compile(r"^````\{(exercise|solution)\} (.+)\n", re.MULTILINE)
HEAD = re.compile(r"\*(\w+), ([^.]+)\. ([^.]+)\.\* (\S.*)", re.DOTALL)
FOLDED = re.compile(r"```\{admonition\} (.+)\n:class: dropdown tip\n(.*?)```", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Exercise:
    """What stands in the notebook; empty where it does not."""

    label: str
    level: str
    minutes: str
    kind: str
    text: str
    stub: str
    folded: str  # title of the hint
    hint: str
    solution: str = ""
    why: str = ""  # the words of the solution

    @property
    def is_open(self) -> bool:
        """Whether it has no solution by design."""
        return self.level == "Open"


def exercises(notebook: Path) -> list[Exercise]:
    """All exercises of a chapter, in order.

    Raises:
        ValueError: if a cell is not of the form, or a solution does not follow its exercise.
    """
    found: list[Exercise] = []
    for cell in read_json(notebook)["cells"]:
        match = CELL.search(source(cell)) if cell["cell_type"] == "markdown" else None
        if match is None:
            continue
        if match[1] == "exercise":
            found.append(_exercise(source(cell)))
        elif match[2] != found[-1].label or found[-1].solution:
            raise ValueError(f"the solution of {match[2]} follows {found[-1].label}")
        else:
            text = source(cell)
            changes = {"solution": "\n".join(CODE.findall(text)), "why": CODE.sub("", text)}
            found[-1] = Exercise(**(vars(found[-1]) | changes))
    return found


def _exercise(text: str) -> Exercise:
    label, head, folded = re.search(r":label: (\S+)", text), HEAD.search(text), FOLDED.search(text)
    if label is None or head is None or folded is None or len(CODE.findall(text)) != 1:
        raise ValueError(f"not of the form: label, *level, minutes. kind.*, stub, hint: {text}")
    return Exercise(
        label[1], *head.groups()[:3], text, CODE.findall(text)[0], folded[1], folded[2].strip()
    )


def asserts(block: str) -> list[str]:
    """The assertions at the top level of a block, one form for all spacing."""
    return [ast.unparse(s) for s in ast.walk(ast.parse(block)) if isinstance(s, ast.Assert)]
