"""The commands: one function for each, named after it, returning its exit status.

Everything is imported where it is used, so that the command line answers at once and can say what
is missing where a dependency is.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import IclError

BUILD = Path("_build")
Action = Callable[[argparse.Namespace], int]
Option = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """A command: what it does, in a line; words that show its use; its arguments."""

    act: Action
    what: str
    examples: tuple[str, ...]
    options: tuple[Option, ...]


COMMANDS: dict[str, Command] = {}


def option(*names: str, **settings: Any) -> Option:
    """What ``add_argument`` takes."""
    return names, settings


def command(what: str, examples: tuple[str, ...], *options: Option) -> Callable[[Action], Action]:
    """List a function as a command of its name."""

    def add(act: Action) -> Action:
        COMMANDS[act.__name__] = Command(act, what, examples, options)
        return act

    return add


@command(
    "check this machine, and say what is missing and how to mend it",
    ("", "--network"),
    option("--network", action="store_true", help="also ask whether the hub answers"),
)
def doctor(given: argparse.Namespace) -> int:
    from . import doctor

    findings = doctor.examine(BUILD, network=given.network)
    print(doctor.report(findings))
    return 0 if doctor.healthy(findings) else 1


@command(
    "run a chapter, or all, and keep the results",
    (
        *("01", "all", "01 --seed 3 --force", "01 --tier paper --device cuda"),
        *("01 --model path/to/folder", "01 --model owner/name@COMMIT", "01 -p seed=3"),
    ),
    option("chapter", nargs="?", default="all", help="01, its full name, or all"),
    option("--tier", help="mini (default) or paper"),
    option("--model", help="a model of your own instead of the tier's"),
    option("--seed", type=int, help="of every random draw"),
    option("--device", help="auto, cpu or cuda"),
    option(
        *("-p", "--parameter"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any parameter of the notebook, as often as needed",
    ),
    option("--force", action="store_true", help="run even if up to date"),
)
def run(given: argparse.Namespace) -> int:
    from . import run

    named = {name: getattr(given, name) for name in ("tier", "model", "seed", "device")}
    values = {name: value for name, value in named.items() if value is not None}
    for pair in given.parameter:
        name, equals, text = pair.partition("=")
        if not equals:
            raise IclError(f"-p takes NAME=VALUE; got {pair!r}.")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    wanted = run.chapters() if given.chapter == "all" else [given.chapter]
    for done in run.run_chapters(wanted, values, BUILD, force=given.force):
        print(f"{'ran' if done.fresh else 'up to date'}: {done.notebook}")
    return 0


@command(
    "draw one chapter's main figure for one model",
    (
        *("01 --model path/to/folder", "01 --model gpt2 --prompt 'a text'", "05 --out edges.svg"),
        "02 --model gpt2 --demonstration 'fun=Good' --demonstration 'dull=Bad' --query 'great'",
    ),
    option("chapter", help="01 to 05"),
    option("--model", default="", help="a Hugging Face folder, or a name; else ours"),
    option("--prompt", default="", help="01: a text, which is shown twice"),
    option(
        "--demonstration",
        action="append",
        default=[],
        metavar="TEXT=LABEL",
        help="02: a labelled text, as often as needed",
    ),
    option("--query", default="", help="02: the text to be labelled"),
    option("--seed", type=int, default=0, help="of every random draw"),
    option("--device", default="auto", help="auto, cpu or cuda"),
    option("--out", type=Path, default=Path("figure.png"), help=".png or .svg"),
)
def show(given: argparse.Namespace) -> int:
    from .quick_figures import show

    pairs = [text.rpartition("=")[::2] for text in given.demonstration]
    if not all(text and label for text, label in pairs):
        raise IclError("--demonstration takes TEXT=LABEL.")
    asked = {name: getattr(given, name) for name in ("prompt", "query", "seed", "device")}
    made = show(given.chapter, given.model, demonstrations=pairs, **asked)
    print(made)
    print(f"wrote {made.save(given.out)}")
    return 0


@command(
    "print the claims with their latest verdicts",
    ("", "03"),
    option("chapter", nargs="?", help="01 or its full name; all if omitted"),
)
def claims(given: argparse.Namespace) -> int:
    from . import claims

    results = claims.read_results(*claims.result_folders())
    for claim in claims.ledger(given.chapter).values():
        for tier in claim.tiers:
            found = results.get((tier, claim.id))
            value = f"{found.value:.4g}" if found else ""
            print(f"{found.verdict if found else 'not run':<15} {tier:<6} {claim.id:<40} {value}")
    return 0


@command("list the models that load() knows by name", ("",))
def models(given: argparse.Namespace) -> int:
    from .. import models, zoo
    from ..zoo import smollm2

    for name in zoo.names():
        print(f"{name:<22} shipped; training steps {', '.join(map(str, zoo.steps(name)))}")
    state = f"in {smollm2.folder()}" if smollm2.is_there() else "fetched at first use, 93 MB"
    print(f"{smollm2.NAME:<22} SmolLM2-135M-Instruct, four bits, of {smollm2.PACKAGE}; {state}")
    for name, spec in models.HUB.items():
        print(f"{name:<22} hub: {spec.repo} at {spec.revision}")
    print("Also: any Hugging Face folder on disk, and owner/name with revision=<40-hex commit>.")
    return 0


@command(
    "train a shipped model again, or one of the paper's size",
    (
        *("", "induction-0", "'regression-one-*' --jobs 2"),
        "'regression-paper-*' --device cuda --cluster tcp://scheduler:8786",
    ),
    option("name", nargs="?", help="a recipe, or several: 'regression-one-*'"),
    option("--out", type=Path, help="folder (default _build/train/NAME)"),
    option("--quiet", action="store_true", help="no progress bar"),
    option("--device", default="cpu", help="cpu (default), cuda or auto"),
    option("--jobs", type=int, help="of several, how many at a time (all cores)"),
    option("--cluster", default="", help="address of a Dask scheduler, for several"),
)
def train(given: argparse.Namespace) -> int:
    from .. import training, zoo
    from ..progress import say
    from ..training import sweep
    from .session import resolve_device

    if given.name is None:
        print("\n".join(training.all_names()))
        return 0
    names = training.matching(given.name)
    device = resolve_device(given.device)
    if len(names) > 1:
        out = given.out or zoo.trained()
        recipes = [training.recipe(name, device) for name in names]
        if not given.quiet:
            say(f"{len(names)} trainings, the first of which is {training.cost(recipes[0])}")
        with sweep.on_cluster(given.cluster):
            folders = sweep.sweep(recipes, out, given.jobs)
        print("\n".join(map(str, folders)))
        return 0
    if given.jobs is not None or given.cluster:
        raise IclError(
            f"--jobs and --cluster are for several recipes, and {given.name!r} names one. "
            "Leave them out, or quote a pattern: 'regression-one-*'."
        )
    out = given.out or zoo.trained() / names[0]
    if not given.quiet:
        say(training.cost(training.recipe(names[0], device)))
    training.train(names[0], out, progress=not given.quiet, device=device)
    print(f"{out} holds the model. To ship it, copy it to iclutils/zoo/{names[0]}.")
    return 0


@command("run what changed, check the claims, build the pages", ("",))
def book(given: argparse.Namespace) -> int:
    from . import build

    print(build.make(Path.cwd(), BUILD))
    return 0


@command("pack the built pages into one file, to be read offline", ("",))
def zip(given: argparse.Namespace) -> int:
    from . import build

    print(build.pack(BUILD))
    return 0


@command(
    "print chapters of the built book",
    ("", "01 03"),
    option("chapters", nargs="*", help="01, or its full name; all if omitted"),
)
def pdf(given: argparse.Namespace) -> int:
    from . import pdf, run

    wanted = [run.resolve(chapter) for chapter in given.chapters] or run.chapters()
    names = [f"notebooks/{name}" for name in wanted]
    print(*pdf.make(BUILD / "html", BUILD / "pdf", names), sep="\n")
    return 0


@command("make the last mini run the committed one", ("",))
def accept(given: argparse.Namespace) -> int:
    from . import build

    for path in build.accept(Path.cwd(), BUILD):
        print(f"updated {path}")
    return 0


@command(
    "derive the students' homework from the solved masters",
    ("", "hw01"),
    option("homework", nargs="?", default="", help="hw01; all if omitted"),
)
def assignments(given: argparse.Namespace) -> int:
    from .coursework import assignments

    for made in assignments.make(Path.cwd(), BUILD, given.homework):
        folder = made.student.parents[1].as_posix()
        print(f"{'made' if made.fresh else 'up to date'}: {folder}")
    return 0


@command(
    "grade a folder of homework into a table",
    ("path/to/folder", "path/to/folder --homework hw01 --seconds 120"),
    option("submissions", type=Path, help="folder with one notebook per student"),
    option("--homework", default="", help="hw01; what they say they are if omitted"),
    option("--seconds", type=float, default=300.0, help="for each submission (300)"),
    option("--memory", type=float, default=4.0, help="GB for each submission (4)"),
    option("--jobs", type=int, default=2, help="how many at a time (2)"),
    option("--force", action="store_true", help="grade again what has not changed"),
)
def grade(given: argparse.Namespace) -> int:
    from .coursework import confine, grading

    limits = confine.Limits(given.seconds, given.memory)
    table = grading.grade(
        *(Path.cwd(), BUILD, given.submissions, given.homework),
        limits=limits,
        jobs=given.jobs,
        force=given.force,
    )
    print(table.read_text(encoding="utf-8"), end="")
    print(f"written to {table}")
    return 0


@command("write the public address into the files that store it", ("",))
def address(given: argparse.Namespace) -> int:
    from . import address

    for path in address.apply(Path.cwd()):
        print(f"updated {path}")
    return 0
