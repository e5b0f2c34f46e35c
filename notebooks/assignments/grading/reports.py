"""What a grader hands on: a table for each homework, a page for each student, the gradebook.

The tables are the machine's, and made anew each time from ``grades.json``; each is copied before
(``table1.csv``, ...). What a person enters, points and comments by student and question, stands in
files of their own, ``by_hand.csv``, ``by_hand1.csv`` and so on: grading begins a new one for
paragraphs that stand in none, and never writes into one that is there.
"""

import csv
import io
import itertools
import json
import re
import shutil
import unicodedata
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from iclutils.errors import IclError
from iclutils.files import read_json, write_text

from .assignments import Assignment

# What they call a submission, for example Ada Lovelace_12_... and lovelaceada_12_34_...
MOODLE, CANVAS = r"(.+)_\d+_assignsubmission_", r"[^\W_]+?(?:_LATE)?_(\d+)_\d+_"
COLUMNS = ["student", "question", "points", "of", "comment", "written"]
Row = dict[str, Any]
Entries = dict[tuple[str, str], Row]  # rows of by_hand.csv by the words of the student, question


def write(place: Path, submissions: Path, made: Assignment, grades: list[Row]) -> Path:
    """Write what one folder of submissions gives into the table of its homework; return it. What
    other folders gave stays, and so do their pages."""
    folder, store = str(submissions.resolve()), place / "grades.json"
    old = read_json(store)["grades"] if store.is_file() else []
    pages = {each["folder"]: each["pages"] for each in old}
    pages.setdefault(folder, _free(place / "feedback" / plain(Path(folder).name)).name)
    whole = [each for each in old if each["folder"] != folder]
    whole += [each | {"folder": folder, "pages": pages[folder]} for each in grades]
    entries, rows, new = entered(place, made.points), list[Row](), dict[tuple[str, str], Any]()
    for each in whole:
        name = plain(student(each["name"]))
        own = {q: x for q in made.points if (x := entries.get((words(name), q)))}
        points = {q: x for q, x in each["scores"].items() if q in made.points}
        points |= {q: float(x["points"]) for q, x in own.items() if x["points"]}
        of = sum(made.points[q] for q in points)
        sums = {"total": sum(points.values()), "possible": of} if points else {}
        row = {
            "name": each["name"],
            "student": name,
            **{key: each[key] for key in ("signed", "status", "confined")},
            **dict.fromkeys([*made.points, "total", "possible"], ""),
            **{key: f"{round(x, 2):g}" for key, x in (points | sums).items()},
            "message": "; ".join(f"{q}: {x}" if q else x for q, x in each["notes"].items()),
            "comment": "; ".join(x["comment"] for x in own.values() if x["comment"]),
            "written": each["written"],
        }
        row = {key: plain(x) for key, x in row.items()}
        rows.append(row | {"folder": plain(each["folder"]), "pages": each["pages"]})
        with suppress(OSError):  # its name is too long for a file
            page = place / "feedback" / each["pages"] / f"{each['name']}.md"
            save(page, "".join(f"- {key}: {x}\n" for key, x in row.items() if x))
        for question in made.by_hand:
            if question not in own:
                line = name, question, "", f"{made.points[question]:g}", "", row["written"]
                new.setdefault((words(name), question), line)
    save(store, json.dumps({"points": made.points, "grades": whole}))
    save(place / "table.csv", pd.DataFrame(rows).to_csv(index=False))
    if new:
        lines = pd.DataFrame(new.values(), columns=COLUMNS)
        save(_free(place / "by_hand.csv"), lines.to_csv(index=False))
    return place / "table.csv"


def entered(place: Path, points: dict[str, float]) -> Entries:
    """Return what persons entered; refuse points that cannot be, with row and student."""
    entries: Entries = {}
    for path in sorted(place.glob("by_hand*")):
        if path.suffix in (".xlsx", ".xls", ".ods", ".numbers"):
            raise IclError(f"{path} is not read. Save it as CSV, and move it to another folder.")
        rows = table_of(path).to_dict("records") if path.suffix == ".csv" else []
        if rows and (lost := {*COLUMNS[:3]} - rows[0].keys()):
            raise IclError(f"{path} has no column {', '.join(sorted(lost))} in its first line.")
        for number, row in enumerate(rows, 2):
            row = dict.fromkeys(COLUMNS, "") | row
            key, text = (words(row["student"]), row["question"]), row["points"].replace(",", ".")
            who = f"{path}, row {number}, {row['student']}: {row['points']!r}"
            value = float(text) if re.fullmatch(r"\d+\.?\d*|\.\d+", text, re.ASCII) else -1.0
            if text and not 0 <= value <= points.get(key[1], -1.0):
                every = ", ".join(f"{of:g} for {name}" for name, of in points.items())
                raise IclError(f"{who} for {key[1]}. Enter points from 0 to {every}.")
            row["points"] = f"{value:g}" if text else ""
            other = entries.get(key, row)
            if "" != other["points"] != row["points"] != "":
                raise IclError(f"{who}, and another row gives {other['points']}. Leave one.")
            entries[key] = row | {name: x for name, x in other.items() if x}
    return entries


