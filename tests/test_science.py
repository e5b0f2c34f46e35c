"""What a number depends on is found by name: what changes no number changes no hash, and a constant
three calls deep changes that of its own definition."""

from collections.abc import Callable

import pytest

from book._tools import dependencies
from iclutils import science

FILES = {
    "__init__.py": "from .session import begin\n",
    "session.py": """
from . import loading
class Session:
    def load(self, name):
        return self._loaded(name)
    def _loaded(self, name):
        return loading.load(name)
    def check(self, claim, value):
        print(claim, value)
    def lsa(self, name):
        return loading.other(name)
def begin():
    return Session()
""",
    "loading.py": "def load(name):\n    return [len(name)]\n\ndef other(name):\n    return 0\n",
    "interp/__init__.py": "",
    "interp/deep.py": """
from pathlib import Path
import math as m
from ..errors import Wrong
RATE, UNUSED = 0.5, 7
DATA = Path(__file__).parent / "data"
class Scale:
    by: float = RATE
    def times(self, x, more=1):
        total = m.sqrt(x)
        if more < 0:
            raise Wrong("less than nothing")
        return [total * self.by * part for part in range(more)]
def read():
    return (DATA / "words.tsv").read_text()
""",
    "interp/middle.py": """
from . import deep
def middle(x):
    return deep.Scale().times(x) + [len(deep.read())]
""",
    "interp/data/words.tsv": "one\n",
    "chapters/one.py": """
from ..interp.middle import middle
def measure(net, n):
    return middle(net[:n])
""",
    "chapters/two.py": "def measure(net):\n    return 2\n",
    "plots.py": "def draw(x):\n    return x\n",
    "errors.py": "class Wrong(ValueError): pass\n",
}
CELLS = {
    "begin": "import iclutils\nbook = iclutils.begin()\nsizes = book.tier.one",
    "imports": "from iclutils.chapters import one\nfrom iclutils.plots import draw",
    "load": "net = book.load('a')",
    "measure": "found = {}\nfor name in ('a', 'b'):\n    found[name] = one.measure(net, sizes.n)",
    "show": "figure = draw(found)\nfigure.title('What was found')",
    "check": "def judge(claim):\n    book.check(claim, found)\njudge('01.first')",
}
Told = Callable[..., science.Science]


@pytest.fixture
def told(tmp_path, monkeypatch):
    """``told(files, **cells)``: the science of a notebook in a package, with changes."""
    package = tmp_path / "iclutils"
    monkeypatch.setattr(science, "PACKAGE", package)
    caches = dependencies.of_notebook, science._module, science._definition, science._session

    def made(files=None, **cells):
        code = {package / name: text.encode() for name, text in (FILES | (files or {})).items()}
        monkeypatch.setattr(science, "sources", lambda: code)
        for cache in caches:
            cache.cache_clear()
        found, sizes = dependencies.of_notebook(tuple((CELLS | cells).values()))
        assert sizes == {"one"}
        return found

    yield made
    for cache in caches:
        cache.cache_clear()


def differing(one, other):
    return {name for name in one | other if one.get(name) != other.get(name)}


def edited(name, *pairs):
    text = FILES[name]
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return {name: text}


def test_what_a_check_can_reach_is_told_by_name(told):
    package = {"load", "measure", "middle", "Scale", "RATE", "read", "DATA"}
    assert told().keys() == package | {"net", "sizes", "found", "judge", "01.first"}


@pytest.mark.parametrize(
    "files",  # a docstring and comment, annotations, an import, local names, a message, a refusal,
    # beside it, a file renamed, a function moved, another chapter, not called, plots, how said
    [
        edited("interp/deep.py", ("def read():\n", 'def read():\n    """Words."""  # all\n\n\n')),
        edited("interp/deep.py", ("x, more=1):", "x: float, more: int = 1) -> list:")),
        edited("interp/deep.py", ("import math as m", "import math"), ("m.sqrt", "math.sqrt")),
        edited("interp/deep.py", ("total", "root"), ("part", "each")),
        edited("interp/deep.py", ('"less than nothing"', '"another message"')),
        edited("interp/deep.py", ("more < 0", "more <= -1")),
        edited("interp/deep.py", ("UNUSED = 0.5, 7", "UNUSED = 0.5, 8")),
        {
            "interp/moved.py": FILES["interp/deep.py"],
            **edited("interp/middle.py", ("deep", "moved")),
        },
        {
            "interp/middle.py": "from ..models.here import middle\n",
            "models/here.py": "from ..interp.deep import Scale, read\n"
            "def middle(x):\n    return Scale().times(x) + [len(read())]\n",
        },
        edited("chapters/two.py", ("2", "3")),
        edited("loading.py", ("return 0", "return 1")),
        edited("plots.py", ("return x", "return -x")),
        edited("session.py", ("print(claim, value)", "print(value)")),
    ],
)
def test_what_changes_no_number_changes_nothing(told, files):
    assert told() == told(files)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (edited("interp/deep.py", ("0.5", "0.6")), {"RATE"}),
        (edited("interp/deep.py", ("total * self", "total / self")), {"Scale"}),
        (edited("interp/deep.py", ("more=1", "more=2")), {"Scale"}),
        (edited("interp/deep.py", ("m.sqrt", "m.exp")), {"Scale"}),
        (edited("interp/deep.py", ("import math as m", "import cmath as m")), {"Scale"}),
        ({"interp/data/words.tsv": "two\n"}, {"DATA"}),
        (edited("loading.py", ("[len(name)]", "[1 + len(name)]")), {"load"}),
    ],
)
def test_what_may_change_a_number_changes_its_definition(told, files, names):
    assert differing(told(), told(files)) == names


def test_of_a_notebook_what_computes_counts_and_what_shows_does_not(told):
    before = told()
    assert before == told(show="figure = draw([found, net])\nfigure.title('Another')\nprint(found)")
    assert differing(before, told(measure=CELLS["measure"].replace("'b'", "'c'"))) == {"found"}
    assert differing(before, told(show="found.update(c=3)")) == {"found"}
    assert differing(before, told(check=CELLS["check"].replace("first", "other"))) == {
        "01.first",
        "01.other",
    }
    counts = "def count():\n    found.update(c=3)\n"
    assert differing(before, told(show=f"{counts}count()")) == {"count"}
    assert before == told(show=counts)
    tossed = {
        "load": "net, coin = book.load('a'), book.generator('one')",
        "check": "book.check('01.first', [coin, sizes])",
    }
    assert differing(told(**tossed), told(**tossed, show="shown = coin.tossed()")) == {"shown"}
    inside = "def judge():\n    book.check('01.first', found)\njudge()"
    assert "found" in told(check=inside), "a check in a function that is called"
    assert differing(before, told(begin="found = 1\n" + CELLS["begin"])) == set(), "made anew"
    drawn = "if found:\n    found, figure = found, draw(found, 'A title')"
    assert before != told(show=drawn) == told(show=drawn.replace("A", "Another")), "its words"
