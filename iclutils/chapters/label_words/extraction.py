"""Extraction: does the target read its answer from the label words, and in which layers?

In every layer the target's attention to the label words is turned into a classifier: how well
does a_c, the attention to the label words of class c, tell which class the *model* predicts? Its
area under the ROC curve is 0.5 when it tells nothing, whatever the layer's scale. R_l is the
share of everything above 0.5 that layers up to l have gathered; terms may be negative, so it
need not rise.

The score is a correlation with the model's own prediction, not with the right answer, and a
layer that repeats what an earlier one decided scores just as high.

Source: Wang et al. 2023, section 2.3, equations 5 and 6, and appendix E.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ...interp.hooks import Hook
from ...interp.readout import batches
from ...models import TransformerBridge, get_act_name
from ...tasks.prompts import Prompts
from .answers import answers


def label_attention(
    model: TransformerBridge, prompts: Prompts, batch_size: int | None = None
) -> tuple[Float[Tensor, "batch layer cls"], Int[Tensor, "batch"]]:
    """The target's attention to the label words of each class, and the class predicted.

    ``a_l[c]`` is summed over the heads and over all label words of class c.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.label_words import extraction
        >>> from iclutils.tasks import topics
        >>> asked = topics.sample(40, torch.Generator().manual_seed(0), classes=2)
        >>> attention, predicted = extraction.label_attention(models.load("anchors-0"), asked)
        >>> attention.shape[1:], len(extraction.auc_by_layer(attention, predicted))
        (torch.Size([4, 2]), 4)
    """
    by_head, predicted = _by_head(model, prompts, batch_size)
    return by_head.sum(2), predicted


def label_reading(model: TransformerBridge, prompts: Prompts) -> Float[Tensor, "layer head"]:
    """Mean attention of every head from the target to the label words of the predicted class."""
    by_head, predicted = _by_head(model, prompts, None)
    return by_head[torch.arange(len(prompts)), :, :, predicted].mean(0)


def _by_head(
    model: TransformerBridge, prompts: Prompts, batch_size: int | None
) -> tuple[Float[Tensor, "batch layer head cls"], Int[Tensor, "batch"]]:
    seen, predicted = [], []
    for rows in batches(prompts, batch_size, "attention"):
        part = prompts[rows]
        layers: dict[int, Tensor] = {}

        def read(layer: int, part: Prompts = part, layers: dict = layers) -> Hook:
            each = torch.arange(len(part), device=part.tokens.device)
            places = part.label_pos[:, None].expand(-1, model.cfg.n_heads, -1)

            def store(pattern: Tensor, hook: object) -> Tensor:
                row = pattern[each, :, part.target]  # (batch, head, src)
                layers[layer] = part.by_class(row.gather(2, places))
                return pattern

            return get_act_name("pattern", layer), store

        hooks = [read(layer) for layer in range(model.cfg.n_layers)]
        predicted.append(answers(model, part, hooks).predicted)
        seen.append(torch.stack([layers[layer] for layer in range(model.cfg.n_layers)], 1))
    return torch.cat(seen), torch.cat(predicted)


def auc(scores: Float[Tensor, "batch cls"], predicted: Int[Tensor, "batch"]) -> float:
    """Area under the ROC curve of ``scores`` for the class ``predicted``, as in the paper's code.

    Classes that are never predicted are left out first. Two that remain are told apart by the
    raw score of the second. With more, every row is divided by its sum over the classes that
    remain, and the areas of all ordered pairs of classes are averaged (one-vs-one, macro; Hand
    and Till 2001). A row without any attention to them counts as even.

    Returns:
        A number in 0..1; 0.5 is chance. NaN if only one class is ever predicted: then there is
        nothing to tell apart.

    Example:
        >>> import torch
        >>> from iclutils.chapters.label_words import extraction
        >>> extraction.auc(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]))
        1.0
    """
    present = predicted.unique()
    if len(present) < 2:
        return float("nan")
    kept, truth = scores[:, present].double().cpu(), predicted.cpu().numpy()
    if len(present) == 2:
        return float(roc_auc_score(truth, kept[:, 1].numpy()))
    total = kept.sum(-1, keepdim=True)
    shares = torch.where(total > 0, kept / total, 1 / len(present))
    return float(roc_auc_score(truth, shares.numpy(), multi_class="ovo", average="macro"))


def auc_by_layer(
    attention: Float[Tensor, "batch layer cls"], predicted: Int[Tensor, "batch"]
) -> Float[Tensor, "layer"]:
    """AUCROC_l: ``auc`` of every layer; all NaN if only one class is ever predicted."""
    values = [auc(attention[:, layer], predicted) for layer in range(attention.shape[1])]
    return torch.tensor(values, dtype=torch.float64)


def cumulative(aucs: Float[Tensor, "layer"]) -> Float[Tensor, "layer"]:
    """R_l: share of all AUC above chance that the layers up to l hold; R of the last is 1.

    Average AUCs over seeds and data sets first. NaN where they are, or if they sum to chance.

    Example:
        >>> import torch
        >>> from iclutils.chapters.label_words import extraction
        >>> extraction.cumulative(torch.tensor([0.5, 0.6, 0.8])).round(decimals=2)
        tensor([0.0000, 0.2500, 1.0000])
    """
    above = aucs - 0.5
    total = above.sum()
    return above.cumsum(0) / torch.where(total == 0, torch.nan, total)


def released_axis_bug(
    attention: Float[Tensor, "batch layer cls"],
) -> Float[Tensor, "batch layer cls"]:
    """What the released notebook reads, with one demonstration per class, for ``attention``.

    The released code stores every row class-major, (class, layer), whatever the number of
    demonstrations; the notebook unpacks it as (layer, class) when there is one per class. So
    "layer l, class c" holds entry l C + c of the class-major list, mostly of another layer; the
    first and the last are always right.
    """
    return attention.transpose(1, 2).reshape(attention.shape)
