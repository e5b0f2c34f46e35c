"""What trained the networks of the paper's size takes the steps of the recipe."""

from dataclasses import replace

import torch

from book._tools.on_gpu import Captured
from iclutils.models.regressors import Shape
from iclutils.zoo.recipes import loop, regression


def test_the_steps_are_those_of_the_loop():
    plan = regression.recipe("regression-paper-L2")
    plan = replace(plan, shape=Shape(8, 17, "two", 2, 16, 4), batch=8, steps=20, warmup=4)
    plain, fast = plan.network().train(), Captured(plan)
    optimizers = plan.optimizers(plain)
    for step in range(1, 6):
        loss = loop.take_step(plain, optimizers, plan, step)
        assert abs(loss - fast.step(step).item()) < 1e-4 * loss
    start = plan.network().state_dict()
    for name, weight in fast.network.state_dict().items():
        wanted = plain.state_dict()[name]
        if name.endswith("qkv.bias"):  # softmax ignores those of keys, whose steps are rounding
            weight, wanted = (x.unflatten(-1, (3, -1))[..., ::2, :] for x in (weight, wanted))
            start[name] = start[name].unflatten(-1, (3, -1))[..., ::2, :]
        assert torch.allclose(weight, wanted, atol=2e-5), name
        assert not torch.allclose(weight, start[name], atol=1e-4), f"{name} has not moved"
