"""Members: several networks trained as one program, each as it would be trained alone.

Example:
    >>> import torch
    >>> from iclutils.learners import Learners, Shape
    >>> from iclutils.tasks import regression
    >>> from iclutils.training import members
    >>> small = Shape(dim=1, pairs=3, format="one", layers=1, width=4, heads=1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn

from ..tasks.regression import Contexts


def draw_each(
    samplers: Sequence[Callable[[Generator], Contexts]], starts: Sequence[int], source: Generator
) -> tuple[Tensor, Tensor]:
    """xs (member, context, n, d) and ys of every member, each drawn from a start of its own.

    Example:
        >>> def three(generator):
        ...     return regression.sample(regression.Task(1), 2, 3, generator)
        ...
        >>> xs, ys = members.draw_each([three, three], [5, 5], torch.Generator())
        >>> torch.equal(xs[0], xs[1])
        True
    """
    drawn = [
        sampler(source.manual_seed(start)) for sampler, start in zip(samplers, starts, strict=True)
    ]
    return torch.stack([d.xs for d in drawn]), torch.stack([d.ys for d in drawn])


def clip_each(network: nn.Module, clip: float) -> None:
    """Clip the gradient of each member by itself.

    The first axis of every parameter counts the members.

    Example:
        >>> network = Learners(small, [0, 1])
        >>> xs, ys = torch.ones(1, 2, 3, 1), torch.ones(1, 2, 3)
        >>> (100 * network(xs, ys).square().sum()).backward()
        >>> members.clip_each(network, 1.0)
        >>> bool(sum(p.grad[0].square().sum() for p in network.parameters()) < 1.01)
        True
    """
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    share = clip / norms.clamp(min=clip)
    for gradient in gradients:
        gradient.mul_(share.view(-1, *[1] * (gradient.ndim - 1)))
