"""For nbval alone (``make notebooks``): what the kernels of the notebooks are told."""

from __future__ import annotations

import tempfile
from collections.abc import Generator

import pytest

RESULTS = tempfile.TemporaryDirectory(prefix="iclutils-")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """A kernel starts while its first cell is set up: no progress bars, no results kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("ICLUTILS_PROGRESS", "0")
        patch.setenv("ICLUTILS_RESULTS", RESULTS.name)
        return (yield)
