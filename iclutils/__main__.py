"""Everything that can be done with this package, as commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from .bookkit import commands
from .errors import IclError, unknown

OVERVIEW = """\
examples:
  python -m iclutils doctor
  python -m iclutils run 01
  python -m iclutils run 01 --model path/to/folder
  python -m iclutils claims 03
  python -m iclutils train induction-0

Each command explains itself: python -m iclutils run --help"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status (2 for a mistake of the user's)."""
    words = sys.argv[1:] if arguments is None else arguments
    parser, known = _parser()
    if not words:
        parser.print_help()
        return 0
    try:
        if words[0] not in known and not words[0].startswith("-"):
            raise unknown("command", words[0], known)
        given = parser.parse_args(words)
        return given.act(given)
    except IclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept: run again to continue", file=sys.stderr)
        return 130


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and the names of its commands."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m iclutils",
        description=__doc__,
        epilog=OVERVIEW,
        formatter_class=plain,
    )
    listed = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(
        act: Callable[[argparse.Namespace], int], what: str, *examples: str
    ) -> argparse.ArgumentParser:
        """Add the command that ``act`` is named after."""
        name = act.__name__
        lines = "\n".join(f"  python -m iclutils {name} {text}".rstrip() for text in examples)
        added = listed.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"examples:\n{lines}",
            formatter_class=plain,
        )
        added.set_defaults(act=act)
        return added

    doctor = command(
        commands.doctor,
        "check this machine, and say what is missing and how to mend it",
        "",
        "--network",
    )
    doctor.add_argument("--network", action="store_true", help="also ask whether the hub answers")

    run = command(
        commands.run,
        "run a chapter, or all, and keep the results",
        *("01", "all", "01 --seed 3 --force", "01 --tier paper --device cuda"),
        *("01 --model path/to/folder", "01 --model owner/name@COMMIT", "01 -p seed=3"),
    )
    run.add_argument("chapter", nargs="?", default="all", help="01, its full name, or all")
    run.add_argument("--tier", default=None, help="mini (default) or paper")
    run.add_argument("--model", default=None, help="a model of your own instead of the tier's")
    run.add_argument("--seed", type=int, default=None, help="of every random draw")
    run.add_argument("--device", default=None, help="auto, cpu or cuda")
    run.add_argument(
        *("-p", "--parameter"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any parameter of the notebook, as often as needed",
    )
    run.add_argument("--force", action="store_true", help="run even if up to date")

    show = command(
        commands.show,
        "draw one chapter's main figure for one model",
        *("01 --model path/to/folder", "01 --model gpt2 --prompt 'a text'", "05 --out wires.svg"),
        "02 --model gpt2 --demonstration 'fun=Good' --demonstration 'dull=Bad' --query 'great'",
    )
    show.add_argument("chapter", help="01 to 05")
    show.add_argument("--model", default="", help="a Hugging Face folder, or a name; else ours")
    show.add_argument("--prompt", default="", help="01: a text, which is shown twice")
    show.add_argument(
        "--demonstration",
        action="append",
        default=[],
        metavar="TEXT=LABEL",
        help="02: a labelled text, as often as needed",
    )
    show.add_argument("--query", default="", help="02: the text to be labelled")
    show.add_argument("--seed", type=int, default=0, help="of every random draw")
    show.add_argument("--device", default="auto", help="auto, cpu or cuda")
    show.add_argument("--out", type=Path, default=Path("figure.png"), help=".png or .svg")

    claims = command(commands.claims, "print the claims with their latest verdicts", "", "03")
    claims.add_argument("chapter", nargs="?", help="01 or its full name; all if omitted")

    command(commands.models, "list the models that load() knows by name", "")

    train = command(
        commands.train,
        "train a shipped model again, or one of the paper's size",
        *("", "induction-0", "'regression-one-*' --jobs 2"),
        "'regression-paper-*' --device cuda --cluster tcp://scheduler:8786",
    )
    train.add_argument("name", nargs="?", help="a recipe, or several: 'regression-one-*'")
    train.add_argument("--out", type=Path, help="folder (default _build/train/NAME)")
    train.add_argument("--quiet", action="store_true", help="no progress bar")
    train.add_argument("--device", default="cpu", help="cpu (default), cuda or auto")
    train.add_argument("--jobs", type=int, help="of several, how many at a time (all cores)")
    train.add_argument("--cluster", default="", help="address of a Dask scheduler, for several")

    command(commands.book, "run what changed, check the claims, build the pages", "")
    command(commands.zip, "pack the built pages into one file, to be read offline", "")
    pdf = command(commands.pdf, "print chapters of the built book", "", "01 03")
    pdf.add_argument("chapters", nargs="*", help="01, or its full name; all if omitted")
    command(commands.accept, "make the last mini run the committed one", "")
    assignments = command(
        commands.assignments, "derive the students' homework from the solved masters", "", "hw01"
    )
    assignments.add_argument("homework", nargs="?", default="", help="hw01; all if omitted")

    grade = command(
        commands.grade,
        "grade a folder of homework into a table",
        *("path/to/folder", "path/to/folder --homework hw01 --seconds 120"),
    )
    grade.add_argument("submissions", type=Path, help="folder with one notebook per student")
    grade.add_argument("--homework", default="", help="hw01; what they say they are if omitted")
    grade.add_argument("--seconds", type=float, default=300.0, help="for each submission (300)")
    grade.add_argument("--memory", type=float, default=4.0, help="GB for each submission (4)")
    grade.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    grade.add_argument("--force", action="store_true", help="grade again what has not changed")

    command(commands.address, "write the public address into the files that store it", "")
    return parser, list(listed.choices)


if __name__ == "__main__":
    sys.exit(main())
