"""The reference: the examples of the public functions run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import iclutils

PACKAGE = Path(iclutils.__file__).parent
# What makes the book and marks coursework; nobody points it at a model.
MACHINERY = ("__init__", "__main__", "bookkit")
OPTIONS = doctest.ELLIPSIS


def modules() -> list[str]:
    """Every module of the package that the reference shows."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in MACHINERY and not re.match("_[a-z]", parts[-1]):
            names.append(".".join(("iclutils", *parts)).removesuffix(".__init__"))
    return names


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions that a module defines and does not hide."""
    for name, value in vars(module).items():
        own = getattr(value, "__module__", "") == module.__name__
        if own and inspect.isfunction(value) and not name.startswith("_"):
            yield name, value


def run(text: str, names: dict[str, Any], what: str) -> int:
    """Run the examples of a docstring with these names; return how many there are."""
    test = doctest.DocTestParser().get_doctest(text, names, what, None, 0)
    test.globs = names  # the parser made a copy
    report: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
    return len(test.examples)


@pytest.mark.usefixtures("results_elsewhere")
@pytest.mark.parametrize("name", modules())
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    start: dict[str, Any] = {}
    run(inspect.getdoc(module) or "", start, name)
    for function, value in public(module):
        run(inspect.getdoc(value) or "", dict(start), function)


def test_an_example_that_is_wrong_is_noticed() -> None:
    with pytest.raises(AssertionError, match="Expected"):
        run(">>> 1 + 1\n3\n", {}, "wrong")


def test_no_example_is_skipped() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert "doctest: +SKIP" not in path.read_text(), path
