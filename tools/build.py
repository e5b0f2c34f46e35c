"""Build the pages: python tools/build.py; they land in _build/html.

They show the last run of each chapter, or its committed outputs where it was not run, or failed: a
box below the title then names the cell and the error. ``--committed`` shows what is committed.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "_build/run/book"
PAGES = ("book", "_config.yml", "_toc.yml", "CHANGELOG.md", "CITATION.cff")
FAILED = """:::{{error}} This chapter did not run to its end
What stands below was computed earlier. The last run stopped: `{0}`
:::"""


def main() -> int:
    """Read the command line, build, say where the pages are; 1 if Sphinx warned or a run failed."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--committed", action="store_true", help="leave out what ran here")
    cli.add_argument("--zip", action="store_true", help="also pack the pages, to be read offline")
    options = cli.parse_args()
    runs = {} if options.committed else last_runs()
    log = render(ROOT / "_build/src", ROOT / "_build/html", runs)
    if log:
        print(f"Sphinx warns:\n{log}")
    if options.zip:
        print(pack(ROOT / "_build/html"))
    print(f"The book: {(ROOT / '_build/html/index.html').as_uri()}")
    return int(bool(log) or any(record["error"] for record in runs.values()))


def last_runs() -> dict[str, dict]:
    """Return the record of the last run at the tier ``mini`` of each notebook, by its name."""
    records = {p.stem: json.loads(p.read_text()) for p in sorted(RUN.glob("mini/*.json"))}
    return {name: r for name, r in records.items() if (ROOT / f"notebooks/{name}.ipynb").is_file()}


def stage(source: Path, runs: dict[str, dict]) -> set[str]:
    """Bring the sources together, touching only what differs; return the names of what differed."""
    files = {}
    for path in (p for name in PAGES for p in [ROOT / name, *(ROOT / name).rglob("*")]):
        if path.is_file() and "_ext" not in path.parts and "__pycache__" not in path.parts:
            files[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    listed = re.findall(r"^[\s-]*(?:root|file): *(\S+)", (ROOT / "_toc.yml").read_text(), re.M)
    for name in (Path(page).name for page in listed if page.startswith("notebooks/")):
        notebook = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))
        if record := runs.get(name):
            show(notebook, RUN / f"mini/{name}.ipynb", record["error"])
        files[f"notebooks/{name}.ipynb"] = json.dumps(notebook, ensure_ascii=False).encode()
    failed = {name[:2] for name, record in runs.items() if record["error"]}
    for path in RUN.glob("results/mini/*.json") if runs else ():
        if path.stem not in failed:
            files[f"book/results/mini/{path.name}"] = path.read_bytes()
    code = [p for p in [*ROOT.glob("book/_ext/*"), *ROOT.glob("iclutils/**/*.*")] if p.is_file()]
    code = sorted(path for path in code if "__pycache__" not in path.parts)
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in code]
    files["code.txt"] = "\n".join(sums).encode()  # the reference and the directives
    there = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()}
    changed = there - files.keys() - {"conf.py"}  # which is made below
    for name in changed:
        (source / name).unlink()
    for name, content in files.items():
        path = source / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            changed.add(name)
    return changed


def show(notebook: dict, executed: Path, error: str) -> None:
    """Give a notebook the outputs of its last run, or a box with the error below its title."""
    if error:
        title = notebook["cells"][0]
        title["source"] = [*title["source"], "\n\n", FAILED.format(error)]
        return
    take_outputs(notebook, executed)


def take_outputs(notebook: dict, executed: Path) -> bool:
    """Give a notebook the outputs of its run; return False, and give it none, if it was edited
    since."""
    cells = json.loads(executed.read_text(encoding="utf-8"))["cells"]
    sources = (["".join(cell["source"]) for cell in each] for each in (cells, notebook["cells"]))
    if len(set(map(tuple, sources))) > 1:
        return False
    for cell, fresh in zip(notebook["cells"], cells, strict=True):
        cell |= {key: fresh[key] for key in ("outputs", "execution_count") if key in fresh}
    return True


def render(source: Path, html: Path, runs: dict[str, dict]) -> str:
    """Stage the sources and build them; return Sphinx's warnings, or nothing."""
    record = html.with_suffix(".ok")  # of pages that are not read again Sphinx forgets the warnings
    changed = stage(source, runs)
    if record.is_file() and not changed:
        return ""
    fresh = not record.is_file() or any(not n.endswith((".md", ".ipynb")) for n in changed)
    record.unlink(missing_ok=True)
    if fresh:
        program = Path(sys.executable).with_name("jupyter-book")
        subprocess.run([program, "config", "sphinx", source], check=True, capture_output=True)
    options = "-b html -j auto -W -n --keep-going -q --no-color" + " -E -a" * fresh
    trees = html.with_name(f"{html.name}.doctrees")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options.split(), "-d", trees, source, html],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")  # fmt: skip
    if done.returncode:
        return done.stdout.strip()[-8000:] or f"status {done.returncode}"
    record.touch()
    return ""


def pack(html: Path) -> Path:
    """Pack the pages into one file beside them, in a folder of the book's name."""
    out = html.with_name("icl-taken-apart.zip")
    temporary = out.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(p for p in html.rglob("*") if p.is_file()):
            archive.write(path, Path("icl-taken-apart", path.relative_to(html)))
    return Path(shutil.move(temporary, out))


if __name__ == "__main__":
    sys.exit(main())
