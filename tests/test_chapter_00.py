"""The tour beyond its defaults: a seed, and a reader's own model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from notebook_rules import source
from run_cells import run_cells
from tiny import save_gpt2

from iclutils import IclError
from iclutils.bookkit import claims, presets
from iclutils.bookkit.run import NOTEBOOKS
from iclutils.files import read_json

NOTEBOOK = NOTEBOOKS / "00_tour.ipynb"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mini tier, with fewer contexts and sequences."""
    tier = presets.TIERS["mini"]
    fewer = replace(
        tier,
        regression=replace(tier.regression, contexts=300),
        circuits=replace(tier.circuits, sequences=6),
    )
    monkeypatch.setitem(presets.TIERS, "mini", fewer)


@pytest.mark.nightly
def test_another_seed_tells_the_same_story(small: None) -> None:
    printed = run_cells(NOTEBOOK, seed=1)
    assert printed.startswith("mini tier, the tier's own models, seed 1")
    said, right = re.findall(r"^(?:model|right): (.+)$", printed, re.M)
    assert said == right
    assert "into labels: layer 0; from labels: layer 3" in printed
    assert "most prefix matching: head 1." in printed
    assert "right with the steps: 1.0; without: 0.0" in printed
    enough = re.search(r"^(\d+) of 479 wires", printed, re.M)
    assert enough is not None
    assert 10 <= int(enough[1]) <= 40


@pytest.mark.nightly
def test_a_readers_own_model_gets_what_it_can_be_asked(small: None, tmp_path: Path) -> None:
    save_gpt2(tmp_path / "own", n_positions=80, vocab_size=90, bos_token_id=89, eos_token_id=89)
    printed = run_cells(NOTEBOOK, model=str(tmp_path / "own"))
    assert "3 layers of 4 heads" in printed
    assert "does not read our made-up texts" in printed
    assert "iclutils.show('02', demonstrations=..., query=...)" in printed
    assert "nearest of 34 algorithms" in printed
    assert "of 262 wires" in printed


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(IclError, match="There is no folder"):
        run_cells(NOTEBOOK, model="./nowhere")


def test_the_tour_leads_to_every_chapter_and_to_claims_of_each() -> None:
    text = "\n".join(source(cell) for cell in read_json(NOTEBOOK)["cells"])
    for name in claims.chapters():
        number = name[:2]
        assert f"<{name}>`" in text
        rows = re.findall(rf"<claim-({number}-[\w-]+)-mini>", text)
        assert rows, number
        known = {claim.replace(".", "-").replace("_", "-") for claim in claims.ledger(number)}
        assert set(rows) <= known
