"""The machine that a program runs on: processor, cores, memory and GPU, as a reader knows them."""

from __future__ import annotations

import os
import platform
import re
import time
from functools import cache
from pathlib import Path

from iclutils import room


def describe() -> dict[str, str | int]:
    """Processor, cores, memory in GiB and GPU; what the system does not tell is ``""`` or 0."""
    return {"cpu": cpu(), "cores": cores(), "memory_gib": room.memory_gib(), "gpu": gpu()}


def cpu() -> str:
    """Model of the processor, or its architecture where the system does not name it."""
    listing = Path("/proc/cpuinfo")
    text = listing.read_text(encoding="utf-8", errors="replace") if listing.is_file() else ""
    named = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return " ".join(named[1].split()) if named else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 0


def gpu() -> str:
    """Model of the first CUDA GPU, or ``""``."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


@cache
def pace() -> float:
    """Processor seconds of a fixed piece of work here, the best of three: those of a run on one
    machine are to its pace as on another, whatever runs beside it."""
    import torch

    def once() -> float:
        start, x = time.process_time(), torch.full((384, 384), 1 / 384)
        for _ in range(100):
            x = (x @ x).softmax(-1)
        return time.process_time() - start

    return round(min(once() for _ in range(3)), 4)
