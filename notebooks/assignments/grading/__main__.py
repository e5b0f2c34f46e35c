"""``make assignments``, ``make grade``, ``make gradebook`` and ``make class-trial``."""

import argparse
import os
import sys
from pathlib import Path

from iclutils.errors import IclError

from . import assignments, confine, reports, submissions, trial

BOUNDS = {
    "step": "seconds of computing for each cell and question",
    "seconds": "seconds of computing for each submission",
    "memory": "GB for each submission",
}


def run(options: argparse.Namespace) -> None:
    """Run one command and print what it made."""
    build = options.build
    if options.command == "assignments":
        for made in assignments.make(build, options.homework):
            folder = made.student.parents[1].as_posix()
            print(f"{'made' if made.fresh else 'up to date'}: {folder}")
    elif options.command == "grade":
        limits = confine.Limits(**{name: getattr(options, name) for name in BOUNDS})
        asked = (options.submissions, options.homework, limits, options.jobs, options.unconfined)
        table = submissions.grade(build, *asked)
        print(reports.table_of(table).to_csv(index=False), end="")
        print(f"written to {table}; feedback for students beside it, by_hand.csv above it")
    elif options.command == "gradebook":
        print(f"written to {reports.gradebook(build / 'grades', options.roster)}")
    else:
        print(trial.run(build / "trial", options.jobs, options.unconfined))


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status, 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser("grading", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    derive = commands.add_parser("assignments", help="derive homework from the solved masters")
    grade = commands.add_parser("grade", help="grade a folder into a table, with feedback files")
    book = commands.add_parser("gradebook", help="join the graded homeworks by student")
    dry = commands.add_parser("trial", help="twelve submissions of all kinds, and their grades")
    for each in (derive, grade, book, dry):
        each.add_argument("--build", type=Path, default=Path("_build"), help="where all goes")
    for each in (derive, grade):
        each.add_argument("--masters", type=Path, help="folder of homework of your own")
    for each in (grade, dry):
        each.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
        each.add_argument("--unconfined", action="store_true", help="without a sandbox")
    derive.add_argument("homework", nargs="?", default="", help="hw01; all if omitted")
    grade.add_argument("submissions", type=Path, help="folder with one notebook per student")
    grade.add_argument("--homework", default="", help="hw01; what they say they are if omitted")
    for name, what in BOUNDS.items():
        most = getattr(confine.Limits, name)
        grade.add_argument(f"--{name}", type=float, default=most, help=f"{what} ({most:g})")
    book.add_argument("--roster", type=Path, help="participants, as Moodle or Canvas exports them")
    try:
        options = parser.parse_args(arguments)
        if masters := getattr(options, "masters", None):
            os.environ["ICLUTILS_HOMEWORK"] = str(masters.resolve())
        run(options)
    except (IclError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was graded is stored: run again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
