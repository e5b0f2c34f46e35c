"""The training loop: bit for bit the same, also after a kill; nothing is pickled."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from iclutils import IclError, models, training, zoo
from iclutils.files import sha256
from iclutils.training import induction, language, loop

STEPS = 12


def recipe(batch: object = None, steps: int = STEPS) -> language.LanguageRecipe:
    """A recipe of seconds: the real loop on a very small model."""

    def sample(step: int) -> language.Batch:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 20, (4, 9), generator=generator)
        return language.Batch(tokens, torch.arange(8).expand(4, 8))

    config = GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=19
    )
    return language.LanguageRecipe(
        name="toy",
        seed=0,
        config=config,
        batch=batch or sample,  # type: ignore[arg-type]
        steps=steps,
        checkpoints=(0, steps // 2, steps),
        held_out=lambda network: {
            "parameters": float(sum(p.numel() for p in network.parameters()))
        },
        card="# toy\n",
        warmup=2,
        log_every=4,
    )


def digests(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): sha256(p) for p in sorted(folder.rglob("*.safetensors"))
    }


def test_training_twice_gives_the_same_bits_and_a_zoo_folder(tmp_path: Path) -> None:
    a = loop.train(recipe(), tmp_path / "a", progress=False)
    b = loop.train(recipe(), tmp_path / "b", progress=False)
    assert digests(a) == digests(b)
    assert set(digests(a)) == {f"step-{s:05d}/model.safetensors" for s in (0, 6, 12)}
    assert len(set(digests(a).values())) == 3, "training changed nothing"
    names = {p.name for p in a.iterdir()}
    assert {"README.md", "SHA256SUMS", "training.jsonl"} <= names
    assert "resume.safetensors" not in names
    rows = [json.loads(line) for line in (a / "training.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert models.load(a / "step-00012").cfg.n_layers == 1


def test_an_interrupted_training_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 4)
    whole = loop.train(recipe(), tmp_path / "whole", progress=False)
    plain = recipe().batch
    calls: list[int] = []

    def stops(step: int) -> language.Batch:
        if step == 10 and not calls.count(10):
            calls.append(step)
            raise KeyboardInterrupt
        calls.append(step)
        return plain(step)

    broken = replace(recipe(), batch=stops)
    with pytest.raises(KeyboardInterrupt):
        loop.train(broken, tmp_path / "cut", progress=False)
    assert (tmp_path / "cut" / "resume.safetensors").is_file()
    assert not (tmp_path / "cut" / "SHA256SUMS").exists()
    loop.train(broken, tmp_path / "cut", progress=False)
    assert calls == [*range(1, 11), *range(9, 13)], "it should go on from step 8"
    assert digests(tmp_path / "cut") == digests(whole)
    log = (tmp_path / "cut" / "training.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [4, 8, 12]


def test_a_finished_training_is_left_alone(tmp_path: Path) -> None:
    work = loop.train(recipe(), tmp_path, progress=False)
    before = digests(work)

    def never(step: int) -> language.Batch:
        raise AssertionError("trained again")

    loop.train(replace(recipe(), batch=never), work, progress=False)
    assert digests(work) == before


def test_the_first_step_is_the_one_torch_takes(tmp_path: Path) -> None:
    """One step of the loop against AdamW written out in float64."""
    one = replace(recipe(steps=2), checkpoints=(0, 1, 2), warmup=1, clip=1e9)
    for share in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(one.config, share, 0.0)
    loop.train(one, tmp_path, progress=False)
    torch.manual_seed(one.seed)
    network = GPT2LMHeadModel(one.config).train()
    tokens, positions, _ = one.batch(1)
    loss = network(tokens[:, :-1], position_ids=positions, labels=None).logits.log_softmax(-1)
    picked = loss.gather(-1, tokens[:, 1:, None]).mean()
    (-picked).backward()
    after = load_file(tmp_path / "step-00001" / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    weight = network.get_parameter(name).detach().double()
    gradient = network.get_parameter(name).grad
    assert gradient is not None
    rate = one.rate(1)
    # after one step both bias-corrected moments are the gradient and its square
    expected = weight * (1 - rate * one.weight_decay) - rate * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(after[name].double(), expected, atol=2e-4, rtol=2e-3)


def test_the_learning_rate_warms_up_and_falls() -> None:
    plan = recipe(steps=100)
    rates = [plan.rate(step) for step in range(1, 101)]
    assert max(rates) == pytest.approx(plan.peak_rate, rel=1e-2)
    assert rates.index(max(rates)) == plan.warmup - 1
    assert rates[-1] == pytest.approx(plan.floor * plan.peak_rate)
    assert all(a >= b for a, b in itertools.pairwise(rates[1:]))


def test_a_loss_that_is_no_number_stops_with_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(IclError, match=r"toy: the loss is nan at step .*lower the rate"):
        loop.train(replace(recipe(), peak_rate=1e38), tmp_path, progress=False)


def test_a_foreign_resume_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 4)
    plain = recipe().batch

    def stops(step: int) -> language.Batch:
        if step == 6:
            raise KeyboardInterrupt
        return plain(step)

    with pytest.raises(KeyboardInterrupt):
        loop.train(replace(recipe(), batch=stops), tmp_path, progress=False)
    with pytest.raises(IclError, match="belongs to another recipe"):
        loop.train(replace(recipe(), name="other"), tmp_path, progress=False)


def test_a_killed_training_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    """The real command, killed hard after its first checkpoint, then continued in place."""
    command = [sys.executable, "-m", "iclutils", "train", "induction-0", "--quiet", "--out"]
    process = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "step-00000" / "model.safetensors").is_file():
        assert process.poll() is None, "the command ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "SHA256SUMS").exists()
    shipped = zoo.folder("induction-0", 0) / "model.safetensors"
    assert sha256(tmp_path / "step-00000" / "model.safetensors") == sha256(shipped)


def test_unknown_recipes_are_refused() -> None:
    with pytest.raises(IclError, match=r"Unknown recipe 'induction-00'\. Did you mean"):
        training.recipe("induction-00")


def test_recipes_and_zoo_agree() -> None:
    assert set(training.names()) == set(zoo.names())
    for name in training.names():
        plan = training.recipe(name)
        if not isinstance(plan, language.LanguageRecipe):
            continue  # test_regression_recipes and test_solver_recipes have them
        assert list(plan.checkpoints) == zoo.steps(name)
        config = models.load(name).cfg
        assert (config.n_layers, config.n_heads, config.d_vocab, config.n_ctx) == (
            plan.config.n_layer,
            plan.config.n_head,
            plan.config.vocab_size,
            plan.config.n_positions,
        )
        assert zoo.read_card(name) == plan.card


def test_the_induction_data_repeat_and_depend_on_step_and_seed() -> None:
    tokens, positions, _ = training.recipe("induction-0").batch(7)
    again, *_ = training.recipe("induction-0").batch(7)
    other, *_ = training.recipe("induction-1").batch(7)
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    assert tokens.shape == (induction.BATCH, induction.LENGTH)
    assert (tokens[:, 0] == induction.BOS).all()
    for row in tokens[:, 1:].tolist():
        periods = [p for p in range(12, 33) if row[p:] == row[:-p]]
        assert periods, "a sequence does not repeat with a period of 12 to 32"
    starts = positions[:, 0]
    assert torch.equal(positions, starts[:, None] + torch.arange(induction.LENGTH - 1))
    assert int(starts.max()) + induction.LENGTH - 1 <= 96
    assert len(set(starts.tolist())) > 5


def test_the_first_steps_of_a_shipped_model_can_be_rebuilt(tmp_path: Path) -> None:
    """The initial weights are the same bits anywhere; later ones on the same machine only."""
    plan = replace(training.recipe("induction-2"), steps=1, checkpoints=(0,))
    plan = replace(plan, held_out=lambda network: {})
    loop.train(plan, tmp_path, progress=False)
    shipped = zoo.folder("induction-2", 0) / "model.safetensors"
    ours = load_file(tmp_path / "step-00000" / "model.safetensors")
    for name, value in load_file(shipped).items():
        torch.testing.assert_close(ours[name], value, atol=0, rtol=0)
