"""Gradient descent on the contrastive loss, explicit: a matrix W, a loss, autograd.

Nothing here knows a closed form. Features are the Taylor ones, so that answers are those of
attention up to the truncated series (``features.needed_degree``). For a few small contexts.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import explicit
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError
from .contrastive import Demos, Query, checked_demos, start
from .features import Keys, Values, scaled, taylor

Loss = Callable[[Tensor], Tensor]


def descend(
    loss: Loss, matrix: Float[Tensor, "*shape"], rate: float, steps: int = 1
) -> Float[Tensor, "*shape"]:
    """W ← W - rate ∂loss/∂W, so many times; the loss may sum over a batch.

    Example:
        >>> matrix = torch.tensor([[3.0]])
        >>> explicit.descend(lambda w: (w**2).sum() / 2, matrix, rate=0.5)
        tensor([[1.5000]])
    """
    if steps < 1:
        raise IclError(f"Gradient descent takes at least one step; got {steps}.")
    for _ in range(steps):
        with torch.enable_grad():
            at = matrix.detach().requires_grad_()
            (slope,) = torch.autograd.grad(loss(at), at)
        matrix = matrix - rate * slope
    return matrix


def learnt(
    query: Query,
    keys: Keys,
    values: Values,
    demos: Demos,
    degree: int,
    *,
    rate: float = 1.0,
    steps: int = 1,
    alpha: float = 0.0,
    beta: float = 0.0,
    negatives: Bool[Tensor, "*negatives"] | None = None,
    temperature: float | None = None,
) -> Float[Tensor, "*batch value"]:
    """What the model says to the query after gradient steps from W_0.

    The loss is, with u_i = W φ(k_i) and D_q exact,

        (1/(η D_q)) Σ_D [-v_i·u_i + β mean_{j∈N_i} v_j·u_i + τ log Σ_{j∈D} exp(v_j·u_i/τ)]
        + (α/(2η)) |W|²,

    each term only if asked for.

    Args:
        query: (*batch, channel).
        keys: all keys.
        values: all values.
        demos: which of them are demonstrations; the rest make W_0.
        degree: of the Taylor features.
        rate: η.
        steps: how many.
        alpha: α, of the squared norm.
        beta: β, of the negatives.
        negatives: (…, key, key), row i the set N_i; all other demonstrations if omitted.
        temperature: τ; without it, no such term.

    Example:
        >>> from iclutils.chapters.gradient_descent.features import attention
        >>> generator = torch.Generator().manual_seed(0)
        >>> keys, values = torch.randn(2, 4, 2, generator=generator).double()
        >>> query, demos = torch.ones(2).double(), torch.tensor([True, True, True, False])
        >>> said = explicit.learnt(query, keys, values, demos, degree=20)
        >>> torch.allclose(said, attention(query[None], keys, values)[0])
        True
    """
    model = start(query, keys, values, demos)
    chosen = checked_demos(demos, keys)
    held = model.log_scale.exp()
    key = taylor(scaled(keys), degree)
    matrix = torch.einsum("...,...k,...kv,...kf->...vf", held, model.coefficients, values, key)
    if negatives is None:
        negatives = others(chosen)
    share = negatives.to(keys.dtype) / negatives.sum(-1, keepdim=True).clamp(min=1)

    def loss(at: Tensor) -> Tensor:
        answers = key @ at.mT
        towards = (answers * values).sum(-1)
        if beta:
            against = answers @ values.mT
            towards = towards - beta * (share * against).sum(-1)
        if temperature is not None:
            logits = (answers @ values.mT / temperature).masked_fill(
                ~chosen[..., None, :], -torch.inf
            )
            towards = towards - temperature * logits.logsumexp(-1)
        fit = -torch.where(chosen, towards, 0.0).sum(-1) * held / rate
        return fit.sum() + alpha / (2 * rate) * at.square().sum()

    final = descend(loss, matrix, rate, steps)
    return (final @ taylor(scaled(query), degree)[..., None])[..., 0]


def others(demos: Bool[Tensor, "*batch key"]) -> Bool[Tensor, "*batch key key"]:
    """Row i: all demonstrations but i.

    Example:
        >>> explicit.others(torch.tensor([True, True, False])).int()
        tensor([[0, 1, 0],
                [1, 0, 0],
                [1, 1, 0]], dtype=torch.int32)
    """
    alone = torch.eye(demos.shape[-1], dtype=torch.bool, device=demos.device)
    return demos[..., None, :] & ~alone
