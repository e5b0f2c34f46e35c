"""What every committed notebook must satisfy, as one function that lists the faults.

nbval compares outputs; it says nothing about a cell that was never run. These rules see to it
that there is something to compare, and that it is fit to be compared and to be read.
"""

import re
from pathlib import Path

from iclutils import claims
from iclutils.claims import verdicts
from iclutils.files import read_json

FLOAT = re.compile(r"(?<![\w.])[-+−]?(\d+\.\d*|\.\d+|\d+(?=e))(?:e[-+]?\d+)?(?!\d|\.\d)", re.I)
LABEL = re.compile(r"^\((\d\d-[\w-]+)\)=\s*$", re.MULTILINE)
REPETITIONS = 5  # behind a finding, at least
LISTS = 3  # and of word lists, which are few, as functions of one are averaged


def source(cell):
    return "".join(cell["source"])


def tags(cell):
    return set(cell["metadata"].get("tags", []))


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


TOUR = read_json(Path(__file__).parents[1] / "notebooks/00_tour.ipynb")
SET_UP = next(source(cell) for cell in TOUR["cells"] if "set-up" in tags(cell))


def claims_in(cells):
    """Ids of the ledger that code names, other than to show a stored result; of an f-string, such
    as ``f"07.ioi_{test}"``, all that it can mean."""
    text = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "code")
    text = re.sub(r"\bbook\.(table|stored_result)\(.*?\)", "", text, flags=re.DOTALL)
    named = set(re.findall(r"""["'](\d\d\.[a-z][\w{}]*)["']""", text))
    patterns = [re.sub(r"\{\w+\}", r"\\w+", name) for name in named]
    meant = {c for c in claims.ledger() for pattern in patterns if re.fullmatch(pattern, c)}
    return meant | {name for name in named if "{" not in name}


def printed(cell):
    shown = (o.get("data", {}) for o in cell["outputs"])
    tables = (data.get("text/markdown") or data.get("text/plain", "") for data in shown)
    texts = (o.get("text") or table for o, table in zip(cell["outputs"], tables, strict=True))
    return "\n".join(map("".join, texts))


def faults(notebook, chapter, ledger):
    """Everything that is wrong with a notebook; ``chapter`` is its number."""
    of_cells = (fault for cell in code(notebook) for fault in _outputs(cell))
    every = _frame(notebook), _execution(notebook), of_cells, _claims(notebook, chapter, ledger)
    return [fault for faults in every for fault in faults]


def _frame(notebook):
    cells = code(notebook)
    for place, tag in enumerate(("parameters", "set-up")):
        if [tag in tags(cell) for cell in cells].count(True) != 1 or tag not in tags(cells[place]):
            yield f"code cell {place + 1} must be the only one tagged {tag}"
            return
    if source(cells[1]) != SET_UP:
        yield "the set-up cell is not that of the tour, which all notebooks share"
    for cell in notebook["cells"]:
        if "remove-cell" in tags(cell):
            yield f"removed from the page: the cell {_name(cell)}"
        if re.search(r"^\|\s*\|.*\n\|[-:]", source(cell), re.MULTILINE):
            yield f"a table without a word above its first column, in the cell {_name(cell)}"


def _execution(notebook):
    counts = [cell["execution_count"] for cell in code(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"the cells were not all run once, in order: {counts}"


def _outputs(cell):
    is_checked = "nbval-ignore-output" not in tags(cell)  # by nbval
    given = cell["metadata"].get("mystnb", {})
    alt = given.get("image", {}).get("alt") or given.get("figure", {}).get("caption", "")
    for output in cell["outputs"]:
        kinds = set(output.get("data", {}))
        if output["output_type"] == "error":
            yield f"an error in the cell {_name(cell)}"
        if output.get("name") == "stderr":
            yield f"text on stderr in the cell {_name(cell)}"
        if any(kind.startswith("image/") and kind != "image/svg+xml" for kind in kinds):
            yield f"an image that is not SVG in the cell {_name(cell)}"
        if any(kind.startswith("image/") for kind in kinds) and len(alt.split()) < 5:
            yield f"no alt text, or too short, for the image of the cell {_name(cell)}"
        if is_checked and kinds & {"text/html", "application/javascript"}:
            yield f"HTML in the checked cell {_name(cell)}"
    for match in FLOAT.finditer(printed(cell) if is_checked else ""):
        if len(re.sub(r"\D", "", match[1]).lstrip("0")) > 4:  # significant digits
            yield f"the raw number {match.group()} in the checked cell {_name(cell)}"


def _claims(notebook, chapter, ledger):
    labels, named = [], {}  # of each claim the labels above the last cell that names it
    for cell in notebook["cells"]:
        labels += LABEL.findall(source(cell)) if cell["cell_type"] == "markdown" else []
        named |= {claim: set(labels) for claim in claims_in([cell])}
    for claim in sorted(set(named) - set(ledger)):
        yield f"{claim} is not in the ledger"
    for name, claim in ledger.items():
        if name not in named:
            yield f"{name} is never checked"
        elif (label := f"{chapter}-{claim.cell}") not in named[name]:
            yield f"{name} is checked before ({label})=, the section that it names"


def _name(cell):
    first = source(cell).strip().split("\n")[0]
    return f"[{cell.get('execution_count') or ' '}] {first[:60]!r}"


def problems(results, chapter=None, tier="mini"):
    """What stands in the way of these results' being what their kinds say."""
    for name, claim in claims.ledger(chapter).items():
        result = results.get((tier, name))
        if result is None:
            if tier in claim.tiers:
                yield f"{name} was not measured."
            continue
        null, over = claims.null_of(result, results), claim.text_at("over", tier)
        says = verdicts.judge(result, null) != verdicts.SAME
        least = LISTS if "functions of one averaged" in over else REPETITIONS
        if says and result.count < least:
            yield f"{name} is a finding of {result.count} repetitions."
        if max(result.count, null.count if null else 0) > 1 and not over:
            yield f"{name} does not say over what its {result.count} repetitions are."
        if null is None:
            yield f"{name} is a finding without a null."
        silent = null and null.verdict == verdicts.UNDEFINED and not claim.undefined
        if silent:
            yield f"{name} does not say why its null is undefined."
        if claim.null and not result.null:
            yield f"{name} names a null of its own, which its cell does not pass to check()."
