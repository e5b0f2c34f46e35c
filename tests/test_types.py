"""mypy over the package: a minute of one core, so it runs beside the other tests."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_types():
    command = [sys.executable, "-m", "mypy"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
