"""Run chapters with papermill, side by side: python tools/run.py 01 --tier real; or all.

Executed notebooks and results go to _build/run. A chapter whose cells, parameters, package and
models have not changed since its last good run is not run again. One that fails costs only itself.
"""

import argparse
import ast
import hashlib
import json
import logging
import os
import platform
import re
import sys
import time
import traceback
from pathlib import Path

import nbformat
import papermill as pm
import psutil
import yaml
from joblib import Parallel, cpu_count, delayed, parallel_config
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "_build" / "run"
BOOK = ("tier", "weights", "device")  # parameters that the book itself varies
# The tag of the cells that a tier leaves out.
LEFT_OUT = {"real": "networks", "real-part": "networks", "paper": "small-networks"}
MINUTES = {"mini": 10, "real": 60, "real-part": 30, "paper": 240}  # that one cell may take
START = 120  # seconds that a kernel may take to start


def main() -> int:
    """Read the command line, run the chapters, print one table; 1 if one of them failed."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("chapters", nargs="*", help="01, or a notebook's name; all if omitted")
    cli.add_argument("--tier", choices=MINUTES, help="mini (default), real, its part, or paper")
    cli.add_argument("--weights", choices=("trained", "random"), help="random: the null")
    cli.add_argument("--model", help="a Hugging Face folder, or owner/name@COMMIT")
    cli.add_argument("--device", help="auto (default), cpu or cuda")
    cli.add_argument("--seed", type=int)
    cli.add_argument("-p", action="append", nargs=2, default=[], help="any parameter: NAME VALUE")
    cli.add_argument("--jobs", type=int, help="chapters at a time; as many as there are cores")
    cli.add_argument("--scheduler", help="address of a Dask scheduler, whose workers run them")
    cli.add_argument("--force", action="store_true", help="run also what has not changed")
    values = {k: v for k, v in vars(cli.parse_args()).items() if v is not None}
    names, jobs = values.pop("chapters"), values.pop("jobs", 0)
    scheduler, force = values.pop("scheduler", ""), values.pop("force")
    values |= {name: yaml.safe_load(value) for name, value in values.pop("p")}
    if "model" in values and Path(values["model"]).expanduser().is_dir():
        from iclutils.models import local_folder  # takes seconds to import

        if folder := local_folder(values["model"]):  # a cluster's worker stands elsewhere
            values["model"] = str(folder.resolve())
    plans = [plan(path, values) for path in notebooks(names, values.get("tier", "mini"))]
    due = sorted((p for p in plans if force or not is_current(*p)), key=seconds, reverse=True)
    jobs = jobs or (1 if values.get("tier") == "paper" else cpu_count())
    reports = execute_all(due, jobs, scheduler)
    if len(due) < len(plans):
        print(f"{len(plans) - len(due)} of {len(plans)} have not changed since they were run")
    print(table(reports))
    return int(any(error for *_, error in reports))


def notebooks(names: list[str], tier: str) -> list[Path]:
    """Return the notebooks of these chapters, or all of which a claim is asked at the tier."""
    folder = ROOT / "notebooks"
    every = sorted([*folder.glob("[0-9][0-9]_*.ipynb"), folder / "your_model.ipynb"])
    if not names:
        return [path for path in every[:-1] if tier == "mini" or _is_asked(path, tier)]
    calls = {path: {path.stem, path.stem[:2], path.name} for path in every}
    if unknown := set(names) - set.union(*calls.values()):
        raise SystemExit(
            f"no notebook {sorted(unknown)}; there are {', '.join(p.stem for p in every)}"
        )
    return [path for path in every if calls[path] & set(names)]


def plan(notebook: Path, values: dict) -> tuple[Path, Path, dict]:
    """Return a notebook, where its outputs go, and the parameters that are not its defaults.

    A run of the book's own (another tier, random weights) has the results folder of the book; one
    with another seed, model or size a folder named after it, where nothing is taken for the book's.
    """
    defaults = {k: ast.literal_eval(v["default"]) for k, v in pm.inspect_notebook(notebook).items()}
    for name, value in values.items():
        if name not in defaults:
            raise SystemExit(f"{notebook.stem} has no parameter {name!r}; it has {defaults}")
        if type(value) is not type(defaults[name]):
            kind = type(defaults[name]).__name__
            raise SystemExit(f"{name} of {notebook.stem} is of type {kind}; got {value!r}")
    changed = {k: v for k, v in values.items() if v != defaults[k]}
    own = [f"{k}-{v}" for k, v in sorted(changed.items()) if k not in BOOK]
    column = changed.get("tier", "mini") + "-null" * (changed.get("weights") == "random")
    folder = BUILD / re.sub(r"[^\w.+-]+", "_", "+".join(["own", *own]) if own else "book") / column
    return notebook, folder / notebook.name, changed


def seconds(plan: tuple[Path, Path, dict]) -> float:
    """Return what the committed run took, so that the longest begin first; unknown ones before."""
    stored = ROOT / "book/runs.json"
    times = json.loads(stored.read_text()) if stored.is_file() else {}
    last = times.get(plan[1].parent.name, {}).get(plan[0].stem, {})
    return last.get("seconds", float("inf"))


def execute_all(plans: list, jobs: int, scheduler: str) -> list[tuple[Path, float, str]]:
    """Execute notebooks, ``jobs`` at a time; return each with its seconds and its error, if any."""
    if scheduler:
        from training.sweep import on_cluster  # takes seconds to import
    backend = on_cluster(scheduler) if scheduler else parallel_config("threading")
    try:
        with backend:
            run = Parallel(n_jobs=jobs, return_as="generator_unordered", pre_dispatch="all")
            return list(run(delayed(execute)(*p, fingerprint(*p)) for p in plans))
    except KeyboardInterrupt:
        print("\ninterrupted; what was finished is stored, run again to go on", file=sys.stderr)
        for child in psutil.Process().children(recursive=True):  # kernels have their own sessions
            child.kill()
        os._exit(130)


def execute(notebook: Path, out: Path, changed: dict, print_of: str) -> tuple[Path, float, str]:
    """Execute a notebook; return its output, its seconds, and what went wrong or nothing. The cells
    that ran, and the traceback, are in the output either way."""
    logging.getLogger("papermill").setLevel(logging.ERROR)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").unlink(missing_ok=True)
    os.environ |= {"ICLUTILS_RESULTS": str(out.parents[1] / "results"), "ICLUTILS_QUIET": "1"}
    tier, start, error = changed.get("tier", "mini"), time.perf_counter(), ""
    cells = sum(c.cell_type == "code" for c in nbformat.read(notebook, 4).cells)
    bar = tqdm(total=cells, desc=notebook.stem, leave=False, delay=2, disable=None)

    def begin(cell, **_):
        bar.set_description(f"{notebook.stem} {cell.source.strip().splitlines()[0][:30]!r}")

    try:
        pm.execute_notebook(
            notebook, out, changed, progress_bar=False, start_timeout=START,
            execution_timeout=60 * MINUTES[tier], skip_cells_with_tag=LEFT_OUT.get(tier, ""),
            on_cell_execute=begin, on_cell_executed=lambda **_: bar.update(),
            extra_arguments=["--IPKernelApp.log_level=50"],  # 40 tells that it is shut down
        )  # fmt: skip
    except PapermillExecutionError as stop:
        error = f"cell [{stop.exec_count}]: {stop.ename}: {stop.evalue}"
    except (CellTimeoutError, DeadKernelError, RuntimeError) as stop:
        error = f"{type(stop).__name__}: {str(stop).strip().splitlines()[0]}"
    except Exception:  # a fault of the runner's own is told, too, and the other chapters go on
        error = traceback.format_exc()
    finally:
        bar.close()
    seconds = round(time.perf_counter() - start, 1)
    ran = nbformat.read(out, 4).cells if out.is_file() else []
    outputs = (each for cell in ran for each in cell.get("outputs", ()))
    told = "".join(each.text for each in outputs if each.get("name") == "stderr")
    read = re.findall(r": read; an earlier run took ([\d.]+) s", told)  # of iclutils.cache
    record = {"inputs": print_of, "seconds": seconds, "error": error, "machine": machine()}
    record["read"] = round(sum(map(float, read)), 1)  # seconds of earlier runs, from their cache
    out.with_suffix(".json").write_text(json.dumps(record, indent=1))
    return out, seconds, error


def fingerprint(notebook: Path, out: Path, changed: dict) -> str:
    """Hash all that a run depends on: cells, package, models, parameters, libraries."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    digest = hashlib.sha256(repr([sources, changed, platform.python_version()]).encode())
    code = (path for name in ("iclutils", "training") for path in (ROOT / name).rglob("*"))
    package = (path for path in code if path.suffix in (".py", ".yml", ".toml", ".tsv"))
    sums = (ROOT / "iclutils/zoo").glob("*/SHA256SUMS")
    stored = (ROOT / "book/results").glob("real*/*.json")  # what chapters show of SmolLM2
    for path in sorted([*package, *sums, *stored, ROOT / "constraints.txt"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current(notebook: Path, out: Path, changed: dict) -> bool:
    """Whether the last run ended well and nothing has changed since."""
    record = out.with_suffix(".json")
    last = json.loads(record.read_text()) if record.is_file() and out.is_file() else {}
    return last.get("error") == "" and last["inputs"] == fingerprint(notebook, out, changed)


def machine() -> str:
    """Name the processor, its widest instructions, its cores, and the GPU if there is one."""
    listing, model = Path("/proc/cpuinfo"), platform.machine()
    told = listing.read_text() if listing.is_file() else ""
    if match := re.search(r"model name\s*: (.+)", told):
        model = match[1]
    for flag, name in {"avx512f": "AVX-512", "avx2": "AVX2"}.items():
        if f" {flag} " in told:  # two processors of one name may differ in it
            model += f" with {name}"
            break
    gpu = ", GPU" if Path("/proc/driver/nvidia/gpus").is_dir() else ""
    return f"{model}, {os.cpu_count()} cores{gpu}"


def table(reports: list[tuple[Path, float, str]]) -> str:
    """Return a line for each run: what it was, seconds, and what went wrong."""
    lines, told = [], "{}: the cells that ran, with the traceback, are in {}"
    for out, spent, error in sorted(reports):
        lines.append(f"{out.stem:<24} {out.parent.name:<12} {spent:7.1f} s  {error or 'ok'}")
    lines += [told.format(out.stem, out) for out, _, error in sorted(reports) if error]
    return "\n".join(lines) or "nothing to run"


def _is_asked(notebook: Path, tier: str) -> bool:
    """Whether the notebook names a claim of its chapter that is put to the tier."""
    from iclutils import claims

    ids = [name for name, claim in claims.ledger().items() if claims.tier_of(tier) in claim.tiers]
    named = re.findall(r"\b(\d\d\.[a-z]\w*)", notebook.read_text(encoding="utf-8"))
    named = [name for name in named if name[:2] == notebook.stem[:2]]
    return any(claim.startswith(name) for claim in ids for name in named)


if __name__ == "__main__":
    sys.exit(main())
