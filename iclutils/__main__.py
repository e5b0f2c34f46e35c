"""Everything that can be done with this package, as commands."""

from __future__ import annotations

import argparse
import errno
import os
import sys

from .bookkit.commands import COMMANDS
from .errors import IclError, unknown

CURES = {
    errno.ENOSPC: "Make room on the disk and run again; what was finished is kept.",
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Run where you may write files."),
}
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
    if not words:
        parser().print_help()
        return 0
    try:
        if words[0] not in COMMANDS and not words[0].startswith("-"):
            raise unknown("command", words[0], COMMANDS)
        given = parser().parse_args(words)
        return given.act(given) or 0
    except IclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"error: {what}. {CURES.get(error.errno or 0, '')}".rstrip(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept: run again to continue", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    prog, plain = "python -m iclutils", argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(
        prog, description=__doc__, epilog=OVERVIEW, formatter_class=plain
    )
    listed = made.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        what = str(command.act.__doc__)
        shown = "\n".join(f"  {prog} {name} {words}".rstrip() for words in command.examples)
        line, end = f"{what[0].lower()}{what[1:-1]}", f"examples:\n{shown}"
        added = listed.add_parser(
            name, help=line, description=what, epilog=end, formatter_class=plain
        )
        added.set_defaults(act=command.act)
        for names, about in command.options:
            added.add_argument(*names, **about)
    return made


if __name__ == "__main__":
    sys.exit(main())
