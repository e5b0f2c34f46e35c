"""Fine-tuning a finished network with its own recipe, on data that it has not seen.

Example:
    >>> from iclutils.models.regressors import Shape
    >>> from iclutils.tasks.regression import Task
    >>> from iclutils.training import regression, tune
    >>> small = Shape(dim=1, pairs=3, format="one", layers=1, width=4, heads=1)
    >>> made = regression.group("small", "cpu", small, [(0, Task(1))], steps=3)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..errors import IclError
from ..progress import bar
from .loop import Recipe, take_step


def tune(
    network: nn.Module,
    recipe: Recipe,
    steps: int,
    rate: float,
    first_step: int | None = None,
) -> list[float]:
    """Train on, in place, at a constant rate, with a fresh optimiser; the loss of every step.

    Deterministic: one thread, and data that depend on the recipe's seed and the step alone. A
    pruned head stays pruned, because no gradient reaches it. Works inside ``models.rebuilt``,
    which holds gradients back.

    Args:
        network: the recipe's, in place.
        recipe: whose loss, data, optimiser and clipping are used.
        steps: how many.
        rate: peak learning rate.
        first_step: which data come first; by default those after the recipe's last step.

    Example:
        >>> len(tune.tune(made.network(), made, steps=2, rate=1e-3))
        2
    """
    if steps < 1:
        raise IclError(f"Tuning needs at least one step; got {steps}.")
    first = recipe.steps + 1 if first_step is None else first_step
    constant = replace(recipe, peak_rate=rate, warmup=1, floor=1.0)
    threads, training = torch.get_num_threads(), network.training
    torch.set_num_threads(1)
    network.train()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            optimizers = constant.optimizers(network)
            taken = bar(range(first, first + steps), "tuning")
            return [take_step(network, optimizers, constant, step) for step in taken]
    finally:
        torch.set_num_threads(threads)
        network.train(training)
        network.zero_grad()
