"""Generators, random tensors, and layers of linear self-attention in double precision."""

import torch

from iclutils.models.lsa import LinearSelfAttention, Shape

TIGHT = {"atol": 1e-10, "rtol": 1e-10}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(seed: int, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    source = seeded(seed)
    return [torch.randn(size, generator=source, dtype=torch.float64) for size in sizes]


def random(shape: Shape, seeds: tuple[int, ...] = (0, 1)) -> LinearSelfAttention:
    return LinearSelfAttention(shape, seeds, 1.0).double().requires_grad_(False)
