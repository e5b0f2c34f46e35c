"""Make the last runs the committed ones: python tools/accept.py; then read ``git diff``.

Outputs of the tier ``mini`` go into the notebooks, results into book/results, times into
book/runs.json. A value within 1e-4 of the committed one stays: the diff shows changes alone.
"""

import argparse
import base64
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from iclutils import claims  # noqa: E402
from iclutils.files import write_json  # noqa: E402
from iclutils.plots.figures import few_colours  # noqa: E402

RUN = ROOT / "_build/run/book"
ROUNDING = 1e-4


def main() -> None:
    """Read the command line and accept what ran without an error."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    cli.add_argument(
        "chapters", nargs="*", help="01, or a notebook's name; all that ran if omitted"
    )
    wanted = cli.parse_args().chapters
    times = json.loads((ROOT / "book/runs.json").read_text())
    for path in sorted(RUN.glob("*/*.json")):
        column, name = path.parent.name, path.stem
        if column == "results" or (wanted and not {name, name[:2]} & {*wanted}):
            continue
        record = json.loads(path.read_text())
        if record["error"]:
            print(f"not accepted: {name} ({column}) stopped in {record['error']}")
            continue
        if column == "mini":
            take_outputs(ROOT / f"notebooks/{name}.ipynb", path.with_suffix(".ipynb"))
        results = RUN / "results" / column / f"{name[:2]}.json"
        if results.is_file():
            take_results(ROOT / "book/results" / column / results.name, results)
        times.setdefault(column, {})[name] = {k: record[k] for k in ("seconds", "machine")}
    write_json(ROOT / "book/runs.json", times)


def take_outputs(notebook: Path, executed: Path) -> None:
    """Give a notebook the outputs of its run, figures in 256 colours, and nothing else of it."""
    page, ran = (json.loads(path.read_text(encoding="utf-8")) for path in (notebook, executed))
    sources = (["".join(cell["source"]) for cell in each["cells"]] for each in (page, ran))
    if len(set(map(tuple, sources))) > 1:
        raise SystemExit(f"{notebook.name} was edited since it was run: run it again")
    count = 0
    for number, (cell, fresh) in enumerate(zip(page["cells"], ran["cells"], strict=True)):
        cell.setdefault("id", f"cell-{number:02d}")
        if cell["cell_type"] == "code":
            cell["execution_count"] = count = count + 1
            cell["outputs"] = [_lighter(output, count) for output in fresh["outputs"]]
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


def _is_same(one: claims.Result, other: claims.Result) -> bool:
    close = all(
        a is b or (None not in (a, b) and math.isclose(a, b, rel_tol=ROUNDING, abs_tol=ROUNDING))
        for a, b in ((one.value, other.value), (one.spread, other.spread))
    )
    return close and (one.count, one.verdict) == (other.count, other.verdict)


def _lighter(output: dict, count: int) -> dict:
    if output.get("execution_count"):
        output["execution_count"] = count
    picture = output.get("data", {}).get("image/png")
    if picture:
        small = few_colours(base64.b64decode(picture), 256, "RGBA")
        output["data"]["image/png"] = base64.b64encode(small).decode()
    return output


if __name__ == "__main__":
    main()
