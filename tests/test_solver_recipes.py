"""Recipes of solvers: what they optimise, and that the shipped ones are theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_training import digests

from iclutils import training, zoo
from iclutils.models import lsa
from iclutils.models.lsa import Shape
from iclutils.tasks.functions import Problem
from iclutils.tasks.regression import Task
from iclutils.training import loop
from iclutils.training import solvers as recipes

EASY, NOISY = Problem(Task(2)), Problem(Task(2, noise=2.0))


def small(name: str, members: list[tuple[int, recipes.Data]], steps: int) -> recipes.SolverRecipe:
    """A solver of three pairs, trained for a moment."""
    made = recipes.group(name, "cpu", Shape(2, 3), members, steps=steps, extra=(0,), batch=32)
    return replace(made, log_every=4)


def test_members_train_together_as_they_would_alone(tmp_path: Path) -> None:
    """Clipping, too, is each member's own: with so small a clip it acts at every step."""
    members: list[tuple[int, recipes.Data]] = [(0, EASY), (5, NOISY)]
    loop.train(small("both", members, 10), tmp_path / "both", progress=False)
    together = load_file(tmp_path / "both" / "step-00010" / "model.safetensors")
    for i, member in enumerate(members):
        loop.train(small("one", [member], 10), tmp_path / f"{i}", progress=False)
        alone = load_file(tmp_path / f"{i}" / "step-00010" / "model.safetensors")
        for name, value in alone.items():
            torch.testing.assert_close(together[name][i : i + 1], value, atol=1e-5, rtol=1e-3)
    first = load_file(tmp_path / "both" / "step-00000" / "model.safetensors")
    moved = (together["attention.value"] - first["attention.value"]).abs().amax((1, 2, 3, 4))
    assert moved.min() > 1e-3


def test_an_interrupted_training_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 4)
    plan = small("plain", [(0, EASY), (1, EASY)], 12)
    whole = loop.train(plan, tmp_path / "whole", progress=False)
    calm = loop.take_step
    seen: list[int] = []

    def cut(network, optimizers, recipe, step):  # type: ignore[no-untyped-def]
        seen.append(step)
        if seen.count(10) == 1 and step == 10:
            raise KeyboardInterrupt
        return calm(network, optimizers, recipe, step)

    monkeypatch.setattr(loop, "take_step", cut)
    with pytest.raises(KeyboardInterrupt):
        loop.train(plan, tmp_path / "cut", progress=False)
    loop.train(plan, tmp_path / "cut", progress=False)
    assert seen == [*range(1, 11), *range(9, 13)]
    assert digests(tmp_path / "cut") == digests(whole)


def test_the_loss_is_half_the_squared_error_of_the_query() -> None:
    plan = small("zero", [(3, EASY), (4, NOISY)], 1)
    network = plan.network()
    with torch.no_grad():
        network.attention["out"].zero_()
    expected = 0.0
    for seed, problem in zip(plan.seeds, plan.data, strict=True):
        source = torch.Generator().manual_seed(seed * 1_000_003 + 7)
        ys = problem.sample(plan.batch, 4, source).ys[:, -1]
        expected += np.mean(ys.double().numpy() ** 2) / 2
    assert plan.loss(network, 7).item() == pytest.approx(expected, rel=1e-5)
    assert plan.loss(network, 8).item() != pytest.approx(expected, rel=1e-3)


def test_shipped_solvers_are_those_of_their_recipes() -> None:
    for name in recipes.SHIPPED:
        plan = training.recipe(name)
        assert isinstance(plan, recipes.SolverRecipe)
        assert list(plan.checkpoints) == zoo.steps(name)
        shipped = lsa.load(name)
        assert (shipped.shape, shipped.seeds) == (plan.shape, plan.seeds)
        assert [task["kind"] for task in shipped.tasks] == [type(d).__name__ for d in plan.data]
        assert zoo.read_card(name) == plan.card
    files = [
        p for kind in ("lsa", "contrastive") for p in zoo.ROOT.glob(f"{kind}-*/**/*") if p.is_file()
    ]
    assert sum(p.stat().st_size for p in files) < 5_000_000


def test_shipped_solvers_start_where_their_recipes_do() -> None:
    """The weights of step 0 are drawn again, bit for bit."""
    plan = training.recipe("lsa-2")
    drawn = plan.network().state_dict()
    for name, value in lsa.load("lsa-2", step=0).state_dict().items():
        assert torch.equal(drawn[name], value)


def test_a_shipped_layer_reaches_the_closed_form() -> None:
    """Best single step on U(-1/2, 1/2), d = N = 10: s² = 1/12, fourth moment 1/80."""
    variance, fourth, n = 1 / 12, 1 / 80, 10
    spread = (fourth + 9 * variance**2) / n + (n - 1) * variance**2 / n
    best = 0.5 * n * variance * (1 - variance**2 / spread)
    drawn = recipes.ISOTROPIC.sample(20_000, 11, torch.Generator().manual_seed(4242))
    with torch.no_grad():
        found = lsa.load("lsa-1")(drawn.xs[None], drawn.ys[None])
    losses = 0.5 * (found - drawn.ys[:, -1]).square().mean(-1)
    assert best == pytest.approx(0.2062, abs=1e-4)
    assert losses.max().item() < 1.03 * best


def test_paper_size_is_that_of_the_released_code() -> None:
    plan = training.recipe("lsa-paper-5-shared")
    assert isinstance(plan, recipes.SolverRecipe)
    assert (plan.shape.dim, plan.shape.pairs, plan.shape.layers) == (10, 10, 5)
    assert (plan.batch, plan.steps, plan.peak_rate) == (2048, 5000, 5e-4)
    assert plan.rate(1) == plan.rate(5000) == 5e-4
    assert training.recipe("lsa-paper-2").steps == 50_000
