"""The reference: every module of the science is on a page, and the examples in docstrings run."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
from tiny import language_model

import iclutils
from book._ext import api

BOOK = Path(__file__).parents[2] / "book/api"
PACKAGE = Path(iclutils.__file__).parent


def packages():
    """Names in the directives of the pages."""
    found = "".join(path.read_text(encoding="utf-8") for path in BOOK.glob("*.md"))
    return "".join(re.findall(r"```{api}\n(.*?)```", found, re.DOTALL)).split()


SHOWN = sorted(module for name in packages() for module in api.modules(name))


def test_every_module_of_the_science_is_on_one_page():
    assert len(SHOWN) == len(set(SHOWN))
    parts = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert parts <= {name.removeprefix("iclutils.") for name in packages()}


def run(text, names, what):
    """Run the examples of a docstring with these names; skip where the model they take is not."""
    if 'load("smollm2")' in text:
        language_model()
    test = doctest.DocTestParser().get_doctest(text, names, what, None, 0)
    test.globs = names  # the parser made a copy
    report = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, report.append, clear_globs=False)
    assert not report, "".join(report)


@pytest.mark.usefixtures("results_elsewhere")
@pytest.mark.parametrize("name", SHOWN)
def test_examples_run(name):
    """The lines of a module first, then of each function those and its own."""
    module = importlib.import_module(name)
    start = {}
    run(inspect.getdoc(module) or "", start, name)
    for function, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == name and function[0] != "_":
            run(inspect.getdoc(value) or "", dict(start), f"{name}.{function}")
