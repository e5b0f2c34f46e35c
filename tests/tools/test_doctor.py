"""The tools' doctor: the kernel of the notebooks, and what is optional."""

import sys

import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel

from book._tools import doctor as tools

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("program", "state"),
    [("python", "ok"), (sys.executable, "ok"), ("/nowhere/bin/python", "missing"), ("", "missing")],
)
def test_the_kernel(monkeypatch, program, state):
    def get(_: object, name: str) -> KernelSpec:
        if not program:
            raise NoSuchKernel(name)
        return KernelSpec(argv=[program, "-m", "ipykernel_launcher"])

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", get)
    found = next(tools.kernel())
    assert found.state == state
    assert (f"{sys.executable} -m ipykernel install" in found.cure) == (state == "missing")
