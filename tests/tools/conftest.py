"""A checkout with one chapter."""

import pytest
from ledger import CELLS, LEDGER, RECORD

from book._tools import __main__ as tools
from book._tools import run
from iclutils.files import write_json


@pytest.fixture
def root(tmp_path, make_ledger, monkeypatch):
    """It has its ledger and no results; the build folder is ``_build``."""
    make_ledger("90_demo", LEDGER)
    cell = {"cell_type": "code", "execution_count": None, "outputs": [], "metadata": {}}
    cells = [cell | {"id": str(n), "source": it} for n, it in enumerate(CELLS)]
    cells[0]["metadata"] = {"tags": ["parameters"]}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}}
    notebook |= {"nbformat": 4, "nbformat_minor": 5}
    write_json(tmp_path / "notebooks/90_demo.ipynb", notebook)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(run.Run, "code", lambda _: RECORD["science"])
    monkeypatch.setattr(tools, "BUILD", tmp_path / "_build")
    monkeypatch.setenv("ICLUTILS_RESULTS", str(tmp_path / "_build/results"))
    return tmp_path
