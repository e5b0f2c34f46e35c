"""How the book is made: its sources brought together, its HTML built, a run accepted."""

import re
import shutil
from pathlib import Path

import pytest
from ledger import LEDGER, measured

from book._tools import build, run
from iclutils.errors import IclError
from iclutils.files import read_json, write_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path, make_ledger, monkeypatch):
    """A checkout with one chapter, its ledger and no results; the build folder is ``_build``."""
    root = tmp_path / "checkout"
    make_ledger("90_demo", LEDGER)
    (root / "book").mkdir(parents=True)
    (root / "_config.yml").write_text("title: Demo\n")
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/intro\nchapters:\n  - file: notebooks/90_demo\n"
    )
    (root / "book/intro.md").write_text("# Intro\n")
    empty = {"cell_type": "code", "execution_count": None, "outputs": []}
    cells = [
        {"cell_type": "markdown", "id": "title", "metadata": {}, "source": ["# Demo"]},
        {**empty, "id": "first", "metadata": {"tags": ["kept"]}, "source": "1 + 1"},
        {**empty, "id": "second", "metadata": {}, "source": ["book.check(\n", "    2)"]},
    ]
    notebook = {"cells": cells, "metadata": {"own": 1}, "nbformat": 4, "nbformat_minor": 5}
    write_json(root / "notebooks/90_demo.ipynb", notebook)
    monkeypatch.setattr(run, "ROOT", root)
    monkeypatch.setattr(run, "NOTEBOOKS", root / "notebooks")
    monkeypatch.setenv("ICLUTILS_RESULTS", str(root / "_build/results"))
    return root


RECORD = {"chapter": "90_demo", "machine": {"cores": 2}, "seconds": 1.5, "date": "2026-01-01",
          "commit": "1" * 40}  # fmt: skip


def ran(root: Path, value: float, shown: str = "2") -> run.Run:
    """Leave behind what a run of the chapter would."""
    for claim in ("90.first", "90.second"):
        measured(claim, value)
    notebook = read_json(root / "notebooks/90_demo.ipynb")
    for number, cell in enumerate(notebook["cells"][1:], 1):
        cell["execution_count"] = number
        cell["metadata"]["papermill"] = {"duration": 0.1}
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": [shown]}]
    notebook["metadata"]["papermill"] = {"version": "2"}
    write_json(root / "_build/run/mini/90_demo.ipynb", notebook)
    write_json(root / "_build/runs/mini/90_demo.json", RECORD)
    return run.Run("90_demo", {"tier": "mini"}, root / "_build", fresh=True)


def test_a_verdict_that_changed_stops_the_book(checkout, monkeypatch, capsys):
    folder, value = checkout / "_build", 2.0
    monkeypatch.setattr(run, "run_chapters", lambda *_: [ran(checkout, value)])
    monkeypatch.setattr(build, "render", lambda source, _: source / "_config.yml")
    assert build.make(checkout, folder, accept=True) == 0
    capsys.readouterr()
    assert build.make(checkout, folder) == 0
    said = capsys.readouterr().out.splitlines()
    assert "nothing differs (2 values compared)" in said
    assert said[-1].startswith("The book: file://")
    value = 0.5
    assert build.make(checkout, folder) == 1
    text = capsys.readouterr().out
    assert re.search(r"90\.first +mini +2\.00 +0\.500 +holds -> holds partly\n", text)
    assert "The book:" not in text


def test_stage_takes_fresh_outputs_and_touches_only_what_differs(checkout):
    folder = checkout / "_build"
    write_json(checkout / "book/results/paper/90.first.json", {"old": 1})
    staged = build.stage(checkout, folder, [])
    assert read_json(staged / "notebooks/90_demo.ipynb")["cells"][1]["outputs"] == []

    def files() -> set[tuple[str, int]]:
        found = [path for path in staged.rglob("*.*") if path.is_file()]
        return {(path.relative_to(staged).as_posix(), path.stat().st_mtime_ns) for path in found}

    before, done = files(), ran(checkout, 2.0, shown="fresh")
    (staged / "book/left_over.md").write_text("# Old\n")
    build.stage(checkout, folder, [done])
    assert {name for name, _ in files() - before} == {
        "notebooks/90_demo.ipynb",
        "book/results/mini/90.first.json",
        "book/results/mini/90.second.json",
        "book/runs/mini/90_demo.json",
    }
    assert {name for name, _ in before - files()} == {"notebooks/90_demo.ipynb"}
    assert "fresh" in (staged / "notebooks/90_demo.ipynb").read_text()
    assert "papermill" not in (staged / "notebooks/90_demo.ipynb").read_text()


@pytest.mark.nightly
def test_a_warning_fails_the_build_and_is_not_forgotten(checkout):
    """Sphinx itself passes the second time: it does not read an unchanged page again."""
    folder = checkout / "_build"
    for name in ("book/_static", "book/_templates"):
        shutil.copytree(ROOT / name, checkout / name)
    for name in ("_config.yml", "book/references.bib"):
        shutil.copyfile(ROOT / name, checkout / name)
    (checkout / "_toc.yml").write_text("format: jb-book\nroot: book/intro\n")
    (checkout / "book/intro.md").write_text("# Intro\n\n{doc}`missing` and {measured}`90.x`\n")
    for _ in range(2):
        with pytest.raises(IclError, match=r"did not build:\n(.|\n)*intro.md:3: WARNING") as error:
            build.render(build.stage(checkout, folder, []), folder)
        assert "unknown document: 'missing'" in str(error.value)
        assert "Unknown claim '90.x'" in str(error.value)
    assert not (folder / "html").exists()
    (checkout / "book/intro.md").write_text(
        "# Intro\n\nRight {cite}`xiang2024`.\n\n```{bibliography}\n```\n"
    )
    index = build.render(build.stage(checkout, folder, []), folder)
    assert "Right" in (index.parent / "book/intro.html").read_text()
    # Nothing changed: nothing is built.
    index.with_name("mark").touch()
    assert build.render(build.stage(checkout, folder, []), folder) == index
    assert index.with_name("mark").exists()
