"""What a grader hands on: tables, feedback for each student, the gradebook.

All of it is CSV and Markdown. ``by_hand.csv``, one for each homework, is the file that a person
edits: points and comments by student and question, for what is graded by hand and wherever the
machine's points are to be others. It is merged, never replaced, and no file is written over without
a copy (``by_hand.1.csv``, ...).
"""

import csv
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from iclutils.errors import IclError
from iclutils.files import read_json

from .assignments import Assignment

if TYPE_CHECKING:
    from .submissions import Grade

# What they call a submission, for example Ada Lovelace_12_... and lovelaceada_12_34_...
MOODLE, CANVAS = r"(.+)_\d+_assignsubmission_", r"([^\W_]+?)(?:_LATE)?(_\d+)_\d+_"
COLUMNS = ["student", "question", "points", "of", "comment", "written", "file"]
Row = dict[str, Any]
Entries = dict[tuple[str, str], Row]  # rows of by_hand.csv by the words of the student, question


def write(place: Path, submissions: Path, made: Assignment, grades: list["Grade"]) -> Path:
    """Write all that one folder of submissions gives into a folder below ``place``, its own also
    where another has the same name; return the table."""
    save(place / "points.json", json.dumps(made.points))
    source, name = _writable(str(submissions.resolve())), submissions.resolve().name
    numbered = (place / (f"{name}-{i}" if i > 1 else name) for i in itertools.count(1))
    folder = next(each for each in numbered if _source(each) in ("", source))
    paths = [path for path in place.glob("*/table.csv") if path.parent != folder]
    others = {words(row["student"]) for path in paths for row in read(path)}
    entries = _merged(place, made, grades, others)
    save(folder / "source.txt", source)
    rows = [_row(each, entries, made.points) for each in grades]
    save(folder / "table.csv", _csv(rows))
    for each, row in zip(grades, rows, strict=True):
        path = folder / "feedback" / f"{each.name}.md"
        save(path.with_name(_short(path.name)), _feedback(made, each, row, entries))
    return folder / "table.csv"


def _source(folder: Path) -> str:
    """The folder of submissions whose tables these are, or nothing."""
    path = folder / "source.txt"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def entered(place: Path, points: dict[str, float]) -> Entries:
    """What stands in ``by_hand.csv``; points that cannot be are refused, with row and student."""
    entries: Entries = {}
    for number, row in enumerate(read(place / "by_hand.csv"), 2):
        row |= {name: row.get(name, "").strip() for name in COLUMNS}
        who = f"{place / 'by_hand.csv'}, row {number}, {row['student']}"
        key, text = (words(row["student"]), row["question"]), row["points"].replace(",", ".")
        if text:
            if key[1] not in points:
                raise IclError(f"{who}: {key[1]!r} is no question; these are: {', '.join(points)}.")
            of, is_number = points[key[1]], re.fullmatch(r"\d+\.?\d*|\.\d+", text, re.ASCII)
            if not (is_number and float(text) <= of):
                raise IclError(f"{who}: {text!r} for {key[1]}. Enter points from 0 to {of:g}.")
            row["points"] = f"{float(text):g}"
            other = entries.get(key, row)["points"]
            if other not in ("", row["points"]):
                raise IclError(f"{who}: another row gives {other} for {key[1]}. Leave one.")
        if any(key):
            earlier = entries.get(key, {})
            entries[key] = row | {name: cell for name, cell in earlier.items() if cell}
    return entries


def _merged(place: Path, made: Assignment, grades: list["Grade"], others: set[str]) -> Entries:
    """Write ``by_hand.csv`` anew: every row that is there, and one for each paragraph.

    Where a file has another name than before, what was entered for it goes with it.
    """
    entries = entered(place, made.points)
    names = {each.name: _plain(student(each.name)) for each in grades}
    here = {words(name) for name in names.values()} | others
    for each in grades:
        who = names[each.name]
        whose = {key[0] for key, row in entries.items() if row["points"] or row["comment"]}
        files = {key[0] for key, row in entries.items() if row["file"] == each.digest}
        if words(who) not in whose and len(before := files - here) == 1:
            for key in [key for key in entries if key[0] in before]:
                entries[words(who), key[1]] = entries.pop(key) | {"student": who}
    for question in made.by_hand:
        for each in sorted(grades, key=lambda each: bool(each.written.get(question))):
            own = {"written": _plain(each.written.get(question, "")), "file": each.digest}
            new = dict.fromkeys(COLUMNS, "") | {"student": names[each.name], "question": question}
            key = words(names[each.name]), question
            entries[key] = new | entries.get(key, {}) | own
    for (_, question), row in entries.items():
        row["of"] = f"{made.points[question]:g}" if question in made.points else row["of"]
    columns = [name for row in entries.values() for name in row if name]  # a person's, too
    save(place / "by_hand.csv", _csv(entries.values(), list(dict.fromkeys([*COLUMNS, *columns]))))
    return entries


