"""Chapter 04 beyond its defaults: the paper tier's code path, and a reader's own transformer."""

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
from iclutils.training import loop
from iclutils.training import lsa as lsa_recipes

NOTEBOOK = NOTEBOOKS / "04_contrastive_gd.ipynb"
PAPER = {name for name, claim in claims.ledger("04").items() if "paper" in claim.tiers}
pytestmark = pytest.mark.usefixtures("results_elsewhere")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiers, cut down to a few contexts, draws and prompts."""
    for name in ("mini", "paper"):
        tier = presets.TIERS[name]
        sizes = replace(tier.gradient_descent, contexts=400, tuned=400, draws=4, prompts=6)
        monkeypatch.setitem(presets.TIERS, name, replace(tier, gradient_descent=sizes))


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper tier's solvers, each with its name and shape, trained for a moment."""
    monkeypatch.setenv("ICLUTILS_TRAINED", str(tmp_path / "trained"))
    for name in lsa_recipes.PAPER:
        plan = lsa_recipes.recipe(name)
        hasty = replace(plan, steps=30, batch=32, log_every=10, checkpoints=(0, 10, 30))
        loop.train(hasty, tmp_path / "trained" / name, progress=False)


@pytest.mark.nightly
@pytest.mark.shared
def test_the_paper_tier_runs_offline_on_solvers_that_were_trained_here(
    small: None, trained: None, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {p.name: sha256(p) for p in text_model.iterdir() if p.name != "generation_config.json"}
    stand_in = models.HubModel("openai-community/stand-in", "0" * 40, files)
    monkeypatch.setitem(models.HUB, "gpt2", stand_in)
    monkeypatch.setattr(models, "snapshot_download", lambda *_, **__: str(text_model))
    printed = run_cells(NOTEBOOK, tier="paper")
    assert printed.startswith("paper tier, ")
    written = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "results/paper").iterdir()}
    undefined = {line.split()[1] for line in printed.splitlines() if line.startswith("undefined")}
    assert set(written) | undefined == PAPER
    assert len(undefined) < 6  # a random transformer copies nothing: its shares are 0 of 0
    # networks that were hardly trained take no step: the claims can fail, and do
    for name in ("04.one_cosine", "04.one_loss", "04.two_like_plus", "04.five_shared_plus"):
        assert written[name]["verdict"] == "not reproduced", name
    # the identities hold for any weights
    for name in ("04.stacks", "04.kernel", "04.dual_step", "04.head_identity", "04.head_step"):
        assert written[name]["verdict"] == "reproduced", name
    assert written["04.sign"]["verdict"] == "corrected"


def test_the_paper_tier_says_how_to_train_its_solvers(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ICLUTILS_TRAINED", str(tmp_path / "nothing"))
    with pytest.raises(IclError, match=r"python -m iclutils train lsa-paper-1"):
        run_cells(NOTEBOOK, tier="paper")


@pytest.mark.nightly
def test_a_readers_own_transformer_gets_numbers_and_no_verdicts(
    small: None, tmp_path: Path
) -> None:
    save_gpt2(tmp_path / "own", n_positions=80, vocab_size=90, bos_token_id=89, eos_token_id=89)
    printed = run_cells(NOTEBOOK, model=str(tmp_path / "own"))
    assert "measured        04.head_identity = " in printed
    assert not any(printed.count(verdict) for verdict in ("reproduced", "corrected", "partly"))
    assert not (tmp_path / "results").exists()


@pytest.mark.nightly
def test_a_transformer_with_too_short_a_context_says_so(small: None, tmp_path: Path) -> None:
    save_gpt2(tmp_path / "own", n_positions=40, vocab_size=90, bos_token_id=89, eos_token_id=89)
    with pytest.raises(IclError, match=r"46 tokens.*40|40.*46"):
        run_cells(NOTEBOOK, model=str(tmp_path / "own"))
