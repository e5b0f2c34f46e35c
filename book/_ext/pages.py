"""Directives of single pages: status, how to cite, model cards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from iclutils import claims, scorecard, zoo
from iclutils.errors import IclError
from iclutils.files import read_json

from .markdown import Generated, commit, plain, rows, table, versions

FIELDS = {
    *("chapter", "tier", "seconds", "peak_gib"),
    *("machine", "versions", "python", "commit", "date"),
}
# Not in every record: older runs had none, ``values`` are those of a part of a tier, and ``equal``
# says when later code was found to give the same.
NEWER = {"pace", "cpu_seconds", "cells", "science", "values", "equal"}
LATE = "its code has changed; not measured again yet"


class Status(Generated):
    """``{status}``: run time, machine, date, commit and verdicts of each notebook at each tier."""

    def markdown(self) -> list[str]:
        folder = Path(self.env.srcdir, "book/runs")
        runs, late = read_runs(folder), owed(folder)
        table_of = {name: rows(self.env, name[:2]) for name in claims.chapters()}
        machines = sorted({_machine(run) for run in runs.values()})
        body = []
        for page in sorted(name for name in self.env.found_docs if name.startswith("notebooks/")):
            name = page.removeprefix("notebooks/")
            for column, label in scorecard.COLUMNS.items():
                entries = scorecard.of(table_of.get(name, []), column)
                run = runs.get((column, name))
                if not (run or entries or column == "mini"):
                    continue
                found = scorecard.tally(e for e in entries if e.claim.kind == "finding")
                verdicts = ", ".join(f"{count} {verdict}" for verdict, count in found.items())
                missing = "no record" if any(e.result for e in entries) else scorecard.NOT_RUN
                ran = _ran(run, machines) if run else [missing, *[""] * 5]
                ran[-1] = LATE if f"{column} {name}" in late else ran[-1]
                body.append([f"{{doc}}`/{page}`", label, *ran, verdicts or "none"])
        head = ["Notebook", "Models", "Time", "Memory used", "Machine", "Measured", "Commit"]
        head.append("Since then")
        lines = table([*head, "Findings"], body, "status")
        if machines:
            head = ["Machine", "Processor", "Cores", "Memory", "GPU", "Versions"]
            body = [[f"{{#machine-{n}}}\n{n}", *one] for n, one in enumerate(machines, 1)]
            lines += table(head, body, "status-machines")
        return lines


class LiveTimes(Generated):
    """``{livetimes}``: how fast the live figures answer, as a nightly test has measured it."""

    def markdown(self) -> list[str]:
        known = read_json(Path(self.env.srcdir, "book/runs/live.json"))
        head = ["Figure", "First answer, ms", "A change, median ms", "The slowest change, ms"]
        body = [[name, *map(str, times)] for name, times in known["figures"].items()]
        where = f"{plain(known['machine']['cpu'])}, {known['machine']['cores']} cores"
        said = f"Measured {known['date']}, {commit(known['commit'])}: {known['browser']}, {where}"
        return [*table(head, body, "status-live"), "", f"{said}, load {known['load']}."]


def read_runs(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Records of runs by (tier, notebook)."""
    found = {}
    for path in sorted(folder.glob("*/*.json")):
        record = read_json(path)
        if not isinstance(record, dict) or set(record) - NEWER != FIELDS:
            raise IclError(f"{path} is not the record of a run. Delete it.")
        found[record["tier"], record["chapter"]] = record
    return found


def owed(folder: Path) -> set[str]:
    """Runs (``tier notebook``) whose code has changed since, and that nobody has repeated yet."""
    path = folder / "owed.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {line for line in lines if not line.startswith("#")}


