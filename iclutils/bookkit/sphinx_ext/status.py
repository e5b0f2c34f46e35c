"""The status page: the last accepted run of each notebook, and the machines they ran on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from ...errors import IclError
from ...files import read_json
from .. import presets, scorecard
from ..claims import VERDICTS
from . import shown
from .tables import Cell, commit, table, text, versions

FIELDS = {
    *("chapter", "tier", "seconds", "peak_gib"),
    *("machine", "versions", "python", "commit", "date"),
}


class Status(SphinxDirective):
    """``{status}``: run time, machine, date, commit and verdicts of each notebook at each tier."""

    def run(self) -> list[nodes.Node]:
        """Build the tables."""
        shown.use(self.env)
        try:
            runs = read_runs(Path(self.env.srcdir, "book/runs"))
            counts = scorecard.counts(scorecard.rows(shown.results(self.env)))
        except IclError as error:
            raise self.error(str(error)) from error
        machines = sorted({_machine(run) for run in runs.values()})
        body = []
        chapters = sorted(name for name in self.env.found_docs if name.startswith("notebooks/"))
        for page in chapters:
            for tier in presets.TIERS:
                name = page.removeprefix("notebooks/")
                found = counts.get((name.split("_")[0], tier), Counter[str]())
                verdicts = ", ".join(f"{found[v]} {v}" for v in VERDICTS if found.get(v))
                run = runs.get((tier, name))
                missing = "no record" if set(found) - {scorecard.NOT_RUN} else scorecard.NOT_RUN
                ran = _ran(run, machines) if run else [[text(x)] for x in (missing, *[""] * 4)]
                cells = [[self.link(page)], [text(tier)], *ran, [text(verdicts or "no claims")]]
                body.append(cells)
        head = ["Notebook", "Tier", "Time", "Memory used", "Machine", "Date", "Commit", "Verdicts"]
        parts: list[nodes.Node] = [table(head, body, "status", stub=True)]
        if machines:
            kinds = ["Machine", "Processor", "Cores", "Memory", "GPU", "Versions"]
            lines = []
            for number, machine in enumerate(machines, 1):
                first = nodes.paragraph("", str(number), ids=[f"machine-{number}"])
                lines.append([[first], *([text(cell)] for cell in machine)])
            parts.append(table(kinds, lines, "status-machines", stub=True))
        return parts

    def link(self, page: str) -> nodes.Node:
        """The notebook's title as a link to it."""
        xref = addnodes.pending_xref(
            "",
            nodes.inline("", page),
            refdomain="std",
            reftype="doc",
            reftarget=f"/{page}",
            refdoc=self.env.docname,
            refexplicit=False,
            refwarn=True,
        )
        return nodes.paragraph("", "", xref)


def read_runs(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Records of runs by (tier, notebook)."""
    found = {}
    for path in sorted(folder.glob("*/*.json")):
        record = read_json(path)
        if not isinstance(record, dict) or set(record) != FIELDS:
            raise IclError(f"{path} is not the record of a run. Delete it.")
        found[record["tier"], record["chapter"]] = record
    return found


def duration(seconds: float) -> str:
    """A run time for a reader: ``45 s`` or ``2 min 05 s``."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def held(peak: dict[str, float]) -> str:
    """Memory that a run held at most, for a reader: ``2.1 GiB, GPU 30 GiB``."""
    parts = [("", peak["memory"]), ("GPU ", peak["gpu"])]
    return ", ".join(f"{where}{size:.3g} GiB" for where, size in parts if size) or "unknown"


def _ran(run: dict[str, Any], machines: list[tuple[str, ...]]) -> list[Cell]:
    number = machines.index(_machine(run)) + 1
    link = nodes.reference("", str(number), refid=f"machine-{number}", internal=True)
    return [
        [text(duration(run["seconds"]))],
        [text(held(run["peak_gib"]))],
        [nodes.paragraph("", "", link)],
        [text(run["date"])],
        [text(commit(run["commit"]))],
    ]


def _machine(run: dict[str, Any]) -> tuple[str, ...]:
    """What runs on one machine with the same versions have in common."""
    machine = run["machine"]
    return (
        machine["cpu"] or "unknown",
        str(machine["cores"] or "unknown"),
        f"{machine['memory_gib']} GiB" if machine["memory_gib"] else "unknown",
        machine["gpu"] or "none",
        versions(run["python"], run["versions"]),
    )
