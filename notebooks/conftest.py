"""For nbval alone: its options, and what the kernels are told."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from iclutils.zoo import smollm2

collect_ignore = ["assignments"]
OPTIONS = {
    "current_env": True,
    "cell_timeout": 600,  # seconds
    "kernel_startup_timeout": 120,
    "sanitize_with": str(Path(__file__).parents[1] / "tests/sanitize.cfg"),
}


def pytest_configure(config: pytest.Config) -> None:
    """The same options wherever the notebooks are compared."""
    for name, value in OPTIONS.items():
        setattr(config.option, f"nbval_{name}", value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """A kernel starts with its first cell: no hub, no bars."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("ICLUTILS_QUIET", "1")
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Text is compared, not figures; what SmolLM2 shows, where SmolLM2 is."""
    cells = [item for item in items if hasattr(item, "cell")]
    for notebook in {cell.parent for cell in cells}:
        notebook.skip_compare += ("image/svg+xml",)
    shown = [
        it
        for it in cells
        if smollm2.NAME in it.cell["metadata"].get("tags", [])
    ]
    if shown and smollm2.fetch_error():
        for cell in shown:
            cell.options["check"] = False
