"""What can be done with this package alone, as commands."""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

from .commandline import CommandLine, option
from .errors import IclError
from .files import CHECKOUT

SHOWN = ("doctor", "run 01 --model path/to/folder", "train induction-0")
LINE = CommandLine("iclutils", __doc__, SHOWN)
command = LINE.command


@command(
    option("--network", action="store_true", help="also ask whether the hub answers"),
    examples=("", "--network"),
)
def doctor(given: Namespace) -> int:
    """Say whether chapters can run on this machine, and how to mend what is missing."""
    from . import doctor

    findings = doctor.examine(Path("_build"), network=given.network)
    print(doctor.report(findings))
    return 0 if doctor.healthy(findings) else 1


@command()
def models(given: Namespace) -> None:
    """List the models that load() knows by name."""
    from . import models, zoo
    from .zoo import smollm2

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
    from . import zoo
    from .progress import say
    from .session import resolve_device
    from .zoo import recipes
    from .zoo.recipes import sweep

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


@command(examples=("01", "01 --model path/to/folder", "01 --tier paper --device cuda", "--help"))
def run(given: Namespace) -> None:
    """Run a chapter of the checkout, on a model of your own if you name one."""
    raise IclError(
        "Chapters are run in a checkout of the book, and this package is installed without one. "
        "Clone the repository and run this there, or open the notebook and set its parameters."
    )


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status (2 for a mistake of the user's)."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] != ["run"]:
        return LINE.main(words)
    if not (CHECKOUT / "book/_tools").is_dir():
        return LINE.main(["run"])
    sys.path.insert(0, str(CHECKOUT))
    return int(import_module("book._tools.__main__").LINE.main(words))


if __name__ == "__main__":
    sys.exit(main())
