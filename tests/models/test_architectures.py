"""The table *Architectures*: every measure equals transformers alone, or is refused."""

import json
import re

import pytest

from tools import architectures

STORED = json.loads((architectures.PAGES / "table.json").read_text())["rows"]
# Measures that are not right yet on every architecture: interp is to refuse or mend them.
LATER = ()
OFTEN = ("GPT-2", "Llama-3", "Gemma-2", "BLOOM", "GPT-OSS")  # the others at night


def test_the_table_is_whole_and_every_number_in_it_is_rounding():
    assert list(STORED) == list(architectures.CASES)
    for name, row in STORED.items():
        assert list(row) == list(architectures.MEASURES), name
        assert are_exact(row), name
    assert (architectures.PAGES / "table.md").read_text() == architectures.table(STORED)


def are_exact(row):
    return all(architectures.is_exact(x) for what, x in row.items() if what not in LATER)


def refusals(row):
    """The sentences, without what rounding may change in them."""
    told = {what: x for what, x in row.items() if isinstance(x, str) and what not in LATER}
    return {what: re.sub(r"[\d.e-]+ nats", "some nats", x) for what, x in told.items()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OFTEN else pytest.mark.nightly)
        for name in architectures.CASES
    ],
)
def test_a_row_is_made_again(name):
    """As large a difference, up to rounding, or the very sentence."""
    row = architectures.measure(name)
    assert are_exact(row), row
    assert refusals(row) == refusals(STORED[name])
