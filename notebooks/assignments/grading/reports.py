"""What a grader hands on: tables, feedback for each student, the gradebook.

All of it is CSV and Markdown. ``by_hand.csv``, one for each homework, is the file that a person
edits: points and comments by student and question, for what is graded by hand and wherever the
machine's points are to be others. It is merged, never replaced, and no table is written over
without a copy (``by_hand.1.csv``, ...).
"""

import csv
import hashlib
import io
import itertools
import json
import re
import shutil
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from iclutils.errors import IclError
from iclutils.files import read_json, write_text

from .assignments import Assignment

if TYPE_CHECKING:
    from .submissions import Grade

# What they call a submission, for example Ada Lovelace_12_... and lovelaceada_12_34_...
MOODLE, CANVAS = r"(.+)_\d+_assignsubmission_", r"([^\W_]+?)(?:_LATE)?(_\d+)_\d+_"
COLUMNS = ["student", "question", "points", "of", "comment", "written", "file"]
Row = dict[str, Any]
Entries = dict[tuple[str, str], Row]  # rows of by_hand.csv by the words of the student, question


def write(place: Path, submissions: Path, made: Assignment, grades: list["Grade"]) -> Path:
    """Write what one folder of submissions gives into the tables of its homework; return the one
    with the points. What other folders gave stays."""
    folder, path = _plain(str(submissions.resolve())), place / "table.csv"
    rows = [row for row in read(path) if row["folder"] != folder]
    entries = _merged(place, made, grades, {words(row["student"]) for row in rows})
    for each in grades:
        row = _row(each, entries, made.points) | {"folder": folder}
        page = place / "feedback" / submissions.resolve().name / _short(f"{each.name}.md")
        save(page, _feedback(made, each, row, entries))
        rows.append(row)
    save(place / "points.json", json.dumps(made.points))
    save(path, _csv(rows))
    return path


def entered(place: Path, points: dict[str, float]) -> Entries:
    """Return what stands in ``by_hand.csv``; refuse points that cannot be, with row and student."""
    entries: Entries = {}
    for number, cells in enumerate(read(place / "by_hand.csv"), 2):
        row = dict.fromkeys(COLUMNS, "") | cells
        key, text = (words(row["student"]), row["question"]), row["points"].replace(",", ".")
        if text:
            who = f"{place / 'by_hand.csv'}, row {number}, {row['student']}: {row['points']!r}"
            value = float(text) if re.fullmatch(r"\d+\.?\d*|\.\d+", text, re.ASCII) else -1.0
            if not 0 <= value <= points.get(key[1], -1.0):
                every = ", ".join(f"{of:g} for {name}" for name, of in points.items())
                raise IclError(f"{who} for {key[1]}. Enter points from 0 to {every}.")
            row |= {"points": f"{value:g}", "of": f"{points[key[1]]:g}"}
            if (other := entries.get(key, row)["points"]) not in ("", row["points"]):
                raise IclError(f"{who}, and another row gives {other} for {key[1]}. Leave one.")
        entries[key] = row | {name: cell for name, cell in entries.get(key, {}).items() if cell}
    return entries


def _merged(place: Path, made: Assignment, grades: list["Grade"], others: set[str]) -> Entries:
    """Write ``by_hand.csv`` anew: every row that is there, and one for each paragraph.

    Where a file has another name than before, what was entered for it goes with it.
    """
    entries = entered(place, made.points)
    present = others | {words(student(each.name)) for each in grades}
    for each in grades:
        name = _plain(student(each.name))
        before = {who for (who, _), row in entries.items() if row["file"] == each.digest} - present
        if len(before) == 1 and not any(who == words(name) for who, _ in entries):
            for who, question in [key for key in entries if key[0] in before]:
                entries[words(name), question] = entries.pop((who, question)) | {"student": name}
        for question in made.by_hand:
            new = dict.fromkeys(COLUMNS, "") | {"student": name, "question": question}
            row = entries.setdefault((words(name), question), new)
            row |= {"written": _plain(each.written) or row["written"], "file": each.digest}
            row["of"] = f"{made.points[question]:g}"
    save(place / "by_hand.csv", _csv(entries.values()))
    return entries


