"""The files around the package: they parse, agree with each other and name nothing twice."""

import re
import subprocess
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import iclutils

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"].values()
DEPENDENCIES = [
    Requirement(each) for part in (PROJECT["project"]["dependencies"], *EXTRAS) for each in part
]
TARGETS = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def tracked():
    """Files that git tracks, or, outside a checkout, a skip."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@cache
def text_files():
    found = {}
    for path in tracked():
        try:
            found[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found


def test_dependencies_are_named_once_in_pyproject_and_pinned_within_their_range():
    """Each has one pin, which is what is installed where the tests run; torch has no ceiling."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    ranges = {each.name: each.specifier for each in DEPENDENCIES}
    assert sorted(pins) == sorted(each.name for each in DEPENDENCIES), "each is named once"
    assert not any(each.url for each in DEPENDENCIES), "no direct addresses"
    for name, pin in pins.items():
        assert ranges[name].contains(pin), name
        assert metadata.version(name).split("+")[0] == pin, name
    assert ranges["ipykernel"].contains("6.17.1"), "Colab's: it must not be replaced while it runs"
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert sorted(conda) == ["pip", f"python{PROJECT['project']['requires-python']}"]
    assert pip == {"pip": ["-c constraints.txt", "-e .[book,dev]"]}
    for name, text in text_files().items():
        for line in re.findall(r"^[^#\n]*pip install (.+)$", text, re.MULTILINE):
            words = {re.split(r"[\[<>=!~;@]", word.strip("\"'`"))[0] for word in line.split()}
            assert name.startswith("tests/") or not words & ranges.keys(), f"{name}: {line}"


def test_versions_agree():
    project, tool = PROJECT["project"], PROJECT["tool"]
    version = project["version"]
    assert iclutils.__version__ == version, "installed from another version: make setup"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == version
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "the standard's own"
    least = (project["requires-python"], tool["ruff"]["target-version"])
    assert (*least, tool["mypy"]["python_version"]) == (">=3.11", "py311", "3.11")
    assert "sys.version_info >= (3, 11)" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_pinned_and_has_least_rights(path):
    workflow = yaml.safe_load(text := path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for step in (s for job in workflow["jobs"].values() for s in job["steps"]):
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]), step["uses"]
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        # What others can choose (titles, branch names, inputs) reaches a shell only through env.
        assert "${{" not in step.get("run", ""), step["run"]
    assert set(re.findall(r"secrets\.(\w+)", text)) <= {"GITHUB_TOKEN"}
    for job in workflow["jobs"].values():  # who may write installs nothing
        writes = "write" in job.get("permissions", {}).values()
        assert not writes or not any("setup" in step.get("run", "") for step in job["steps"])


ELSEWHERE = re.compile(r"(?<![\w./:-])/(?:home|Users|root|work|mnt)/\w")


def test_no_absolute_path_of_a_machine_is_tracked():
    for name, text in text_files().items():
        if name in ("tests/notebook_rules.py", "tests/pages/test_notebooks.py"):
            continue  # they name such paths in order to refuse them
        for line in text.splitlines():
            assert not ELSEWHERE.search(line[:2000]), f"{name}: {line[:200]}"


# Pickles run code when they are opened, and so does what comes with a model of the hub.
FORBIDDEN = (
    r"^\s*(import|from) (pickle|dill)\b|\bjoblib\.(load|dump)\(|from joblib import.*\bload\b"
    r"|\btorch\.(load|save)\(|allow_pickle=True|trust_remote_code=True"
)


def test_code_runs_no_code_of_others_and_weights_are_safetensors():
    """But the memory of measurements reads back the pickles that it has put in the user's cache."""
    for name, text in text_files().items():
        if name.startswith(("iclutils/", "book/_", "notebooks/", "benchmarks/")):
            allowed = name == "iclutils/cache.py"
            assert allowed or not re.search(FORBIDDEN, text, re.MULTILINE), name
    suffixes = {path.suffix for path in tracked()}
    assert not suffixes & {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".h5"}


def test_what_the_top_files_name_exists():
    for name in ("README.md", "CONTRIBUTING.md", "book/architecture.md"):
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{name}: {target}"
        for word in re.findall(r"`((?:notebooks|book|iclutils|tests)/[\w./]+)`", text):
            assert (ROOT / word).exists() or "NN" in word, f"{name} names {word}"
    for name in ("README.md", "CONTRIBUTING.md", "book/how_to_run.md"):
        quoted = set(re.findall(r"`make ([a-z-]+)", (ROOT / name).read_text()))
        assert quoted, f"{name} names no command"
        assert quoted <= set(TARGETS), f"{name}: {sorted(quoted - set(TARGETS))}"
