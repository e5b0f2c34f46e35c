"""For nbval alone: what the kernels of the notebooks are told."""

from __future__ import annotations

import tempfile
from collections.abc import Generator

import pytest

RESULTS = tempfile.TemporaryDirectory(prefix="iclutils-")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """A kernel starts with its first cell: no hub, bars or kept results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("ICLUTILS_QUIET", "1")
        patch.setenv("ICLUTILS_RESULTS", RESULTS.name)
        return (yield)
