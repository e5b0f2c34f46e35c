"""Extraction: does the target read its answer from the label words, and in which layers?

A layer's attention from the target to the label words is a classifier of the class that the *model*
predicts; a layer that repeats another scores as high. Source: Wang et al. 2023, section 2.3,
appendix E."""

import statistics
from itertools import permutations

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.stats import rankdata
from torch import Tensor

from ...interp.readout import in_batches
from ...interp.statistics import area
from ...models import TransformerBridge, get_act_name
from ...tasks.prompts import Prompts
from .answers import answers


def label_attention(
    model: TransformerBridge, prompts: Prompts, batch_size: int | None = None
) -> tuple[Float[Tensor, "batch layer cls"], Int[Tensor, "batch"]]:
    """Return the target's attention to the label words of each class, ``a_l[c]``, summed over the
    heads and the label words of class c, and the class predicted."""
    by_head, predicted = _by_head(model, prompts, batch_size)
    return by_head.sum(2), predicted


def label_reading(
    model: TransformerBridge, prompts: Prompts, every: bool = False
) -> Float[Tensor, "layer head"]:
    """Return the mean attention from the target to label words, of the predicted class or all."""
    by_head, predicted = _by_head(model, prompts, None)
    chosen = torch.arange(len(prompts), device=predicted.device), slice(None), slice(None)
    return by_head.sum(-1).mean(0) if every else by_head[*chosen, predicted].mean(0)


def _by_head(
    model: TransformerBridge, prompts: Prompts, batch_size: int | None
) -> tuple[Float[Tensor, "batch layer head cls"], Int[Tensor, "batch"]]:
    def measure(batch: Prompts, _: Tensor) -> list[Tensor]:
        by_layer: list[Tensor] = []
        prompt = torch.arange(len(batch), device=batch.tokens.device)
        places = batch.label_pos[:, None].expand(-1, model.cfg.n_heads, -1)

        def store(pattern: Tensor, hook: object) -> Tensor:
            from_target = pattern[prompt, :, batch.target]  # (batch, head, src)
            by_layer.append(batch.by_class(from_target.gather(2, places)))
            return pattern

        hooks = [(get_act_name("pattern", layer), store) for layer in range(model.cfg.n_layers)]
        predicted = answers(model, batch, hooks).predicted
        return [torch.stack(by_layer, 1), predicted]

    attention, predicted = in_batches(prompts, batch_size, "attention", measure)
    return attention, predicted


def correlation_within_layers(
    one: Float[Tensor, "layer head"], other: Float[Tensor, "layer head"]
) -> float:
    """Return the rank correlation of two scores over heads, the mean rank of each layer taken out:
    that both rise with depth does not count."""
    a, b = (rankdata(x.cpu()).reshape(x.shape) for x in (one, other))
    a, b = (x - x.mean(1, keepdims=True) for x in (a, b))
    return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


def auc(scores: Float[Tensor, "batch cls"], predicted: Int[Tensor, "batch"]) -> float:
    """Return the area under the ROC curve of ``scores`` for the class ``predicted`` (paper's code).

    Two classes are told apart by the raw score of the second; with more, rows are divided by their
    sums (without any attention they count as even) and the areas of all pairs averaged (one-vs-one;
    Hand and Till 2001). With one alone it is NaN."""
    present = predicted.unique()
    if len(present) < 2:
        return float("nan")
    shares = scores[:, present].double()
    if len(present) > 2:
        total = shares.sum(-1, keepdim=True)
        shares = torch.where(total > 0, shares / total, 1 / len(present))
    of = [shares[predicted == one] for one in present]
    pairs = list(permutations(range(len(present)), 2)) if len(present) > 2 else [(1, 0)]
    return statistics.fmean(area(of[i][:, i], of[j][:, i]) for i, j in pairs)


def auc_by_layer(
    attention: Float[Tensor, "batch layer cls"], predicted: Int[Tensor, "batch"]
) -> Float[Tensor, "layer"]:
    """Return AUCROC_l: ``auc`` of every layer."""
    values = [auc(attention[:, layer], predicted) for layer in range(attention.shape[1])]
    return torch.tensor(values, dtype=torch.float64)
