"""The reference: every module of the science is on a page, and the examples run."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
from tiny import language_model

from book._ext import api

BOOK = Path(__file__).parents[2] / "book/api"
PACKAGE = Path(api.iclutils.__file__).parent


def listed(page, directive):
    """The modules that a directive of a page stands for."""
    found = re.search(rf"```{{{directive}}}\n(.*?)```", page.read_text(), re.DOTALL)
    return [module for name in found[1].split() for module in api.modules(name)] if found else []


SHOWN = sorted(module for page in BOOK.glob("*.md") for module in listed(page, "api"))
PARTS = r"iclutils\.((models|tasks|interp|zoo|plots|errors)\b.*|chapters\..*)"
SCIENCE = [name for name in SHOWN if re.fullmatch(PARTS, name)]


def test_every_module_of_the_science_is_on_one_page_and_in_the_table():
    assert len(SHOWN) == len(set(SHOWN))
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    names = {".".join(("iclutils", *path.parts)).removesuffix(".__init__") for path in paths}
    science = {name for name in names if re.fullmatch(PARTS, name) and "._" not in name}
    empty = {name for name in science if not inspect.getdoc(importlib.import_module(name))}
    assert science - empty == set(SCIENCE)
    assert set(listed(BOOK / "index.md", "modules")) == set(SCIENCE)


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
