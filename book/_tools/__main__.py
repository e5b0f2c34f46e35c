"""Everything that makes the book, as commands; ``make`` calls them."""

from __future__ import annotations

import ast
import sys
from argparse import Namespace
from pathlib import Path

from iclutils.commandline import DEVICE, SEED, CommandLine, named, option
from iclutils.errors import IclError

BUILD = Path("_build")
LINE = CommandLine("book._tools", __doc__, ("book", "run 01", "run all --tier real", "claims 03"))
command = LINE.command
ACCEPT = option("--accept", action="store_true", help="make what differs the committed ones")
CHAPTER = option("chapter", nargs="?", help="01 or its full name; all if omitted")


@command(
    option("chapter", nargs="?", default="all", help="01, its full name, or all"),
    option("--tier", help="mini (default), real, its real-part, or paper"),
    option("--model", help="a model of your own instead of the tier's"),
    option("--weights", help="trained (default), or random: the null of every finding"),
    *(SEED, DEVICE),
    option(
        *("-p", "--parameter"),
        **{"action": "append", "default": [], "metavar": "NAME=VALUE"},
        help="any parameter of the notebook, as often as needed",
    ),
    option("--force", action="store_true", help="run even if up to date"),
    ACCEPT,
    examples=(
        *("01", "all", "01 --seed 3 --force", "01 --tier paper --device cuda", "--weights random"),
        *("01 --model path/to/folder", "01 --model owner/name@COMMIT", "01 -p seed=3"),
    ),
)
def run(given: Namespace) -> int:
    """Run a chapter, or all, and say which values are not the committed ones."""
    from . import results, run

    values = named(given, "tier", "model", "weights", "seed", "device")
    for pair in given.parameter:
        name, equals, text = pair.partition("=")
        if not equals:
            raise IclError(f"-p takes NAME=VALUE; got {pair!r}.")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    wanted = run.chapters() if given.chapter == "all" else [given.chapter]
    runs = run.run_chapters(wanted, values, BUILD, force=given.force)
    for done in runs:
        print(f"{'ran' if done.fresh else 'up to date'}: {done.notebook}")
    return results.conclude(runs, given.accept)


@command(
    CHAPTER,
    option("--tier", help="mini, real, real-part or paper; all if omitted"),
    option("--seed", type=int, help="of runs with this seed: which verdicts differ"),
    ACCEPT,
    examples=("", "03", "--tier real", "--seed 1", "--accept"),
)
def compare(given: Namespace) -> int:
    """Say which values of the last runs are not the committed ones, without running anything."""
    from iclutils.claims import NULL

    from . import results, run

    wanted = run.resolve(given.chapter) if given.chapter else run.chapters()
    build = run.apart(BUILD, named(given, "seed"), {"seed": 0})
    runs = [done for done in results.last(build) if done.chapter in wanted]
    runs = [done for done in runs if given.tier in (None, done.kind.removesuffix(NULL))]
    if build != BUILD:
        if given.accept:
            raise IclError("Results of another seed are not the book's: leave --accept out.")
        print(results.moved(runs))
        return 0
    return results.conclude(runs, given.accept)


@command(
    option("--network", action="store_true", help="also ask whether the hub answers"),
    examples=("", "--network"),
)
def doctor(given: Namespace) -> int:
    """Check this machine, and say what is missing and how to mend it."""
    from iclutils import doctor

    from . import doctor as also

    findings = [*doctor.examine(BUILD, network=given.network), *also.examine()]
    print(doctor.report(findings))
    return 0 if doctor.healthy(findings) else 1


@command(CHAPTER, examples=("", "03"))
def claims(given: Namespace) -> None:
    """Print the claims with their latest verdicts."""
    from iclutils import claims, scorecard

    results = claims.read_results(*claims.result_folders())
    for row in scorecard.rows(results, given.chapter):
        for column, entry in row.items():
            if entry.verdict != scorecard.NOT_ASKED:
                name = f"{entry.claim.id:<40} {entry.claim.kind:<9}"
                print(f"{entry.verdict:<18} {column:<9} {name} {entry.value}")


@command(CHAPTER, examples=("", "03"))
def scorecard(given: Namespace) -> None:
    """Print how many findings hold, and which do not."""
    from iclutils import claims, scorecard

    from .results import totals

    results = claims.read_results(*claims.result_folders())
    print(totals(scorecard.rows(results, given.chapter)))


@command(ACCEPT, examples=("", "--accept"))
def book(given: Namespace) -> int:
    """Run what changed, check the claims, build the pages."""
    from . import build

    return build.make(Path.cwd(), BUILD, accept=given.accept)


@command()
def zip(given: Namespace) -> None:
    """Pack the built pages into one file, to be read offline."""
    from . import build

    print(build.pack(BUILD))


WANTED = option("chapters", nargs="*", help="01, or its full name; all if omitted")


def _wanted(given: Namespace) -> list[str]:
    from . import run

    return [name for chapter in given.chapters for name in run.resolve(chapter)]


@command(WANTED, examples=("", "01 03"))
def pdf(given: Namespace) -> None:
    """Print chapters of the built book."""
    from . import pdf, run

    names = [f"notebooks/{name}" for name in _wanted(given) or run.chapters()]
    print(*pdf.make(BUILD / "html", BUILD / "pdf", names), sep="\n")


@command(
    CHAPTER,
    option("--out", type=Path, default=BUILD / "exercises", help="folder (_build/exercises)"),
    examples=("", "01", "01 --out path/to/folder"),
)
def exercises(given: Namespace) -> None:
    """Write the chapters without the solutions of their exercises, to be handed out."""
    from . import exercises

    for path in exercises.without_solutions(given.chapter, given.out):
        print(f"wrote {path}")


@command(WANTED, examples=("", "03"))
def tutor(given: Namespace) -> None:
    """Write chapters with all outputs, solutions and timing, for the person who teaches."""
    from . import lectures

    print(*lectures.tutor(BUILD, _wanted(given)), sep="\n")


@command(WANTED, examples=("", "03"))
def slides(given: Namespace) -> None:
    """Write slides for two lectures a chapter."""
    from . import lectures

    print(*lectures.slides(BUILD, _wanted(given)), sep="\n")


@command()
def address(given: Namespace) -> None:
    """Write the public address into the files that store it."""
    from . import address

    for path in address.apply(Path.cwd()):
        print(f"updated {path}")


if __name__ == "__main__":
    sys.exit(LINE.main())
