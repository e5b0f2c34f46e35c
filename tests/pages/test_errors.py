"""The page about errors: what it shows is what happens."""

import re
from pathlib import Path

import pytest

from iclutils import IclError

PAGE = (Path(__file__).parents[2] / "book/errors.md").read_text(encoding="utf-8")
# For each kind of error its message, and the lines that bring it about if there are some.
KINDS = {
    section.partition("\n")[0]: re.findall(r"^```(?:text|python)\n(.*?)^```", section, re.S | re.M)
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
}
# What cannot be brought about safely, or not on every machine.
WITHOUT = {
    *("A chapter that stopped", "A chapter that was not run", "A part that is not installed"),
    *("Coursework that cannot be derived or graded", "The book does not build"),
    *("The hub cannot be reached", "Values that are not the committed ones"),
}


def test_which_kinds_have_examples():
    assert {kind for kind, blocks in KINDS.items() if len(blocks) == 1} == WITHOUT


@pytest.mark.usefixtures("results_elsewhere")
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - WITHOUT))
def test_an_example_raises_what_is_shown(kind):
    shown, example = KINDS[kind]
    with pytest.raises(IclError) as caught:
        exec(example, {})
    said = re.sub(r"/\S*/tmp\w+", "FOLDER", str(caught.value))
    assert said.split() == shown.split()
