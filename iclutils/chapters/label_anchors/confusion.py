"""Error diagnosis: which classes will be confused, read off the keys of their label words.

The target's attention tells classes apart by these keys, along the directions in which the targets'
queries vary; both are taken before any rotation by position. Source: Wang et al. 2023, section 3.3,
appendices J and K; the rank correlation is ours."""

from __future__ import annotations

import math
import statistics
from functools import partial

import torch
from jaxtyping import Float, Int
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ...errors import IclError
from ...interp.readout import in_batches
from ...models import TransformerBridge, get_act_name
from ...tasks.prompts import Prompts
from .answers import Answers, answers


def queries_and_keys(
    model: TransformerBridge, prompts: Prompts, batch_size: int | None = None
) -> tuple[Float[Tensor, "layer batch width"], Float[Tensor, "layer batch cls width"], Answers]:
    """Queries at the target, keys at the label words, and the answers; one forward pass. All heads
    are concatenated (width = heads x d_head). Keys of a class that is shown several times are
    averaged (ours). The paper takes those of its first set of demonstrations: ``keys[:, 0]``."""
    layers = range(model.cfg.n_layers)
    names = [(get_act_name("q", la), get_act_name("k", la)) for la in layers]

    def measure(batch: Prompts, _: Tensor) -> list[Tensor]:
        seen: dict[str, Tensor] = {}
        prompt = torch.arange(len(batch), device=batch.tokens.device)[:, None]

        def store(value: Tensor, hook: object, name: str, at: Tensor) -> Tensor:
            seen[name] = value[prompt, at]  # (batch, position, head, d_head)
            return value

        at = {q: batch.target[:, None] for q, _ in names} | {k: batch.label_pos for _, k in names}
        hooks = [(name, partial(store, name=name, at=place)) for name, place in at.items()]
        told = answers(model, batch, hooks)
        query = torch.stack([seen[q][:, 0] for q, _ in names], 1)
        key = torch.stack([seen[k] for _, k in names]).flatten(-2)
        share = batch.of_class().to(key.dtype)
        share = share / share.sum(1, keepdim=True)
        by_class = torch.einsum("bdc,lbdw->lbcw", share, key).transpose(0, 1)
        return [query.flatten(-2), by_class, *vars(told).values()]

    query, key, *told = in_batches(prompts, batch_size, "queries and keys", measure)
    return query.transpose(0, 1), key.transpose(0, 1), Answers(*told)


def key_distances(
    queries: Float[Tensor, "*lead batch width"],
    keys: Float[Tensor, "*lead cls width"],
    directions: int,
) -> Float[Tensor, "*lead cls cls"]:
    """Distances of the keys, each projected to ``sigma_m * (v_m . k)``, not centred, with v_m the
    first ``directions`` principal directions of the queries and sigma_m their standard
    deviations."""
    count, width = queries.shape[-2:]
    most = min(count - 1, width)
    if not 1 <= directions <= most:
        raise IclError(f"These queries vary along at most {most} directions; got {directions=}.")
    centred = queries.double() - queries.double().mean(-2, keepdim=True)
    _, sigma, basis = torch.linalg.svd(centred, full_matrices=False)
    sigma = (sigma / math.sqrt(count))[..., :directions].to(queries.dtype)
    projected = keys @ basis[..., :directions, :].to(queries.dtype).mT * sigma[..., None, :]
    return (projected[..., :, None, :] - projected[..., None, :, :]).norm(dim=-1)


def predicted_confusion(
    queries: Float[Tensor, "*lead batch width"],
    keys: Float[Tensor, "*lead cls width"],
    directions: int = 10,
) -> Float[Tensor, "*lead cls cls"]:
    """Distance over the largest; small: easily confused. NaN where all keys coincide, 1 on the
    diagonal."""
    distances = key_distances(queries, keys, directions)
    relative = distances / distances.amax((-2, -1), keepdim=True)
    same = torch.eye(keys.shape[-2], dtype=torch.bool, device=keys.device)
    return relative.masked_fill(same, 1.0)


def actual_confusion(
    scores: Float[Tensor, "batch cls"], gold: Int[Tensor, "batch"]
) -> Float[Tensor, "cls cls"]:
    """ROC-AUC of telling i from j by p_i / p_j (from log-probabilities or logits), over the prompts
    whose gold class is one of them. 1 is never confused, .5 is chance; the diagonal is set to 1;
    NaN where one of the two classes is nobody's gold class."""
    classes = scores.shape[1]
    auc = torch.full((classes, classes), torch.nan, dtype=scores.dtype).fill_diagonal_(1.0)
    scores, gold = scores.detach().cpu(), gold.cpu()
    for i in range(classes):
        for j in range(i):
            rows = (gold == i) | (gold == j)
            if len(gold[rows].unique()) == 2:
                ratio = scores[rows, i] - scores[rows, j]
                auc[i, j] = auc[j, i] = float(roc_auc_score(gold[rows] == i, ratio))
    return auc


def rank_correlation(
    predicted: Float[Tensor, "*set cls cls"], actual: Float[Tensor, "*set cls cls"]
) -> float:
    """Spearman correlation over pairs of classes, mean over sets of demonstrations; positive: near
    keys, low AUC. NaN pairs and sets with nothing to rank are left out."""
    classes = predicted.shape[-1]
    i, j = torch.tril_indices(classes, classes, -1)
    flat = (x.detach().cpu().double().view(-1, classes, classes) for x in (predicted, actual))
    rhos = []
    for one, other in zip(*(x[:, i, j] for x in flat), strict=True):
        known = ~(one.isnan() | other.isnan())
        if len(one[known].unique()) > 1 and len(other[known].unique()) > 1:
            rhos.append(float(spearmanr(one[known], other[known]).statistic))
    return statistics.fmean(rhos) if rhos else math.nan