def _row(each: "Grade", entries: Entries, points: dict[str, float]) -> Row:
    """One line of the table. What was not graded is blank: also the total, then."""
    by_hand = {q: entries.get((words(student(each.name)), q), {}).get("points") for q in points}
    scores = each.scores | {q: float(text) for q, text in by_hand.items() if text}
    total, possible = sum(scores.values()), sum(points[q] for q in scores)
    sums = {"total": total, "possible": possible, "percent": 100 * total / (possible or 1)}
    texts = {"name": each.name, "student": student(each.name), "signed": each.signed}
    texts |= {"status": each.status, "confined": each.confined}
    numbers = dict.fromkeys([*points, *sums], "")
    numbers |= {q: f"{round(x, 2):g}" for q, x in (scores | sums).items() if scores}
    return {
        **{name: _plain(text) for name, text in texts.items()},
        **numbers,
        "message": _plain(each.message),
    }


def student(name: str) -> str:
    """Whose a submission is: its folder, else its file, without what Moodle and Canvas add."""
    first, *rest = Path(unicodedata.normalize("NFC", name)).parts
    whole = first if rest else Path(first).stem
    match = re.match(MOODLE, whole) or re.match(CANVAS, whole)
    return "".join(match.groups()) if match else whole


def _feedback(made: Assignment, each: "Grade", row: Row, entries: Entries) -> str:
    """What a student reads."""
    graded = row["total"] != ""
    whole = f"{row['total']} of {row['possible']} points" if graded else "not graded"
    lines = [f"# {made.name}: {student(each.name)}", "", f"{whole} ({each.status})", ""]
    lines += [each.notes[""], ""] if each.notes.get("") else []
    lines += ["| question | points | of | to look at |", "|---|---|---|---|"] if graded else []
    for question, of in made.points.items() if graded else ():
        entry = entries.get((words(student(each.name)), question), {})
        note = entry.get("comment") or ("" if entry.get("points") else each.notes.get(question, ""))
        cell = _plain(note).replace("|", "\\|")
        lines.append(f"| {question} | {row[question] or 'not yet graded'} | {of:g} | {cell} |")
    return "\n".join(lines).rstrip() + "\n"


def gradebook(grades: Path, roster: Path | None = None) -> Path:
    """Join the tables of all homeworks, and what was entered by hand, into one line for each
    student, ``gradebook.csv``. Of a student in several folders the one graded last counts.

    With a ``roster``, the list of participants that a learning-management system exports (Moodle,
    Canvas), its lines and columns come first, so that the system imports the file again; a student
    is recognised by one of its columns, or by two: first and last name; name and number (Canvas).
    """
    spelling: dict[str, str] = {}
    places = [path for path in sorted(grades.glob("hw[0-9][0-9]")) if path.is_dir()]
    totals = pd.DataFrame({place.name: _totals(place, spelling) for place in places})
    if not len(totals):
        raise IclError(f"{grades} holds no table. Grade a folder first: make grade SUBMISSIONS=...")
    totals = totals.loc[:, totals.notna().any()].rename(index=spelling).sort_index()
    totals = totals.map(lambda x: "" if x != x else f"{x:g}")
    table = totals.rename_axis("student").reset_index() if roster is None else _on(roster, totals)
    save(grades / "gradebook.csv", table.to_csv(index=False))
    return grades / "gradebook.csv"


def _totals(place: Path, spelling: dict[str, str]) -> "pd.Series[float]":
    """Totals of one homework by the words of the student."""
    points = read_json(place / "points.json") if (place / "points.json").is_file() else {"total": 0}
    by_question: dict[str, dict[str, float]] = {}
    for path in sorted(place.glob("*/table.csv"), key=lambda path: path.stat().st_mtime):
        once: dict[str, Row] = {}
        for row in read(path):
            if row["total"]:
                who = words(row["student"])
                spelling.setdefault(who, row["student"])
                first = once.setdefault(who, row)
                if first["total"] != row["total"]:
                    raise IclError(
                        f"{path} has two of one student: {first['name']} with {first['total']} "
                        f"points and {row['name']} with {row['total']}. Take one away, and grade "
                        "again."
                    )
                by_question[who] = {q: float(row[q]) for q in points if row.get(q)}
    for (who, question), row in entered(place, points).items():
        if row["points"]:
            spelling.setdefault(who, row["student"])
            by_question.setdefault(who, {})[question] = float(row["points"])
    return pd.Series({who: sum(each.values()) for who, each in by_question.items()}, dtype=float)


