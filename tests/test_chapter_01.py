"""Chapter 01 beyond its defaults: the paper tier's code path, and a reader's own model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from run_cells import run_cells
from tiny import save_gpt2

from iclutils import IclError, models
from iclutils.bookkit import claims, presets
from iclutils.bookkit.run import NOTEBOOKS
from iclutils.files import sha256

NOTEBOOK = NOTEBOOKS / "01_gpt2_induction.ipynb"
PAPER = {name for name, claim in claims.ledger("01").items() if "paper" in claim.tiers}
pytestmark = pytest.mark.usefixtures("results_elsewhere")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with GPT-2 small's layers and heads, narrow, random, in the hub's format.

    It takes the place of ``gpt2`` at a pinned revision; sizes of the tier are cut down.
    """
    folder = tmp_path / "hub"
    save_gpt2(
        folder,
        vocab_size=400,
        n_positions=128,
        n_layer=12,
        n_head=12,
        n_embd=48,
        bos_token_id=399,
        eos_token_id=399,
    )
    files = {p.name: sha256(p) for p in folder.iterdir() if p.name != "generation_config.json"}
    monkeypatch.setitem(models.HUB, "gpt2", models.HubModel("openai/stand-in", "0" * 40, files))
    monkeypatch.setattr(models, "snapshot_download", lambda *_, **__: str(folder))
    paper = presets.TIERS["paper"]
    small = replace(paper.induction, sequences=4, sweeps=1, pairs=3)
    monkeypatch.setitem(presets.TIERS, "paper", replace(paper, induction=small))
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("parameters", [{"tier": "paper"}, {"model": "gpt2"}], ids=str)
def test_the_paper_tier_checks_every_claim(
    stand_in: Path, tmp_path: Path, parameters: dict[str, str]
) -> None:
    printed = run_cells(NOTEBOOK, **parameters)
    assert printed.startswith("paper tier, ")
    written = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "results/paper").iterdir()}
    assert set(written) == PAPER
    assert {r["model"] for r in written.values()} == {"gpt2"}
    # random weights have no circuit: the claims can fail, and do
    for name in ("prefix_best", "clean_accuracy", "stripe_5_5", "circuit_top1", "cause_loss"):
        if f"01.{name}" in PAPER:
            assert written[f"01.{name}"]["verdict"] == "not reproduced"
    assert written["01.detector_agrees"]["verdict"] == "reproduced"


@pytest.mark.nightly
def test_a_readers_own_model_gets_numbers_and_no_verdicts(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "own", n_positions=80, vocab_size=90, bos_token_id=89, eos_token_id=89)
    printed = run_cells(NOTEBOOK, model=str(tmp_path / "own"))
    assert "measured        01.prefix_best = " in printed
    assert not any(printed.count(verdict) for verdict in ("reproduced", "corrected", "partly"))
    assert not (tmp_path / "results").exists()


def test_a_model_with_too_short_a_context_says_so(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "own", n_positions=40)
    with pytest.raises(IclError, match="L = 30 needs 61 positions and the model has 40"):
        run_cells(NOTEBOOK, model=str(tmp_path / "own"))
