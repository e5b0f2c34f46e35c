"""The tools' doctor: the kernel of the notebooks, and what is optional."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel

from book._tools import doctor as tools
from iclutils import doctor

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("program", "state"),
    [("python", "ok"), (sys.executable, "ok"), ("/nowhere/bin/python", "missing"), ("", "missing")],
)
def test_the_kernel(monkeypatch: Patch, program: str, state: str) -> None:
    def get(_: object, name: str) -> KernelSpec:
        if not program:
            raise NoSuchKernel(name)
        return KernelSpec(argv=[program, "-m", "ipykernel_launcher"])

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", get)
    found = next(tools.kernel())
    assert found.state == state
    assert (f"{sys.executable} -m ipykernel install" in found.cure) == (state == "missing")


def test_what_is_optional(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("ICLUTILS_DATA", str(tmp_path))
    assert next(doctor.texts()).state == "ok"
    monkeypatch.setenv("ICLUTILS_DATA", str(tmp_path / "gone"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert next(doctor.texts()).state == "note"
    findings = list(tools.programs())
    assert [finding.state for finding in findings] == ["note"] * 3
    assert doctor.healthy(findings)
