"""Chapter 02 beyond its defaults: the paper tier's code path, and a reader's own model."""

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

NOTEBOOK = NOTEBOOKS / "02_label_anchors.ipynb"
PAPER = {name for name, claim in claims.ledger("02").items() if "paper" in claim.tiers}
pytestmark = pytest.mark.usefixtures("results_elsewhere")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiers, cut down to a few prompts and one model."""
    for name in ("mini", "paper"):
        tier = presets.TIERS[name]
        sizes = replace(
            tier.label_words,
            models=tier.label_words.models[:1],
            prompts=20,
            saliency_prompts=6,
            many_shots=2,
            sets=2,
            queries=24,
            train_per_class=2,
            epochs=1,
        )
        monkeypatch.setitem(presets.TIERS, name, replace(tier, label_words=sizes))


@pytest.mark.nightly
@pytest.mark.shared
def test_the_paper_tier_runs_offline_on_real_rows(
    small: None, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {p.name: sha256(p) for p in text_model.iterdir() if p.name != "generation_config.json"}
    stand_in = models.HubModel("openai-community/stand-in", "0" * 40, files)
    monkeypatch.setitem(models.HUB, "gpt2-xl", stand_in)
    monkeypatch.setattr(models, "snapshot_download", lambda *_, **__: str(text_model))
    printed = run_cells(NOTEBOOK, tier="paper", tasks="sst2,trec,ag_news")
    assert printed.startswith("paper tier, ")
    written = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "results/paper").iterdir()}
    undefined = {line.split()[1] for line in printed.splitlines() if line.startswith("undefined")}
    emoc = {name for name in PAPER if name.endswith("emoc")}  # its rows are nowhere to be had
    assert set(written) | undefined == PAPER - emoc
    assert not set(written) & undefined
    # random weights have no anchors: the claims can fail, and do; the instruments work
    for name in ("02.isolate_first", "02.beats_text", "02.reweighting", "02.swp_shallow"):
        assert written[name]["verdict"] == "not reproduced"
    assert written["02.exact"]["verdict"] == "reproduced"
    assert written["02.last_layer_is_blind"]["verdict"] == "corrected"
    assert written["02.few_shot_is_not_training"]["value"] == 0


@pytest.mark.nightly
@pytest.mark.shared
def test_a_readers_own_text_model_gets_numbers_and_no_verdicts(
    small: None, text_model: Path, tmp_path: Path
) -> None:
    printed = run_cells(NOTEBOOK, model=str(text_model))
    assert "sst2" in printed
    assert "measured        02.hidden_anchor = " in printed
    assert not any(printed.count(verdict) for verdict in ("reproduced", "corrected", "partly"))
    assert not (tmp_path / "results").exists()


def test_topics_need_their_own_vocabulary(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "own", n_positions=80, vocab_size=90, bos_token_id=89, eos_token_id=89)
    with pytest.raises(IclError, match="choose a text task"):
        run_cells(NOTEBOOK, model=str(tmp_path / "own"), tasks="topics")
    with pytest.raises(IclError, match=r"Unknown task 'sst3'\. Did you mean 'sst2'"):
        run_cells(NOTEBOOK, model=str(tmp_path / "own"), tasks="sst3")
