"""Room: how much memory and disk there is, and the refusal of what would not fit."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from .errors import IclError

GIB = 2**30
MEMORY = "Close other programs, or take a machine with more memory."


def memory_gib() -> int:
    """Memory of the machine in GiB, rounded; 0 where the system does not say."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB)
    except (AttributeError, OSError, ValueError):
        return 0


def memory() -> float | None:
    """GiB of memory that a program may still take, or None where the system does not say."""
    free = []
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    limit, held = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and held.isdigit():  # of a container
        free.append(int(limit) - int(held))
    return min(free) / GIB if free else None


def disk(folder: Path) -> float:
    """GiB of disk that are free where a folder is, or would be."""
    return shutil.disk_usage(nearest(folder)).free / GIB


def nearest(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    return next(path for path in (folder, *folder.resolve().parents) if path.is_dir())


def refuse_without(needed: float, free: float | None, what: str, cure: str) -> None:
    """Refuse what needs more GiB than are free, before it begins."""
    if free is not None and free < needed:
        raise IclError(f"{what}: {needed:.1f} GiB are needed and {free:.1f} are free. {cure}")


def taken() -> dict[str, Any]:
    """What this process has taken so far: the most memory in GiB, 0 where that is not known, and
    processor seconds of all its threads."""
    import torch

    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # not a Unix
        most = 0
    else:
        most = getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    there = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    peak = {"memory": round(most / GIB, 1), "gpu": round(there / GIB, 1)}
    return {"peak_gib": peak, "cpu_seconds": round(time.process_time(), 1)}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
