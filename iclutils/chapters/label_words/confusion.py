"""Error diagnosis: which classes will be confused, read off the keys of their label words.

If the target's attention tells classes apart by the keys of their label words, two classes with
near keys are hard to tell apart. "Near" counts only along the directions in which the targets'
queries vary: those are found by PCA and weighted by how much the queries vary along them. The
prediction is compared with the confusion that happens, pair by pair, by rank correlation.

Queries and keys are the vectors before any rotation by position: with learned positions there
are no others, and with rotary positions they say what a head looks for, while the rotation adds
where from. So two label words are not held to be different because one stands further back.

Source: Wang et al. 2023, section 3.3, appendices J and K. The rank correlation and its null are
ours: the paper compares by eye.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.label_words import confusion
    >>> from iclutils.tasks import topics
    >>> net = models.load("anchors-0")
    >>> asked = topics.sample(40, torch.Generator().manual_seed(0), shared=True)
    >>> queries = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.1], [0.0, -0.1]])
    >>> keys = torch.tensor([[0.0, 0.0], [4.0, 0.0], [3.0, 0.0]])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.stats import rankdata
from torch import Tensor

from ...errors import IclError, unknown
from ...interp.hooks import Hook
from ...interp.readout import at_target, batches, check_prompts
from ...models import TransformerBridge
from ...tasks.prompts import Prompts, class_logits

Scale = Literal["std", "singular"]
Other = Float[Tensor, "*other_set other_cls other_cls"]  # must match; a mismatch is refused
EXACT = 5040  # up to so many relabellings (7 classes) the null is enumerated


@dataclass(frozen=True)
class Correlation:
    """Rank correlation of two confusion matrices, and what chance would give.

    Attributes:
        rho: Spearman's, over pairs of classes, averaged over the sets that have something to
            rank; NaN if none has.
        p_value: how often a relabelling does at least as well (one-sided); NaN if rho is.
        null: rho of every relabelling.
        exact: whether ``null`` holds all relabellings rather than random ones.
    """

    rho: float
    p_value: float
    null: Float[np.ndarray, "draw"]
    exact: bool


def queries_and_keys(
    model: TransformerBridge, prompts: Prompts, batch_size: int | None = None
) -> tuple[
    Float[Tensor, "layer batch width"],
    Float[Tensor, "layer batch cls width"],
    Float[Tensor, "batch vocab"],
]:
    """Queries at the target, keys at the label words, logits at the target; one forward pass.

    All heads are concatenated (width = heads x d_head). Where heads share keys, the keys are
    repeated; where a class is shown several times, its keys are averaged (ours: the paper shows
    each class once). Keys of prompts that share their demonstrations are equal; the paper takes
    those of its first set of demonstrations for all queries: ``keys[:, 0]``.

    Example:
        >>> q, k, _ = confusion.queries_and_keys(net, asked)
        >>> q.shape[0] == net.cfg.n_layers, k.shape[2] == asked.classes
        (True, True)
    """
    check_prompts(model, prompts)
    layers = range(model.cfg.n_layers)
    queries, keys, logits = [], [], []
    for rows in batches(prompts, batch_size, "queries and keys"):
        part = prompts[rows]
        every = torch.arange(len(part), device=part.tokens.device)
        seen: dict[str, Tensor] = {}

        def keep(name: str, at: Tensor, every: Tensor = every, seen: dict = seen) -> Hook:
            def store(value: Tensor, hook: object) -> Tensor:
                seen[name] = value[every.view(-1, *[1] * (at.ndim - 1)), at]
                return value

            return name, store

        hooks = [keep(f"blocks.{layer}.attn.hook_q", part.target) for layer in layers]
        hooks += [keep(f"blocks.{layer}.attn.hook_k", part.label_pos) for layer in layers]
        with torch.no_grad():
            out = model.run_with_hooks(part.tokens, fwd_hooks=[*hooks, at_target(part)])
        if len(seen) < 2 * len(layers):
            raise IclError("This model does not expose its queries and keys.")
        share = part.of_class().to(out.dtype)
        share = share / share.sum(1, keepdim=True)
        query = torch.stack([seen[f"blocks.{layer}.attn.hook_q"] for layer in layers])
        key = torch.stack([seen[f"blocks.{layer}.attn.hook_k"] for layer in layers])
        key = key.repeat_interleave(query.shape[-2] // key.shape[-2], -2).flatten(-2)
        queries.append(query.flatten(-2))
        keys.append(torch.einsum("bdc,lbdw->lbcw", share, key))
        logits.append(out[:, 0])
    return torch.cat(queries, 1), torch.cat(keys, 1), torch.cat(logits)


def principal_directions(
    queries: Float[Tensor, "*lead batch width"], directions: int = 10, scale: Scale = "std"
) -> tuple[Float[Tensor, "*lead m width"], Float[Tensor, "*lead m"]]:
    """PCA of the queries: unit directions v_m and the weights sigma_m.

    Args:
        queries: one row per prompt; centred here.
        directions: M.
        scale: ``"std"``: standard deviation of the projections (paper), dividing by the number
            of prompts; ``"singular"``: singular values (released code), larger by the root of
            that number. The factor cancels in ``predicted_confusion``.
    """
    count, width = queries.shape[-2:]
    most = min(count - 1, width)
    if not 1 <= directions <= most:
        raise IclError(
            f"{count} queries of width {width} vary along at most {max(most, 0)} directions; got "
            f"directions={directions}. Use more prompts or fewer directions."
        )
    if scale not in ("std", "singular"):
        raise unknown("scale", scale, ["std", "singular"])
    centred = queries.double() - queries.double().mean(-2, keepdim=True)
    _, sigma, basis = torch.linalg.svd(centred, full_matrices=False)
    sigma = sigma / math.sqrt(count) if scale == "std" else sigma
    return (
        basis[..., :directions, :].to(queries.dtype),
        sigma[..., :directions].to(queries.dtype),
    )


def key_distances(
    queries: Float[Tensor, "*lead batch width"],
    keys: Float[Tensor, "*lead cls width"],
    directions: int = 10,
    scale: Scale = "std",
) -> Float[Tensor, "*lead cls cls"]:
    """Distances of the keys, each projected to ``sigma_m * (v_m . k)``; keys are not centred."""
    basis, sigma = principal_directions(queries, directions, scale)
    projected = keys @ basis.mT * sigma[..., None, :]
    return (projected[..., :, None, :] - projected[..., None, :, :]).norm(dim=-1)


def predicted_confusion(
    queries: Float[Tensor, "*lead batch width"],
    keys: Float[Tensor, "*lead cls width"],
    directions: int = 10,
    scale: Scale = "std",
) -> Float[Tensor, "*lead cls cls"]:
    """Distance over the largest distance; small is easily confused. The diagonal is set to 1.

    NaN off the diagonal where all keys coincide.

    Example:
        >>> confusion.predicted_confusion(queries, keys, directions=1).round(decimals=3)
        tensor([[1.0000, 1.0000, 0.7500],
                [1.0000, 1.0000, 0.2500],
                [0.7500, 0.2500, 1.0000]])
    """
    distances = key_distances(queries, keys, directions, scale)
    relative = distances / distances.amax((-2, -1), keepdim=True)
    return _ones_on_diagonal(relative)


def actual_confusion(
    scores: Float[Tensor, "batch cls"], gold: Int[Tensor, "batch"]
) -> Float[Tensor, "cls cls"]:
    """ROC-AUC of telling i from j, over the prompts whose gold class is one of them.

    The score is p_i / p_j, by which ``p_i / (p_i + p_j)`` ranks alike, with i the positive class;
    ties count half. 1 is never confused, .5 is chance. Symmetric; the diagonal is set to 1; NaN
    where one of the two classes is nobody's gold class.

    Args:
        scores: log-probabilities of the classes, or their logits.
        gold: class of every prompt.
    """
    classes = scores.shape[1]
    auc = scores.new_full((classes, classes), torch.nan, dtype=torch.float64)
    for i in range(classes):
        for j in range(i):
            ratio = scores[:, i] - scores[:, j]
            ahead = ratio[gold == i][:, None] - ratio[gold == j]
            if ahead.numel():
                auc[i, j] = auc[j, i] = ((ahead > 0).double() + 0.5 * (ahead == 0)).mean()
    return _ones_on_diagonal(auc).to(scores.dtype)


def diagnose(
    model: TransformerBridge,
    prompts: Prompts,
    directions: int = 10,
    batch_size: int | None = None,
) -> tuple[Float[Tensor, "layer cls cls"], Float[Tensor, "cls cls"]]:
    """Predicted confusion at every layer, and the actual one; keys are the first prompt's.

    Example:
        >>> predicted, actual = confusion.diagnose(net, asked)
        >>> predicted.shape[1:] == actual.shape
        True
    """
    queries, keys, logits = queries_and_keys(model, prompts, batch_size)
    predicted = predicted_confusion(queries, keys[:, 0], directions)
    return predicted, actual_confusion(class_logits(prompts, logits), prompts.gold)


def rank_correlation(
    predicted: Float[Tensor, "*set cls cls"],
    actual: Other,
    draws: int = 2000,
    seed: int = 0,
) -> Correlation:
    """Spearman correlation over pairs of classes, with the null of relabelled classes.

    Entries of a matrix are not independent, so the null permutes classes, rows and columns
    together (Mantel 1967), of ``predicted``; for several sets of demonstrations independently in
    each, and rho is the mean over the sets. A single set of few classes is enumerated. Pairs that
    are NaN in ``actual`` are left out, and so are sets with nothing to rank (all pairs alike);
    rho is NaN if no set is left. Positive is agreement: near keys, low AUC.

    Args:
        predicted: from ``predicted_confusion``.
        actual: from ``actual_confusion``.
        draws: random relabellings, where they are not enumerated.
        seed: of the draws.

    Example:
        >>> matrix = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
        >>> matrix = matrix + matrix.T
        >>> round(confusion.rank_correlation(matrix, matrix).rho, 3)
        1.0
    """
    if predicted.shape != actual.shape or draws < 1:
        raise IclError(
            f"Compare matrices of the same shape, with at least one draw; got "
            f"{tuple(predicted.shape)} and {tuple(actual.shape)}, draws={draws}."
        )
    classes = predicted.shape[-1]
    left = predicted.detach().cpu().double().reshape(-1, classes, classes).numpy()
    right = actual.detach().cpu().double().reshape(-1, classes, classes).numpy()
    exact = len(left) == 1 and math.factorial(classes) <= EXACT
    rng = np.random.default_rng(seed)
    rhos, nulls = [], []
    for one, other in zip(left, right, strict=True):
        if exact:
            orders = np.array(list(permutations(range(classes))))
        else:
            orders = rng.permuted(np.tile(np.arange(classes), (draws, 1)), axis=1)
        rho = _spearman(one, other, np.arange(classes)[None])[0]
        if not np.isnan(rho):
            rhos.append(rho)
            nulls.append(_spearman(one, other, orders))
    if not rhos:
        return Correlation(math.nan, math.nan, np.zeros(0), exact)
    rho, null = float(np.mean(rhos)), np.mean(nulls, axis=0)
    as_good = int((null >= rho - 1e-9).sum())
    p_value = as_good / len(null) if exact else (1 + as_good) / (1 + len(null))
    return Correlation(rho, math.nan if math.isnan(rho) else p_value, null, exact)


def _spearman(
    one: Float[np.ndarray, "cls cls"],
    other: Float[np.ndarray, "cls cls"],
    orders: Int[np.ndarray, "draw cls"],
) -> Float[np.ndarray, "draw"]:
    """Spearman correlation of ``other`` with ``one`` relabelled by each of ``orders``."""
    i, j = np.tril_indices(len(one), -1)
    known = ~np.isnan(other[i, j])
    i, j = i[known], j[known]
    if len(i) < 2:
        return np.full(len(orders), np.nan)
    values = one[orders[:, i], orders[:, j]]
    left, right = rankdata(values, axis=1), rankdata(other[i, j])
    left = left - left.mean(1, keepdims=True)
    right = right - right.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        return (left @ right) / np.sqrt((left**2).sum(1) * (right**2).sum())


def _ones_on_diagonal(matrix: Float[Tensor, "*lead cls cls"]) -> Float[Tensor, "*lead cls cls"]:
    same = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    return matrix.masked_fill(same, 1.0)
