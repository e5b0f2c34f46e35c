"""What a grader hands on: the table, feedback for each student, what is alike, the gradebook.

All of them are plain CSV and Markdown. Points of the question that a person grades are entered in
``by_hand.csv``, which also shows what was written; the next grading, or the gradebook, adds them.
"""

import csv
import io
import itertools
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iclutils.errors import IclError
from iclutils.files import write_text

from .assignments import BY_HAND

if TYPE_CHECKING:
    from .submissions import Grade

ALIKE = 0.6  # similarity from which two submissions are worth a look
# What they call a submission, for example Ada Lovelace_12_... and lovelaceada_12_34_...
MOODLE, CANVAS = r"(.+)_\d+_assignsubmission_", r"([^\W_]+?)(?:_LATE)?(_\d+)_\d+_"
Rows = list[dict[str, Any]]


def write(folder: Path, homework: str, grades: list["Grade"], points: dict[str, float]) -> Path:
    """Write all that one folder of submissions gives into ``folder``; return the table.

    A table that is there and differs is kept as ``table.1.csv``, ``table.2.csv``, ...
    """
    table = folder / "table.csv"
    by_hand = {row["name"]: row for row in read(folder / "by_hand.csv")}
    rows = [_row(each, by_hand.get(_plain(each.name), {}), points) for each in grades]
    if table.is_file() and table.read_text(encoding="utf-8") != _csv(rows):
        free = next(i for i in range(1, 10**6) if not (folder / f"table.{i}.csv").exists())
        table.rename(folder / f"table.{free}.csv")
    write_text(table, _csv(rows))
    entries = [
        {"name": _plain(each.name), BY_HAND: "", "comment": ""}
        | by_hand.get(_plain(each.name), {})
        | {"written": _plain(each.written)}
        for each in grades
    ]
    write_text(folder / "by_hand.csv", _csv(entries))
    alike = [{"one": a, "other": b, "alike": f"{s:.2f}"} for a, b, s in similar(grades)]
    write_text(folder / "similar.csv", _csv(alike, ["one", "other", "alike"]))
    for each, row in zip(grades, rows, strict=True):
        comment = by_hand.get(_plain(each.name), {}).get("comment", "")
        text = _feedback(homework, each, row, points, comment)
        write_text(folder / "feedback" / f"{each.name}.md", text)
    return table


def _row(each: "Grade", by_hand: dict[str, Any], points: dict[str, float]) -> dict[str, Any]:
    """One line of the table. What was not graded is blank: also the total, then."""
    scores: dict[str, float] = {**each.scores}
    if each.scores and (given := str(by_hand.get(BY_HAND, "")).strip()):
        try:
            scores[BY_HAND] = float(given)
        except ValueError:
            raise IclError(f"by_hand.csv: {given!r}, for {each.name}, is no number.") from None
    possible = sum(points[name] for name in points if name != BY_HAND or BY_HAND in scores)
    total = sum(scores.values())
    sums = (total, possible, round(100 * total / possible, 1)) if scores else ("", "", "")
    return {
        **{"name": _plain(each.name), "student": _plain(student(each.name))},
        "status": each.status,
        **{name: _number(scores.get(name, "")) for name in points},
        **dict(zip(("total", "possible", "percent"), map(_number, sums), strict=True)),
        "message": _plain(each.message),
    }


def student(name: str) -> str:
    """Whose a submission is: its folder, else its file, without what Moodle and Canvas add."""
    first, *rest = Path(name).parts
    whole = first if rest else Path(first).stem
    found = re.match(MOODLE, whole) or re.match(CANVAS, whole)
    return "".join(found.groups()) if found else whole


def _feedback(
    homework: str, each: "Grade", row: dict[str, Any], points: dict[str, float], comment: str
) -> str:
    """What a student reads."""
    whole = f"{row['total']} of {row['possible']} points" if each.scores else "not graded"
    lines = [f"# {homework}: {student(each.name)}", "", f"{whole} ({each.status})", ""]
    lines += [each.notes[""], ""] if each.notes.get("") else []
    lines += ["| question | points | of | to look at |", "|---|---|---|---|"] if each.scores else []
    for name, of in points.items() if each.scores else ():
        said = comment if name == BY_HAND else each.notes.get(name, "")
        given = row[name] if row[name] != "" else "not yet graded"
        lines.append(f"| {name} | {given} | {of:g} | {_plain(said).replace('|', chr(92) + '|')} |")
    return "\n".join(lines).rstrip() + "\n"


