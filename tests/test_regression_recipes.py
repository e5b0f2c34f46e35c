"""Recipes of learners: one program for all members, each as it would be alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_training import digests
from test_training_sweep import plan

from iclutils import training, zoo
from iclutils.models import regressors
from iclutils.models.regressors import Shape
from iclutils.tasks.regression import Task
from iclutils.training import loop, regression


def test_members_train_together_as_they_would_alone(tmp_path: Path) -> None:
    """Clipping, too, is each member's own: with a small clip it acts at every step."""
    shape = Shape(2, 5, "two", 1, 8, 2)
    members = [(0, Task(2)), (5, Task(2, noise=2.0))]
    both = replace(regression.group("both", "cpu", shape, members, steps=10), clip=0.05)
    loop.train(both, tmp_path / "both", progress=False)
    together = load_file(tmp_path / "both" / "step-00010" / "model.safetensors")
    for i, member in enumerate(members):
        one = replace(regression.group("one", "cpu", shape, [member], steps=10), clip=0.05)
        loop.train(one, tmp_path / f"one-{i}", progress=False)
        alone = load_file(tmp_path / f"one-{i}" / "step-00010" / "model.safetensors")
        for name, value in alone.items():
            torch.testing.assert_close(together[name][i : i + 1], value, atol=2e-3, rtol=2e-2)
    first = regressors.Learners(shape, [0]).state_dict()["read_in.weight"]
    assert (together["read_in.weight"][:1].float() - first).abs().max() > 0.01


def test_an_interrupted_training_of_learners_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two optimisers, of which each keeps its own state."""
    monkeypatch.setattr(loop, "SAVE_EVERY", 4)
    whole = loop.train(plan("plain", steps=12), tmp_path / "whole", progress=False)
    steps: list[int] = []

    class Cut(regression.RegressionRecipe):
        def loss(self, network: torch.nn.Module, step: int) -> torch.Tensor:
            steps.append(step)
            if step == 10 and steps.count(10) == 1:
                raise KeyboardInterrupt
            return super().loss(network, step)

    base = plan("plain", steps=12)
    broken = Cut(**{name: getattr(base, name) for name in base.__dataclass_fields__})
    for _ in range(2):
        try:
            loop.train(broken, tmp_path / "cut", progress=False)
        except KeyboardInterrupt:
            continue
    assert steps == [*range(1, 11), *range(9, 13)]
    assert digests(tmp_path / "cut") == digests(whole)


def test_the_loss_counts_every_prediction_the_first_included() -> None:
    base = plan("noisy")
    network = base.network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    drawn = [
        regression.sample(task, base.batch, 5, torch.Generator().manual_seed(seed * 1_000_003 + 7))
        for seed, task in zip(base.seeds, base.tasks, strict=True)
    ]
    expected = sum(np.mean(d.ys.double().numpy() ** 2) for d in drawn)
    assert base.loss(network, 7).item() == pytest.approx(expected, rel=1e-5)
    assert base.loss(network, 8).item() != pytest.approx(expected, rel=1e-3)


def test_the_log_tells_distance_pace_and_work(tmp_path: Path) -> None:
    base = replace(plan("plain", steps=200), log_every=50)
    loop.train(base, tmp_path, progress=False)
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [50, 100, 150, 200]
    assert rows[-1]["spd_best_0"] < rows[0]["spd_best_0"] - 0.05
    assert all(row["steps_per_second"] > 0 for row in rows)
    assert "teraflops" in rows[0]


def test_operations_are_those_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    base = regression.group(
        "count", "cpu", Shape(8, 17, "two", 4, 64, 2), [(0, Task(8)), (1, Task(8))], steps=1
    )
    network = base.network()
    with FlopCounterMode(display=False) as counter:
        base.loss(network, 1).backward()
    assert base.operations() == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_shipped_learners_are_those_of_their_recipes() -> None:
    for name in regression.SHIPPED:
        base = training.recipe(name)
        assert isinstance(base, regression.RegressionRecipe)
        assert list(base.checkpoints) == zoo.steps(name)
        shipped = regressors.load(name)
        assert (shipped.shape, shipped.seeds) == (base.shape, base.seeds)
        assert shipped.tasks == base.network().tasks
        assert zoo.read_card(name) == base.card


def test_paper_size_is_that_of_the_paper() -> None:
    base = training.recipe("regression-paper-d8")
    assert isinstance(base, regression.RegressionRecipe)
    assert (base.shape.layers, base.shape.width, base.shape.heads) == (16, 512, 4)
    assert (base.shape.format, base.shape.block, base.batch) == ("two", "released", 64)
    assert (base.steps, base.peak_rate, base.warmup) == (500_000, 1e-4, 100_000)
    (only,) = base.optimizers(base.network())
    assert isinstance(only, torch.optim.AdamW)
    ratios = [Task(8, noise=n, prior=p).ridge for n, p in regression.NOISES]
    assert ratios == pytest.approx([1 / 16, 1 / 9, 1 / 4, 4 / 9])


def test_mixed_precision_runs_and_stays_near() -> None:
    base = plan("wide")
    network = base.network()
    full = base.loss(network, 3).item()
    half = replace(base, mixed=True).loss(network, 3)
    half.backward()
    assert half.item() == pytest.approx(full, rel=0.02)
    assert half.item() != full
