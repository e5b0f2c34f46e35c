"""Run all notebooks as on other processors, with 1, 2 and 4 threads: python tools/anywhere.py.

For each kind of processor nbval compares what cells print with what is committed, and each number
and verdict is compared, too. The table lands in book/anywhere.md, a part of the page Status.
"""

import math
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from iclutils import claims  # noqa: E402
from iclutils.files import write_text  # noqa: E402
from tools.run import machine  # noqa: E402

WORK = ROOT / "_build/anywhere"
TABLE = ROOT / "book/anywhere.md"
CPU = {  # what torch, oneDNN and MKL are told to leave unused
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
             "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
                "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}  # fmt: skip
HEAD = "| processor, date | instructions | threads | cells | verdicts moved | largest change |"


def main() -> int:
    """Run all kinds, write the table; 1 if a cell failed or a verdict moved."""
    rows, bad = [], 0
    kinds = [kind for kind in CPU if kind != "avx2" or "AVX-512" in machine()]  # else it is native
    for kind, threads in product(kinds, (1, 2, 4)):
        row, failed = measure(kind, threads)
        rows.append(row)
        bad += failed
        print(row, flush=True)
        store(rows)
    return int(bad > 0)


def measure(kind: str, threads: int) -> tuple[str, bool]:
    """Run all notebooks once; return a row of the table, and whether anything is as it must not."""
    results = WORK / f"{kind}-{threads}"
    shutil.rmtree(results, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    settings = {"ICLUTILS_RESULTS": str(results), "OMP_NUM_THREADS": str(threads)}
    here = os.environ | CPU[kind] | settings | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "notebooks", "--nbval", "-q",
               "-n", "2" if threads == 1 else "1", "--dist=loadfile"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=here, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    (WORK / f"{kind}-{threads}.log").write_text(done.stdout)
    count = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    moved, largest, where = changes(claims.read_results(results))
    failed = count.get("failed", 0) + count.get("error", 0)
    every = sum(count.values())
    cells = f"{failed} of {every} differ" if failed else f"{every} equal"
    change = f"{largest:.1e} ({where})" if where else "0"
    name = f"{machine()}, {datetime.now(UTC):%Y-%m-%d}"
    row = f"| {name} | {kind} | {threads} | {cells} | {', '.join(moved) or 'none'} | {change} |"
    return row, bool(failed or moved or not count)


def changes(now: dict) -> tuple[list[str], float, str]:
    """Return the claims whose verdict moved, and the largest change relative to the value's size or
    its spread, with its claim."""
    before = claims.read_results(ROOT / "book/results")
    missing = [k for k in before if k[0] == "mini" and k not in now]
    moved, largest, where = [f"{name} is missing" for _, name in missing], 0.0, ""
    for key, result in now.items():
        old = before.get(key)
        if old is None or None in (old.value, result.value):
            continue
        scale = max(abs(old.value), old.spread) or math.inf
        change = abs(result.value - old.value) / scale
        moved += [key[1]] if old.verdict != result.verdict else []
        largest, where = max((largest, where), (change, key[1]))
    return moved, largest, where


def store(rows: list[str]) -> None:
    """Write the table: these rows, and those of other processors that it already has."""
    before = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.is_file() else []
    name = rows[0].split("|")[1].rpartition(",")[0]
    others = [row for row in before[2:] if row.split("|")[1].rpartition(",")[0] != name]
    rule = "|".join(["", *["---"] * (HEAD.count("|") - 1), ""])
    write_text(TABLE, "\n".join([HEAD, rule, *others, *rows]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
