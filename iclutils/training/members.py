"""Members: several networks trained as one program, each as it would be trained alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn

from ..tasks.regression import Contexts


def draw_each(
    samplers: Sequence[Callable[[Generator], Contexts]], starts: Sequence[int], source: Generator
) -> tuple[Tensor, Tensor]:
    """xs (member, context, n, d) and ys of every member, each drawn from a start of its own."""
    drawn = [
        sampler(source.manual_seed(start)) for sampler, start in zip(samplers, starts, strict=True)
    ]
    return torch.stack([d.xs for d in drawn]), torch.stack([d.ys for d in drawn])


def clip_each(network: nn.Module, clip: float) -> None:
    """Clip the gradient of each member by itself.

    The first axis of every parameter counts the members.
    """
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    share = clip / norms.clamp(min=clip)
    for gradient in gradients:
        gradient.mul_(share.view(-1, *[1] * (gradient.ndim - 1)))
