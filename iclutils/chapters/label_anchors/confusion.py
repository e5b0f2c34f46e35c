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
from torch import Tensor

from ...errors import IclError
from ...interp.hooks import Hook
from ...interp.kv_cache import demonstrations, sets
from ...models import TransformerBridge, get_act_name
from ...tasks.prompts import Prompts
from .answers import Answers, answers_by_set
from .extraction import area


def queries_and_keys(
    model: TransformerBridge, prompts: Prompts, batch_size: int | None = None
) -> tuple[Float[Tensor, "layer batch width"], Float[Tensor, "layer batch cls width"], Answers]:
    """Queries at the target, keys at the label words, and the answers; demonstrations that prompts
    share are read once. All heads are concatenated (width = heads x d_head). Keys of a class that
    is shown several times are averaged (ours). The paper takes those of its first set of
    demonstrations: ``keys[:, 0]``."""
    layers = range(model.cfg.n_layers)
    queries, keys = ([get_act_name(kind, la) for la in layers] for kind in "qk")
    seen: dict[str, list[Tensor]] = {name: [] for name in (*queries, *keys)}

    def watch(names: list[str], at: Int[Tensor, "batch place"]) -> list[Hook]:
        """Hooks that keep (prompt, place, width) at some positions, one more set at each call."""
        prompt = torch.arange(len(at), device=at.device)[:, None]

        def keep(value: Tensor, hook: object, name: str) -> Tensor:
            seen[name].append(value[prompt, at].flatten(-2))
            return value

        return [(name, partial(keep, name=name)) for name in names]

    def asked(some: Prompts) -> list[Hook]:
        return watch(queries, (some.target - demonstrations(some).sum(1))[:, None])

    def shown(some: Prompts) -> list[Hook]:
        return watch(keys, some.label_pos)

    told = answers_by_set(model, prompts, shown, asked, batch_size)
    groups = sets(prompts)
    order = torch.cat(groups).argsort()
    of_set = torch.cat([torch.full_like(rows, n) for n, rows in enumerate(groups)])[order]
    query = torch.stack([torch.cat(seen[name])[order, 0] for name in queries])
    key = torch.stack([torch.cat(seen[name])[of_set] for name in keys])
    share = prompts.of_class().to(key.dtype)
    share = share / share.sum(1, keepdim=True)
    return query, torch.einsum("bdc,lbdw->lbcw", share, key), told


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
    auc = torch.eye(classes, dtype=scores.dtype)
    scores, gold = scores.detach().cpu(), gold.cpu()
    for i in range(classes):
        for j in range(i):
            ratio = scores[:, i] - scores[:, j]
            auc[i, j] = auc[j, i] = area(ratio[gold == i], ratio[gold == j])
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
