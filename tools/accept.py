"""Make the last runs the committed ones: python tools/accept.py, or of one chapter: ... 01.

Outputs of the tier ``mini`` go into the notebooks, results into book/results, times into
book/runs.json. A value within 1e-4 of the committed one stays: the diff shows changes alone. What
ran on a part of a tier shows that the code works, and stays where it is.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from iclutils import claims, presets  # noqa: E402
from iclutils.files import write_json  # noqa: E402
from tools import build  # noqa: E402

RUN = ROOT / "_build/run/book"
ROUNDING = 1e-4  # relative or absolute: what may lie between two processors
TIMES = ("seconds", "read", "machine")
MEASURED = ("value", "spread", "count", "null", "detail")


def main() -> None:
    """Accept what ran without an error, of the chapters that the command line names, if any."""
    wanted = sys.argv[1:]
    times, files = json.loads((ROOT / "book/runs.json").read_text()), set()
    for path in sorted(RUN.glob("*/*.json")):
        column, name = path.parent.name, path.stem
        is_part = column.startswith(presets.PART.column)
        if is_part or column == "results" or (wanted and not {name, name[:2]} & {*wanted}):
            continue
        record = json.loads(path.read_text())
        if record["error"]:
            print(f"not accepted: {name} ({column}) stopped in {record['error']}")
            continue
        if column == "mini":
            take_outputs(ROOT / f"notebooks/{name}.ipynb", path.with_suffix(".ipynb"))
        files.add(RUN / "results" / column / f"{name[:2]}.json")  # of a chapter and its appendix
        times.setdefault(column, {})[name] = {key: record[key] for key in TIMES}
    for path in filter(Path.is_file, files):
        take_results(ROOT / "book/results" / path.parent.name / path.name, path)
    write_json(ROOT / "book/runs.json", times)


def take_outputs(notebook: Path, executed: Path) -> None:
    """Give a committed notebook the outputs of its run, and nothing else of it."""
    page = json.loads(notebook.read_text(encoding="utf-8"))
    if not build.take_outputs(page, executed):
        raise SystemExit(f"{notebook.name} was edited since it was run: run it again")
    for number, cell in enumerate(page["cells"]):
        cell.setdefault("id", f"cell-{number:02d}")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    page["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    write_json(notebook, page)


def take_results(committed: Path, fresh: Path) -> None:
    """Store results, but for those that say what is committed."""
    before = claims.read_file(committed) if committed.is_file() else {}
    now = claims.read_file(fresh)
    for name, old in before.items():
        if name in now and _is_same(old, now[name]):
            now[name] = old
    committed.parent.mkdir(parents=True, exist_ok=True)
    claims.write_file(committed, before | now)


def is_close(one: Any, other: Any, step: float = 0.0) -> bool:
    """Whether two measurements are equal but for rounding, in every number that they hold.

    ``step`` is how far rounding can move a number that jumps, as the ledger says.
    """
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=max(ROUNDING, step))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_close, one, other))
    return bool(one == other)


def _is_same(one: claims.Result, other: claims.Result) -> bool:
    close = all(is_close(getattr(one, name), getattr(other, name)) for name in MEASURED)
    return close and one.verdict == other.verdict


if __name__ == "__main__":
    main()
