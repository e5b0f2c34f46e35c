"""The dual model of softmax attention: a linear model of features, after one gradient step.

With D the demonstrations, T the other keys, φ(k)·φ(q) = exp(k·q/√d) and D_q = Σ φ(k_j)·φ(q),
attention gives W_0 φ(q) + ΔW φ(q), its *start* and its *update*: W_0 = Σ_T v_j φ(k_j)ᵀ / D_q, ΔW =
Σ_D v_i φ(k_i)ᵀ / D_q. The update is one step of gradient descent, D_q held fixed, on
L(W) = -Σ_D v_i · W φ(k_i) / D_q (after the abstract of {cite}`ren2024`; derived here), which raises
similarities and has no minimum. The start is not what the head would say without the examples: they
are in D_q. Shapes as in ``features``; ``demos`` (…, key) are the keys of D.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...interp.at_query import Allowed, Keys, Queries, scores
from .features import Values

Demos = Bool[Tensor, "*#batch key"]


def dual_form(
    queries: Queries, keys: Keys, values: Values, demos: Demos, allowed: Allowed | None = None
) -> tuple[Float[Tensor, "*batch query value"], Float[Tensor, "*batch query value"]]:
    """Return start and update of all queries; their sum is softmax attention.

    Example:
        >>> import torch
        >>> from iclutils.chapters.contrastive_kernel import dual, features
        >>> tokens = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        >>> demos = torch.tensor([True, True, True, False, False])
        >>> start, update = dual.dual_form(tokens, tokens, tokens, demos)
        >>> torch.allclose(start + update, features.attention(tokens, tokens, tokens))
        True
    """
    weights = scores(queries, keys, allowed).softmax(-1)
    chosen = demos[..., None, :]
    return (weights * ~chosen) @ values, (weights * chosen) @ values


def explicit_steps(
    query: Float[Tensor, "*batch feature"],
    keys: Float[Tensor, "*batch key feature"],
    values: Float[Tensor, "*batch key value"],
    demos: Demos,
    allowed: Allowed | None = None,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
) -> tuple[Float[Tensor, "*batch value"], Float[Tensor, "*batch value"]]:
    """Return answers before and after a gradient step from W_0 by autograd, with W a matrix: what
    ``dual_form`` is checked against.

    Query and keys come as features, ``features.gram``; ``allowed`` is (…, key). With u_i = W φ(k_i)
    the loss is (1/D_q) Σ_D [-v_i·u_i + β mean_{j∈D, j≠i} v_j·u_i] + (α/2) |W|².
    """
    seen = torch.ones_like(keys[..., 0], dtype=torch.bool) if allowed is None else allowed
    chosen = demos & seen
    values = values.to(keys)
    total = ((keys @ query[..., None])[..., 0] * seen).sum(-1)
    targets = contrast(values, chosen, beta)

    start = (values * (seen & ~chosen)[..., None]).mT @ keys / total[..., None, None]
    with torch.enable_grad():
        matrix = start.detach().requires_grad_()  # W_0, (*batch, value, feature)
        towards = ((keys @ matrix.mT) * targets).sum(-1) * chosen  # v_i·u_i, (*batch, key)
        loss = -(towards.sum(-1) / total).sum() + alpha / 2 * matrix.square().sum()
        (slope,) = torch.autograd.grad(loss, matrix)
    before, after = ((w @ query[..., None])[..., 0] for w in (start, start - slope))
    return before, after


def contrast(values: Values, demos: Demos, beta: float) -> Float[Tensor, "*batch key value"]:
    """Return v_i - β mean_{j∈D, j≠i} v_j for demonstrations i; the values of other keys stay."""
    chosen = demos[..., None].to(values)
    others = (values * chosen).sum(-2, keepdim=True) - values
    return values - beta * chosen * others / (chosen.sum(-2, keepdim=True) - 1).clamp(min=1)
