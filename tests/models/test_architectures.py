"""The table *Architectures*: every measure equals transformers alone, or is refused."""

import json
import re
from dataclasses import replace

import pytest

from iclutils import IclError, models
from iclutils.interp import invariants
from tools import architectures
from tools.architectures import CASES, MEASURES

STORED = json.loads((architectures.PAGES / "table.json").read_text())["rows"]
OFTEN = {"GPT-2", "Llama-3", "Gemma-2", "BLOOM", "GPT-OSS", "Granite", "Phi", "Falcon, ALiBi"}
OFTEN |= {"GPT-1", "OPT, post-norm"}  # a part that others have is lacking


def test_the_table_is_whole_and_every_number_in_it_is_rounding():
    assert list(STORED) == list(CASES)
    for name, row in STORED.items():
        assert list(row) == list(MEASURES), name
        assert all(map(architectures.is_exact, row.values())), name
    assert (architectures.PAGES / "table.md").read_text() == architectures.table(STORED)


def refusals(row):
    """The sentences, without what rounding may change in them."""
    told = {what: x for what, x in row.items() if isinstance(x, str)}
    return {what: re.sub(r"[\d.e-]+ nats|by [\d.e-]+ of", "", x) for what, x in told.items()}


# Would catch what a head writes read before a norm or a factor, a norm whose scale is frozen where
# it is computed anew, a reader whose hook never fires (its edges are exactly 0), a restart above a
# layer that the architecture ignores, an option that TransformerLens ignores.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.nightly) for name in CASES],
)
def test_a_row_is_made_again(name):
    """As large a difference, up to rounding, or the very sentence."""
    row = architectures.measure(name)
    assert {k: x for k, x in row.items() if not architectures.is_exact(x)} == {}
    assert refusals(row) == refusals(STORED[name])


# Folding moves what values add by their bias out of the heads; these have none.
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Llama, grouped", "Granite", "Gemma-3", "Cohere"])
def test_direct_effects_after_folding(name, tmp_path):
    case = architectures.Case.of(name, tmp_path)
    folded = replace(case, model=models.load(tmp_path, fold=True))
    assert architectures.direct_effects(folded) <= architectures.EXACT


def test_a_model_that_fits_no_known_way_is_refused(tmp_path, monkeypatch):
    case = architectures.Case.of("Phi", tmp_path)
    monkeypatch.setattr(case.model.cfg, "parallel_attn_mlp", False)
    with pytest.raises(IclError, match=r"\(phi\).* what the MLP reads is no norm .* off by \d"):
        architectures.edges(case, "qkv")
    monkeypatch.undo()
    case = replace(case, model=models.load(tmp_path))  # a model is tried once
    case.model.set_use_hook_mlp_in(True)
    monkeypatch.setitem(invariants.EDITED, "hook_mlp_in", (3, 2))
    with pytest.raises(IclError, match=r"nothing ever passes blocks\.0\.hook_mlp_in"):
        architectures.direct_effects(case)