def _on(roster: Path, totals: pd.DataFrame) -> pd.DataFrame:
    """The lines of a roster, with what each student got."""
    names: dict[str, str] = {}
    for name in totals.index:
        if (other := names.setdefault(_in_order(name), name)) != name:
            raise IclError(f"{other} and {name} have the same words: name them apart.")
    table, met = table_of(roster), list[str]()
    for line in table.itertuples(index=False, name=None):
        texts = [text for text in line if text.strip()]
        first = [*texts, *(re.sub(r"[\W\d_]", "", text) for text in texts)]  # Canvas: lovelaceada
        spellings = {_in_order(f"{one} {other}") for one in first for other in ("", *texts)}
        known = {names[each] for each in spellings if each in names}
        met.append(known.pop() if len(known) == 1 else "")
    if lost := sorted(set(totals.index) - set(met)):
        raise IclError(
            f"{roster} does not name {', '.join(lost)}. Add them to it, or rename what they "
            "handed in and grade again: what you entered for a file goes with it."
        )
    if twice := sorted({name for name in met if name and met.count(name) > 1}):
        raise IclError(f"{roster} names {', '.join(twice)} in two lines. Leave one.")
    added = totals.reindex(met).fillna("").reset_index(drop=True)
    return pd.concat([table.drop(columns=[c for c in added if c in table]), added], axis=1)


def words(name: str) -> str:
    """A name as its words, so that "Ada Lovelace" is ada_lovelace, however accents are written."""
    composed = unicodedata.normalize("NFC", name)
    return " ".join(re.findall(r"\w+", composed.casefold().replace("_", " ")))


def _in_order(name: str) -> str:
    """A name as its words in order, so that "Lovelace, Ada" is ada_lovelace."""
    return " ".join(sorted(words(name).split()))


def read(path: Path) -> list[Row]:
    """The rows of a CSV, whichever program saved it; none of a file that is not there."""
    return [dict(row) for row in table_of(path).to_dict("records")] if path.is_file() else []


def table_of(path: Path) -> pd.DataFrame:
    """A CSV as any spreadsheet saves it: its encoding, its separator; blank lines are left out, and
    short ones filled up."""
    data = path.read_bytes()
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    for encoding in ("utf-16",) if wide else ("utf-8-sig", "cp1252", "latin-1"):
        with suppress(UnicodeDecodeError):
            text = data.decode(encoding).replace("\0", "")
            break
    else:
        raise IclError(f"{path} is no text. Save it as CSV, in UTF-8.")
    text = re.sub(r"\A\s*(sep=.\s*\n)?", "", text)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    csv.field_size_limit(2**27)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    lines = [line for line in reader if any(map(str.strip, line))]
    filled = list(zip(*itertools.zip_longest(*lines, fillvalue=""), strict=True))
    return pd.DataFrame(filled[1:], columns=[each.strip() for each in filled[0]] if filled else [])


def _csv(rows: Iterable[Row], columns: list[str] | None = None) -> str:
    return pd.DataFrame(list(rows), columns=columns).fillna("").to_csv(index=False)


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    text = " ".join(_writable(text).split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _writable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _short(name: str) -> str:
    """A name that a file may have: of a longer one its beginning, and a digest."""
    data = _writable(name).encode()
    if len(data) <= 255:
        return data.decode()
    return data[:200].decode("utf-8", "ignore") + f"~{hashlib.sha256(data).hexdigest()[:8]}.md"


def save(path: Path, text: str) -> None:
    """Write a file at once or not at all; what a table held before is copied beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_table = path.suffix == ".csv"
    data = _writable(text).encode("utf-8-sig" if is_table else "utf-8")  # spreadsheets know it
    if path.is_file() and path.read_bytes() == data:
        return
    if path.is_file() and is_table:
        names = (path.with_name(f"{path.stem}.{i}.csv") for i in itertools.count(1))
        shutil.copy2(path, next(name for name in names if not name.exists()))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as stream:
        stream.write(data)
    os.chmod(stream.name, 0o644)
    os.replace(stream.name, path)
