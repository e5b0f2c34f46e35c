"""Chapter 05 beyond its defaults: the paper tier's code path, and a reader's own model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from run_cells import run_cells
from tiny import save_gpt2

from iclutils import models
from iclutils.bookkit import claims, presets
from iclutils.bookkit.run import NOTEBOOKS
from iclutils.files import sha256

NOTEBOOK = NOTEBOOKS / "05_attention_circuits.ipynb"
PAPER = {name for name, claim in claims.ledger("05").items() if "paper" in claim.tiers}
GPT2 = {"05.typical_heads", "05.typical_induction_heads"}  # need twelve layers of twelve heads
BREAKS = {  # only what works can be broken
    name for name, claim in claims.ledger("05").items() if claim.cell in ("failures", "diagnosis")
}
pytestmark = pytest.mark.usefixtures("results_elsewhere")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiers, cut down to a few short sequences."""
    for name in ("mini", "paper"):
        tier = presets.TIERS[name]
        sizes = replace(
            tier.circuits,
            length=12,
            sequences=6,
            patterned=30,
            influenced=6,
            draws=2,
            untrained=1,
            cases=12,
        )
        monkeypatch.setitem(presets.TIERS, name, replace(tier, circuits=sizes))


@pytest.mark.nightly
def test_the_paper_tier_runs_on_a_model_that_has_no_circuit(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub"
    save_gpt2(
        folder,
        vocab_size=90,
        n_positions=64,
        n_layer=3,
        n_head=3,
        n_embd=48,
        bos_token_id=89,
        eos_token_id=89,
    )
    files = {p.name: sha256(p) for p in folder.iterdir() if p.name != "generation_config.json"}
    monkeypatch.setitem(models.HUB, "gpt2", models.HubModel("openai/stand-in", "0" * 40, files))
    monkeypatch.setattr(models, "snapshot_download", lambda *_, **__: str(folder))
    printed = run_cells(NOTEBOOK, tier="paper")
    assert printed.startswith("paper tier, ")
    written = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "results/paper").iterdir()}
    undefined = {line.split()[1] for line in printed.splitlines() if line.startswith("undefined")}
    assert set(written) | undefined == PAPER - GPT2 - BREAKS
    assert "left out: a model that does not do it has nothing to break" in printed
    # random weights have no circuit: the claims can fail, and do
    for name in ("05.behaviour_accuracy", "05.behaviour_gap", "05.pair_formula"):
        assert written[name]["verdict"] == "not reproduced", name
    # what holds for any weights
    assert written["05.flow_forward"]["verdict"] == "reproduced"
    assert written["05.flow_fast"]["verdict"] == "reproduced"
    assert written["05.correlation_basis"]["value"] > 0


@pytest.mark.nightly
def test_a_readers_own_model_gets_numbers_and_no_verdicts(small: None, tmp_path: Path) -> None:
    save_gpt2(tmp_path / "own", n_positions=80, vocab_size=90, bos_token_id=89, eos_token_id=89)
    printed = run_cells(NOTEBOOK, model=str(tmp_path / "own"))
    assert "measured        05.behaviour_gap = " in printed
    assert not any(printed.count(verdict) for verdict in ("reproduced", "corrected", "partly"))
    assert not (tmp_path / "results").exists()