def duration(seconds: float) -> str:
    """A run time for a reader: ``45 s`` or ``2 min 05 s``."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def held(peak: dict[str, float]) -> str:
    """Memory that a run held at most, for a reader: ``2.1 GiB, GPU 30 GiB``."""
    parts = [("", peak["memory"]), ("GPU ", peak["gpu"])]
    return ", ".join(f"{where}{size:.3g} GiB" for where, size in parts if size) or "unknown"


def _ran(run: dict[str, Any], machines: list[tuple[str, ...]]) -> list[str]:
    number = machines.index(_machine(run)) + 1
    which = f"[{number}](#machine-{number})"
    told = duration(run["seconds"]), held(run["peak_gib"])
    since = ""
    if equal := run.get("equal"):
        since = f"found equal in {equal['in']}, {equal['date']}, {commit(equal['commit'])}"
    return [*told, which, run["date"], commit(run["commit"]), since]


def _machine(run: dict[str, Any]) -> tuple[str, ...]:
    """What runs on one machine with the same versions have in common."""
    machine = run["machine"]
    return (
        plain(machine["cpu"] or "unknown"),
        str(machine["cores"] or "unknown"),
        f"{machine['memory_gib']} GiB" if machine["memory_gib"] else "unknown",
        plain(machine["gpu"] or "none"),
        versions(run["python"], run["versions"]),
    )


class Citation(Generated):
    """``{citation}``: how to cite the book, from ``CITATION.cff``, as text and as BibTeX."""

    def markdown(self) -> list[str]:
        path = Path(self.env.srcdir, "CITATION.cff")
        if not path.is_file():
            raise IclError("The book has no CITATION.cff.")
        cited = yaml.safe_load(path.read_text(encoding="utf-8"))
        names = [
            " ".join(author[part] for part in ("given-names", "family-names") if part in author)
            or author["name"]
            for author in cited["authors"]
        ]
        released = cited.get("date-released")  # until then the year of the copyright
        year = str(released.year) if released else self.env.config.copyright
        where = cited.get("repository-code", "")
        parts = [
            ", ".join(names) + (f" ({year})" if year else ""),
            f"{cited['title']}, version {cited['version']}",
            f"Licence: {cited['license']}",
            where,
        ]
        fields = {  # in braces, so that BibTeX leaves words and capitals as they are
            "author": " and ".join(f"{{{name}}}" for name in names),
            "title": f"{{{cited['title']}}}",
            "version": str(cited["version"]),
            "year": year,
            "url": where,
        }
        entry = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        sentence = " ".join(f"{part}." for part in parts if part)
        bibtex = ["```bibtex", "@software{icl_taken_apart,", *entry, "}", "```"]
        return [f"> {plain(sentence)}", "", *bibtex]


class ModelCards(Generated):
    """``{modelcards}``: the card of each shipped model, its title one level down. What several of a
    recipe say but for their names stands in the first one's card alone."""

    def markdown(self) -> list[str]:
        cards, said = list[str](), dict[tuple[str, str], str]()
        for name in zoo.names():
            card = zoo.read_card(name)
            head, *entries = re.split(r"^(?=- \*\*)", card, flags=re.MULTILINE)
            recipe = re.search(r"zoo\.recipes\.\w+|$", card)
            same = dict[str, list[str]]()
            for entry in entries:
                plainly = " ".join(entry.replace(name, "NAME").split())
                first = said.setdefault((recipe[0] if recipe else "", plainly), name)
                if first == name:
                    head += entry
                else:
                    title = plainly.split("**")[1]
                    same.setdefault(first, []).append(title[0].lower() + title[1:])
            for first, titles in same.items():
                head += f"- **As of {first}, but for the name**: {', '.join(titles)}.\n"
            cards.append(_one_level_down(head))
        return "\n\n".join(cards or ["No model is shipped yet."]).splitlines()


def _one_level_down(card: str) -> str:
    """Markdown without its front matter and with every heading one level lower."""
    card = re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
    pieces = re.split(r"^(```.*?^```)", card, flags=re.DOTALL | re.MULTILINE)
    pieces[::2] = [re.sub(r"^#", "##", piece, flags=re.MULTILINE) for piece in pieces[::2]]
    return "".join(pieces)
