"""Results of runs beside the committed ones: what differs beyond rounding, what is stored, and what
was measured by code that has changed since.

A run of a whole tier is accepted: its results and record become the committed ones. A run of a part
of the tier stores its few values in its record; where a later one gives the same, the whole, which
was measured by the code of the first, counts as measured by the code of the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iclutils import claims, presets, scorecard
from iclutils.errors import IclError
from iclutils.files import read_json, write_json

from . import run
from .run import Run

SHOWN = 8  # names of definitions in a message
ROUNDING = 1e-4  # relative or absolute: what may lie between two processors
# What differs between two runs of the same.
VOLATILE = ("date", "commit", "seconds", "cpu_seconds", "pace", "peak_gib", "cells")
HEADER = ["claim", "models", "committed", "now", "verdicts"]
Value = tuple[float | None, float, str]  # with its standard error and verdict
GONE = (None, 0.0, "no longer measured")
NEW = (None, 0.0, "not committed")


@dataclass(frozen=True)
class Difference:
    """A value that is not the committed one."""

    kind: str
    name: str
    committed: Value
    now: Value

    @property
    def is_wrong(self) -> bool:
        """Whether it must not pass: another verdict, or another value of a part."""
        part = self.kind.startswith(presets.PART.column)
        return self.committed != NEW and (part or self.committed[2] != self.now[2])

    def cells(self) -> list[str]:
        """Its row of the table."""
        said = [scorecard.number(v, s) if v is not None else "–" for v, s, _ in self.values()]
        verdicts = dict.fromkeys(verdict for _, _, verdict in self.values())
        return [self.name, self.kind, *said, " -> ".join(verdicts)]

    def values(self) -> tuple[Value, Value]:
        """The committed one and the new one."""
        return self.committed, self.now


def conclude(runs: list[Run], accept: bool = False) -> int:
    """Say what differs from what is committed, and store it if it is to be accepted; the status to
    exit with, 1 if a verdict or a value of a part differs and is not accepted."""
    usual, count = [each for each in runs if each.is_usual()], 0
    for each in runs:
        if each not in usual:
            print(f"{each.chapter}: not compared: its model, seed or parameters are not the book's")
    found: list[Difference] = []
    equal: list[Run] = []
    for each in usual:
        compared, differ = compare(each)
        count, found = count + compared, found + differ
        equal += [] if differ else [each]
    later = [each.chapter for each in equal if not each.part and stale(each)]
    if later and not accept:
        print(f"the code of {', '.join(later)} is not what is noted: --accept notes it")
    print(told(count, found))
    for path in store(usual) if accept else renew(equal):
        print(f"updated {path}")
    return int(not accept and any(each.is_wrong for each in found))


def last(build: Path) -> list[Run]:
    """The runs whose outputs are in the build folder."""
    found = (path for path in build.glob("run/*/*.json") if "." not in path.stem)  # no leftovers
    stamps = sorted(found, key=lambda path: (path.parent.name, path.stem))
    runs = (Run(path.stem, read_json(path)["parameters"], build) for path in stamps)
    return [each for each in runs if each.chapter in run.chapters() and each.record.is_file()]


def moved(runs: list[Run]) -> str:
    """The table of the verdicts that differ from the committed ones, of runs with another seed."""
    compared = [compare(each) for each in runs]
    found = [each for _, differ in compared for each in differ]
    verdicts = [each for each in found if each.committed[2] != each.now[2]]
    lines = [HEADER, *(each.cells() for each in verdicts)]
    total = f"{len(verdicts)} of {sum(count for count, _ in compared)} verdicts differ"
    return "\n".join([*(_aligned(lines) if verdicts else []), total])


def compare(run: Run) -> tuple[int, list[Difference]]:
    """How many values of a run were compared, and which differ beyond rounding or in verdict."""
    committed, now = (dict(values(run, fresh)) for fresh in (False, True))
    pairs = {name: (committed.get(name, NEW), now.get(name, GONE)) for name in committed | now}
    found = (Difference(run.kind, name, *pairs[name]) for name in sorted(pairs))
    return len(pairs), [each for each in found if not _same(*each.values())]


def told(count: int, found: list[Difference]) -> str:
    """The table of what differs, or that nothing does."""
    if not found:
        return f"nothing differs ({count} values compared)"
    lines = [HEADER, *(each.cells() for each in found)]
    cure = f"{len(found)} of {count} values differ. Look at them; to make them the committed ones, "
    return "\n".join([*_aligned(lines), f"{cure}run the same again with --accept, or: make accept"])


def totals(table: list[scorecard.Row]) -> str:
    """Totals of the findings on small models by chapter and by source, what stands apart from
    them, and the findings that do not hold by name."""
    if not table:
        return "No claims yet."
    findings = scorecard.of(table, kind="finding")
    shown = [v for v in claims.VERDICTS if v in {*claims.JUDGED, *scorecard.tally(findings)}]
    chapters = sorted({entry.claim.chapter for entry in findings})
    groups = {f"chapter {name}": {"chapter": name} for name in chapters}
    groups |= {words: {"origin": name} for name, words in scorecard.ORIGINS.items()} | {"all": {}}
    lines = [["findings on small models", *shown]]
    for name, fields in groups.items():
        found = scorecard.tally(scorecard.of(table, kind="finding", **fields))
        lines.append([name, *(str(found[verdict]) for verdict in shown)])
    said = _aligned(lines)
    for kind, name in (("identity", "identities"), ("erratum", "errata")):
        counted = scorecard.tally(scorecard.of(table, kind=kind))
        said.append(f"{counted.total()} {name}, {counted[claims.HOLDS]} hold")
    for column in ("real", "paper"):
        counted = scorecard.tally(scorecard.of(table, column, kind="finding"))
        each = ", ".join(f"{count} {verdict}" for verdict, count in counted.items())
        said.append(f"findings, {scorecard.COLUMNS[column].lower()}: {each or 'none yet'}")
    failed = [entry.claim.id for entry in findings if entry.verdict == claims.FAILS]
    if failed:
        said.append(f"Does not hold on small models: {', '.join(failed)}")
    return "\n".join(said)


def _aligned(lines: list[list[str]]) -> list[str]:
    """Rows of cells as lines of text, in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def values(of: Run, fresh: bool) -> Iterator[tuple[str, Value]]:
    """What a run measured, or what is committed of it: by claim, and by ``claim (null)`` where the
    cell measures the null itself."""
    folder = of.results if fresh else run.ROOT / "book/results"
    if of.part:
        record = of.record if fresh else of.committed
        stored = read_json(record)["values"] if record.is_file() else {}
        yield from ((name, (value, 0.0, "")) for name, value in stored.items())
        return
    known = {path.stem for path in (folder / of.kind).glob(f"{of.chapter[:2]}.*.json")}
    for name in (known - claims.ledger().keys()) | (known & set(of.asks())):
        result = read_json(folder / of.kind / f"{name}.json")
        if name not in claims.ledger():
            yield name, (result["value"], result["spread"], "not in the ledger")
            continue
        judged = claims.of_json(result)  # both sides in the words of today
        yield name, (judged.value, judged.spread, judged.verdict)
        if null := judged.null and claims.null_of(judged, {}):
            yield f"{name} (null)", (null.value, null.spread, null.verdict)


