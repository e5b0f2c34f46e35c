"""Generators, random tensors, and layers of linear self-attention in double precision."""

import torch

from iclutils.models.lsa import LinearSelfAttention

TIGHT = {"atol": 1e-10, "rtol": 1e-10}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def some(seed, *sizes):
    source = seeded(seed)
    return [torch.randn(size, generator=source, dtype=torch.float64) for size in sizes]


def normal(*size, seed=0):
    return some(seed, size)[0]


def random(shape, seeds=(0, 1)):
    return LinearSelfAttention(shape, seeds, 1.0).double().requires_grad_(False)