def _row(each: "Grade", entries: Entries, points: dict[str, float]) -> Row:
    """Return one line of the table. What was not graded is blank: also the total, then."""
    who = words(student(each.name))
    by_hand = {q: entries[who, q]["points"] for q in points if (who, q) in entries}
    scores = each.scores | {q: float(text) for q, text in by_hand.items() if text}
    total, possible = sum(scores.values()), sum(points[q] for q in scores)
    sums = {"total": total, "possible": possible, "percent": 100 * total / (possible or 1)}
    message = "; ".join(f"{name}: {text}" if name else text for name, text in each.notes.items())
    return {
        "name": _plain(each.name),
        "student": _plain(student(each.name)),
        "signed": _plain(each.signed),
        "status": each.status,
        "confined": each.confined,
        **dict.fromkeys([*points, *sums], ""),
        **{name: f"{round(x, 2):g}" for name, x in (scores | sums).items() if scores},
        "message": _plain(message),
    }


def student(name: str) -> str:
    """Return whose a submission is: its folder, else its file, without what Moodle and Canvas
    add."""
    first, *rest = Path(unicodedata.normalize("NFC", name)).parts
    whole = first if rest else Path(first).stem
    match = re.match(MOODLE, whole) or re.match(CANVAS, whole)
    return "".join(match.groups()) if match else whole


def _feedback(made: Assignment, each: "Grade", row: Row, entries: Entries) -> str:
    """Return what a student reads."""
    whole = f"{row['total']} of {row['possible']} points" if row["total"] else "not graded"
    lines = [f"# {made.name}: {student(each.name)}\n", f"{whole} ({each.status})\n"]
    lines += [f"{each.notes['']}\n"] if "" in each.notes else []
    if row["total"]:
        lines += ["| question | points | of | to look at |", "|---|---|---|---|"]
    for question, of in made.points.items() if row["total"] else ():
        entry = entries.get((words(student(each.name)), question), {})
        note = entry.get("comment") or ("" if entry.get("points") else each.notes.get(question, ""))
        cell = _plain(note).replace("|", "\\|")
        lines.append(f"| {question} | {row[question] or 'not yet graded'} | {of:g} | {cell} |")
    return "\n".join(lines) + "\n"


def gradebook(grades: Path, roster: Path | None = None) -> Path:
    """Join the tables of all homeworks, and what was entered by hand, into one line for each
    student, ``gradebook.csv``. Of a student in several folders the one graded last counts.

    With a ``roster``, the list of participants that a learning-management system exports (Moodle,
    Canvas), its lines and columns come first, so that the system imports the file again.
    """
    spelling: dict[str, str] = {}
    places = [path.parent for path in sorted(grades.glob("hw*/points.json"))]
    totals = pd.DataFrame({place.name: _totals(place, spelling) for place in places})
    totals = totals.dropna(axis=1, how="all").rename(index=spelling).sort_index()
    if not len(totals):
        raise IclError(f"{grades} holds no table. Grade a folder first: make grade SUBMISSIONS=...")
    totals = totals.map(lambda x: "" if x != x else f"{x:g}")
    table = totals.rename_axis("student").reset_index() if roster is None else _on(roster, totals)
    save(grades / "gradebook.csv", table.to_csv(index=False))
    return grades / "gradebook.csv"


