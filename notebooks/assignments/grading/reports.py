"""What a grader hands on: a table for each homework, a page for each student, the gradebook.

They are made anew each time from ``grades.json``, what the machine gave, and ``by_hand.csv``, what
a person entered by student and question: grading adds lines for paragraphs that have none, and
changes no other. Each table is copied before it changes.
"""

import csv
import io
import itertools
import re
import shutil
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from iclutils.errors import IclError
from iclutils.files import read_json, write_json, write_text

from .assignments import Homework

# What they call a submission, for example Ada Lovelace_12_... and lovelaceada_12_34_...
MOODLE, CANVAS = r"(.+)_\d+_assignsubmission_", r"[^\W_]+?(?:_LATE)?_(\d+)_\d+_"
ENTERED = ["student", "question", "points", "of", "comment", "written"]


def write(place: Path, submissions: Path, made: Homework, grades: list[dict[str, Any]]) -> Path:
    """Write what one folder of submissions gives into the table of its homework; return it. What
    other folders gave stays, and so do their pages."""
    folder, store = str(submissions.resolve()), place / "grades.json"
    old = read_json(store)["grades"] if store.is_file() else []
    whole = [each for each in old if each["folder"] != folder]
    whole += [each | {"folder": folder} for each in grades]
    write_json(store, {"points": made.points, "grades": whole})
    table, own = joined(place), entered(place, made.points)
    text = table.astype(object).fillna("")
    text = text.map(lambda x: f"{x:g}" if isinstance(x, float) else plain(x))
    save(place / "table.csv", text)
    pages = table["folder"].str.cat(table["name"], "/")
    for page, row in zip(pages, text.to_dict("records"), strict=True):
        with suppress(OSError):  # its name is too long for a file
            said = "".join(f"- {key}: {x}\n" for key, x in row.items() if x)
            write_text(place.joinpath("feedback", *Path(f"{page}.md").parts[1:]), said)
    blank = text.assign(points="", comment="")
    new = [blank.assign(question=q, of=f"{made.points[q]:g}")[ENTERED] for q in made.by_hand]
    lines = pd.concat([own, *new])
    twice = lines.set_index("question", append=True).index.duplicated()
    twice[: len(own)] = False  # what a person entered stays
    if not twice[len(own) :].all():
        save(place / "by_hand.csv", lines[~twice])
    return place / "table.csv"


def joined(place: Path) -> pd.DataFrame:
    """Return the table of a homework, by student: a row for each submission, with the points that
    a person entered in the place of the machine's, and one for who has such points alone."""
    points, grades = read_json(place / "grades.json").values()
    own = entered(place, points)
    table = pd.DataFrame([each | each["scores"] for each in grades])
    table["student"] = [plain(student(name)) for name in table["name"]]
    table.index = table["student"].map(words)
    given = own[own["points"] != ""].astype({"points": float})
    alone = given[~given.index.isin(table.index)].groupby(level=0).first()
    alone = alone[["student"]].assign(name=alone["student"], folder="/by hand", status="by hand")
    table = pd.concat([table, alone])
    marks = given.pivot(columns="question", values="points")
    marks = marks.reindex(table.index, columns=[*points]).fillna(table.reindex(columns=[*points]))
    table[[*points]] = marks = marks.astype(float)
    table["total"] = marks.sum(axis=1, min_count=1)
    possible = (marks.notna() * pd.Series(points)).sum(axis=1)
    table["possible"] = possible.where(table["total"].notna())
    comments = own["comment"][own["comment"] != ""].groupby(level=0).agg("; ".join)
    table["comment"] = comments.reindex(table.index)
    first, last = "name student signed status confined", "total possible message comment written"
    return table.reindex(columns=[*first.split(), *points, *last.split(), "folder"])


