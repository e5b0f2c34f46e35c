"""Command lines: a function for each command, with what it does as its docstring.

Commands import what they need when they run, so that the command line answers at once and can say
what is missing where a dependency is.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import IclError, unknown

FULL = "Make room on the disk and run again; what was finished is kept."
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
Action = Callable[[Namespace], int | None]
Option = tuple[tuple[str, ...], dict[str, Any]]


class Command(NamedTuple):
    """A command: what it runs, words that show its use, and its arguments."""

    act: Action
    examples: tuple[str, ...]
    options: tuple[Option, ...]


def option(*names: str, **settings: Any) -> Option:
    """What ``add_argument`` takes."""
    return names, settings


SEED = option("--seed", type=int, help="of every random draw")
DEVICE = option("--device", help="auto, cpu or cuda")


def named(given: Namespace, *names: str) -> dict[str, Any]:
    """The options of these names that were given."""
    return {name: value for name in names if (value := getattr(given, name)) is not None}


@dataclass
class CommandLine:
    """The commands of one program, ``python -m program``."""

    program: str
    description: str
    examples: tuple[str, ...]
    closed: str = "Run where you may write files."  # the cure where that is refused
    commands: dict[str, Command] = field(default_factory=dict)

    def command(
        self, *options: Option, examples: tuple[str, ...] = ("",)
    ) -> Callable[[Action], Action]:
        """List a function as a command of its name."""

        def add(act: Action) -> Action:
            self.commands[act.__name__] = Command(act, examples, options)
            return act

        return add

    def main(self, arguments: list[str] | None = None) -> int:
        """Run one command; return its exit status (2 for a mistake of the user's)."""
        words = sys.argv[1:] if arguments is None else arguments
        if not words:
            self.parser().print_help()
            return 0
        try:
            if words[0] not in self.commands and not words[0].startswith("-"):
                raise unknown("command", words[0], self.commands)
            given = self.parser().parse_args(words)
            return given.act(given) or 0
        except IclError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except ModuleNotFoundError as error:
            print(f'error: {error}. Install it: pip install -e ".[book,dev]"', file=sys.stderr)
            return 2
        except BrokenPipeError:  # whoever read has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            cures = dict.fromkeys(CLOSED, self.closed) | {errno.ENOSPC: FULL}
            print(f"error: {what}. {cures.get(error.errno or 0, '')}".rstrip(), file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted; what was finished is kept: run again to continue", file=sys.stderr)
            return 130

    def parser(self) -> argparse.ArgumentParser:
        """The parser of all commands."""
        prog, plain = f"python -m {self.program}", argparse.RawDescriptionHelpFormatter
        shown = "\n".join(f"  {prog} {words}" for words in self.examples)
        about = f"examples:\n{shown}\n\nEach command explains itself: {prog} COMMAND --help"
        made = argparse.ArgumentParser(
            prog, description=self.description, epilog=about, formatter_class=plain
        )
        listed = made.add_subparsers(title="commands", metavar="COMMAND")
        for name, command in self.commands.items():
            what = str(command.act.__doc__)
            shown = "\n".join(f"  {prog} {name} {words}".rstrip() for words in command.examples)
            line, end = f"{what[0].lower()}{what[1:-1]}", f"examples:\n{shown}"
            added = listed.add_parser(
                name, help=line, description=what, epilog=end, formatter_class=plain
            )
            added.set_defaults(act=command.act)
            for names, settings in command.options:
                added.add_argument(*names, **settings)
        return made