def _totals(place: Path, spelling: dict[str, str]) -> "pd.Series[float]":
    """Return the totals of one homework by the words of the student."""
    points = read_json(place / "points.json")
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    first: dict[tuple[str, str], Row] = {}
    for row in read(place / "table.csv"):
        if row["total"]:
            who = words(row["student"])
            other = first.setdefault((who, row["folder"]), row)
            if other["total"] != row["total"]:
                raise IclError(
                    f"{row['folder']} has two of one student: {other['name']} with "
                    f"{other['total']} points and {row['name']} with {row['total']}. Take one "
                    "away, and grade again."
                )
            spelling.setdefault(who, row["student"])
            scores[who] = {q: float(row[q]) for q in points if row[q]}
    for (who, question), row in entered(place, points).items():
        if row["points"]:
            spelling.setdefault(who, row["student"])
            scores[who][question] = float(row["points"])
    return pd.Series({who: sum(each.values()) for who, each in scores.items()}, dtype=float)


def _on(roster: Path, totals: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of a roster, with what each student got. The column that knows most of the
    students names them, or two: first and last name; name and number (Canvas)."""
    table = table_of(roster)
    columns = [table[name] for name in table]
    columns += [each.str.replace(r"(.*?), *(.*)", r"\2 \1", regex=True) for each in columns]
    keys = [(one + other).map(_letters) for one in columns for other in ("", *columns)]
    known = {_letters(name): name for name in totals.index}
    met = max(keys, key=lambda key: key.isin(known.keys()).sum()).map(known).fillna("")
    if lost := sorted(set(totals.index) - set(met)):
        raise IclError(
            f"{roster} does not name {', '.join(lost)}. Add them to it, or rename what they "
            "handed in and grade again: what you entered for a file goes with it."
        )
    if twice := sorted({*met[met.duplicated()]} - {""}):
        raise IclError(f"{roster} names {', '.join(twice)} in two lines. Leave one.")
    added = totals.reindex(met).fillna("").reset_index(drop=True)
    return table.drop(columns=[c for c in added if c in table]).join(added)


def words(name: str) -> str:
    """Return a name as its words, so that "Ada Lovelace" is ada_lovelace, whichever its accents."""
    composed = unicodedata.normalize("NFC", name)
    return " ".join(re.findall(r"\w+", composed.casefold().replace("_", " ")))


def _letters(name: str) -> str:
    return words(name).replace(" ", "")


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV; none of a file that is not there."""
    return [dict(row) for row in table_of(path).to_dict("records")] if path.is_file() else []


def table_of(path: Path) -> pd.DataFrame:
    """Read a CSV as any spreadsheet saves it: its encoding, its separator; blank lines are left
    out, and short ones filled up."""
    for encoding in ("utf-16", "utf-8-sig", "cp1252", "latin-1"):
        with suppress(UnicodeError):
            text = re.sub(r"\A\s*(sep=.\s*\n)?", "", path.read_text(encoding))
            break
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    lines = [cells for line in reader if any(cells := [cell.strip() for cell in line])]
    head, *rows = [*zip(*itertools.zip_longest(*lines, fillvalue=""), strict=True)] or [()]
    return pd.DataFrame(rows, columns=head)


def _csv(rows: Iterable[Row]) -> str:
    return str(pd.DataFrame(list(rows)).fillna("").to_csv(index=False))


def _plain(text: str) -> str:
    """Return text in one line that can be written, and that no spreadsheet takes for a formula."""
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _short(name: str) -> str:
    """Return a name that a file may have: of a long one its beginning, and a digest."""
    data = name.encode("utf-8", "replace")
    if len(data) <= 200:
        return data.decode()
    return data[:150].decode("utf-8", "ignore") + f"~{hashlib.sha256(data).hexdigest()[:8]}.md"


def save(path: Path, text: str) -> None:
    """Write a file at once or not at all; what a table held before is copied beside it."""
    is_table = path.suffix == ".csv"  # spreadsheets know UTF-8 by the first character
    text = "\ufeff" * is_table + text.encode("utf-8", "replace").decode()
    if path.is_file() and path.read_bytes() == text.encode():
        return
    if path.is_file() and is_table:
        names = (path.with_name(f"{path.stem}.{i}.csv") for i in itertools.count(1))
        shutil.copy2(path, next(name for name in names if not name.exists()))
    write_text(path, text)
