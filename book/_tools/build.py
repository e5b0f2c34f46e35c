"""The book: run what changed, check the claims, stage the sources, build the HTML. Everything
happens in the build folder; only what is accepted is written into the checkout.
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

from iclutils import claims, scorecard
from iclutils.errors import IclError
from iclutils.files import CHECKOUT, PACKAGE, read_json, replacing, write_json

from . import machine, results, run

SETTINGS = ("_config.yml", "_toc.yml")
CODE = {"_ext", "_tools"}  # of folders in book/ that are no pages
SHOWN = ("CHANGELOG.md", "CITATION.cff")  # pages of the book show them
BUILDERS = ("jupyter-book", "sphinx", "sphinx-book-theme", "myst-nb",
            "vl-convert-python")  # fmt: skip
# Jupyter Book's own command has no option for several processes, and pybtex looks through all
# installed packages for its plugins at every citation.
PROGRAM = """
import functools, sys
sys.path.insert(0, {root!r})  # where the extension is
from jupyter_book import sphinx
from jupyter_book.cli.main import main
from pybtex import plugin
sphinx.build_sphinx = functools.partial(sphinx.build_sphinx, jobs={jobs})
plugin._load_entry_point = functools.cache(plugin._load_entry_point)
sys.exit(main())
"""


def make(root: Path, build: Path, *, accept: bool = False) -> int:
    """Run the chapters that changed, build the HTML, say where it is; return the status to exit
    with. Another verdict than the committed one, if not accepted, stops it."""
    _refuse_elsewhere(root)
    done = run.run_chapters(run.chapters(), {}, build)
    if status := results.conclude(done, accept):
        return status
    index = render(stage(root, build, done), build)
    print(results.totals(scorecard.rows(claims.read_results(build / "src/book/results"))))
    print(f"The book: {index.resolve().as_uri()}")
    return 0


def stage(root: Path, build: Path, done: list[run.Run]) -> Path:
    """Bring the sources of the book together in ``build/src``, touching only what differs; those of
    the runs ``done`` take the place of the committed notebooks, results and records."""
    fresh = {f"notebooks/{item.chapter}": item.notebook for item in done}
    paths = [root / name for name in (*SETTINGS, *SHOWN)] + sorted((root / "book").rglob("*"))
    sources = [path for path in paths if path.is_file() and not CODE & set(path.parts)]
    wanted = {path.relative_to(root).as_posix(): path.read_bytes() for path in sources}
    for name in pages(root):
        path = root / f"{name}.ipynb"
        if path.is_file():
            notebook = results.executed(path, fresh[name]) if name in fresh else read_json(path)
            wanted[f"{name}.ipynb"] = json.dumps(notebook, ensure_ascii=False).encode()
        elif not (root / f"{name}.md").is_file():
            raise IclError(f"_toc.yml names {name}, but there is no such .md or .ipynb file.")
    found = {path for item in done for path in item.results.glob("*/*.json")}
    made = [p for p in found if p.stem in claims.ledger()] + [item.record for item in done]
    wanted |= {f"book/{p.relative_to(build).as_posix()}": p.read_bytes() for p in made}
    _sync(build / "src", wanted)
    return build / "src"


def pages(root: Path) -> list[str]:
    """Pages that the table of contents names, in order, without their endings."""
    text = (root / "_toc.yml").read_text(encoding="utf-8")
    return re.findall(r"^[\s-]*(?:root|file): *(\S+)", text, re.MULTILINE)


def render(source: Path, build: Path) -> Path:
    """Build the HTML of a staged tree into ``build/html``, unless it is up to date. Sphinx forgets
    the warnings of pages that it does not read again; so after a build that failed, or when more
    than the text of pages changed, all is built anew."""
    html, work, record = build / "html", build / "_build", build / "book.json"
    stamp = _stamp(source)
    last = read_json(record) if record.is_file() else {}
    if last == stamp and (html / "index.html").is_file():
        return html / "index.html"
    if last.get("frame") != stamp["frame"]:
        shutil.rmtree(work, ignore_errors=True)
    record.unlink(missing_ok=True)
    program = PROGRAM.format(root=str(CHECKOUT), jobs=max(1, machine.cores()))
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
    from iclutils import zoo

    framing = [source / name for name in SETTINGS]
    framing += sorted((source / "book/_static").rglob("*.*"))
    framing += sorted((CHECKOUT / "book/_ext").glob("*.*"))
    framing += [Path(module.__file__ or "") for module in (claims, scorecard)]
    texts = [path for path in sorted(source.rglob("*")) if path.is_file()]
    texts += sorted([*claims.ROOT.glob("*.yml"), *zoo.ROOT.glob("*/README.md")])
    texts += sorted(zoo.ROOT.glob("*/SHA256SUMS"))  # of the weights that run in the page
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


def _refuse_elsewhere(root: Path) -> None:
    if root.resolve() != run.ROOT.resolve() or not (root / "_toc.yml").is_file():
        raise IclError(f"Run this in the checkout that iclutils is installed from: {run.ROOT}")
