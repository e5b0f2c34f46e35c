"""What the weights alone say: copying, composition, and the two-head circuit's QK matching.

These scores read weights, not activations, so they depend on how LayerNorm is treated. Pass a
model loaded with ``fold=True``: its LayerNorm scales are folded into the weights that read the
residual stream, and what writes to it is centred, as in the original TransformerLens scores.

Conventions: row vectors, ``resid @ W``; ``W_QK = W_Q W_K^T`` and ``W_OV = W_V W_O``.
Sources: Elhage et al. 2021 (copying, composition); ARENA 2023 (baseline, top-1); seed note 003.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters import induction
    >>> from iclutils.interp import weights
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> found = induction.find(net, repeated_tokens(net, 8, 20, generator))
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from ..errors import IclError
from ..models import TransformerBridge
from .hooks import Head

Embedding = Literal["tokens", "effective"]
CHUNK = 512  # queries compared with all keys at once: 512 x 50,257 floats are 100 MB


def copying_scores(model: TransformerBridge) -> Float[Tensor, "layer head"]:
    """OV copying score, sum(eigenvalues) / sum(|eigenvalues|) of ``W_E W_V W_O W_U``.

    +1: attending to a token raises its own logit, for every direction; 0: as often as not.
    The matrix is vocabulary x vocabulary of rank d_head; AB and BA have the same eigenvalues but
    for zeros, so those of the d_head x d_head matrix ``W_O (W_U W_E) W_V`` are enough.

    Example:
        >>> weights.copying_scores(net)[found.induction] > 0.5
        tensor(True)
    """
    core = (model.W_O @ (model.W_U @ model.W_E) @ model.W_V).double()
    values = torch.linalg.eigvals(core)
    return (values.sum(-1).real / values.abs().sum(-1)).float().cpu()


def composition_scores(
    model: TransformerBridge, kind: Literal["Q", "K", "V"]
) -> Float[Tensor, "layer head layer head"]:
    """Elhage's composition of an earlier head with a later one, ``|W_OV W| / (|W_OV| |W|)``.

    Index [l1, h1, l2, h2]; zero unless l1 < l2. Frobenius norms. Subtract
    ``composition_baseline`` before calling a value large. Computed by TransformerLens.

    Example:
        >>> weights.composition_scores(net, "K")[1].abs().max()
        tensor(0.)
    """
    return model.all_composition_scores(kind).scores


def composition_baseline(
    d_model: int, d_head: int, generator: Generator, draws: int = 300
) -> tuple[float, float]:
    """Mean and standard deviation of the composition score of random heads of the same shape.

    Factors have uniform entries, as Kaiming initialisation gives; the score ignores their scale.

    Example:
        >>> mean, spread = weights.composition_baseline(64, 16, generator, draws=20)
        >>> bool(0 < spread < mean < 1)
        True
    """

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
    embedding: Embedding = "tokens",
) -> tuple[float, float]:
    """Top-1 matching of the two-head K-composition circuit (seed note 003).

    With queries ``Q = E W_Q`` and keys ``K = E W_V W_O W_K`` (the key of the token that follows
    i carries what the previous-token head wrote about i), the matrix ``M = Q K^T`` asks: does
    token i's query prefer the position after an i? It is about QK matching, not about
    predicting tokens: no OV, no softmax over a real context, no positions.

    Args:
        model: loaded with ``fold=True`` to compare with published values.
        previous: (layer, head) of the previous-token head, in an earlier layer.
        induction: (layer, head) of the induction head.
        embedding: ``"tokens"`` takes E = W_E; ``"effective"`` adds the first MLP's output to
            what is read above layer 0 (what a token looks like after layer 0, without context).

    Returns:
        Fraction of tokens whose best key is their own (argmax over columns), and fraction of
        tokens whose best query is their own (argmax over rows). Chance is 1 / vocabulary.

    Example:
        >>> matched, above_chance = weights.qk_matching(net, found.previous, found.induction)
        >>> matched > 0.5
        True
    """
    (l1, h1), (l2, h2) = previous, induction
    if l2 <= l1:
        raise IclError(f"{l2}.{h2} cannot read {l1}.{h1}: it must be in a later layer.")
    queries = _embedding(model, l2, embedding) @ model.W_Q[l2, h2]
    values = _embedding(model, l1, embedding) @ model.W_V[l1, h1]
    keys = values @ model.W_O[l1, h1] @ model.W_K[l2, h2]
    return top1(queries, keys), top1(keys, queries)


def top1(rows: Float[Tensor, "vocab d_head"], columns: Float[Tensor, "vocab d_head"]) -> float:
    """Fraction of i with ``argmax_j rows_i . columns_j == i``, never forming all products."""
    own = torch.arange(len(rows), device=rows.device)
    best = [(part @ columns.T).argmax(-1) for part in rows.split(CHUNK)]
    return (torch.cat(best) == own).float().mean().item()


def head_pairs(model: TransformerBridge) -> list[tuple[Head, Head]]:
    """All pairs of heads of which the second is in a later layer.

    Example:
        >>> pairs = weights.head_pairs(net)
        >>> len(pairs), pairs[0]
        (16, ((0, 0), (1, 0)))
    """
    heads = [(la, h) for la in range(model.cfg.n_layers) for h in range(model.cfg.n_heads)]
    return [(a, b) for a in heads for b in heads if a[0] < b[0]]


def _embedding(
    model: TransformerBridge, layer: int, kind: Embedding
) -> Float[Tensor, "vocab d_model"]:
    """What the given layer sees of a token without context or position."""
    tokens, block = model.W_E, model.blocks[0]
    if kind == "tokens" or layer == 0:
        return tokens
    with torch.no_grad():
        parts = [block.mlp(block.ln2(part[None]))[0] for part in tokens.split(CHUNK)]
    return tokens + torch.cat(parts)
