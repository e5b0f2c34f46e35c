"""The arrows between the packages: the science never imports the book."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from iclutils.files import read_json

PACKAGE = Path(__file__).parents[1] / "iclutils"
COMMON = {"errors", "files", "progress", "zoo"}
BOOK = {"claims", "presets", "cache", "scorecard", "session"}
MAY_IMPORT = {
    "__init__": {*COMMON, "session"},  # when a name is first used
    "errors": set(),
    "files": {"errors"},
    "progress": set(),
    "zoo": {"errors", "files", "progress"},
    "models": COMMON,
    "tasks": {*COMMON, "models"},
    "interp": {*COMMON, "models", "tasks"},
    "chapters": {*COMMON, "models", "tasks", "interp"},
    "plots": COMMON,
    "presets": COMMON,
    "claims": {*COMMON, "presets"},
    "cache": {*COMMON, "claims"},
    "scorecard": {"claims"},
    "session": {*COMMON, *BOOK, "models", "tasks"},
}


def imported(path):
    """The parts of ``iclutils`` that a module imports, wherever in it."""
    package = ("iclutils", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            start += tuple((node.module or "").split(".")) if node.module else ()
            names = [(*start, alias.name) for alias in node.names]
        for first, *rest in names:
            if first == "iclutils" and rest:
                yield rest[0]


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_arrows_point_one_way(part):
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert parts - {"__pycache__", "py"} == set(MAY_IMPORT), "every part has its place"
    folder = PACKAGE / part
    for path in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        wrong = set(imported(path)) & set(MAY_IMPORT) - MAY_IMPORT[part] - {part}
        assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}"


def top_level(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_the_package_knows_no_builder_grader_or_browser_and_one_part_transformer_lens():
    machinery = "book grading otter sphinx myst_nb jupyter_book nbclient nbformat playwright bs4"
    for path in PACKAGE.rglob("*.py"):
        part, libraries = path.relative_to(PACKAGE).parts[0], set(top_level(path))
        assert not libraries & set(machinery.split()), path
        assert part == "models" or "transformer_lens" not in libraries, path


def test_an_import_of_the_package_imports_no_library():
    """So that it takes milliseconds; its names are imported when they are first used."""
    code = "import sys; old = {*sys.modules}; import iclutils; print(*({*sys.modules} - old))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name.split(".")[0] for name in loaded} <= {"iclutils", *sys.stdlib_module_names}
    assert "importlib.metadata" not in loaded


def named(code):
    """Names and attributes that a program uses, other than to import them."""
    nodes = list(ast.walk(ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE))))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_what_is_public_has_a_caller_outside_the_tests():
    names = ("book", "benchmarks", "notebooks", "training", "tools")
    folders = (PACKAGE, *(PACKAGE.parent / name for name in names))
    used = {"collect"}  # makes the shipped curves of the phase change: CONTRIBUTING.md
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        used |= named(path.read_text(encoding="utf-8"))
    for path in (PACKAGE.parent / "notebooks").rglob("*.ipynb"):
        for cell in read_json(path)["cells"]:
            text = "".join(cell["source"])
            fenced = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
            for code in [text] if cell["cell_type"] == "code" else fenced:
                used |= named(code)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                assert node.name in used, f"nothing uses {node.name} of {path.relative_to(PACKAGE)}"
