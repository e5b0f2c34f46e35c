"""Muon for stacks of matrices: momentum, made orthogonal, as the step of every matrix at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)  # of Jordan et al. 2024: brings singular values to .7 .. 1.2
ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) on parameters (..., in, out), each matrix of a stack by itself.

    ``torch.optim.Muon`` takes single matrices only, in bfloat16; several small models trained as
    one program have stacks, and few enough numbers for float32.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.01, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            momentum = group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                past = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = orthogonal(weight.grad.lerp(past, momentum))
                n_in, n_out = weight.shape[-2:]
                weight.sub_(update, alpha=group["lr"] * max(1.0, n_out / n_in) ** 0.5)


def orthogonal(matrix: Float[Tensor, "*stack a b"]) -> Float[Tensor, "*stack a b"]:
    """Bring all singular values near 1, vectors unchanged (Newton-Schulz, five rounds)."""
    a, b, c = QUINTIC
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if wide else matrix.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT
