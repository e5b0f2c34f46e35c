"""What is said of the machine, against what the system says elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from iclutils.bookkit import machine


def test_the_description_agrees_with_the_system() -> None:
    said = machine.describe()
    assert set(said) == {"cpu", "cores", "memory_gib", "gpu"}
    assert said["cpu"]
    assert "\n" not in str(said["cpu"])
    assert 1 <= int(said["cores"]) <= (os.cpu_count() or 1)
    assert bool(said["gpu"]) == torch.cuda.is_available()
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        kib = int(meminfo.read_text().split()[1])  # the first line is MemTotal
        assert said["memory_gib"] == pytest.approx(kib / 2**20, abs=0.5)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken away here")
def test_only_cores_that_the_process_may_use_count() -> None:
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from iclutils.bookkit import machine; print(machine.cores())"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.strip() == "1", shown.stderr


def test_what_the_system_does_not_tell_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda _: (_ for _ in ()).throw(ValueError))
    assert machine.memory_gib() == 0
