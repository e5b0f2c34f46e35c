"""The commands: a function for each, named after it, with what it does as its docstring.

Everything is imported where it is used, so that the command line answers at once and can say what
is missing where a dependency is.
"""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import IclError

BUILD = Path("_build")
Action = Callable[[Namespace], int | None]
Option = tuple[tuple[str, ...], dict[str, Any]]


class Command(NamedTuple):
    """A command: what it runs, words that show its use, and its arguments."""

    act: Action
    examples: tuple[str, ...]
    options: tuple[Option, ...]


COMMANDS: dict[str, Command] = {}


def command(*options: Option, examples: tuple[str, ...] = ("",)) -> Callable[[Action], Action]:
    """List a function as a command of its name."""

    def add(act: Action) -> Action:
        COMMANDS[act.__name__] = Command(act, examples, options)
        return act

    return add


def option(*names: str, **settings: Any) -> Option:
    """What ``add_argument`` takes."""
    return names, settings


def _given(given: Namespace, *names: str) -> dict[str, Any]:
    """The options of these names that were named."""
    return {name: value for name in names if (value := getattr(given, name)) is not None}


SEED = option("--seed", type=int, help="of every random draw")
DEVICE = option("--device", help="auto, cpu or cuda")
ACCEPT = option("--accept", action="store_true", help="make what differs the committed ones")
CHAPTER = option("chapter", nargs="?", help="01 or its full name; all if omitted")


@command(
    option("--network", action="store_true", help="also ask whether the hub answers"),
    examples=("", "--network"),
)
def doctor(given: Namespace) -> int:
    """Check this machine, and say what is missing and how to mend it."""
    from . import doctor

    findings = doctor.examine(BUILD, network=given.network)
    print(doctor.report(findings))
    return 0 if doctor.healthy(findings) else 1


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

    values = _given(given, "tier", "model", "weights", "seed", "device")
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


@command(CHAPTER, ACCEPT, examples=("", "03", "--accept"))
def compare(given: Namespace) -> int:
    """Say which values of the last runs are not the committed ones, without running anything."""
    from . import results, run

    wanted = run.resolve(given.chapter) if given.chapter else run.chapters()
    runs = [done for done in results.last(BUILD) if done.chapter in wanted]
    return results.conclude(runs, given.accept)


@command(
    option("chapter", help="01 to 06"),
    option("--model", default="", help="a Hugging Face folder, or a name; else ours"),
    option("--prompt", help="01: a text, which is shown twice"),
    option(
        "--demonstration",
        **{"action": "append", "default": [], "metavar": "TEXT=LABEL"},
        help="02: a labelled text, as often as needed",
    ),
    option("--query", help="02: the text to be labelled"),
    *(SEED, DEVICE),
    option("--out", type=Path, default=Path("figure.png"), help=".png or .svg"),
    examples=(
        *("01 --model path/to/folder", "01 --model gpt2 --prompt 'a text'", "05 --out edges.svg"),
        "02 --model gpt2 --demonstration 'fun=Good' --demonstration 'dull=Bad' --query 'great'",
    ),
)
def show(given: Namespace) -> None:
    """Draw one chapter's main figure for one model."""
    from .quick_figures import show
    from .quick_figures.quick_figure import ending

    ending(given.out)
    pairs = [text.rpartition("=")[::2] for text in given.demonstration]
    if not all(text and label for text, label in pairs):
        raise IclError("--demonstration takes TEXT=LABEL.")
    asked = _given(given, "prompt", "query", "seed", "device")
    made = show(given.chapter, given.model, demonstrations=pairs, **asked)
    print(made)
    print(f"wrote {made.save(given.out)}")


@command(CHAPTER, examples=("", "03"))
def claims(given: Namespace) -> None:
    """Print the claims with their latest verdicts."""
    from .. import claims, scorecard

    results = claims.read_results(*claims.result_folders())
    for row in scorecard.rows(results, given.chapter):
        for column, entry in row.items():
            if entry.verdict != scorecard.NOT_ASKED:
                name = f"{entry.claim.id:<40} {entry.claim.kind:<9}"
                print(f"{entry.verdict:<18} {column:<9} {name} {entry.value}")


@command(CHAPTER, examples=("", "03"))
def scorecard(given: Namespace) -> None:
    """Print how many findings hold, and which do not."""
    from .. import claims, scorecard

    results = claims.read_results(*claims.result_folders())
    print(scorecard.text(scorecard.rows(results, given.chapter)))


@command()
def models(given: Namespace) -> None:
    """List the models that load() knows by name."""
    from .. import models, zoo
    from ..zoo import smollm2

    for name in zoo.names():
        print(f"{name:<22} shipped; training steps {', '.join(map(str, zoo.steps(name)))}")
    state = f"in {smollm2.folder()}" if smollm2.is_there() else "fetched at first use, 93 MB"
    print(f"{smollm2.NAME:<22} SmolLM2-135M-Instruct, four bits, of {smollm2.PACKAGE}; {state}")
    for name, spec in models.HUB.items():
        print(f"{name:<22} hub: {spec.repo} at {spec.revision}")
    print("Also: any Hugging Face folder on disk, and owner/name with revision=<40-hex commit>.")


@command(
    option("name", nargs="?", help="a recipe, or several: 'regression-one-*'"),
    option("--out", type=Path, help="folder (default _build/train/NAME)"),
    option("--quiet", action="store_true", help="no progress bar"),
    option("--device", default="cpu", help="cpu (default), cuda or auto"),
    option("--jobs", type=int, help="of several, how many at a time (all cores)"),
    option("--cluster", default="", help="address of a Dask scheduler, for several"),
    examples=(
        *("", "induction-0", "'regression-one-*' --jobs 2"),
        "'regression-paper-*' --device cuda --cluster tcp://scheduler:8786",
    ),
)
def train(given: Namespace) -> None:
    """Train a shipped model again, or one of the paper's size."""
    from .. import zoo
    from ..progress import say
    from ..session import resolve_device
    from ..zoo import recipes
    from ..zoo.recipes import sweep

    names = recipes.matching(given.name) if given.name else recipes.all_names()
    if given.name is None:
        print("\n".join(names))
        return
    several, device = len(names) > 1, resolve_device(given.device)
    if not several and (given.jobs is not None or given.cluster):
        raise IclError(
            f"--jobs and --cluster are for several recipes, and {given.name!r} names one. "
            "Leave them out, or quote a pattern: 'regression-one-*'."
        )
    plans = [recipes.recipe(name, device) for name in names]
    if not given.quiet:
        first = f"{len(names)} trainings, the first of which is " if several else ""
        say(f"{first}{recipes.cost(plans[0])}")
    if several:
        with sweep.on_cluster(given.cluster):
            folders = sweep.sweep(plans, given.out or zoo.trained(), given.jobs)
        print("\n".join(map(str, folders)))
    else:
        out = given.out or zoo.trained() / names[0]
        recipes.train(names[0], out, progress=not given.quiet, device=device)
        print(f"{out} holds the model. To ship it, copy it to iclutils/zoo/{names[0]}.")


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
