"""``make assignments``, ``make grade`` and ``make gradebook``."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path

from iclutils.errors import IclError

from . import assignments, confine, reports, submissions

HOOKS_ALONE = (
    "Without namespaces, which this system does not give to this user, submissions are held by "
    "Python's own hooks alone, and native code can go round those. If you do not trust your class, "
    "grade where namespaces are (see the page on coursework) or where nothing else is."
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status (2 for a mistake of the user's)."""
    given = parser().parse_args(arguments)
    if getattr(given, "masters", None):
        os.environ["ICLUTILS_HOMEWORK"] = str(given.masters.resolve())
    try:
        given.act(given)
    except IclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        closed = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        cure = " Name a folder that can be written to: BUILD=path/to/folder" if closed else ""
        print(f"error: {error.filename}: {error.strerror}.{cure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept: run again to go on", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the three commands."""
    made = argparse.ArgumentParser("grading", description=__doc__)
    listed = made.add_subparsers(required=True, metavar="COMMAND")
    derive = listed.add_parser("assignments", help="derive homework from the solved masters")
    derive.set_defaults(act=derived)
    derive.add_argument("homework", nargs="?", default="", help="hw01; all if omitted")
    grade = listed.add_parser("grade", help="grade a folder of homework into a table")
    grade.set_defaults(act=graded)
    grade.add_argument("submissions", type=Path, help="folder with one notebook per student")
    grade.add_argument("--homework", default="", help="hw01; what they say they are if omitted")
    bounds = {"step": "seconds for each cell and question", "seconds": "for each submission"}
    for name, what in (bounds | {"memory": "GB for each submission"}).items():
        usual = getattr(confine.Limits, name)
        grade.add_argument(f"--{name}", type=float, default=usual, help=f"{what} ({usual:g})")
    grade.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    grade.add_argument("--force", action="store_true", help="grade again what has not changed")
    grade.add_argument("--retry", action="store_true", help="that with which grading ended, too")
    book = listed.add_parser("gradebook", help="join the graded homeworks by student")
    book.set_defaults(act=joined)
    book.add_argument("--roster", type=Path, help="participants, as Moodle or Canvas exports them")
    for each in (derive, grade):
        each.add_argument("--masters", type=Path, help="folder of homework of your own")
    for each in (derive, grade, book):
        each.add_argument("--build", type=Path, default=Path("_build"), help="where all is written")
    return made


def derived(given: argparse.Namespace) -> None:
    """Derive the students' homework from the solved masters."""
    for made in assignments.make(given.build, given.homework):
        folder = made.student.parents[1].as_posix()
        print(f"{'made' if made.fresh else 'up to date'}: {folder}")


def graded(given: argparse.Namespace) -> None:
    """Grade a folder of homework into a table, with a feedback file for each student."""
    limits = confine.Limits(given.step, given.seconds, given.memory)
    asked = (given.submissions, given.homework, limits, given.jobs, given.force, given.retry)
    table = submissions.grade(given.build, *asked)
    print(table.read_text(encoding="utf-8"), end="")
    print(f"written to {table}; feedback for students beside it")
    if confine.namespaces.cache_info().currsize and not confine.namespaces():  # if any was run
        print(HOOKS_ALONE, file=sys.stderr)


def joined(given: argparse.Namespace) -> None:
    """Join the graded homeworks into one table by student."""
    print(f"written to {reports.gradebook(given.build / 'grades', given.roster)}")


if __name__ == "__main__":
    sys.exit(main())
