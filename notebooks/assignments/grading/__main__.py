"""``make assignments``, ``make grade``, ``make gradebook`` and ``make class-trial``."""

import argparse
import os
import sys
from pathlib import Path

from iclutils.errors import IclError

BOUNDS = {
    "step": "seconds of computing for each cell and question",
    "seconds": "seconds of computing for each submission",
    "memory": "GB for each submission",
}


def assignments(options: argparse.Namespace) -> None:
    """Derive the students' homework from the solved masters."""
    from . import assignments

    for made in assignments.make(options.build, options.homework):
        folder = made.student.parents[1].as_posix()
        print(f"{'made' if made.fresh else 'up to date'}: {folder}")


def grade(options: argparse.Namespace) -> None:
    """Grade a folder of homework into a table, with a feedback file for each student."""
    from . import confine, reports, submissions

    limits = confine.Limits(**{name: getattr(options, name) for name in BOUNDS})
    table = submissions.grade(
        options.build, options.submissions, options.homework, limits, options.jobs,
        options.force, options.unconfined,
    )  # fmt: skip
    print(reports.table_of(table).to_csv(index=False), end="")
    print(f"written to {table}; feedback for students beside it, by_hand.csv above it")


def gradebook(options: argparse.Namespace) -> None:
    """Join the graded homeworks, and points entered by hand, into one table by student."""
    from . import reports

    print(f"written to {reports.gradebook(options.build / 'grades', options.roster)}")


def trial(options: argparse.Namespace) -> None:
    """Make twelve submissions of all kinds, grade them, and print what a teacher sees."""
    from . import trial

    print(trial.run(options.build / "trial", options.jobs, options.unconfined))


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status, 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser("grading", description=__doc__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    own = {each: commands.add_parser(each.__name__, help=each.__doc__, description=each.__doc__)
           for each in (assignments, grade, gradebook, trial)}  # fmt: skip
    for act, command in own.items():
        command.set_defaults(act=act)
        command.add_argument("--build", type=Path, default=Path("_build"), help="where all goes")
    own[assignments].add_argument("homework", nargs="?", default="", help="hw01; all if omitted")
    own[grade].add_argument("submissions", type=Path, help="folder with a notebook per student")
    own[grade].add_argument("--homework", default="", help="hw01; what they say if omitted")
    from .confine import Limits

    for name, what in BOUNDS.items():
        default = getattr(Limits, name)
        own[grade].add_argument(
            f"--{name}", type=float, default=default, help=f"{what} (%(default)g)"
        )
    own[grade].add_argument("--force", action="store_true", help="also what has not changed")
    own[gradebook].add_argument("--roster", type=Path, help="as Moodle or Canvas exports it")
    for act in (grade, trial):
        own[act].add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
        own[act].add_argument("--unconfined", action="store_true", help="without a sandbox")
    for act in (assignments, grade):
        own[act].add_argument("--masters", type=Path, help="folder of homework of your own")
    try:
        options = parser.parse_args(arguments)
        if masters := getattr(options, "masters", None):
            os.environ["ICLUTILS_HOMEWORK"] = str(masters.resolve())
        options.act(options)
    except IclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}. What was graded is kept.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was graded is stored: run again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
