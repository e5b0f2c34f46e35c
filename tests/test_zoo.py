"""The shipped models: whole, documented, and as good as they were meant to be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from iclutils import IclError, models, zoo
from iclutils.chapters.label_words import saliency
from iclutils.chapters.regression import algorithms, distances
from iclutils.files import check_sums
from iclutils.interp import head_scores, readout
from iclutils.interp.readout import target_logits
from iclutils.models import regressors
from iclutils.tasks import topics
from iclutils.tasks.prompts import correct
from iclutils.tasks.regression import Task, sample
from iclutils.tasks.repeated import repeated_tokens

PENALTIES = (0.0, 1 / 16, 1 / 9, 1 / 4, 4 / 9)
BARS = {"accuracy": 0.97, "prefix": 0.80, "previous": 0.70}


@pytest.mark.parametrize("name", zoo.names())
def test_every_file_matches_its_checksum(name: str) -> None:
    folder = zoo.ROOT / name
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS"]
    check_sums(folder, [p.relative_to(folder).as_posix() for p in files], "")
    assert "__pycache__" not in {p.name for p in folder.rglob("*")}


@pytest.mark.parametrize("name", zoo.names())
def test_cards_and_logs_are_there(name: str) -> None:
    card = zoo.read_card(name)
    for needed in ("Data", "Training", "Rebuild", "Limits", "Licence"):
        assert f"**{needed}**" in card
    log = (zoo.ROOT / name / "training.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in log]
    assert rows[-1]["step"] == zoo.steps(name)[-1]
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("name", [n for n in zoo.names() if n.startswith("induction-")])
def test_the_bars_are_met_by_every_seed(name: str) -> None:
    """Fresh sequences, another seed than the chapter's."""
    model = models.load(name)
    batch = repeated_tokens(model, 64, 30, torch.Generator().manual_seed(4242))
    _, right = readout.predictions(model, batch.tokens)
    scores = {k: v.mean(0) for k, v in head_scores.head_scores(model, batch.tokens, 30).items()}
    assert right[:, batch.clean_half].float().mean() >= BARS["accuracy"]
    assert scores["prefix"].max() >= BARS["prefix"]
    assert scores["previous"].max() >= BARS["previous"]


@pytest.mark.parametrize("name", ["anchors-0", "anchors-1", "anchors-2", "anchors-deep"])
def test_anchors_meet_their_bars(name: str) -> None:
    """Fresh prompts: one-shot accuracy, and where saliency flows in the first and deep layers."""
    model = models.load(name)
    asked = topics.sample(1000, torch.Generator().manual_seed(4242))
    logits = target_logits(model, asked, batch_size=250)
    assert correct(asked, logits).float().mean() >= 0.90
    into, read, other = saliency.measure(model, asked[:256]).relative.unbind(-1)
    assert into[0] > max(read[0], other[0])
    deep = slice(model.cfg.n_layers // 2, None)
    assert (read[deep] > torch.maximum(into, other)[deep]).all()


def test_the_control_without_copying_stays_at_chance() -> None:
    model = models.load("anchors-uncopied")
    asked = topics.sample(500, torch.Generator().manual_seed(4242))
    share = correct(asked, target_logits(model, asked, batch_size=250)).float().mean()
    assert 0.15 < share < 0.35


def test_learners_meet_their_bars() -> None:
    """Fresh contexts: least squares without noise, ridge with it; under 15 MB in all."""
    best = {}
    for name in ("regression-d8", "regression-d8-long"):
        drawn = sample(Task(8), 2000, 17, torch.Generator().manual_seed(4242))
        found = distances.ask(regressors.load(name), drawn.xs, drawn.ys)
        apart = distances.spd(found, algorithms.ols(drawn.xs, drawn.ys), 8).mean
        away = [n for n in range(1, 17) if abs(n - 8) > 2]
        best[name] = apart[:, away].max(1).values.min().item()
    assert min(best.values()) <= 0.01
    nearest = {}
    for name in ("regression-d8-long", "regression-noise", "regression-noise-long"):
        net = regressors.load(name)
        for i, task in enumerate(Task(**t) for t in net.tasks):
            drawn = sample(task, 2000, 17, torch.Generator().manual_seed(4242))
            found = distances.ask(net, drawn.xs, drawn.ys)[i]
            rows = {p: algorithms.ridge(drawn.xs, drawn.ys, p) for p in PENALTIES}
            away = {p: distances.mspd(found, g, 8).mean.item() for p, g in rows.items()}
            nearest[task.ridge] = min(away, key=away.__getitem__)
    assert len(nearest) == 5
    assert sum(abs(ratio - found) < 1e-6 for ratio, found in nearest.items()) >= 4
    files = [p for p in zoo.ROOT.glob("regression-*/**/*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 15_000_000


def test_steps_are_ordered_and_about_a_dozen_where_training_is_shown() -> None:
    for name in zoo.names():
        steps = zoo.steps(name)
        assert steps == sorted(steps)
        if name.startswith(("regression-", "lsa-", "contrastive-")):
            continue  # those of one shape and several trainings: test_solver_recipes has the rest
        assert steps[0] == 0
        assert len(steps) >= (2 if name in ("detour", "anchors-uncopied") else 10)


def test_unknown_names_and_steps_are_refused() -> None:
    with pytest.raises(IclError, match=r"Unknown zoo model 'induction'\. Did you mean 'induction-"):
        zoo.steps("induction")
    with pytest.raises(IclError, match="Unknown training step of induction-0 7"):
        zoo.folder("induction-0", 7)
    with pytest.raises(IclError, match="Unknown zoo model"):
        zoo.read_card("nobody")


def test_missing_and_damaged_checkpoints_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(zoo.ROOT / "induction-0", tmp_path / "induction-0")
    monkeypatch.setattr(zoo, "ROOT", tmp_path)
    final = tmp_path / "induction-0" / f"step-{zoo.steps('induction-0')[-1]:05d}"
    weights = final / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    cure = "python -m iclutils train induction-0"
    with pytest.raises(IclError, match=f"damaged.*{cure}"):
        models.load("induction-0")
    weights.unlink()
    with pytest.raises(IclError, match=f"is missing.*{cure}"):
        models.load("induction-0")
    (tmp_path / "induction-0" / "README.md").unlink()
    with pytest.raises(IclError, match="no model card"):
        zoo.read_card("induction-0")
