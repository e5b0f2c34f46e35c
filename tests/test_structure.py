"""The arrows between the packages: the science never imports the book."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from iclutils.files import read_json

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "iclutils"
PICTURE = (ROOT / "book/architecture.md").read_text(encoding="utf-8")
FLOORS = {
    room: int(floor)
    for floor, rooms in re.findall(r"^(\d)  (.*?)(?:  .*)?$", PICTURE, re.MULTILINE)
    for room in rooms.split(", ")
}
HOMEWORK = ROOT / "notebooks/assignments"
BESIDE = {
    **{name: ROOT / name for name in ("training", "tools", "book/_ext")},
    **{name: HOMEWORK / name for name in ("grading", "answers")},
}
COMMON = {"errors", "files", "progress", "zoo"}
SCIENCE = {"models", "tasks", "interp", "chapters"}
JUDGING = {"presets", "claims", "cache", "scorecard"}


def modules(room):
    place = BESIDE.get(room, PACKAGE / room)
    return place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]


def room_of(first, *rest):
    """The room of a dotted name, or nothing if it is a library's."""
    if first == "iclutils":
        return rest[0] if rest else ""
    if (HOMEWORK / f"answers/{first}.py").is_file():
        return "answers"
    return next((room for room in BESIDE if "/".join([first, *rest]).startswith(room)), "")


def imported(path):
    """The dotted names that a module imports, wherever in it."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            start += tuple((node.module or "").split(".")) if node.module else ()
            yield from ((*start, alias.name) for alias in node.names)


def test_the_picture_of_the_rooms_is_that_of_their_imports():
    """Each stands one floor above the highest that it uses, so there is no circle."""
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert parts - {"__init__", "__pycache__", "py"} == FLOORS.keys() - BESIDE
    for room, floor in FLOORS.items():
        used = {room_of(*name) for path in modules(room) for name in imported(path)}
        used = (used & FLOORS.keys()) - {room}
        assert floor == 1 + max(map(FLOORS.get, used), default=0), f"{room} uses {sorted(used)}"
        assert room not in SCIENCE or used <= SCIENCE | COMMON
        assert room not in JUDGING or used <= JUDGING | COMMON
        assert room != "plots" or used <= COMMON


def test_the_package_knows_no_builder_grader_or_browser_and_one_part_transformer_lens():
    machinery = "book grading otter sphinx myst_nb jupyter_book nbclient nbformat playwright bs4"
    for path in PACKAGE.rglob("*.py"):
        part, libraries = path.relative_to(PACKAGE).parts[0], {name[0] for name in imported(path)}
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
    """What a program takes from other modules: attributes, and names that it imports."""
    nodes = list(ast.walk(ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE))))
    taken = {x.name for node in nodes if isinstance(node, ast.ImportFrom) for x in node.names}
    return taken | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_what_is_public_has_a_caller_outside_the_tests():
    names = ("iclutils", "book", "benchmarks", "notebooks", "training", "tools")
    folders = [ROOT / name for name in names]
    used = {"collect"}  # what makes the shipped curves of a training
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        used |= named(path.read_text(encoding="utf-8"))
    for path in (ROOT / "notebooks").rglob("*.ipynb"):
        for cell in read_json(path)["cells"]:
            text = "".join(cell["source"])
            fenced = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
            for code in [text] if cell["cell_type"] == "code" else fenced:
                used |= named(code)
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                known = node.name in used | own
                assert known, f"nothing uses {node.name} of {path.relative_to(PACKAGE)}"
