"""``make assignments``, ``make grade`` and ``make gradebook``."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from iclutils.commandline import CommandLine, option

from . import confine

HOOKS_ALONE = (
    "Without namespaces, which this system does not give to this user, submissions are held by "
    "Python's own hooks alone, and native code can go round those. If you do not trust your class, "
    "grade where namespaces are (see the page on coursework) or where nothing else is."
)
LINE = CommandLine(
    "grading",
    __doc__,
    ("assignments hw01", "grade path/to/submissions", "gradebook --roster participants.csv"),
    closed="Name a folder that can be written to: BUILD=path/to/folder",
)
main, command = LINE.main, LINE.command
MASTERS = option("--masters", type=Path, help="folder of homework of your own")
BUILD = option("--build", type=Path, default=Path("_build"), help="where all is written")
USUAL = " (%(default)g)"
BOUNDS = {
    "step": "seconds of computing for each cell and question",
    "seconds": "for each submission",
    "memory": "GB for each submission",
}


def _take_masters(given: Namespace) -> None:
    if given.masters:
        os.environ["ICLUTILS_HOMEWORK"] = str(given.masters.resolve())


@command(option("homework", nargs="?", default="", help="hw01; all if omitted"), MASTERS, BUILD)
def assignments(given: Namespace) -> None:
    """Derive the students' homework from the solved masters."""
    from . import assignments

    _take_masters(given)
    for made in assignments.make(given.build, given.homework):
        folder = made.student.parents[1].as_posix()
        print(f"{'made' if made.fresh else 'up to date'}: {folder}")


@command(
    option("submissions", type=Path, help="folder with one notebook per student"),
    option("--homework", default="", help="hw01; what they say they are if omitted"),
    *(
        option(f"--{name}", type=float, default=getattr(confine.Limits, name), help=what + USUAL)
        for name, what in BOUNDS.items()
    ),
    option("--jobs", type=int, default=2, help="how many at a time (2)"),
    option("--force", action="store_true", help="grade again what has not changed"),
    option("--retry", action="store_true", help="that with which grading ended, too"),
    *(MASTERS, BUILD),
    examples=("path/to/submissions --jobs 4",),
)
def grade(given: Namespace) -> None:
    """Grade a folder of homework into a table, with a feedback file for each student."""
    from . import submissions

    _take_masters(given)
    limits = confine.Limits(given.step, given.seconds, given.memory)
    asked = (given.submissions, given.homework, limits, given.jobs, given.force, given.retry)
    table = submissions.grade(given.build, *asked)
    print(table.read_text(encoding="utf-8"), end="")
    print(f"written to {table}; feedback for students beside it")
    if confine.namespaces.cache_info().currsize and not confine.namespaces():  # if any was run
        print(HOOKS_ALONE, file=sys.stderr)


@command(
    option("--roster", type=Path, help="participants, as Moodle or Canvas exports them"), BUILD
)
def gradebook(given: Namespace) -> None:
    """Join the graded homeworks into one table by student."""
    from . import reports

    print(f"written to {reports.gradebook(given.build / 'grades', given.roster)}")


if __name__ == "__main__":
    sys.exit(main())
