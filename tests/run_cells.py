"""A chapter's code run here, in the test's own process, with other parameters."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from iclutils.files import read_json


def run_cells(notebook: Path, **parameters: Any) -> str:
    """Execute the notebook's code on the CPU and return what it prints."""
    mpl.use("Agg")
    space: dict[str, Any] = {}
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            for cell in read_json(notebook)["cells"]:
                if cell["cell_type"] == "code":
                    exec("".join(cell["source"]), space)
                    plt.close("all")
                    if "parameters" in cell["metadata"].get("tags", []):
                        space.update(parameters, device="cpu")
    finally:
        plt.close("all")
    return out.getvalue()
