"""``make assignments``, ``make grade``, ``make gradebook`` and ``make class-trial``."""

import argparse
import sys
from pathlib import Path

from iclutils.errors import IclError

from . import assignments, class_trial, reports, submissions

parser = argparse.ArgumentParser("grading", description=__doc__)
parser.add_argument("command", choices=("assignments", "grade", "gradebook", "trial"))
parser.add_argument("--build", type=Path, default=Path("_build"), help="where all goes")
parser.add_argument("--homework", default="", help="hw01; if omitted, all are derived")
parser.add_argument("--submissions", type=Path, help="folder with a notebook for each student")
parser.add_argument("--unconfined", action="store_true", help="grade without a sandbox")
parser.add_argument("--roster", type=Path, help="participants, as Moodle or Canvas lists them")
given = parser.parse_args()
try:
    if given.command == "assignments":
        for made in assignments.make(given.build, given.homework):
            print(made.student.parents[1])
    elif given.command == "grade":
        where = given.build, given.submissions, given.homework
        table = submissions.grade(*where, unconfined=given.unconfined)
        print(f"{reports.shown(table)}\nin {table}; by_hand.csv and feedback/ are beside it")
    elif given.command == "gradebook":
        print(reports.gradebook(given.build / "grades", given.roster))
    else:
        print(class_trial.run(given.build / "trial", given.unconfined))
except (IclError, OSError) as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit("interrupted; what was graded is stored: run again to continue")
