"""The exercises of a chapter, read from its notebook.

An exercise is three cells: the box with its hint, the stub, and the test of what is written there.
The boxes of the solutions stand at the end of the chapter; an open question has none.
"""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notebook_rules import source, tags

from iclutils.files import read_json
from iclutils.session import UNFILLED

LEVELS = ("Easy", "Medium", "Hard", "Open")
KINDS = ("Warm-up", "By hand", "Extend the method", "Break a claim", "Open question")
BOX = re.compile(r"````\{exercise\} .+?````", re.DOTALL)
SOLVED = re.compile(r"````\{solution\} (\S+)\n:class: dropdown\n(.+?)````", re.DOTALL)
HEAD = re.compile(r"\*(\w+), ([^.]+)\. ([^.]+)\.\* (\S.*)", re.DOTALL)
FOLDED = re.compile(r"```\{admonition\} (.+)\n:class: dropdown tip\n(.*?)```", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass
class Exercise:
    """What stands in the notebook; empty where it does not."""

    label: str
    level: str
    minutes: str
    kind: str
    text: str
    folded: str  # title of the hint
    hint: str
    ids: list[str] = field(default_factory=list)  # of its cells, the solution's last
    stub: str = ""
    test: str = ""
    solution: str = ""
    why: str = ""  # the words of the solution

    @property
    def is_open(self) -> bool:
        """Whether it has no solution by design."""
        return self.level == "Open"


def exercises(notebook: Path) -> list[Exercise]:
    """All exercises of a chapter, in order.

    Raises:
        ValueError: if a cell is not of the form, or is not where it should be.
    """
    found: dict[str, Exercise] = {}
    for cell in read_json(notebook)["cells"]:
        text = source(cell)
        if "exercise" in tags(cell) and cell["cell_type"] == "markdown":
            made = _box(text)
            found[made.label] = made
            made.ids.append(cell["id"])
        elif "exercise" in tags(cell):
            last = list(found.values())[-1]
            if last.test:
                raise ValueError(f"more than two cells of code under {last.label}")
            setattr(last, "test" if last.stub else "stub", text)
            last.ids.append(cell["id"])
        elif "solution" in tags(cell) and not text.startswith("## Solutions"):
            solved = SOLVED.fullmatch(text)
            if solved is None:
                raise ValueError(f"a solution is not of the form: {text}")
            solution = found[solved[1]]
            solution.solution, solution.why = "\n".join(CODE.findall(text)), CODE.sub("", text)
            solution.ids.append(cell["id"])
    return list(found.values())


def _box(text: str) -> Exercise:
    label, head, folded = re.search(r":label: (\S+)", text), HEAD.search(text), FOLDED.search(text)
    if not (BOX.fullmatch(text) and label and head and folded) or CODE.search(text):
        raise ValueError(f"not of the form: label, *level, minutes. kind.*, hint: {text}")
    level, minutes, kind = head.groups()[:3]
    return Exercise(label[1], level, minutes, kind, text, folded[1], folded[2].strip())


def unfilled(stub: str) -> list[str]:
    """Names of the functions that a stub leaves to the reader."""
    last = {f.name: ast.unparse(f.body[-1]) for f in functions(stub)}
    return [
        name for name, line in last.items() if line == f"raise NotImplementedError({UNFILLED!r})"
    ]


def functions(block: str) -> list[ast.FunctionDef]:
    """The functions that a block defines at its top level."""
    return [part for part in ast.parse(block).body if isinstance(part, ast.FunctionDef)]


def blocks(test: str) -> list[ast.With]:
    """The blocks of a test in which the answer is judged."""
    return [part for part in ast.parse(test).body if isinstance(part, ast.With)]


def imported(*sources: str) -> dict[str, Any]:
    """What the imports at the top of blocks of code bind."""
    lines = [ast.unparse(s) for b in sources for s in ast.parse(b).body if isinstance(s, IMPORTS)]
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    return space
