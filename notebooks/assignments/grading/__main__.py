"""``make assignments``, ``make grade``, ``make gradebook`` and ``make class-trial``."""

import argparse
import sys
from pathlib import Path

from iclutils.errors import IclError

from . import assignments, reports, submissions, trial


def main(arguments: list[str] | None = None) -> int:
    """Run one command and print what it made; return its exit status, 2 for a user's mistake."""
    parser = argparse.ArgumentParser("grading", description=__doc__)
    parser.add_argument("command", choices=("assignments", "grade", "gradebook", "trial"))
    parser.add_argument("--build", type=Path, default=Path("_build"), help="where all goes")
    parser.add_argument("--homework", default="", help="hw01; if omitted, all are derived")
    parser.add_argument("--submissions", type=Path, help="folder with a notebook for each student")
    parser.add_argument("--unconfined", action="store_true", help="grade without a sandbox")
    parser.add_argument("--roster", type=Path, help="participants, as Moodle or Canvas lists them")
    given = parser.parse_args(arguments)
    try:
        if given.command == "assignments":
            for made in assignments.make(given.build, given.homework):
                print(made.student.parents[1])
        elif given.command == "grade":
            about = given.build, given.submissions, given.homework
            table = submissions.grade(*about, unconfined=given.unconfined)
            print(reports.shown(table))
            print(f"written to {table}; by_hand.csv and feedback/ are beside it")
        elif given.command == "gradebook":
            print(f"written to {reports.gradebook(given.build / 'grades', given.roster)}")
        else:
            print(trial.run(given.build / "trial", given.unconfined))
    except (IclError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was graded is stored: run again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
