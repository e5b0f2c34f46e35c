"""What a reader waits for: Python, an import, a model, one figure, one chapter.

Each in a process of its own, which imports what it needs; a chapter runs in a copy of its notebook,
and nothing is written into the checkout.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from common import options

ROOT = Path(__file__).parents[1]
COMMAND = "from iclutils.__main__ import main; sys.exit(main({}))"
WAYS = {  # and how often each
    "python alone": ("pass", 9),
    "import iclutils": ("import iclutils", 9),
    "load induction-0": ("from iclutils import models; models.load('induction-0')", 3),
    "show 01": (COMMAND.format(["show", "01"]), 1),
    "chapter 01": (COMMAND.format(["run", "01_gpt2_induction"]), 1),
}


def spent():
    """CPU seconds of the programs that have ended."""
    return sum(getrusage(RUSAGE_CHILDREN)[:2])


if __name__ == "__main__":
    given = options(__doc__)
    threads = {"ICLUTILS_QUIET": "1", "OMP_NUM_THREADS": str(given.threads)}
    for name, (code, repeats) in WAYS.items():
        seconds, work = [], []
        for _ in range(repeats):
            program = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}]; {code}"]
            with tempfile.TemporaryDirectory() as folder:
                began, before = time.perf_counter(), spent()
                subprocess.run(
                    program, cwd=folder, env=os.environ | threads, check=True, capture_output=True
                )
                seconds.append(time.perf_counter() - began)
                work.append(spent() - before)
        print(f"{name:<17} {min(seconds):8.3f} s, {min(work):8.3f} s of CPU, least of {repeats}")
