"""Recipes, what they draw and minimise; the shipped models: theirs, whole and light."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_recipes import linear, regressor

import training as recipes
from iclutils import IclError, models, zoo
from iclutils.files import check_sums
from iclutils.models import lsa as lsa_models
from iclutils.models import regressors
from iclutils.tasks import generator
from iclutils.tasks.regression import Task, sample
from training import curves, induction, language, loop, lsa, regression


@pytest.mark.parametrize("name", recipes.names())
def test_a_shipped_model_is_that_of_its_recipe(name):
    plan = recipes.recipe(name)
    assert zoo.steps(name) == sorted(plan.kept or plan.checkpoints)
    assert (zoo.model_folder(name) / "curves.jsonl").is_file() == bool(plan.curve)
    assert not plan.curve or zoo.curves(name)["step"] == list(plan.checkpoints)
    if isinstance(plan, language.LanguageRecipe):
        config = models.load(name).cfg
        assert (config.n_layers, config.n_heads) == (plan.config.n_layer, plan.config.n_head)
        assert (config.d_vocab, config.n_ctx) == (plan.config.vocab_size, plan.config.n_positions)
        return
    kind = lsa_models if isinstance(plan, lsa.LsaRecipe) else regressors
    shipped = kind.load(name)
    assert (shipped.shape, shipped.seeds) == (plan.shape, plan.seeds)
    assert shipped.tasks == json.loads(json.dumps(plan.network().tasks))


@pytest.mark.parametrize(("name", "load"), [("induction-3", None), ("lsa-2", lsa_models.load)])
def test_the_weights_of_step_0_are_drawn_again_bit_for_bit(name, load):
    drawn = recipes.recipe(name).network().state_dict()
    stored = load(name, step=0).state_dict() if load else None
    stored = stored or load_file(zoo.folder(name, 0) / "model.safetensors")
    for key, value in stored.items():
        assert torch.equal(drawn[key].to(value.dtype), value)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("measure", "name", "steps"),
    [(curves.copying, "induction-3", (850, 1000)), (curves.classifying, "anchors-3", (3000,))],
)
def test_a_logged_curve_is_what_the_kept_checkpoints_give(measure, name, steps):
    logged = zoo.curves(name)
    rows = measure(zoo.model_folder(name), steps)
    at = [logged["step"].index(step) for step in steps]
    for key, values in logged.items():
        expected = [values[i] for i in at]
        if key in ("similarity", "floor"):
            expected[0] = None
        for row, value in zip(rows, expected, strict=True):
            assert row[key] == (pytest.approx(value, abs=1e-4) if value is not None else None)


def test_the_induction_data_repeat_and_depend_on_step_and_seed():
    tokens, positions, _ = induction.recipe(0).batch(7)
    assert torch.equal(tokens, induction.recipe(0).batch(7).tokens)
    assert not torch.equal(tokens, induction.recipe(1).batch(7).tokens)
    assert (tokens[:, 0] == induction.BOS).all()
    for row in tokens[:, 1:].tolist():
        periods = [p for p in range(12, 33) if row[p:] == row[:-p]]
        assert periods, "a sequence does not repeat with a period of 12 to 32"
    starts = positions[:, 0]
    assert torch.equal(positions, starts[:, None] + torch.arange(induction.LENGTH - 1))
    assert int(starts.max()) + induction.LENGTH - 1 <= 96
    assert len(set(starts.tolist())) > 5


@pytest.mark.parametrize("make", [regressor, linear])
def test_networks_train_together_as_they_would_alone(tmp_path, make):
    """Clipping, too, is each network's own: with a small clip it acts at every step."""
    both = make("noisy", members=slice(2))
    loop.train(both, tmp_path / "both", progress=False)
    together = load_file(tmp_path / "both" / "step-00012" / "model.safetensors")
    for i in range(2):
        loop.train(make("noisy", members=slice(i, i + 1)), tmp_path / f"{i}", progress=False)
        alone = load_file(tmp_path / f"{i}" / "step-00012" / "model.safetensors")
        for name, value in alone.items():
            torch.testing.assert_close(together[name][i : i + 1], value, atol=2e-3, rtol=2e-2)
    first = both.network().state_dict()
    moved = max((together[n].float() - v).abs().max().item() for n, v in first.items())
    assert moved > 1e-3


@pytest.mark.parametrize(("make", "half"), [(regressor, 1.0), (linear, 0.5)])
def test_the_loss_of_a_network_that_says_0_is_the_square_of_what_is_asked(make, half):
    """Of regressors every y of a context, of linear attention half of the query's."""
    plan = make("noisy")
    network = plan.network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    expected = 0.0
    for seed, task in zip(plan.seeds, plan.tasks, strict=True):
        source = torch.Generator().manual_seed(seed * 1_000_003 + 7)
        if make is regressor:
            ys = sample(task, plan.batch, 5, source).ys
        else:
            ys = task.sample(plan.batch, 4, source).ys[:, -1]
        expected += half * np.mean(ys.double().numpy() ** 2)
    assert plan.loss(network, 7).item() == pytest.approx(expected, rel=1e-5)
    assert plan.loss(network, 8).item() != pytest.approx(expected, rel=1e-3)


def test_the_stored_distances_are_those_to_numpys_least_squares():
    xs, ys, _ = (part[:200] for part in sample(Task(8), 2000, 17, generator("map")))
    predicted = regressors.load("regression-w8")(xs, ys)[0].double().numpy()
    x, y = xs.double().numpy(), ys.double().numpy()
    squares = [
        (predicted[i, n] - x[i, n] @ np.linalg.lstsq(x[i, :n], y[i, :n], rcond=None)[0]) ** 2
        for i in range(len(x))
        for n in range(1, 17)
    ]
    stored = regression.depth_width()[4, 8]["OLS"][0]
    assert stored == pytest.approx(np.mean(squares) / 8, rel=3e-3)


@pytest.mark.parametrize("name", zoo.names())
def test_files_cards_and_logs_are_whole(name):
    folder = zoo.ROOT / name
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS"]
    check_sums(folder, [p.relative_to(folder).as_posix() for p in files], "")
    card = zoo.read_card(name)
    assert all(f"**{k}**" in card for k in ("Data", "Training", "Rebuild", "Limits", "Licence"))
    rows = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == zoo.steps(name)[-1]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert zoo.steps(name) == sorted(zoo.steps(name))


def test_the_zoo_is_light():
    assert sum(p.stat().st_size for p in zoo.ROOT.rglob("*") if p.is_file()) < 40e6


def test_missing_and_damaged_checkpoints_are_refused(tmp_path, monkeypatch):
    shutil.copytree(zoo.ROOT / "induction-0", tmp_path / "induction-0")
    monkeypatch.setattr(zoo, "ROOT", tmp_path)
    weights = zoo.folder("induction-0") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    cure = "python -m training induction-0"
    with pytest.raises(IclError, match=f"damaged.*{cure}"):
        models.load("induction-0")
    weights.unlink()
    with pytest.raises(IclError, match=f"is missing.*{cure}"):
        models.load("induction-0")
