"""The training loop: bit for bit the same, also after an interruption; nothing is pickled."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_recipes import digests, gpt2, linear, regressor
from transformers import GPT2LMHeadModel

from iclutils import IclError
from training import loop
from training.muon import Muon


@pytest.mark.parametrize("make", [gpt2, regressor, linear])
def test_an_interrupted_training_goes_on_to_the_same_bits(tmp_path, monkeypatch, make):
    """The regressors have two optimisers, of which each keeps its own state."""
    saving = replace(make(), save_every=4)
    whole = loop.train(saving, tmp_path / "whole", progress=False)
    plain, seen = loop.take_step, []

    def cut(network, optimizers, recipe, step):
        seen.append(step)
        if step == 10 and seen.count(10) == 1:
            raise KeyboardInterrupt
        return plain(network, optimizers, recipe, step)

    monkeypatch.setattr(loop, "take_step", cut)
    with pytest.raises(KeyboardInterrupt):
        loop.train(saving, tmp_path / "cut", progress=False)
    assert not (tmp_path / "cut" / "SHA256SUMS").exists()
    with pytest.raises(IclError, match="belongs to another recipe"):
        loop.train(replace(saving, name="other"), tmp_path / "cut", progress=False)
    loop.train(saving, tmp_path / "cut", progress=False)
    assert seen == [*range(1, 11), *range(9, 13)], "it should go on from step 8"
    assert digests(tmp_path / "cut") == digests(whole)


def test_the_first_step_is_the_one_torch_takes(tmp_path):
    """One step of the loop against AdamW written out in float64."""
    one = replace(gpt2(steps=2), checkpoints=(0, 1, 2), warmup=1, clip=1e9)
    for share in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(one.config, share, 0.0)
    loop.train(one, tmp_path, progress=False)
    torch.manual_seed(one.seed)
    network = GPT2LMHeadModel(one.config).train()
    tokens, positions, _ = one.batch(1)
    scores = network(tokens[:, :-1], position_ids=positions).logits.log_softmax(-1)
    (-scores.gather(-1, tokens[:, 1:, None]).mean()).backward()
    after = load_file(tmp_path / "step-00001" / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    weight = network.get_parameter(name).detach().double()
    gradient = network.get_parameter(name).grad
    assert gradient is not None
    rate = one.rate(1)
    # after one step both bias-corrected moments are the gradient and its square
    expected = weight * (1 - rate * one.weight_decay) - rate * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(after[name].double(), expected, atol=2e-4, rtol=2e-3)


def test_the_learning_rate_warms_up_and_falls():
    """After the warm-up as PyTorch's schedulers in sequence; from the start as their product."""
    plan = replace(gpt2(steps=100), warmup=20, floor=0.0)
    weights = [torch.nn.Parameter(torch.zeros(1))]
    sgd = torch.optim.SGD(weights, lr=plan.peak_rate)
    warm = torch.optim.lr_scheduler.LinearLR(sgd, 1e-9, 1.0, 20)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 80)
    theirs = torch.optim.lr_scheduler.SequentialLR(sgd, [warm, fall], [20])
    after = replace(plan, cosine="after warm-up")
    for step in range(101):
        assert after.rate(step) == pytest.approx(sgd.param_groups[0]["lr"], abs=1e-9)
        whole = plan.peak_rate * min(1, step / 20) * 0.5 * (1 + math.cos(math.pi * step / 100))
        assert plan.rate(step) == pytest.approx(whole, abs=1e-12)
        sgd.step()
        theirs.step()
    assert max(map(after.rate, range(101))) == plan.peak_rate > max(map(plan.rate, range(101)))


def test_each_matrix_of_a_stack_moves_as_under_the_muon_of_torch():
    """Torch holds weights (out, in) and turns them in bfloat16: directions agree to its grain."""
    source = torch.Generator().manual_seed(1)
    start = torch.randn(2, 6, 12, generator=source)
    aims = torch.randn(2, 6, 12, generator=source)
    stack, unused = torch.nn.Parameter(start.clone()), torch.nn.Parameter(torch.ones(1, 2, 2))
    single = [torch.nn.Parameter(part.mT.clone()) for part in start]
    ours = Muon([stack, unused], lr=0.05)
    theirs = torch.optim.Muon(single, lr=0.05, weight_decay=0.0, momentum=0.95)
    for _ in range(5):
        ours.zero_grad()
        (stack - aims).square().sum().backward()
        ours.step()
        theirs.zero_grad()
        sum((one.mT - aim).square().sum() for one, aim in zip(single, aims, strict=True)).backward()
        theirs.step()
    moved = stack.detach() - start
    expected = torch.stack([one.detach().mT for one in single]) - start
    assert expected.norm() > 1
    assert (moved - expected).norm() / expected.norm() < 0.02
    assert torch.equal(unused, torch.ones(1, 2, 2)), "it has no gradient"
