"""What a training costs, to be known before it starts.

Example:
    >>> from iclutils import training
    >>> from iclutils.training import cost
"""

from __future__ import annotations

import json
import time

import torch
from torch import nn

from .. import zoo
from .loop import Recipe, take_step

COPIES = 4  # the weights, their gradients, and two running means of the optimiser
TIMED = 3  # steps that are tried where no log tells; the last of them counts


def of(recipe: Recipe) -> str:
    """Steps, minutes and memory of one training, in words.

    The time is that of the shipped model's log; where there is none, it is judged by a few steps
    taken here, on a network of their own.

    Example:
        >>> "as it took for the shipped model" in cost.of(training.recipe("lsa-1"))
        True
    """
    network = recipe.network()
    held = COPIES * sum(p.numel() * p.element_size() for p in network.parameters()) / 2**20
    if recipe.name in zoo.names():
        last = json.loads(zoo.log(recipe.name).read_text(encoding="utf-8").splitlines()[-1])
        seconds, how = last["cpu_seconds"], "as it took for the shipped model on one core"
    else:
        seconds, how = (
            _step(recipe, network) * recipe.steps,
            f"judged by {TIMED} steps on {recipe.device}",
        )
    return (
        f"{recipe.name}: {recipe.steps} steps, about {_words(seconds)}, {how}; {max(1, held):.0f} "
        "MiB for the weights and their training, and a batch on top"
    )


def _step(recipe: Recipe, network: nn.Module) -> float:
    """Seconds of a step of this network, which it changes, on one thread as in training."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network = network.to(recipe.device).train()
        optimizers = recipe.optimizers(network)
        for step in range(1, TIMED + 1):
            start = time.perf_counter()
            take_step(network, optimizers, recipe, step)  # it returns a number, and so is done
        return time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)


def _words(seconds: float) -> str:
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    return f"{seconds / 3600:.1f} hours"