def similar(grades: list["Grade"]) -> list[tuple[str, str, float]]:
    """Pairs of submissions whose code is alike, the most alike first.

    Cosine of tf-idf weights of four tokens in a row, names of variables aside: what all have
    written counts little, what two alone have counts much. A pair is a reason to look, no proof.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    written = [each for each in grades if len(list(_tokens(each.code))) >= 40]
    if len(written) < 2:
        return []
    weights = TfidfVectorizer(analyzer=_fours, sublinear_tf=True)
    matrix = weights.fit_transform([each.code for each in written])
    pairs = (matrix @ matrix.T).toarray()
    found = [
        (written[i].name, written[j].name, float(pairs[i, j]))
        for i in range(len(written))
        for j in range(i)
        if pairs[i, j] >= ALIKE
    ]
    return sorted(found, key=lambda pair: -pair[2])


def _fours(code: str) -> list[str]:
    tokens = list(_tokens(code))
    return [" ".join(tokens[i : i + 4]) for i in range(len(tokens) - 3)]


def _tokens(code: str) -> Iterator[str]:
    """Tokens without comments and texts; names of attributes and functions that are called stay."""
    try:
        found = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError):
        found = []
    for before, each in itertools.pairwise(found):
        if each.type == tokenize.NAME:
            known = keyword.iskeyword(each.string) or before.string == "."
            yield each.string if known else "name"
        elif each.type in (tokenize.OP, tokenize.NUMBER):
            yield each.string


def gradebook(grades: Path, roster: Path | None = None) -> Path:
    """Join the tables of all homeworks into one line for each student, ``gradebook.csv``.

    With a ``roster``, the list of participants that a learning-management system exports (Moodle,
    Canvas), its lines and columns come first, so that the system imports the file again; a student
    is recognised by one of its columns, or by two: first and last name; name and number (Canvas).
    """
    tables = sorted(grades.glob("hw[0-9][0-9]/*/table.csv"), key=lambda path: path.stat().st_mtime)
    if not tables:
        raise IclError(f"{grades} holds no table. Grade a folder first: make grade SUBMISSIONS=...")
    totals: dict[str, dict[str, str]] = {}
    spelt: dict[str, str] = {}  # how a student was first written, by the words of the name
    for table in tables:  # of a student in several tables of one homework, the latest counts
        once: dict[str, dict[str, Any]] = {}
        for row in filter(lambda row: row["total"], read(table)):
            name = spelt.setdefault(_words(row["student"]), row["student"])
            first = once.setdefault(name, row)
            if first["total"] != row["total"]:
                raise IclError(
                    f"{table} has two of one student: {first['name']} with {first['total']} points "
                    f"and {row['name']} with {row['total']}. Take one away, and grade again."
                )
            totals.setdefault(name, {})[table.parts[-3]] = row["total"]
    homeworks = sorted({name for each in totals.values() for name in each})
    empty = dict.fromkeys(homeworks, "")
    if roster is None:
        rows: Rows = [{"student": name} | empty | totals[name] for name in sorted(totals)]
    else:
        rows = _on(roster, totals, empty)
    write_text(grades / "gradebook.csv", _csv(rows))
    return grades / "gradebook.csv"


def _on(roster: Path, totals: dict[str, dict[str, str]], empty: dict[str, str]) -> Rows:
    """The lines of a roster, with what each student got."""
    rows, names, met = read(roster), dict[str, str](), set()
    for name in totals:
        if (other := names.setdefault(_bare(name), name)) != name:
            raise IclError(f"{other} and {name} have the same words: name them apart.")
    for row in rows:
        known = {names[words] for words in _written(row) if words in names}
        name = known.pop() if len(known) == 1 else ""
        met.add(name)
        row |= empty | totals.get(name, {})
    if lost := sorted(totals.keys() - met):
        raise IclError(
            f"{roster} does not name {', '.join(lost)}. Add them to it, or rename what they "
            "handed in and grade again."
        )
    return rows


def _written(row: dict[str, Any]) -> set[str]:
    """All ways in which a line of a roster may name its student."""
    texts = [text for text in row.values() if isinstance(text, str) and text.strip()]
    first = [*texts, *(re.sub(r"[\W\d_]", "", text) for text in texts)]  # Canvas: lovelaceada
    return {_bare(f"{one} {other}") for one in first for other in ("", *texts)}


def _words(name: str) -> str:
    """A name as its words, so that "Ada Lovelace" is ada_lovelace."""
    return " ".join(re.findall(r"\w+", name.casefold().replace("_", " ")))


def _bare(name: str) -> str:
    """A name as its words in order, so that "Lovelace, Ada" is ada_lovelace."""
    return " ".join(sorted(_words(name).split()))


def read(path: Path) -> Rows:
    """The rows of a CSV; none of a file that is not there."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8-sig", newline="") as stream:
        return list(csv.DictReader(stream))


def _csv(rows: Rows, columns: list[str] | None = None) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, columns or list(rows[0]), lineterminator="\n", restval="")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    text = " ".join(text.split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