def entered(place: Path, points: dict[str, float]) -> pd.DataFrame:
    """Return what persons entered, by student; refuse points that cannot be."""
    path = place / "by_hand.csv"
    rows = table_of(path) if path.is_file() else pd.DataFrame(columns=ENTERED, dtype=str)
    if lost := [column for column in ENTERED if column not in rows]:
        raise IclError(f"{path} has no column {', '.join(lost)} in its first line.")
    rows.index = rows["student"].map(words)
    rows["points"] = rows["points"].str.replace(",", ".")
    given, value = rows["points"] != "", pd.to_numeric(rows["points"], errors="coerce")
    right = value.between(0, rows["question"].map(points).astype(float))
    right &= given.groupby([rows.index, rows["question"]]).cumsum() == 1
    for number in (given & ~right).to_numpy().nonzero()[0]:
        who, question, given = rows[ENTERED[:3]].iloc[number]
        every = ", ".join(f"{of:g} for {name}" for name, of in points.items())
        raise IclError(f"{path}, row {number + 2}, {who}: {given!r} for {question}. "
                       f"Enter points from 0 to {every}, once.")  # fmt: skip
    return rows


def student(name: str) -> str:
    """Return whose a submission is: its folder, else its file; of what Moodle and Canvas make of
    it the name, or the number."""
    first, *rest = Path(unicodedata.normalize("NFC", name)).parts
    whole = first if rest else Path(first).stem
    match = re.match(MOODLE, whole) or re.match(CANVAS, whole)
    return match[1] if match else whole


def gradebook(grades: Path, roster: Path | None = None) -> Path:
    """Join all homeworks, and what was entered by hand, into ``gradebook.csv``, a line for each
    student; the best of several submissions counts. With a ``roster``, as Moodle or Canvas exports
    it, its lines and columns come first: the column that knows most of the students names them, or
    two, such as first and last name. Who is not in it has a line, too.
    """
    places = [store.parent for store in sorted(grades.glob("hw*/grades.json"))]
    if not places:
        raise IclError(f"{grades} holds no points: make grade HW=hw01 SUBMISSIONS=folder")
    whole = pd.concat([joined(place).assign(homework=place.name) for place in places])
    totals = whole.groupby([whole.index, "homework"])["total"].max().unstack()
    book = whole.groupby(level=0)[["student"]].first().join(totals)
    if roster:
        table, scored = table_of(roster), whole.index[whole["total"].notna()]
        table = table.loc[:, ~table.columns.duplicated()]
        columns = [column + " " for _, column in table.items()]
        keys = [(one + other).map(words) for one in columns for other in ("", *columns)]
        table.index = pd.Index(max(keys, key=lambda key: key.isin(scored).sum(), default=()))
        table = table.drop(columns=[*book], errors="ignore")
        if twice := {*table.index[table.index.duplicated()]} & {*scored}:
            raise IclError(f"{roster} names {', '.join(twice)} in two lines. Leave one.")
        book = pd.concat([table.join(book), book[~book.index.isin(table.index)]])
    save(grades / "gradebook.csv", book)
    return grades / "gradebook.csv"


def words(name: str) -> str:
    """Return a name as its words, so that "Ada Lovelace" is ada_lovelace, whichever its accents,
    and 007 is 7, which spreadsheets make of it."""
    composed = re.sub(r"[\s_.,;-]+", " ", unicodedata.normalize("NFC", name).casefold())
    return re.sub(r"\b0+(?=\d+\b)", "", composed.strip())


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


def shown(path: Path, without: str = "name signed comment written folder") -> str:
    """Return a table as a person reads it on a screen, without some columns."""
    table = table_of(path).drop(columns=without.split(), errors="ignore")
    return table.to_string(index=False, max_colwidth=60)


def plain(text: str) -> str:
    """Return text in one line that moves no terminal's cursor, and that no spreadsheet takes for a
    formula."""
    text = " ".join(re.sub(r"[\0-\x1f\x7f-\x9f]", " ", text).split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def save(path: Path, table: pd.DataFrame) -> None:
    """Write a table at once or not at all; what it held before is copied beside it."""
    text = "\ufeff" + table.to_csv(index=False, float_format="%g")  # so spreadsheets know UTF-8
    if path.is_file() and path.read_bytes() != text.encode():
        copies = (path.with_stem(f"{path.stem}_old{i}") for i in itertools.count(1))
        shutil.copy2(path, next(copy for copy in copies if not copy.exists()))
    write_text(path, text)
