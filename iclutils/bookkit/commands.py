"""What each command does: one function for each, named after it, returning its exit status.

Everything is imported where it is used, so that the command line answers at once and can say what
is missing where a dependency is.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from ..errors import IclError

BUILD = Path("_build")


def doctor(given: argparse.Namespace) -> int:
    from . import doctor

    findings = doctor.examine(BUILD, network=given.network)
    print(doctor.report(findings))
    return 0 if doctor.healthy(findings) else 1


def run(given: argparse.Namespace) -> int:
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


def show(given: argparse.Namespace) -> int:
    from .quick_figures import show

    pairs = [text.rpartition("=") for text in given.demonstration]
    for text, _, label in pairs:
        if not text or not label:
            raise IclError("--demonstration takes TEXT=LABEL.")
    made = show(
        given.chapter,
        given.model,
        prompt=given.prompt,
        demonstrations=[(text, label) for text, _, label in pairs],
        query=given.query,
        seed=given.seed,
        device=given.device,
    )
    print(made)
    print(f"wrote {made.save(given.out)}")
    return 0


def train(given: argparse.Namespace) -> int:
    from .. import training, zoo
    from ..progress import say
    from ..training import cost, sweep
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
            say(f"{len(names)} trainings, the first of which is {cost.of(recipes[0])}")
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
        say(cost.of(training.recipe(names[0], device)))
    training.train(names[0], out, progress=not given.quiet, device=device)
    print(f"{out} holds the model. To ship it, copy it to iclutils/zoo/{names[0]}.")
    return 0


def claims(given: argparse.Namespace) -> int:
    from . import claims

    results = claims.read_results(*claims.result_folders())
    for claim in claims.ledger(given.chapter).values():
        for tier in claim.tiers:
            found = results.get((tier, claim.id))
            value = f"{found.value:.4g}" if found else ""
            print(f"{found.verdict if found else 'not run':<15} {tier:<6} {claim.id:<40} {value}")
    return 0


def models(given: argparse.Namespace) -> int:
    from .. import models, zoo

    for name in zoo.names():
        print(f"{name:<22} shipped; training steps {', '.join(map(str, zoo.steps(name)))}")
    for name, spec in models.HUB.items():
        print(f"{name:<22} hub: {spec.repo} at {spec.revision}")
    print("Also: any Hugging Face folder on disk, and owner/name with revision=<40-hex commit>.")
    return 0


def book(given: argparse.Namespace) -> int:
    from . import build

    print(build.make(Path.cwd(), BUILD))
    return 0


def zip(given: argparse.Namespace) -> int:
    from . import build

    print(build.pack(BUILD))
    return 0


def pdf(given: argparse.Namespace) -> int:
    from . import pdf, run

    wanted = [run.resolve(chapter) for chapter in given.chapters] or run.chapters()
    names = [f"notebooks/{name}" for name in wanted]
    print(*pdf.make(BUILD / "html", BUILD / "pdf", names), sep="\n")
    return 0


def accept(given: argparse.Namespace) -> int:
    from . import build

    for path in build.accept(Path.cwd(), BUILD):
        print(f"updated {path}")
    return 0


def assignments(given: argparse.Namespace) -> int:
    from .coursework import assignments

    for made in assignments.make(Path.cwd(), BUILD, given.homework):
        folder = made.student.parents[1].as_posix()
        print(f"{'made' if made.fresh else 'up to date'}: {folder}")
    return 0


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


def address(given: argparse.Namespace) -> int:
    from . import address

    for path in address.apply(Path.cwd()):
        print(f"updated {path}")
    return 0
