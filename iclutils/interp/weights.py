"""What the weights alone say: copying, composition, and the two-head circuit's QK matching.

Pass a model loaded with ``fold=True``, as for the original TransformerLens scores. Sources: Elhage
et al. 2021 (copying, composition); ARENA 2023 (baseline, top-1); Xiang 2024.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ..errors import IclError
from ..models import TransformerBridge
from .at_query import rotate_apart
from .hooks import Head, check_head
from .invariants import blocks, check_channels

CHUNK = 512  # queries compared with all keys at once: 512 x 50,257 floats are 100 MB


def copying_scores(model: TransformerBridge) -> Float[Tensor, "layer head"]:
    """Return the OV copying score, sum(eigenvalues) / sum(|eigenvalues|) of ``W_E W_V W_O W_U``.

    +1: attending to a token raises its own logit, for every direction; 0: as often as not. AB and
    BA share their non-zero eigenvalues: the d_head x d_head matrix ``W_O (W_U W_E) W_V`` is enough.
    """
    check_channels(model)
    out = torch.stack([block.reaching for block in blocks(model)])
    core = (out @ (model.W_U @ model.W_E) @ model.W_V).double()
    values = torch.linalg.eigvals(core)
    return (values.sum(-1).real / values.abs().sum(-1)).float().cpu()


def composition_scores(
    model: TransformerBridge, kind: Literal["Q", "K", "V"]
) -> Float[Tensor, "layer head layer head"]:
    """Measure Elhage's composition of an earlier head with a later one, |W_OV W| / (|W_OV| |W|), by
    Frobenius norms; 0 unless the second head is in a later layer. Rotary positions, between W_Q and
    W_K, are left out. Subtract ``composition_baseline`` before calling a value large."""
    config = model.original_model.config
    if clip := getattr(getattr(config, "attn_config", config), "clip_qkv", None):
        raise IclError(
            f"{kind}-composition cannot be read from this model's weights: its heads clip queries, "
            f"keys and values at {clip:g}. Patch paths instead (interp.patching)."
        )
    normed = any(hasattr(x.attn, part) for x in model.blocks for part in ("q_norm", "qk_norm"))
    if kind != "V" and normed:
        raise IclError(
            f"{kind}-composition cannot be read from this model's weights: its heads norm their "
            "queries and keys, so that no one matrix makes the scores. V-composition can."
        )
    check_channels(model)
    out = torch.stack([block.reaching for block in blocks(model)])
    values, queries, keys = model.W_V, model.W_Q, model.W_K
    reads = {"Q": (queries, keys.mT), "K": (keys, queries.mT), "V": (values, out)}
    left, right = reads[kind]
    written, scored = values.mT @ values, right @ right.mT  # |A B C| needs A'A and CC' alone
    size = (written * (out @ out.mT)).sum((-2, -1)).sqrt()
    read_size = ((left.mT @ left) * scored).sum((-2, -1)).sqrt()
    scores = values.new_zeros(*size.shape, *size.shape)
    for later in range(1, len(scores)):
        between = torch.einsum("lhdm,kme->lhkde", out[:later], left[later])  # one large product
        product = (written[:later, :, None] @ between) * (between @ scored[later])
        norm = product.sum((-2, -1)).clamp_min(0).sqrt()
        scores[:later, :, later] = norm / (size[:later, :, None] * read_size[later])
    return scores


def composition_baseline(
    d_model: int, d_head: int, generator: Generator, draws: int = 300
) -> tuple[float, float]:
    """Return mean and standard deviation of the composition score of random heads of this shape,
    with uniform entries, as Kaiming initialisation gives; the score ignores their scale."""

    def factor(rows: int, columns: int) -> Tensor:
        return torch.rand(draws, rows, columns, generator=generator) * 2 - 1

    def norm(left: Tensor, right: Tensor) -> Tensor:
        """Frobenius norm of ``left @ right`` from the d_head x d_head Gram matrices."""
        return ((left.mT @ left) * (right @ right.mT)).sum((-2, -1)).clamp_min(0).sqrt()

    first = factor(d_model, d_head), factor(d_head, d_model)
    second = factor(d_model, d_head), factor(d_head, d_model)
    scores = norm(first[0], first[1] @ second[0] @ second[1]) / (norm(*first) * norm(*second))
    return scores.mean().item(), scores.std().item()


def qk_matching(
    model: TransformerBridge,
    previous: Head,
    induction: Head,
    distance: int = 0,
    among: Int[Tensor, "token"] | None = None,
) -> tuple[float, float]:
    """Return fractions of tokens whose best key, and best query, is their own (Xiang 2024).

    In the K-composition circuit token i asks ``W_E W_Q``, and the token after an i answers
    ``W_E W_V W_O W_K``: QK matching alone, without context. Rotary positions are those of a key
    ``distance`` tokens before the query (an induction head's is L-1). ``among``: the tokens that
    are compared, the vocabulary if None; chance is one over their number.
    """
    (l1, h1), (l2, h2) = previous, induction
    check_head(model, previous)
    check_head(model, induction)
    if l2 <= l1:
        raise IclError(f"{l2}.{h2} cannot read {l1}.{h1}: it must be in a later layer.")
    check_channels(model)
    out = blocks(model)[l1].reaching[h1]
    tokens = model.W_E if among is None else model.W_E[among]  # (token, d_model)
    queries = tokens @ model.W_Q[l2, h2]
    written = tokens @ model.W_V[l1, h1] @ out
    keys = written @ model.W_K[l2, h2]
    queries, keys = rotate_apart(model, l2, distance, queries, keys)
    return top1(queries, keys), top1(keys, queries)


def top1(rows: Float[Tensor, "vocab d_head"], columns: Float[Tensor, "vocab d_head"]) -> float:
    """Return the fraction of i with ``argmax_j rows_i . columns_j == i``, by parts."""
    own = torch.arange(len(rows), device=rows.device)
    best = [(part @ columns.T).argmax(-1) for part in rows.split(CHUNK)]
    return (torch.cat(best) == own).float().mean().item()


def head_pairs(model: TransformerBridge) -> list[tuple[Head, Head]]:
    """List all pairs of heads of which the second is in a later layer."""
    heads = [(la, h) for la in range(model.cfg.n_layers) for h in range(model.cfg.n_heads)]
    return [(a, b) for a in heads for b in heads if a[0] < b[0]]
