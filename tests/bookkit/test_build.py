"""How the book is made: its sources brought together, its HTML built, a run accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger import LEDGER, measured

from iclutils.bookkit import build, run
from iclutils.errors import IclError
from iclutils.files import read_json, write_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(
    tmp_path: Path, make_ledger: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
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


def accept(root: Path) -> list[str]:
    """What accepting the last run changes."""
    return [p.relative_to(root).as_posix() for p in build.accept(root, root / "_build")]


def test_accept_takes_outputs_and_results_and_nothing_else(checkout: Path) -> None:
    ran(checkout, 2.0)
    assert accept(checkout) == [
        "notebooks/90_demo.ipynb",
        "book/runs/mini/90_demo.json",
        "book/results/mini/90.first.json",
        "book/results/mini/90.second.json",
    ]
    text = (checkout / "notebooks/90_demo.ipynb").read_text()
    assert text.endswith("}\n")
    assert "papermill" not in text
    notebook = json.loads(text)
    assert [cell["id"] for cell in notebook["cells"]] == ["title", "first", "second"]
    assert notebook["cells"][1]["metadata"] == {"tags": ["kept"]}
    assert notebook["cells"][2]["outputs"][0]["text"] == ["2"]
    assert [cell.get("execution_count") for cell in notebook["cells"]] == [None, 1, 2]
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert accept(checkout) == []


def test_accept_leaves_what_differs_in_date_alone_and_removes_what_is_gone(checkout: Path) -> None:
    ran(checkout, 2.0)
    accept(checkout)
    name, kept = "book/results/mini/90.first.json", "book/runs/mini/90_demo.json"
    result = read_json(checkout / name)
    write_json(checkout / name, result | {"date": "2020-01-01", "commit": "0" * 40})
    fresh = checkout / "_build/runs/mini/90_demo.json"
    write_json(fresh, RECORD | {"seconds": 9.0, "date": "2026-02-02", "commit": "2" * 40})
    assert accept(checkout) == []
    assert read_json(checkout / kept) == RECORD
    # But a run of a committed package replaces one of a changed package.
    write_json(checkout / name, result | {"commit": "0" * 40 + "+"})
    write_json(fresh, RECORD | {"machine": {"cores": 4}})
    assert accept(checkout) == [kept, name]
    stale, folder = "book/results/mini/90.renamed.json", checkout / "book/results/mini"
    write_json(checkout / stale, result | {"id": "90.renamed"})
    write_json(checkout / "book/runs/mini/91_gone.json", RECORD)
    said = ["90.renamed: holds -> no longer measured"]
    assert build.changed(folder, checkout / "_build/results/mini") == said
    assert accept(checkout) == [stale, "book/runs/mini/91_gone.json"]
    assert not (checkout / stale).exists()
    fresh.unlink()
    with pytest.raises(IclError, match=r"90_demo.ipynb has no record of its last run"):
        accept(checkout)


def test_accept_refuses_a_notebook_that_was_edited_or_never_run(checkout: Path) -> None:
    with pytest.raises(IclError, match=r"has not been run. Run: make book"):
        accept(checkout)
    ran(checkout, 2.0)
    path = checkout / "notebooks/90_demo.ipynb"
    path.write_text(path.read_text().replace("1 + 1", "1 + 2"))
    with pytest.raises(IclError, match=r"was edited since its last run. Run: make book"):
        accept(checkout)


def test_a_verdict_that_changed_stops_the_book(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, value = checkout / "_build", 2.0
    monkeypatch.setattr(run, "run_chapters", lambda *_: [ran(checkout, value)])
    monkeypatch.setattr(build, "render", lambda source, _: source / "_config.yml")
    printed = build.make(checkout, folder)  # nothing is committed yet
    assert printed.startswith("findings on small models")
    build.accept(checkout, folder)
    assert build.make(checkout, folder) == printed
    assert printed.splitlines()[-1].startswith("The book: file://")
    value = 0.5
    wrong = r"90.first: holds -> holds partly\n.*90.second: holds -> does not(.|\n)*make accept"
    with pytest.raises(IclError, match=wrong):
        build.make(checkout, folder)
    # A committed result that someone tampered with is no better.
    value = 2.0
    path = checkout / "book/results/mini/90.first.json"
    write_json(path, read_json(path) | {"verdict": "does not hold"})
    with pytest.raises(IclError, match=r"90\.first: does not hold -> holds"):
        build.make(checkout, folder)


def test_stage_takes_fresh_outputs_and_touches_only_what_differs(checkout: Path) -> None:
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
    # What the pages show of the checkout's own files comes along.
    (checkout / "CHANGELOG.md").write_text("# Changelog\n")
    assert (build.stage(checkout, folder, []) / "CHANGELOG.md").read_text() == "# Changelog\n"


def test_stage_refuses_contents_that_name_a_missing_page(checkout: Path) -> None:
    (checkout / "book/intro.md").unlink()
    with pytest.raises(IclError, match=r"_toc.yml names book/intro, but there is no such"):
        build.stage(checkout, checkout / "_build", [])


@pytest.mark.nightly
def test_a_warning_fails_the_build_and_is_not_forgotten(checkout: Path) -> None:
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
