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
    source = _writable(str(submissions.resolve()))
    folder = _own_folder(place, source)
    others = {
        words(row["student"])
        for path in place.glob("*/table.csv")
        for row in (read(path) if path.parent != folder else ())
    }
    entries = _merged(place, made, grades, others)
    save(folder / "source.txt", source, copy=False)
    rows = [_row(each, entries, made.points) for each in grades]
    save(folder / "table.csv", _csv(rows))
    for each, row in zip(grades, rows, strict=True):
        path = folder / "feedback" / f"{each.name}.md"
        save(path.with_name(_short(path.name)), _feedback(made, each, row, entries), copy=False)
    return folder / "table.csv"


def _own_folder(place: Path, source: str) -> Path:
    """``NAME``, ``NAME-2``, ...: the first that is this source's, or nobody's."""
    name = Path(source).name or "submissions"
    for i in itertools.count(1):
        folder = place / (name if i == 1 else f"{name}-{i}")
        owner = folder / "source.txt"
        if not owner.exists() or owner.read_text(encoding="utf-8") == source:
            return folder
    raise AssertionError


def entered(place: Path, points: dict[str, float]) -> Entries:
    """What stands in ``by_hand.csv``; points that cannot be are refused, with row and student."""
    entries: Entries = {}
    for number, row in enumerate(read(place / "by_hand.csv"), 2):
        row |= {name: row.get(name, "").strip() for name in COLUMNS}
        who = f"{place / 'by_hand.csv'}, row {number}, {row['student']}"
        key, text = (words(row["student"]), row["question"]), row["points"].replace(",", ".")
        if text and key[1] not in points:
            raise IclError(f"{who}: {key[1]!r} is no question; these are: {', '.join(points)}.")
        number_of = re.fullmatch(r"\d+\.?\d*|\.\d+", text, re.ASCII)
        if text and not (number_of and float(text) <= points[key[1]]):
            raise IclError(
                f"{who}: {text!r} for {key[1]}. Enter points from 0 to {points[key[1]]:g}."
            )
        row["points"] = f"{float(text):g}" if text else ""
        other = entries.get(key, row)
        if text and other["points"] not in ("", row["points"]):
            raise IclError(f"{who}: another row gives {other['points']} for {key[1]}. Leave one.")
        if any(key):
            entries[key] = row | {name: cell for name, cell in other.items() if cell}
    return entries


def _merged(place: Path, made: Assignment, grades: list["Grade"], others: set[str]) -> Entries:
    """Write ``by_hand.csv`` anew: every row that is there, and one for each paragraph.

    Where a file has another name than before, what was entered for it goes with it.
    """
    entries = entered(place, made.points)
    here = {words(student(each.name)) for each in grades} | others
    for each in grades:
        who, whose = student(each.name), {key[0] for key, row in entries.items() if _touched(row)}
        files = {key[0] for key, row in entries.items() if row["file"] == each.digest}
        if words(who) not in whose and len(before := files - here) == 1:
            for key in [key for key in entries if key[0] in before]:
                row = entries.pop(key) | {"student": _plain(who)}
                entries[words(who), key[1]] = row
    for question in made.by_hand:
        for each in sorted(grades, key=lambda each: bool(each.written.get(question))):
            own = {"written": _plain(each.written.get(question, "")), "file": each.digest}
            new = {"student": _plain(student(each.name)), "question": question}
            key = words(student(each.name)), question
            entries[key] = dict.fromkeys(COLUMNS, "") | new | entries.get(key, {}) | own
    for (_, question), row in entries.items():
        row["of"] = f"{made.points[question]:g}" if question in made.points else row["of"]
    columns = [name for row in entries.values() for name in row if name]  # a person's, too
    save(place / "by_hand.csv", _csv(entries.values(), list(dict.fromkeys([*COLUMNS, *columns]))))
    return entries


def _touched(row: Row) -> bool:
    """Whether a person entered something."""
    return bool(row["points"] or row["comment"])


