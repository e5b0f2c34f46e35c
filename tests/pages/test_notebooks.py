"""The committed notebooks: fit to be compared, and true to the ledger.

nbval compares what their cells print. Here are the rules that nbval does not know
(``notebook_rules``), and a stand-in that breaks each of them in turn.
"""

import re
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import get_sanitize_patterns
from notebook_rules import claims_in, code, faults, printed, problems, source, tags

from iclutils import claims
from iclutils.files import read_json

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.name)]
SANITIZE = ROOT / "tests" / "sanitize.cfg"


def judged_by(path):
    """Claims of the ledger that a notebook names; several of one number share their ledger."""
    named = claims_in(read_json(path)["cells"])
    return {k: c for k, c in claims.ledger().items() if c.chapter == path.stem[:2] and k in named}


JUDGED = [path for path in CHAPTERS if judged_by(path)]  # not the tour
TAUGHT = [path for path in JUDGED if path.stem in claims.chapters()]  # no page beside them
NUMBER = re.compile(r"\{\w+\}`[^`<]*(?:<[^`]*>)?`")  # a role: one word to a reader
SPREAD = re.compile(r"±|\{(?:measured|real)\}`\d\d\.\w+(?:@[\w-]+)?`")
OF_THE_BOOK = re.compile(r"\b(?:tiers?|claims?|verdicts?|we had asked for)\b")


def test_every_claim_is_judged_by_one_notebook_of_its_chapter():
    assert set(claims.chapters()) <= {path.stem for path in CHAPTERS}
    named = [key for path in CHAPTERS for key in judged_by(path)]
    assert sorted(named) == sorted(claims.ledger())


def story(path):
    """The cells of a chapter before its drawer, without exercises and their solutions."""
    cells = read_json(path)["cells"]
    end = next(i for i, c in enumerate(cells) if f"({path.stem[:2]}-drawer)=" in source(c))
    return [c for c in cells[:end] if not {"exercise", "solution"} & tags(c)]


@pytest.mark.parametrize("path", TAUGHT, ids=lambda path: path.stem)
def test_a_chapter_is_a_story_and_a_drawer(path):
    """1500 words, five figures, five open blocks of twelve lines; the live figure comes first."""
    cells = story(path)
    prose = "\n".join(source(c) for c in cells if c["cell_type"] == "markdown")
    told = NUMBER.sub("number", re.sub(r"^(?:\(.*\)=|```.*|:::.*|:\w+:.*)$", "", prose, flags=re.M))
    assert len(re.findall(r"[A-Za-z0-9][\w'’.-]*", told)) <= 1500
    assert len(SPREAD.findall(prose)) <= 5
    assert not OF_THE_BOOK.findall(told), "the book does not speak of itself"
    assert len(prose.partition("```{live}")[0].split()) <= 100, "the live figure comes first"
    open_code = [c for c in code({"cells": cells}) if not {"hide-input", "hide-cell"} & tags(c)]
    lengths = [sum(bool(line.strip()) for line in source(c).split("\n")) for c in open_code]
    assert len(lengths) <= 5
    assert max(lengths) <= 12
    assert not any("book.check" in source(c) or "assert " in source(c) for c in open_code)
    text = "".join(source(c) + "\n" for c in read_json(path)["cells"] if "exercise" not in tags(c))
    after = text.partition(f"({path.stem[:2]}-drawer)=")[2].partition("\n## ")[2]
    assert "book.check(" not in after.partition("\n## ")[2], "what is judged stands in the drawer"
    pictures = [
        o for c in cells for o in c.get("outputs", []) if "image/svg+xml" in o.get("data", {})
    ]
    assert len(pictures) <= 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_faults(path):
    found = faults(read_json(path), path.stem[:2], judged_by(path))
    assert not found, "\n".join([f"{len(found)} faults", *found])
    assert path.stat().st_size < 1_000_000
    nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", JUDGED, ids=lambda path: path.stem)
def test_the_ledger_is_on_the_page_once_and_findings_have_spread_and_null(path):
    """One table of evidence, which opens with three findings; no verdict is printed."""
    assert sum("```{evidence}" in source(c) for c in read_json(path)["cells"]) == 1
    assert sum(c.headline for c in judged_by(path).values()) == (path in TAUGHT) * 3
    text = "".join(printed(cell) for cell in code(read_json(path)))
    assert not re.findall(rf"^.*\b{path.stem[:2]}\.[a-z]\w+.*$", text, re.MULTILINE)
    results = claims.read_results(claims.COMMITTED)
    assert not list(problems(results, path.stem[:2]))
    real = problems(results, path.stem[:2], "real")
    assert not [fault for fault in real if not fault.endswith("was not measured.")]


def stream(text, stream="stdout"):
    return {"output_type": "stream", "name": stream, "text": text}


def test_every_fault_is_found():
    """Of one notebook that breaks every rule."""
    path = ROOT / "notebooks/04_gradient_step.ipynb"
    broken = read_json(path)
    drawing = [c for c in code(broken) if "image/svg+xml" in str(c["outputs"])]
    judging = [c for c in code(broken) if "book.check(" in source(c)]
    code(broken)[1]["source"] = "import iclutils"
    drawing[0]["metadata"] = {"tags": ["remove-cell"]}
    html = {"output_type": "display_data", "metadata": {}, "data": {"text/html": "<b>1</b>"}}
    drawing[1]["outputs"] = [stream("warning", "stderr"), stream("score 0.81234\n"), html]
    error = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
    drawing[2] |= {"execution_count": None, "outputs": [error]}
    drawing[2]["source"] = 'book.check("04.scoer", 1)'
    judging[1]["source"], judging[-1]["source"] = judging[-1]["source"], judging[1]["source"]
    judging[0]["source"] = "pass"
    found = "\n".join(faults(broken, "04", judged_by(path)))
    for fault in (
        *("that of the tour", "removed from", "no alt text", "stderr", "raw number 0.81234"),
        *("HTML in", "an error in", "not all run once", "04.scoer is not in the"),
        *("is checked before (04-", "is never checked"),
    ):
        assert fault in found, fault


def test_sanitizing_touches_no_number():
    lines = ["3.5 of 10 heads", "-13.898", "accuracy 0.93 ± 0.01"]
    for pattern, replacement in get_sanitize_patterns(SANITIZE.read_text()):
        for line in lines:
            assert re.sub(pattern, replacement, line) == line
