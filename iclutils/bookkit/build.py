"""The book: run what changed, check the claims, stage the sources, build the HTML. Everything
happens in the build folder; only ``accept`` writes into the checkout.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import claims, machine, scorecard
from ..errors import IclError
from ..files import PACKAGE, read_json, replacing, write_json
from . import address, run

SETTINGS = ("_config.yml", "_toc.yml")
SHOWN = ("CHANGELOG.md", "CITATION.cff")  # pages of the book show them
# What differs between two runs of the same.
VOLATILE = ("date", "commit", "seconds", "peak_gib", "cells")
BUILDERS = ("jupyter-book", "sphinx", "sphinx-book-theme", "myst-nb",
            "vl-convert-python")  # fmt: skip
# Jupyter Book's own command has no option for several processes, and pybtex looks through all
# installed packages for its plugins at every citation.
PROGRAM = """
import functools, sys
from jupyter_book import sphinx
from jupyter_book.cli.main import main
from pybtex import plugin
sphinx.build_sphinx = functools.partial(sphinx.build_sphinx, jobs={jobs})
plugin._load_entry_point = functools.cache(plugin._load_entry_point)
sys.exit(main())
"""


def make(root: Path, build: Path) -> str:
    """Run the chapters that changed, check their claims, build the HTML; return the scorecard as
    plain text, and where to open the book."""
    _refuse_elsewhere(root)
    done = run.run_chapters(run.chapters(), {}, build)
    differences = changed(root / "book/results/mini", build / "results/mini")
    if differences:
        lines = "\n  ".join(differences)
        raise IclError(
            f"These verdicts are not the committed ones:\n  {lines}\n"
            f"Look at the notebooks in {build / 'run/mini'}. If the new verdicts are right, "
            "make them the committed ones with: make accept"
        )
    index = render(stage(root, build, done), build)
    card = scorecard.text(scorecard.rows(claims.read_results(build / "src/book/results")))
    return f"{card}\nThe book: {index.resolve().as_uri()}"


def accept(root: Path, build: Path) -> list[Path]:
    """Make the last mini run the committed one, and those of its null and of a real language model
    if they were run: outputs into ``notebooks/``, results and records into ``book/``. What differs
    in date, commit and seconds only stays; return what changed."""
    _refuse_elsewhere(root)
    wanted: dict[Path, Any] = {}
    for name in run.chapters():
        path = root / "notebooks" / f"{name}.ipynb"
        wanted[path] = executed(path, build / "run/mini" / path.name)
        record = f"runs/mini/{name}.json"
        if not (build / record).is_file():
            raise IclError(f"{path.name} has no record of its last run. Run: make book")
        wanted[root / "book" / record] = read_json(build / record)
    for name, claim in claims.ledger().items():
        fresh = build / "results/mini" / f"{name}.json"
        if "mini" in claim.tiers:
            wanted[root / "book/results/mini" / f"{name}.json"] = read_json(fresh)
    others = ("mini" + claims.NULL, "real", "real" + claims.NULL)
    kinds = [kind for kind in others if (build / "runs" / kind).is_dir()]
    for folder in (f"{sort}/{kind}" for kind in kinds for sort in ("results", "runs")):
        for path in (build / folder).glob("*.json"):
            if folder.startswith("runs") or path.stem in claims.ledger():
                wanted[root / "book" / folder / path.name] = read_json(path)
    updated = [path for path, value in wanted.items() if not _stands(path, value)]
    for path in updated:
        write_json(path, wanted[path])
    folders = [f"book/{sort}/{kind}" for sort in ("results", "runs") for kind in ("mini", *kinds)]
    kept = sorted(path for folder in folders for path in (root / folder).glob("*.json"))
    gone = [path for path in kept if path not in wanted]
    for path in gone:
        path.unlink()
    return [*updated, *gone]


def changed(committed: Path, fresh: Path) -> list[str]:
    """What a fresh run says otherwise than the committed results: one line for each claim."""
    lines = []
    for path in sorted(committed.glob("*.json")):
        before, now = read_json(path)["verdict"], "no longer measured"
        if path.stem in claims.ledger() and (fresh / path.name).is_file():
            now = read_json(fresh / path.name)["verdict"]
        lines += [f"{path.stem}: {before} -> {now}"] if now != before else []
    return lines


def executed(source: Path, ran: Path) -> dict[str, Any]:
    """The notebook ``source`` with the outputs of its run ``ran``, and nothing else of it."""
    if not ran.is_file():
        raise IclError(f"{source.name} has not been run. Run: make book")
    notebook, cells = read_json(source), read_json(ran)["cells"]
    cells = [c for c in cells if "injected-parameters" not in c["metadata"].get("tags", [])]
    if [_text(cell) for cell in notebook["cells"]] != [_text(cell) for cell in cells]:
        raise IclError(f"{source.name} was edited since its last run. Run: make book")
    for number, (cell, fresh) in enumerate(zip(notebook["cells"], cells, strict=True)):
        cell.setdefault("id", f"cell-{number:02d}")
        if cell["cell_type"] == "code":
            cell |= {key: fresh[key] for key in ("execution_count", "outputs")}
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook | {"nbformat": 4, "nbformat_minor": 5}


def _text(cell: dict[str, Any]) -> tuple[str, str]:
    return cell["cell_type"], "".join(cell["source"])


def stage(root: Path, build: Path, done: list[run.Run]) -> Path:
    """Bring the sources of the book together in ``build/src``, touching only what differs.

    Notebooks, results and records of the runs ``done`` take the place of the committed ones.
    """
    fresh = {f"notebooks/{item.chapter}": item.notebook for item in done}
    paths = [root / name for name in (*SETTINGS, *SHOWN)] + sorted((root / "book").rglob("*"))
    wanted = {p.relative_to(root).as_posix(): p.read_bytes() for p in paths if p.is_file()}
    for name in pages(root):
        path = root / f"{name}.ipynb"
        if path.is_file():
            notebook = executed(path, fresh[name]) if name in fresh else read_json(path)
            wanted[f"{name}.ipynb"] = json.dumps(notebook, ensure_ascii=False).encode()
        elif not (root / f"{name}.md").is_file():
            raise IclError(f"_toc.yml names {name}, but there is no such .md or .ipynb file.")
    results = {path for item in done for path in item.results.glob("*/*.json")}
    made = [p for p in results if p.stem in claims.ledger()] + [item.record for item in done]
    wanted |= {f"book/{p.relative_to(build).as_posix()}": p.read_bytes() for p in made}
    _sync(build / "src", wanted)
    return build / "src"


def pages(root: Path) -> list[str]:
    """Pages that the table of contents names, in order, without their endings."""
    text = (root / "_toc.yml").read_text(encoding="utf-8")
    return re.findall(r"^[\s-]*(?:root|file): *(\S+)", text, re.MULTILINE)


def render(source: Path, build: Path) -> Path:
    """Build the HTML of a staged tree into ``build/html``, unless it is up to date.

    Sphinx forgets the warnings of pages that it does not read again; so after a build that
    failed or was interrupted, or when more than the text of pages changed, all is built anew.
    """
    html, work, record = build / "html", build / "_build", build / "book.json"
    stamp = _stamp(source)
    last = read_json(record) if record.is_file() else {}
    if last == stamp and (html / "index.html").is_file():
        return html / "index.html"
    if last.get("frame") != stamp["frame"]:
        shutil.rmtree(work, ignore_errors=True)
    record.unlink(missing_ok=True)
    program = PROGRAM.format(jobs=max(1, machine.cores()))
    options = ["build", str(source), "--path-output", str(build), "-n", "-W", "--keep-going", "-q"]
    outcome = subprocess.run(
        [sys.executable, "-c", program, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    if outcome.returncode:
        raise IclError(f"The book did not build:\n{_complaint(outcome.stdout)}")
    fresh = build / "html.new"
    for folder in (fresh, html):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "html", fresh)
    fresh.rename(html)
    write_json(record, stamp)
    return html / "index.html"


def pack(build: Path) -> Path:
    """Pack the built HTML into one zip file beside it, under a folder of the archive's name."""
    html, name = build / "html", f"icl-taken-apart-{metadata.version('iclutils')}"
    if not (html / "index.html").is_file():
        raise IclError(f"There is no book in {html}. Run: make book")
    with (
        replacing(build / f"{name}.zip") as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for path in sorted(html.rglob("*")):
            archive.write(path, Path(name, path.relative_to(html)))
    return build / f"{name}.zip"


def _stamp(source: Path) -> dict[str, str]:
    """Hashes of what the HTML depends on: ``text`` of pages and results, and the ``frame``."""
    from .. import zoo
    from . import sphinx_ext

    framing = [source / name for name in SETTINGS]
    framing += sorted((source / "book/_static").rglob("*.*"))
    framing += sorted(Path(sphinx_ext.__file__).parent.glob("*.*"))
    framing += [Path(module.__file__ or "") for module in (address, claims, scorecard)]
    texts = [path for path in sorted(source.rglob("*")) if path.is_file()]
    texts += [*sorted(claims.ROOT.glob("*.yml")), *sorted(zoo.ROOT.glob("*/README.md"))]
    texts += sorted(PACKAGE.rglob("*.py"))  # the reference is made from them
    frame = hashlib.sha256(b"".join(path.read_bytes() for path in framing))
    frame.update(repr([metadata.version(name) for name in BUILDERS]).encode())
    frame.update("\n".join(str(path) for path in texts).encode())
    text = hashlib.sha256(b"".join(path.read_bytes() for path in texts))
    return {"frame": frame.hexdigest(), "text": text.hexdigest()}


def _complaint(log: str) -> str:
    """The warnings and errors of a build's log, or its end if it has none."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", log).splitlines()
    return "\n".join([x for x in lines if re.search("WARNING:|ERROR:|Error:", x)] or lines[-30:])


def _sync(folder: Path, wanted: dict[str, bytes]) -> None:
    """Make ``folder`` hold exactly these files; those that are right keep their times."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            with replacing(path) as temporary:
                temporary.write_bytes(content)


def _stands(path: Path, value: Any) -> bool:
    """Whether a committed file already says this; date, seconds and clean commit do not count."""
    if not path.is_file():
        return False
    before = read_json(path)
    if path.suffix == ".json" and not before["commit"].endswith("+"):
        value = value | {key: before[key] for key in VOLATILE if key in before}
    return before == value


def _refuse_elsewhere(root: Path) -> None:
    if root.resolve() != run.ROOT.resolve() or not (root / "_toc.yml").is_file():
        raise IclError(f"Run this in the checkout that iclutils is installed from: {run.ROOT}")
