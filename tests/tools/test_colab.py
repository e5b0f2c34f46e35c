"""The set-up cell installs the release into an environment like Colab's, and no more."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from book._tools.address import TAG, set_up_cell

ROOT = Path(__file__).parents[2]
PREINSTALLED = (
    *("accelerate", "datasets", "einops", "huggingface-hub", "ipykernel", "ipywidgets", "joblib"),
    *("matplotlib", "nbconvert", "numpy", "pandas", "pip", "protobuf", "pyarrow", "pyyaml", "rich"),
    *("safetensors", "scikit-learn", "scipy", "sentencepiece", "tokenizers", "torch", "tqdm"),
    *("transformers", "typeguard", "wandb"),
)
ABSENT = ("iclutils", "transformer-lens", "jaxtyping", "gguf")
pytestmark = pytest.mark.nightly


def closure(names):
    found: dict[str, set[str]] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        asked = waiting.pop()
        name, extras = canonicalize_name(asked.name), asked.extras | {""}
        if extras <= found.get(name, set()):
            continue
        found.setdefault(name, set()).update(extras)
        for need in map(Requirement, metadata.requires(name) or []):
            if not need.marker or any(need.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(need)
    return set(found)


def link(names, folder):
    folder.mkdir()
    for name in names:
        installed = metadata.distribution(name)
        parts = {Path(str(file)).parts[0] for file in installed.files or []}
        for part in parts - {"..", "__pycache__"}:
            if not (folder / part).exists():
                (folder / part).symlink_to(Path(str(installed.locate_file(part))).resolve())


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment that has what Colab has, and nothing of ours."""
    folder = tmp_path_factory.mktemp("colab")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=0"]
    asked = [*command, "--timeout=10", f"--dest={folder}", "transformer-lens"]
    if subprocess.run(asked, capture_output=True).returncode:
        pytest.skip("needs a package index, which cannot be reached from here")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    names = closure(PREINSTALLED)
    assert not names & set(ABSENT)
    link(names, folder / "preinstalled")
    site = next((folder / "env").glob("lib/python*/site-packages"))
    (site / "preinstalled.pth").write_text(f"{folder / 'preinstalled'}\n")
    return folder / "env" / "bin" / "python"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Address of a clone with the package (of the zoo only what is read here) at its tag."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    clone = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)

    def ignored(folder, names):
        others = [n for n in names if "-" in n and "induction" not in n and "step" not in n]
        steps = sorted(n for n in names if n.startswith("step-"))
        return ["__pycache__", *(others if Path(folder).name == "zoo" else []), *steps[:-1]]

    def git(*arguments):
        who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        subprocess.run(["git", *who, *arguments], cwd=clone, check=True, capture_output=True)

    shutil.copytree(ROOT / "iclutils", clone / "iclutils", ignore=ignored)
    (clone / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / "your_model.ipynb", clone / "notebooks")
    git("init")
    git("add", ".")
    git("commit", "--message=release")
    git("tag", TAG)
    return f"file://{clone}"


def clean():
    """The environment of a process, without what points at this installation."""
    ours = ("PYTHON", "VIRTUAL_ENV", "ICLUTILS", "PYTEST")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def untouched(python):
    code = """
from importlib import metadata, util
print([(metadata.version(n), util.find_spec(n).origin) for n in ("numpy", "torch")])
"""
    command = [python, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=clean()).stdout


def run_cell(python, source, folder):
    parameters = 'tier, model, seed, device = "mini", "", 0, "cpu"\n'
    command = [python, "-c", parameters + source]
    return subprocess.run(command, cwd=folder, env=clean(), capture_output=True, text=True)


def execute(python, cells, folder):
    fresh = [cell | {"outputs": [], "execution_count": None} for cell in cells]
    text = json.dumps({"cells": fresh, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    (folder / "chapter.ipynb").write_text(text)
    command = [python, "-m", "nbconvert", "--to", "notebook", "--execute", "--output=done.ipynb"]
    done = subprocess.run(
        [*command, "chapter.ipynb"], cwd=folder, env=clean(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ran = json.loads((folder / "done.ipynb").read_text())["cells"]
    return ["".join("".join(out.get("text", "")) for out in cell["outputs"]) for cell in ran]


def chapter(address):
    """The first code cells of chapter 01, up to the first that uses a model."""
    notebook = json.loads((ROOT / "notebooks" / "01_gpt2_induction.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            tagged = "set-up" in cell["metadata"].get("tags", [])
            yield cell | ({"source": set_up_cell(address)} if tagged else {})
            if "book.load(" in "".join(cell["source"]):
                return


def test_a_notebook_installs_the_release_and_runs(python, address, tmp_path):
    before = untouched(python)
    done = run_cell(python, set_up_cell(address, "v9.9.9"), tmp_path)
    assert done.returncode == 1
    assert re.match(r"iclutils was not installed(.|\n)*'v9\.9\.9' did not match", done.stderr)
    assert untouched(python) == before
    cells = list(chapter(address))
    asked = "import numpy, torch; print([(m.__version__, m.__file__) for m in (numpy, torch)])"
    probes = [
        {"cell_type": "code", "metadata": {}, "source": [asked, "\nprint(iclutils.__file__)"]}
    ]
    printed = execute(python, [*cells, cells[1], *probes], tmp_path)
    first, replaced, second = printed[1].splitlines()
    kept = ", ".join(f"{n}=={metadata.version(n)}" for n in ("torch", "numpy", "transformers"))
    assert re.fullmatch(r"replaced: (nothing|\S+ \S+ -> \S+.*)", replaced)
    assert re.fullmatch(rf"installed git\+{address}@{TAG} in \d+ s; kept {re.escape(kept)}", first)
    assert second == "mini tier, the tier's own models, seed 0, cpu"
    assert printed[-2].splitlines() == [second], "where it is present nothing is installed"
    loaded, package = printed[-1].splitlines()
    assert f"{loaded}\n" == before
    assert Path(package).is_relative_to(python.parents[1])
    assert untouched(python) == before
