"""The dual model of softmax attention: a linear model of features, after one gradient step.

With D the demonstrations, T the other keys, φ(k)·φ(q) = exp(k·q/√d) and D_q = Σ φ(k_j)·φ(q),
attention gives W_0 φ(q) + ΔW φ(q), its *start* and its *update*: W_0 = Σ_T v_j φ(k_j)ᵀ / D_q, ΔW =
Σ_D v_i φ(k_i)ᵀ / D_q. The update is one step of gradient descent, D_q held fixed, on
L(W) = -Σ_D v_i · W φ(k_i) / D_q (after the abstract of {cite}`ren2024`; derived here), which raises
similarities and has no minimum. The start is not what the head would say without the examples: they
are in D_q. ``demos`` (…, key) are the keys of D; ``allowed`` (…, query, key): those a query sees.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...interp.at_query import Allowed, Keys, Queries, scores

Values = Float[Tensor, "*batch key value"]
Demos = Bool[Tensor, "*#batch key"]


def dual_form(
    queries: Queries, keys: Keys, values: Values, demos: Demos, allowed: Allowed | None = None
) -> tuple[Float[Tensor, "*batch query value"], Float[Tensor, "*batch query value"]]:
    """Return start and update of all queries; their sum is softmax attention.

    Example:
        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from iclutils.chapters.contrastive_kernel import dual
        >>> tokens = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        >>> demos = torch.tensor([True, True, True, False, False])
        >>> start, update = dual.dual_form(tokens, tokens, tokens, demos)
        >>> torch.allclose(start + update, scaled_dot_product_attention(*3 * [tokens]))
        True
    """
    weights = scores(queries, keys, allowed).softmax(-1)
    chosen = demos[..., None, :]
    return (weights * ~chosen) @ values, (weights * chosen) @ values


def gram(
    query: Float[Tensor, "*batch channel"], keys: Keys
) -> tuple[Float[Tensor, "*batch feature"], Float[Tensor, "*batch key feature"]]:
    """Return φ(q) and φ(k) of one query and n keys, n + 1 features, float64, none above 1: their
    inner products are exp(a·b / √d) up to a factor for the query and one for the keys. The first
    coordinate is along φ(q), so that products with the query keep their relative precision; the
    others are a square root of what is left of the keys' Gram matrix."""
    q, k = query.double(), keys.double()
    root = math.sqrt(query.shape[-1])
    half_q, half_k = ((x * x).sum(-1) / (2 * root) for x in (q, k))
    cross = (k @ q[..., None])[..., 0] / root - half_q[..., None]  # (*batch, key)
    cosine = (cross - half_k).exp()  # of φ(k) and φ(q)
    kernel = (k @ k.mT / root - half_k[..., None] - half_k[..., None, :]).exp()  # (key, key)
    values, vectors = torch.linalg.eigh(kernel - cosine[..., None] * cosine[..., None, :])
    longest = half_k.amax(-1, keepdim=True)
    length = (half_k - longest).exp()[..., None]
    others = vectors * values.clamp_min(0).sqrt()[..., None, :] * length
    phi_k = torch.cat([(cross - longest).exp()[..., None], others], -1)
    phi_q = torch.zeros_like(phi_k[..., 0, :])
    phi_q[..., 0] = 1.0
    return phi_q, phi_k


def explicit_step(
    query: Float[Tensor, "*batch feature"],
    keys: Float[Tensor, "*batch key feature"],
    values: Float[Tensor, "*batch key value"],
    demos: Demos,
    allowed: Allowed | None = None,
) -> tuple[Float[Tensor, "*batch value"], Float[Tensor, "*batch value"]]:
    """Return answers before and after a gradient step from W_0 by autograd, with W a matrix: what
    ``dual_form`` is checked against. Query and keys are features (``gram``); ``allowed``: (…, key).
    """
    seen = torch.ones_like(keys[..., 0], dtype=torch.bool) if allowed is None else allowed
    chosen = demos & seen
    values = values.to(keys)
    total = ((keys @ query[..., None])[..., 0] * seen).sum(-1)
    start = (values * (seen & ~chosen)[..., None]).mT @ keys / total[..., None, None]
    with torch.enable_grad():
        matrix = start.detach().requires_grad_()  # W_0, (*batch, value, feature)
        towards = ((keys @ matrix.mT) * values).sum(-1) * chosen  # v_i·W φ(k_i), (*batch, key)
        loss = -(towards.sum(-1) / total).sum()
        (slope,) = torch.autograd.grad(loss, matrix)
    before, after = ((w @ query[..., None])[..., 0] for w in (start, start - slope))
    return before, after
