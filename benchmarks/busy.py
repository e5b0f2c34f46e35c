"""A busy machine: the book's kind of work on all cores, idle and beside one busy process a core.

Threads that wait for each other spin by default, which takes the time from those they wait for.
``iclutils`` lets them sleep (``OMP_WAIT_POLICY=PASSIVE``); with the default, the same work is shown
for comparison.
"""

from __future__ import annotations

import os
import subprocess
import sys

MOST = 3.0  # times as long as on an idle machine: the share of a core that is left, and some
WORK = """
import time
from iclutils import models
from iclutils.interp import head_scores
import torch
model = models.load("induction-0")
tokens = torch.randint(0, model.cfg.d_vocab, (16, 61))
start = time.perf_counter()
for _ in range(5):
    head_scores.score_heads(model, tokens, 30)
print(time.perf_counter() - start)
"""


def seconds(policy: str) -> float:
    """Time of the work in a process of its own, where threads wait in this way."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", WORK],
        env=environment | {"OMP_WAIT_POLICY": policy},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    idle = {policy: seconds(policy) for policy in ("PASSIVE", "ACTIVE")}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        busy = {policy: seconds(policy) for policy in idle}
    finally:
        for process in others:
            process.kill()
    print(f"{cores} cores, seconds      idle   busy   ratio")
    for policy in idle:
        print(f"threads {policy.lower():<12} {idle[policy]:6.2f} {busy[policy]:6.2f} "
              f"{busy[policy] / idle[policy]:7.1f}")  # fmt: skip
    assert busy["PASSIVE"] < MOST * idle["PASSIVE"]


if __name__ == "__main__":
    main()
