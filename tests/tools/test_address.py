"""The public address is set in one place; what needs it has it, or leaves it out."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import yaml

from book._tools import address

ROOT = Path(__file__).parents[2]
PUBLIC = "https://github.com/owner/repository"


@pytest.fixture
def checkout(tmp_path):
    """A folder with a citation and one notebook, as they are without an address."""
    shutil.copy(ROOT / "CITATION.cff", tmp_path)
    (tmp_path / "notebooks").mkdir()
    cells = [
        {"cell_type": "code", "metadata": {"tags": ["set-up"]}, "source": ["old"], "outputs": [1]},
        {"cell_type": "code", "metadata": {}, "source": ["1 + 1"], "outputs": []},
    ]
    text = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4})
    (tmp_path / "notebooks" / "90_demo.ipynb").write_text(text)
    return tmp_path


def cells(checkout):
    return json.loads((checkout / "notebooks" / "90_demo.ipynb").read_text())["cells"]


def test_what_is_stored_in_files_is_up_to_date(tmp_path):
    shutil.copy(ROOT / "CITATION.cff", tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    assert address.apply(tmp_path) == [], "run: python -m book._tools address"


def test_without_an_address_there_is_nothing_dead(checkout):
    address.apply(checkout, PUBLIC)
    address.apply(checkout, "")  # the way back
    assert "repository-code" not in (checkout / "CITATION.cff").read_text()
    setup = "".join(cells(checkout)[0]["source"])
    assert setup == address.set_up_cell("")
    assert "pip install" not in setup
    assert "http" not in setup


def test_an_address_reaches_every_file_once(checkout):
    changed = {path.name for path in address.apply(checkout, PUBLIC)}
    assert changed == {"CITATION.cff", "90_demo.ipynb"}
    assert address.apply(checkout, PUBLIC) == [], "the second time nothing changes"
    citation = yaml.safe_load((checkout / "CITATION.cff").read_text())
    assert citation["repository-code"] == PUBLIC
    setup = "".join(cells(checkout)[0]["source"])
    assert f'release = "git+{PUBLIC}@{address.TAG}"' in setup
    assert f'version = "{address.TAG[1:]}"' in (ROOT / "pyproject.toml").read_text()
    assert cells(checkout)[1]["source"] == ["1 + 1"]
    assert cells(checkout)[0]["outputs"] == [1], "only the source of the cell is written"
    address.apply(checkout, PUBLIC, "0123abc")  # a commit in the place of the release
    assert f'"git+{PUBLIC}@0123abc"' in "".join(cells(checkout)[0]["source"])


@pytest.mark.parametrize("where", ["", PUBLIC])
def test_the_set_up_cell_is_python_and_passes_every_parameter(where):
    source = address.set_up_cell(where)
    assert max(map(len, source.splitlines())) <= 79
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    begin = next(c for c in calls if ast.unparse(c.func) == "iclutils.begin")
    assert {k.arg for k in begin.keywords} == {"tier", "model", "weights", "seed", "device"}
