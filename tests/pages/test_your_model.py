"""``your_model.ipynb`` by papermill, as its page says: a folder counts from where the user is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_rules import code, printed
from tiny import save_neox

from iclutils.files import read_json

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_it_looks_at_the_model_in_a_folder_beside_the_user(tmp_path):
    """A random model with rotary positions: it copies nothing, and every chapter says so."""
    save_neox(tmp_path / "mine")
    notebook = str(ROOT / "notebooks" / "your_model.ipynb")
    asked = [notebook, "out.ipynb", "-p", "model", "mine", "-k", "python3"]
    quiet = {"ICLUTILS_QUIET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "papermill", *asked],
        cwd=tmp_path, env=os.environ | quiet, check=True, capture_output=True,
    )  # fmt: skip
    text = "\n".join(map(printed, code(read_json(tmp_path / "out.ipynb"))))
    assert f"{tmp_path.resolve()}/mine" in text
    assert "of its probability is on numbers" in text, "chapter 03 asked the reader's own model"
    assert "It does not copy, so there is no answer to have a share in." in text
    assert "Copying, the model gains nothing, of which no circuit has a share." in text
