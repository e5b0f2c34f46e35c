"""Each chapter, run once at the mini tier, prints and judges what is committed.

The runs are those of ``make book``, in the same folder: what is up to date is not run again.
Numbers like 3e-10, rounding errors most of them, may differ between processors, by a factor.
"""

import configparser
import math
import re
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock
from tiny import missing

from book._tools import results, run
from iclutils.files import read_json
from iclutils.zoo import smollm2

BUILD = run.ROOT / "_build"
TINY = re.compile(r"\d(?:\.\d+)?e[-+]\d\d")
FACTOR = 3.0
SANITIZE = configparser.ConfigParser(interpolation=None)
SANITIZE.read(Path(__file__).with_name("sanitize.cfg"))


@cache
def ran(appendices):
    """Runs of the chapters, or of their appendices, by name."""
    names = [name for name in run.chapters() if name.endswith("_appendix") == appendices]
    BUILD.mkdir(exist_ok=True)
    with FileLock(BUILD / ".lock"):
        return {done.chapter: done for done in run.run_chapters(names, {}, BUILD)}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.nightly if "_appendix" in name else ())
        for name in run.chapters()
    ]
)
def done(request):
    """The run of a notebook; that of an appendix every night."""
    return ran("_appendix" in request.param)[request.param]


def printed(notebook):
    """The text that each code cell prints or returns, without what depends on the machine."""
    texts = []
    for cell in read_json(notebook)["cells"]:
        tags = cell["metadata"].get("tags", [])
        here = smollm2.NAME not in tags or not missing()
        if cell["cell_type"] == "code" and "nbval-ignore-output" not in tags and here:
            outputs = [out.get("text", out.get("data", {}).get("text/plain", ""))
                       for out in cell["outputs"]]  # fmt: skip
            text = "".join("".join(output) for output in outputs)
            for rule in SANITIZE.sections():
                text = re.sub(SANITIZE[rule]["regex"], SANITIZE[rule]["replace"], text)
            texts.append(text)
    return texts


@pytest.mark.slow
def test_a_chapter_prints_what_is_committed(done):
    fresh, committed = printed(done.notebook), printed(done.source)
    assert [TINY.sub("#", text) for text in fresh] == [TINY.sub("#", text) for text in committed]
    pairs = zip(TINY.findall(" ".join(fresh)), TINY.findall(" ".join(committed)), strict=True)
    for a, b in ((float(a), float(b)) for a, b in pairs):
        assert a == b or 1 / FACTOR < a / (b or math.inf) < FACTOR, f"{a} instead of {b}"


@pytest.mark.slow
def test_verdicts_are_the_committed_ones(done):
    _, differ = results.compare(done)
    assert not [each.cells() for each in differ if each.is_wrong]
