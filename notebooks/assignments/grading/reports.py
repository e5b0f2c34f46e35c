"""What a grader hands on: a table for each homework, a page for each student, the gradebook.

The tables are the machine's, and made anew each time; each is copied before (``table1.csv``, ...).
What a person enters, points and comments by student and question, stands in files of their own,
``by_hand.csv``, ``by_hand1.csv`` and so on: grading begins a new one for paragraphs that stand in
none, and never writes into one that is there.
"""

import csv
import io
import itertools
import json
import re
import shutil
import unicodedata
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
    """Write what one folder of submissions gives into the table of its homework; return it. The
    rows of other folders stay."""
    folder, new = plain(str(submissions.resolve())), list[Row]()
    rows = [row for row in read(place / "table.csv") if row["folder"] != folder]
    entries = entered(place, made.points)
    for each in grades:
        name = plain(student(each["name"]))
        message = "; ".join(f"{q}: {x}" if q else x for q, x in each["notes"].items())
        own = {q: x for q in made.points if (x := entries.get((words(name), q)))}
        points = each["scores"] | {q: float(x["points"]) for q, x in own.items() if x["points"]}
        of = sum(made.points[q] for q in points)
        sums = {"total": sum(points.values()), "possible": of} if points else {}
        row = {
            "name": plain(each["name"]),
            "student": name,
            "signed": plain(each["signed"]),
            "status": each["status"],
            "confined": each["confined"],
            **dict.fromkeys([*made.points, "total", "possible"], ""),
            **{key: f"{round(x, 2):g}" for key, x in (points | sums).items()},
            "message": plain(message),
            "comment": plain("; ".join(x["comment"] for x in own.values() if x["comment"])),
            "written": plain(each["written"]),
            "folder": folder,
        }
        rows.append(row)
        page = place / "feedback" / submissions.resolve().name / f"{each['name']}.md"
        with suppress(OSError):  # its name is too long for a file
            save(page, "".join(f"- {key}: {x}\n" for key, x in [*row.items()][:-1] if x))
        for question in made.by_hand:
            if question not in own:
                cells = name, question, "", f"{made.points[question]:g}", "", row["written"]
                new.append(dict(zip(COLUMNS, cells, strict=True)))
                entries[words(name), question] = new[-1]
    save(place / "table.csv", pd.DataFrame(rows).fillna("").to_csv(index=False))
    save(place / "points.json", json.dumps(made.points))
    if new:
        save(_free(place / "by_hand.csv"), pd.DataFrame(new).to_csv(index=False))
    return place / "table.csv"


def entered(place: Path, points: dict[str, float]) -> Entries:
    """Return what persons entered; refuse points that cannot be, with row and student."""
    entries: Entries = {}
    for path in sorted(place.glob("by_hand*")):
        if path.suffix in (".xlsx", ".xls", ".ods", ".numbers"):
            raise IclError(f"{path} is not read. Save it as CSV, and move it to another folder.")
        rows = read(path) if path.suffix == ".csv" else []
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
    """Join the tables of all homeworks, and what was entered by hand, into one line for each
    student, ``gradebook.csv``. Of several submissions of a student the best counts.

    With a ``roster``, the list of participants that a learning-management system exports (Moodle,
    Canvas), its lines and columns come first, so that the system imports the file again. The column
    that knows most of the students names them, or two, such as first and last name.
    """
    totals, spelling, named = dict[str, Any](), dict[str, str](), set[str]()
    for place in sorted(path.parent for path in grades.glob("hw*/points.json")):
        points = read_json(place / "points.json")
        rows = pd.DataFrame(read(place / "table.csv"))
        rows = rows.assign(who=rows["student"].map(words))
        named |= {*rows["who"]}
        rows = rows[rows["total"] != ""].replace(r"^(\d+),(\d+)$", r"\1.\2", regex=True)
        rows = rows.sort_values("total", key=pd.to_numeric, kind="stable")
        scores = rows.drop_duplicates("who", keep="last").set_index("who")[[*points]].copy()
        spelling = dict(zip(rows["who"], rows["student"], strict=True)) | spelling
        for (who, question), row in entered(place, points).items():
            if row["points"]:
                scores.loc[who, question] = row["points"]
                spelling.setdefault(who, row["student"])
        if len(scores):
            totals[place.name] = scores.apply(pd.to_numeric).sum(axis=1).map("{:g}".format)
    if not totals:
        raise IclError(f"{grades} holds no table. Grade a folder first: make grade SUBMISSIONS=...")
    book = pd.DataFrame(totals).fillna("").sort_index()
    if roster:
        table = table_of(roster)
        columns = [column + " " for _, column in table.items()]
        keys = [(one + other).map(words) for one in columns for other in ("", *columns)]
        whose = max(keys, key=lambda key: key.isin(book.index).sum())
        if lost := sorted(spelling[who] for who in {*book.index} - {*whose}):
            raise IclError(f"{roster} does not name {', '.join(lost)}. Add them, or rename them in "
                           "what they handed in, and in by_hand.csv, and grade again.")  # fmt: skip
        if twice := sorted({*whose[whose.duplicated()]} & {*book.index}):
            raise IclError(f"{roster} names {', '.join(twice)} in two lines. Leave one.")
        table = table.drop(columns=[name for name in book if name in table])
        book = table.join(book.reindex(whose).fillna("").reset_index(drop=True))
    else:
        if lost := sorted(spelling[who] for who in {*book.index} - named):
            raise IclError(f"Nobody handed in as {', '.join(lost)}, who has points in by_hand.csv. "
                           "Mend the name there, or name a ROSTER that has it.")  # fmt: skip
        book = book.rename(index=spelling).rename_axis("student").reset_index()
    save(grades / "gradebook.csv", book.to_csv(index=False))
    return grades / "gradebook.csv"


def words(name: str) -> str:
    """Return a name as its words, so that "Ada Lovelace" is ada_lovelace, whichever its accents,
    and 007 is 7, which spreadsheets make of it. Vowels of many scripts are marks, not letters."""
    composed = unicodedata.normalize("NFC", name).casefold()
    letters = "".join(x if unicodedata.category(x)[0] in "LMN" else " " for x in composed)
    return re.sub(r"\b0+(?=\d+\b)", "", " ".join(letters.split())) or name


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV; none of a file that is not there."""
    return table_of(path).to_dict("records") if path.is_file() else []


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