def student(name: str) -> str:
    """Return whose a submission is: its folder, else its file; of what Moodle and Canvas make of
    it the name, or the number."""
    first, *rest = Path(unicodedata.normalize("NFC", name)).parts
    whole = first if rest else Path(first).stem
    match = re.match(MOODLE, whole) or re.match(CANVAS, whole)
    return match[1] if match else whole


def gradebook(grades: Path, roster: Path | None = None) -> Path:
    """Join all homeworks, and what was entered by hand, into ``gradebook.csv``, a line for each
    student who handed in. Of several submissions of a student the best counts.

    With a ``roster``, the list of participants that a learning-management system exports (Moodle,
    Canvas), its lines and columns come first, so that the system imports the file again. The column
    that knows most of the students names them, or two, such as first and last name.
    """
    totals, spelling, named = dict[str, Any](), dict[str, str](), dict[str, str]()
    for store in sorted(grades.glob("hw*/grades.json")):
        points, whole = read_json(store).values()
        given = [(plain(student(each["name"])), each["scores"]) for each in whole]
        named = {words(name): name for name, _ in given} | named
        own, best = defaultdict[str, dict[str, float]](dict), dict[str, float]()
        for (who, question), row in entered(store.parent, points).items():
            if row["points"]:
                own[who][question] = float(row["points"])
                given.append((row["student"], own[who]))
        for name, scores in given:
            if scores := scores | own[who := words(name)]:
                spelling.setdefault(who, name)
                total = sum(x for question, x in scores.items() if question in points)
                best[who] = max(best.get(who, 0.0), total)
        if best:
            totals[store.parent.name] = pd.Series(best).map("{:g}".format)
    if not totals:
        raise IclError(f"{grades} holds no points: make grade HW=hw01 SUBMISSIONS=folder")
    book = pd.DataFrame(totals)
    handed_in = pd.DataFrame({"student": [named[who] for who in sorted(named)]})
    table = table_of(roster) if roster else handed_in
    columns = [column + " " for _, column in table.items()]
    keys = [(one + other).map(words) for one in columns for other in ("", *columns)]
    whose = max(keys, key=lambda key: key.isin(book.index).sum())
    if lost := sorted(spelling[who] for who in {*book.index} - {*whose}):
        raise IclError(
            f"{', '.join(lost)}: points, and no line in {roster or 'what was handed in'}. Mend the "
            "name in by_hand.csv, or in what was handed in, or add it to the ROSTER; grade again."
        )
    if twice := sorted({*whose[whose.duplicated()]} & {*book.index}):
        raise IclError(f"{roster} names {', '.join(twice)} in two lines. Leave one.")
    table = table.drop(columns=[name for name in book if name in table])
    book = table.join(book.reindex(whose).fillna("").reset_index(drop=True))
    save(grades / "gradebook.csv", book.to_csv(index=False))
    return grades / "gradebook.csv"


def words(name: str) -> str:
    """Return a name as its words, so that "Ada Lovelace" is ada_lovelace, whichever its accents,
    and 007 is 7, which spreadsheets make of it. Vowels of many scripts are marks, not letters."""
    composed = unicodedata.normalize("NFC", name).casefold()
    letters = "".join(x if unicodedata.category(x)[0] in "LMN" else " " for x in composed)
    return re.sub(r"\b0+(?=\d+\b)", "", " ".join(letters.split())) or name.strip()


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


def shown(path: Path, without: str = "name signed comment written folder pages") -> str:
    """Return a table as a person reads it on a screen, without some columns."""
    table = table_of(path).drop(columns=without.split(), errors="ignore")
    return table.to_string(index=False, max_colwidth=60)


def plain(text: str) -> str:
    """Return text in one line that can be written, that moves no terminal's cursor, and that no
    spreadsheet takes for a formula."""
    text = re.sub(r"[\0-\x1f\x7f-\x9f]", " ", text.encode("utf-8", "replace").decode())
    text = " ".join(text.split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _free(path: Path) -> Path:
    """Return a path, with a number if there is such a file."""
    names = (path.with_stem(f"{path.stem}{i}") for i in itertools.chain([""], itertools.count(1)))
    return next(name for name in names if not name.exists())


def save(path: Path, text: str) -> None:
    """Write a file at once or not at all; what a table held before is copied beside it."""
    is_table = path.suffix == ".csv"  # spreadsheets know UTF-8 by the first character
    text = "\ufeff" * is_table + text.encode("utf-8", "replace").decode()
    if is_table and path.is_file() and path.read_bytes() != text.encode():
        shutil.copy2(path, _free(path))
    write_text(path, text)
