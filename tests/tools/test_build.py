"""How the book is made: its sources brought together, its HTML built, a run accepted."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from ledger import ran

from book._tools import build, run
from iclutils.errors import IclError
from iclutils.files import read_json, write_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(root):
    """With pages, too."""
    (root / "book").mkdir()
    (root / "_config.yml").write_text("title: Demo\n")
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/intro\nchapters:\n  - file: notebooks/90_demo\n"
    )
    (root / "book/intro.md").write_text("# Intro\n")
    return root


def test_a_verdict_that_changed_stops_the_book(checkout, monkeypatch, capsys):
    folder, value = checkout / "_build", 2.0
    monkeypatch.setattr(run, "run_chapters", lambda *_: [replace(ran(checkout, value), fresh=True)])
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
    assert re.search(r"90\.first +mini +2\.00 +0\.500 +holds -> holds in a weaker form\n", text)
    assert "The book:" not in text


def test_stage_takes_fresh_outputs_and_touches_only_what_differs(checkout):
    folder = checkout / "_build"
    write_json(checkout / "book/results/paper/90.first.json", {"old": 1})
    staged = build.stage(checkout, folder, [])
    assert read_json(staged / "notebooks/90_demo.ipynb")["cells"][0]["outputs"] == []

    def files():
        found = [path for path in staged.rglob("*.*") if path.is_file()]
        return {(path.relative_to(staged).as_posix(), path.stat().st_mtime_ns) for path in found}

    before, done = files(), replace(ran(checkout, 2.0), fresh=True)
    (staged / "book/left_over.md").write_text("# Old\n")
    build.stage(checkout, folder, [done])
    assert {name for name, _ in files() - before} == {
        "notebooks/90_demo.ipynb",
        "book/results/mini/90.first.json",
        "book/results/mini/90.second.json",
        "book/runs/mini/90_demo.json",
    }
    assert {name for name, _ in before - files()} == {"notebooks/90_demo.ipynb"}
    assert '"2"' in (staged / "notebooks/90_demo.ipynb").read_text()
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
