"""The shipped models: whole, light, and as good as they were meant to be."""

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
from iclutils.interp import head_scores
from iclutils.interp.readout import target_logits
from iclutils.models import lsa, regressors
from iclutils.tasks import topics
from iclutils.tasks.prompts import correct
from iclutils.tasks.regression import Task, sample
from iclutils.tasks.repeated import repeated_tokens
from iclutils.training.lsa import ISOTROPIC

PENALTIES = (0.0, 1 / 16, 1 / 9, 1 / 4, 4 / 9)


def fresh() -> torch.Generator:
    """Draws that neither training nor chapters have seen."""
    return torch.Generator().manual_seed(4242)


@pytest.mark.parametrize("name", zoo.names())
def test_files_cards_and_logs_are_whole(name: str) -> None:
    folder = zoo.ROOT / name
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS"]
    check_sums(folder, [p.relative_to(folder).as_posix() for p in files], "")
    card = zoo.read_card(name)
    assert all(f"**{k}**" in card for k in ("Data", "Training", "Rebuild", "Limits", "Licence"))
    rows = [json.loads(line) for line in zoo.log(name).read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["step"] == zoo.steps(name)[-1]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert zoo.steps(name) == sorted(zoo.steps(name))


def test_the_zoo_is_light() -> None:
    assert sum(p.stat().st_size for p in zoo.ROOT.rglob("*") if p.is_file()) < 40e6


@pytest.mark.parametrize("seed", [0, 3])
def test_induction_models_copy_with_induction_heads(seed: int) -> None:
    model = models.load(f"induction-{seed}")
    batch = repeated_tokens(model, 64, 30, fresh())
    right = models.logits(model, batch.tokens)[:, :-1].argmax(-1) == batch.tokens[:, 1:]
    scores = {k: v.mean(0) for k, v in head_scores.score_heads(model, batch.tokens, 30).items()}
    assert right[:, batch.clean_half].float().mean() >= 0.97
    assert scores["prefix"].max() >= 0.8
    assert scores["previous"].max() >= 0.7


@pytest.mark.parametrize("name", ["anchors-0", "anchors-deep"])
def test_anchors_classify_through_their_label_words(name: str) -> None:
    """One-shot accuracy, and where saliency flows in the first and deep layers."""
    model = models.load(name)
    asked = topics.sample(500, fresh())
    logits = target_logits(model, asked, batch_size=250)
    assert correct(asked, logits).float().mean() >= 0.9
    into, read, other = saliency.measure(model, asked[:128]).relative.unbind(-1)
    assert into[0] > max(read[0], other[0])
    deep = slice(model.cfg.n_layers // 2, None)
    assert (read[deep] > torch.maximum(into, other)[deep]).all()


def test_the_control_without_copying_stays_at_chance() -> None:
    asked = topics.sample(500, fresh())
    logits = target_logits(models.load("anchors-uncopied-3"), asked, batch_size=250)
    assert 0.15 < correct(asked, logits).float().mean() < 0.35


def test_regressors_come_near_the_best_predictor() -> None:
    """Least squares without noise; of five penalties, nearest to the task's own or the next."""
    best, nearest = [], {}
    for name in ("regression-d8", "regression-d8-long"):
        drawn = sample(Task(8), 500, 17, fresh())
        found = distances.predict(regressors.load(name), drawn.xs, drawn.ys)
        apart = distances.spd(found, algorithms.ols(drawn.xs, drawn.ys), 8).mean
        away = [n for n in range(1, 17) if abs(n - 8) > 2]
        best.append(apart[:, away].max(1).values.min().item())
    assert min(best) <= 0.01
    for name in ("regression-d8", "regression-noise"):
        net = regressors.load(name)
        for i, task in enumerate(Task(**t) for t in net.tasks):
            drawn = sample(task, 500, 17, fresh())
            found = distances.predict(net.select(i), drawn.xs, drawn.ys)[0]
            rows = {p: algorithms.ridge(drawn.xs, drawn.ys, p) for p in PENALTIES}
            away = {p: distances.mspd(found, g, 8).mean.item() for p, g in rows.items()}
            nearest[task.ridge] = min(away, key=away.__getitem__)
    assert len(nearest) == 5
    order = sorted(nearest)
    steps = [order.index(found) - order.index(ratio) for ratio, found in sorted(nearest.items())]
    assert steps.count(0) >= 3
    assert set(steps) <= {0, 1}  # too strong, if anything


def test_one_linear_layer_reaches_the_closed_form() -> None:
    """Best single step on U(-1/2, 1/2), d = N = 10: s² = 1/12, fourth moment 1/80."""
    variance, fourth, n = 1 / 12, 1 / 80, 10
    spread = (fourth + 9 * variance**2) / n + (n - 1) * variance**2 / n
    best = 0.5 * n * variance * (1 - variance**2 / spread)
    drawn = ISOTROPIC.sample(20_000, 11, fresh())
    with torch.no_grad():
        found = lsa.load("lsa-1")(drawn.xs[None], drawn.ys[None])
    losses = 0.5 * (found - drawn.ys[:, -1]).square().mean(-1)
    assert best == pytest.approx(0.2062, abs=1e-4)
    assert losses.max().item() < 1.03 * best


def test_unknown_names_and_steps_are_refused() -> None:
    with pytest.raises(IclError, match=r"Unknown zoo model 'induction'\. Did you mean 'induction-"):
        zoo.steps("induction")
    with pytest.raises(IclError, match="Unknown training step of induction-0 7"):
        zoo.folder("induction-0", 7)
    with pytest.raises(IclError, match="There is no model 'nobody'"):
        zoo.find("nobody")


def test_missing_and_damaged_checkpoints_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(zoo.ROOT / "induction-0", tmp_path / "induction-0")
    monkeypatch.setattr(zoo, "ROOT", tmp_path)
    weights = zoo.folder("induction-0") / "model.safetensors"
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
