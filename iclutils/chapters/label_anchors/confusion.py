"""Error diagnosis: which classes will be confused, read off the keys of their label words.

The target's attention tells classes apart by these keys, along the directions in which the targets'
queries vary; both are taken before any rotation by position. Source: Wang et al. 2023, section 3.3,
appendices J and K; the rank correlation is ours."""

import math
from collections import defaultdict
from functools import partial

import torch
from jaxtyping import Float, Int
from scipy.stats import spearmanr
from torch import Tensor

from ...errors import IclError
from ...interp.hooks import Hook
from ...interp.invariants import check_queries
from ...interp.kv_cache import demonstrations, sets
from ...interp.statistics import area
from ...models import TransformerBridge, get_act_name
from ...tasks.prompts import Prompts
from .answers import Answers, answers_by_set


def queries_and_keys(
    model: TransformerBridge, prompts: Prompts, batch_size: int | None = None
) -> tuple[Float[Tensor, "layer batch width"], Float[Tensor, "layer cls width"], Answers]:
    """Return queries at the target, keys at the label words, and the answers, of prompts that share
    their demonstrations. All heads are side by side (width = heads x d_head); keys of a class that
    is shown several times are averaged (ours)."""
    if len(sets(prompts)) > 1:
        raise IclError("Keys are compared within a set: give prompts that share demonstrations.")
    seen = defaultdict[str, list[Tensor]](list)  # by activation, a pass after the other

    def watch(kind: str, at: Int[Tensor, "batch place"]) -> list[Hook]:
        prompt = torch.arange(len(at), device=at.device)[:, None]

        def store(value: Tensor, hook: object, name: str) -> Tensor:  # (batch, pos, head, d_head)
            check_queries(model, value, "keys of label words")
            seen[name].append(value[prompt, at].flatten(-2))  # (batch, place, width)
            return value

        names = [get_act_name(kind, layer) for layer in range(model.cfg.n_layers)]
        return [(name, partial(store, name=name)) for name in names]

    def keys_of_labels(examples: Prompts) -> list[Hook]:
        return watch("k", examples.label_pos)

    def query_of_target(some: Prompts) -> list[Hook]:
        return watch("q", (some.target - demonstrations(some).sum(1))[:, None])

    model_answers = answers_by_set(model, prompts, keys_of_labels, query_of_target, batch_size)
    keys, queries = (
        torch.stack([torch.cat(seen[get_act_name(kind, la)]) for la in range(model.cfg.n_layers)])
        for kind in "kq"
    )  # (layer, 1, demo, width), (layer, batch, 1, width)
    share = prompts.of_class()[0].to(keys.dtype)  # (demo, cls)
    by_class = torch.einsum("dc,ldw->lcw", share / share.sum(0), keys[:, 0])
    return queries[:, :, 0], by_class, model_answers


def key_distances(
    queries: Float[Tensor, "*lead batch width"],
    keys: Float[Tensor, "*lead cls width"],
    directions: int = 10,
) -> Float[Tensor, "*lead cls cls"]:
    """Return distances of keys, each projected to ``sigma_m * (v_m . k)``, not centred, with v_m
    the first principal ``directions`` of the queries and sigma_m their standard deviations."""
    count = queries.shape[-2]
    centred = queries.double() - queries.double().mean(-2, keepdim=True)
    _, sigma, basis = torch.linalg.svd(centred, full_matrices=False)
    sigma = (sigma / math.sqrt(count))[..., :directions].to(queries.dtype)
    projected = keys @ basis[..., :directions, :].to(queries.dtype).mT * sigma[..., None, :]
    return (projected[..., :, None, :] - projected[..., None, :, :]).norm(dim=-1)


def predicted_confusion(
    distances: Float[Tensor, "*lead cls cls"],
) -> Float[Tensor, "*lead cls cls"]:
    """Return ``key_distances`` over the largest, 1 on the diagonal: small is easily confused."""
    relative = distances / distances.amax((-2, -1), keepdim=True)
    same = torch.eye(distances.shape[-1], dtype=torch.bool, device=distances.device)
    return relative.masked_fill(same, 1.0)


def actual_confusion(
    scores: Float[Tensor, "batch cls"], gold: Int[Tensor, "batch"]
) -> Float[Tensor, "cls cls"]:
    """Return the ROC-AUC of telling i from j by p_i / p_j (from log-probabilities or logits), over
    the prompts whose gold class is one of them. 1 is never confused, .5 is chance; the diagonal is
    1; NaN where one of the two classes is nobody's gold class."""
    classes = scores.shape[1]
    auc = torch.eye(classes, dtype=scores.dtype)
    scores, gold = scores.detach().cpu(), gold.cpu()
    for i in range(classes):
        for j in range(i):
            ratio = scores[:, i] - scores[:, j]
            auc[i, j] = auc[j, i] = area(ratio[gold == i], ratio[gold == j])
    return auc


def rank_correlation(
    predicted: Float[Tensor, "cls cls"], actual: Float[Tensor, "cls cls"]
) -> float:
    """Return the Spearman correlation over pairs of classes, near keys with low AUC being positive.
    NaN pairs are left out; NaN if there is nothing to rank."""
    i, j = torch.tril_indices(len(actual), len(actual), -1)
    one, other = (x.detach().cpu().double()[i, j] for x in (predicted, actual))
    known = ~(one.isnan() | other.isnan())
    if min(len(x[known].unique()) for x in (one, other)) < 2:
        return math.nan
    return float(spearmanr(one[known], other[known]).statistic)