def _row(each: "Grade", entries: Entries, points: dict[str, float]) -> Row:
    """One line of the table. What was not graded is blank: also the total, then."""
    by_hand = {q: entries.get((words(student(each.name)), q), {}).get("points") for q in points}
    scores = each.scores | {q: float(text) for q, text in by_hand.items() if text}
    total, possible = sum(scores.values()), sum(points[q] for q in scores)
    sums = (total, possible, 100 * total / possible) if scores else ("", "", "")
    return {
        **{"name": _plain(each.name), "student": _plain(student(each.name))},
        **{"signed": _plain(each.signed)},
        **{"status": each.status, "confined": each.confined},
        **{q: _number(scores.get(q, "")) for q in points},
        **dict(zip(("total", "possible", "percent"), map(_number, sums), strict=True)),
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
        points = row[question] if row[question] != "" else "not yet graded"
        cell = _plain(note).replace("|", "\\|")
        lines.append(f"| {question} | {points} | {of:g} | {cell} |")
    return "\n".join(lines).rstrip() + "\n"


def gradebook(grades: Path, roster: Path | None = None) -> Path:
    """Join the tables of all homeworks, and what was entered by hand, into one line for each
    student, ``gradebook.csv``. Of a student in several folders the one graded last counts.

    With a ``roster``, the list of participants that a learning-management system exports (Moodle,
    Canvas), its lines and columns come first, so that the system imports the file again; a student
    is recognised by one of its columns, or by two: first and last name; name and number (Canvas).
    """
    totals, spelling = pd.DataFrame(), dict[str, str]()
    for place in sorted(grades.glob("hw[0-9][0-9]")):
        points = read_json(place / "points.json") if (place / "points.json").is_file() else {}
        scores = _scores(place, points, spelling)
        totals = totals.join(scores, how="outer") if len(totals.columns) else scores
    if not len(totals):
        raise IclError(f"{grades} holds no table. Grade a folder first: make grade SUBMISSIONS=...")
    totals = totals.rename(index=spelling).sort_index().map(lambda x: "" if x != x else f"{x:g}")
    table = totals.rename_axis("student").reset_index() if roster is None else _on(roster, totals)
    save(grades / "gradebook.csv", table.to_csv(index=False))
    return grades / "gradebook.csv"


def _scores(place: Path, points: dict[str, float], spelling: dict[str, str]) -> pd.DataFrame:
    """Totals of one homework by the words of the student, in a column of its name."""
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
                questions = points or {"total": 0}
                by_question[who] = {q: float(row[q]) for q in questions if row.get(q)}
    for (who, question), row in entered(place, points).items():
        if row["points"]:
            spelling.setdefault(who, row["student"])
            by_question.setdefault(who, {})[question] = float(row["points"])
    sums = {who: sum(each.values()) for who, each in by_question.items()}
    return pd.DataFrame({place.name: pd.Series(sums, dtype=float)})


def _on(roster: Path, totals: pd.DataFrame) -> pd.DataFrame:
    """The lines of a roster, with what each student got."""
    names: dict[str, str] = {}
    for name in totals.index:
        if (other := names.setdefault(_bare(name), name)) != name:
            raise IclError(f"{other} and {name} have the same words: name them apart.")
    table, met = table_of(roster), list[str]()
    for line in table.itertuples(index=False, name=None):
        known = {names[each] for each in _spellings(line) if each in names}
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


def _spellings(line: Iterable[str]) -> set[str]:
    """All ways in which a line of a roster may name its student."""
    texts = [text for text in line if text.strip()]
    first = [*texts, *(re.sub(r"[\W\d_]", "", text) for text in texts)]  # Canvas: lovelaceada
    return {_bare(f"{one} {other}") for one in first for other in ("", *texts)}


def words(name: str) -> str:
    """A name as its words, so that "Ada Lovelace" is ada_lovelace, however accents are written."""
    composed = unicodedata.normalize("NFC", name)
    return " ".join(re.findall(r"\w+", composed.casefold().replace("_", " ")))


def _bare(name: str) -> str:
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
    header = text.partition("\n")[0]
    separator = max(",;\t", key=header.count)
    csv.field_size_limit(2**27)
    lines = [line for line in csv.reader(io.StringIO(text, newline=""), delimiter=separator)
             if any(map(str.strip, line))]  # fmt: skip
    width = max(map(len, lines), default=0)
    filled = [[*line, *[""] * (width - len(line))] for line in lines]
    return pd.DataFrame(filled[1:], columns=[each.strip() for each in filled[0]] if filled else [])


def _csv(rows: Iterable[Row], columns: list[str] | None = None) -> str:
    return pd.DataFrame(list(rows), columns=columns).fillna("").to_csv(index=False)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):g}"


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


def save(path: Path, text: str, copy: bool = True) -> None:
    """Write a file at once or not at all; what a table held before is copied beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    marked = "utf-8-sig" if path.suffix == ".csv" else "utf-8"  # so that spreadsheets know it
    data = _writable(text).encode(marked)
    if path.is_file():
        if path.read_bytes() == data:
            return
        if copy and path.suffix == ".csv":
            names = (path.with_name(f"{path.stem}.{i}.csv") for i in itertools.count(1))
            shutil.copy2(path, next(name for name in names if not name.exists()))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
