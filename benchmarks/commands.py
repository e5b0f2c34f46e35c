"""The two commands of two checkouts, side by side: seconds, and the largest memory of a process.

    python benchmarks/commands.py ../before . --times 3

Each checkout has its .venv already (make setup). What was built before is removed first; the two
take turns. Nothing else should run on the machine.
"""

import argparse
import shutil
import statistics
import time
from pathlib import Path

import psutil


def measure(folder, target):
    """Return the seconds of a command, the largest memory of a process in GiB, and its status."""
    shutil.rmtree(folder / "_build", ignore_errors=True)
    start, most = time.perf_counter(), 0
    with (folder.parent / f"{folder.name}-{target}.log").open("w") as log:
        process = psutil.Popen(["make", target], cwd=folder, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(0.5)
            for child in process.children(recursive=True):
                try:
                    most = max(most, child.memory_info().rss)
                except psutil.Error:
                    continue
    return time.perf_counter() - start, most / 2**30, process.returncode


def main():
    """Read the command line, measure in turns, print medians and ratios."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("checkouts", nargs=2, type=Path)
    cli.add_argument("--times", type=int, default=3)
    given = cli.parse_args()
    for target in ("book", "test"):
        runs = {folder.resolve(): [] for folder in given.checkouts}
        for folder, results in list(runs.items()) * given.times:
            results.append(measure(folder, target))
            print(f"make {target}, {folder}: {results[-1]}", flush=True)
        old, new = (
            (statistics.median(seconds for seconds, *_ in each), max(most for _, most, _ in each))
            for each in runs.values()
        )
        print(
            f"make {target}: {old[0]:.0f} s, {new[0]:.0f} s, ratio {new[0] / old[0]:.2f}; ", end=""
        )
        print(f"GiB {old[1]:.2f}, {new[1]:.2f}, ratio {new[1] / old[1]:.2f}")


if __name__ == "__main__":
    main()
