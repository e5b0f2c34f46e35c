"""The command line: ``python -m iclutils --help``."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from .errors import IclError

BUILD = Path("_build")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status (2 for a mistake of the user's)."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return given.act(given)
    except IclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept: run again to continue", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m iclutils", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a chapter, or all: run 01 --tier paper")
    run.add_argument("chapter", nargs="?", default="all", help="01, its full name, or all")
    run.add_argument("--tier", default=None, help="mini (default) or paper")
    run.add_argument("--model", default=None, help="a model of your own instead of the tier's")
    run.add_argument("--seed", type=int, default=None)
    run.add_argument("--device", default=None, help="auto, cpu or cuda")
    run.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE")
    run.add_argument("--force", action="store_true", help="run even if up to date")
    run.set_defaults(act=_run)

    train = commands.add_parser("train", help="rebuild zoo models: train induction-0")
    train.add_argument("name", nargs="?", help="a recipe, or several: 'regression-one-*'")
    train.add_argument("--out", type=Path, help="folder (default _build/train/NAME)")
    train.add_argument("--quiet", action="store_true", help="no progress bar")
    train.add_argument("--device", default="cpu", help="cpu (default), cuda or auto")
    train.add_argument("--jobs", type=int, help="of several, how many at a time (all cores)")
    train.add_argument("--cluster", default="", help="address of a Dask scheduler, for several")
    train.set_defaults(act=_train)

    claims = commands.add_parser("claims", help="print the ledger with the latest verdicts")
    claims.add_argument("chapter", nargs="?")
    claims.set_defaults(act=_claims)

    models = commands.add_parser("models", help="list the models that load() knows by name")
    models.set_defaults(act=_models)

    book = commands.add_parser("book", help="run what changed, check the claims, build the HTML")
    book.set_defaults(act=_book)

    accept = commands.add_parser("accept", help="make the last mini run the committed one")
    accept.set_defaults(act=_accept)

    address = commands.add_parser("address", help="write the public address into the files")
    address.set_defaults(act=_address)
    return parser


def _run(given: argparse.Namespace) -> int:
    from . import run

    values = {
        name: value
        for name in ("tier", "model", "seed", "device")
        if (value := getattr(given, name)) is not None
    }
    for pair in given.parameter:
        name, equals, text = pair.partition("=")
        if not equals:
            raise IclError(f"-p takes NAME=VALUE; got {pair!r}.")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    wanted = run.chapters() if given.chapter == "all" else [given.chapter]
    for chapter in wanted:
        done = run.run_chapter(chapter, values, BUILD, force=given.force)
        print(f"{'ran' if done.fresh else 'up to date'}: {done.notebook}")
    return 0


def _train(given: argparse.Namespace) -> int:
    from . import training, zoo
    from .session import resolve_device
    from .training import sweep

    if given.name is None:
        print("\n".join(training.all_names()))
        return 0
    names = training.matching(given.name)
    device = resolve_device(given.device)
    if len(names) > 1:
        out = given.out or zoo.trained()
        recipes = [training.recipe(name, device) for name in names]
        with sweep.on_cluster(given.cluster):
            folders = sweep.sweep(recipes, out, given.jobs)
        print("\n".join(map(str, folders)))
        return 0
    out = given.out or zoo.trained() / names[0]
    training.train(names[0], out, progress=not given.quiet, device=device)
    print(f"{out} holds the model. To ship it, copy it to iclutils/zoo/{names[0]}.")
    return 0


def _claims(given: argparse.Namespace) -> int:
    from . import claims

    results = claims.read_results(*claims.result_folders())
    for claim in claims.ledger(given.chapter).values():
        for tier in claim.tiers:
            found = results.get((tier, claim.id))
            value = f"{found.value:.4g}" if found else ""
            print(f"{found.verdict if found else 'not run':<15} {tier:<6} {claim.id:<40} {value}")
    return 0


def _models(given: argparse.Namespace) -> int:
    from . import models, zoo

    for name in zoo.names():
        print(f"{name:<22} shipped; training steps {', '.join(map(str, zoo.steps(name)))}")
    for name, spec in models.HUB.items():
        print(f"{name:<22} hub: {spec.repo} at {spec.revision}")
    print("Also: any Hugging Face folder on disk, and owner/name with revision=<40-hex commit>.")
    return 0


def _book(given: argparse.Namespace) -> int:
    from . import book

    print(book.make(Path.cwd(), BUILD))
    return 0


def _accept(given: argparse.Namespace) -> int:
    from . import book

    for path in book.accept(Path.cwd(), BUILD):
        print(f"updated {path}")
    return 0


def _address(given: argparse.Namespace) -> int:
    from . import address

    for path in address.apply(Path.cwd()):
        print(f"updated {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