def _same(committed: Value, now: Value) -> bool:
    numbers = [math.nan if x is None else x for x in (committed[0], now[0])]
    equal = math.isclose(*numbers, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return committed[2] == now[2] and (equal or committed[0] is now[0] is None)


def store(runs: Iterable[Run]) -> list[Path]:
    """Make these runs the committed ones: outputs of a mini run into ``notebooks/``, results and
    records into ``book/``. What differs in date, commit and seconds only stays; return what
    changed."""
    runs = list(runs)
    wanted: dict[Path, Any] = {}
    for each in runs:
        if each.kind == "mini":
            wanted[each.source] = executed(each.source, each.notebook)
        if each.chapter not in run.BESIDE:
            wanted[each.committed] = read_json(each.record)
        for name in [] if each.part else sorted(set(each.asks()) - set(each.unchecked())):
            result = each.result(name)
            wanted[run.ROOT / "book/results" / each.kind / result.name] = read_json(result)
    changed = [path for path, value in wanted.items() if not _stands(path, value)]
    for path in changed:
        write_json(path, wanted[path])
    asked = {each.kind: each.tier for each in runs}
    for kind, tier in asked.items():
        kept = {name for name, claim in claims.ledger().items() if tier in claim.tiers}
        for folder, names in (("results", kept), ("runs", set(run.chapters()))):
            gone = (run.ROOT / "book" / folder / kind).glob("*.json")
            changed += [path for path in gone if path.stem not in names]
    for path in changed:
        if path not in wanted:
            path.unlink()
    return changed


def renew(runs: Iterable[Run]) -> list[Path]:
    """Note beside each whole that a run of its part gave the same, with the code of that run; only
    where the part was measured before by the code that had measured the whole."""
    changed = []
    for each in (each for each in runs if each.part):
        path = each.with_tier(each.tier).committed
        whole, before, now = map(read_json, (path, each.committed, each.record))
        if not _same_code(whole, before):
            raise IclError(
                f"{each.chapter} ({each.kind}) was measured by other code than the whole. Run the "
                f"whole, or this part with the code of the whole and --accept."
            )
        if not _same_code(before, now):
            sizes = {"sizes": whole["science"]["sizes"]}
            equal = {"in": "a part", "date": now["date"], "commit": now["commit"]}
            write_json(path, whole | {"science": now["science"] | sizes, "equal": equal})
            write_json(each.committed, now)
            changed += [path, each.committed]
    return changed


def stale(each: Run) -> str:
    """What of the code of a committed result has changed since, or that no run of this notebook is
    on record, and what to do; or nothing."""
    again = f"python -m iclutils run {each.chapter} --tier {each.tier}"
    random = " --weights random" * each.kind.endswith(claims.NULL)
    cure = f"{again}{random} --accept"
    if not each.committed.is_file():
        measured = any(values(each, fresh=False))
        missing = f"{each.chapter} ({each.kind}): results without a record. Run: {cure}"
        return missing if measured else ""
    before, now = read_json(each.committed).get("science", {}), each.code()
    names = sorted(name for name in before | now if before.get(name) != now.get(name))
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    what = f"{', '.join(names[:SHOWN])}{more}" if before else "all, for it was not noted then"
    if presets.PART.name == each.tier and each.with_tier(presets.PART.column).committed.is_file():
        cure = f"{again}-part{random}; if that differs: {cure}"
    return f"{each.chapter} ({each.kind}): changed since it was measured: {what}. Run: {cure}"


def _same_code(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two records are of the same code, whatever the sizes."""
    codes = [record.get("science", {}) | {"sizes": ""} for record in (one, other)]
    return codes[0] == codes[1]


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


def _stands(path: Path, value: Any) -> bool:
    """Whether a committed file already says this; date, seconds and clean commit do not count."""
    if not path.is_file():
        return False
    before = read_json(path)
    if path.suffix == ".json" and not before["commit"].endswith("+"):
        value = value | {key: before[key] for key in VOLATILE if key in before}
    return before == value
