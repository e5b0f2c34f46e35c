"""Tasks: samplers and prompt builders. They return data (tokens, positions), never measurements."""

import zlib

import torch


def generator(purpose: str, draw: int = 0, seed: int = 0) -> torch.Generator:
    """Return a random generator (CPU) of its own for each purpose, draw and seed."""
    return torch.Generator().manual_seed(zlib.crc32(f"{purpose}/{draw}/{seed}".encode()))
