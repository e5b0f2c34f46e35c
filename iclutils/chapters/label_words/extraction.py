"""Extraction: does the target read its answer from the label words, and in which layers?

In every layer the target's attention to the label words is turned into a classifier: how well
does a_c, the attention to the label words of class c, tell which class the *model* predicts? Its
area under the ROC curve is 0.5 when it tells nothing, whatever the layer's scale. R_l is the
share of everything above 0.5 that layers up to l have gathered; terms may be negative, so it
need not rise.

The score is a correlation with the model's own prediction, not with the right answer, and a
layer that repeats what an earlier one decided scores just as high.

Source: Wang et al. 2023, section 2.3, equations 5 and 6, and appendix E.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.label_words import extraction
    >>> from iclutils.tasks import topics
    >>> net = models.load("anchors-0")
    >>> asked = topics.sample(40, torch.Generator().manual_seed(0), classes=2)
    >>> attention, predicted = extraction.label_attention(net, asked)
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ...errors import IclError
from ...interp.hooks import Hook
from ...interp.readout import batches, check_prompts, target_logits
from ...models import TransformerBridge, get_act_name
from ...tasks.prompts import Prompts, predicted_class

Predicted = Int[Tensor, "rows"]  # one per row of scores; a mismatch is refused with a cure


def label_attention(
    model: TransformerBridge, prompts: Prompts, batch_size: int | None = None
) -> tuple[Float[Tensor, "batch layer cls"], Int[Tensor, "batch"]]:
    """The target's attention to the label words of each class, and the class predicted.

    ``a_l[c]`` is summed over the heads and over all label words of class c.

    Args:
        model: the model.
        prompts: the prompts.
        batch_size: prompts per forward pass; all if omitted.

    Example:
        >>> attention.shape[1:], bool((attention >= 0).all())
        (torch.Size([4, 2]), True)
    """
    check_prompts(model, prompts)
    seen, predicted = [], []
    for rows in batches(prompts, batch_size, "attention"):
        part = prompts[rows]
        layers: dict[int, Tensor] = {}
        hooks = [_watch(part, layer, layers) for layer in range(model.cfg.n_layers)]
        predicted.append(predicted_class(part, target_logits(model, part, hooks)))
        seen.append(torch.stack([layers[layer] for layer in range(model.cfg.n_layers)], 1))
    return torch.cat(seen), torch.cat(predicted)


def _watch(prompts: Prompts, layer: int, into: dict[int, Tensor]) -> Hook:
    member = prompts.of_class()
    each = torch.arange(len(prompts), device=prompts.tokens.device)

    def read(pattern: Tensor, hook: object) -> Tensor:
        row = pattern[each, :, prompts.target].sum(1)
        into[layer] = (row.gather(1, prompts.label_pos)[..., None] * member).sum(1)
        return pattern

    return get_act_name("pattern", layer), read


def auc(scores: Float[Tensor, "batch cls"], predicted: Predicted) -> float:
    """Area under the ROC curve of ``scores`` for the class ``predicted``, as in the paper's code.

    Classes that are never predicted are left out first. Two that remain are told apart by the
    raw score of the second. With more, every row is divided by its sum over the classes that
    remain, and the areas of all ordered pairs of classes are averaged (one-vs-one, macro; Hand
    and Till 2001). A row without any attention to them counts as even.

    Returns:
        A number in 0..1; 0.5 is chance. NaN if only one class is ever predicted: then there is
        nothing to tell apart.

    Example:
        >>> extraction.auc(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]))
        1.0
    """
    if len(scores) != len(predicted):
        raise IclError(f"Got {len(scores)} rows of scores for {len(predicted)} predictions.")
    if len(predicted) and not 0 <= int(predicted.min()) <= int(predicted.max()) < scores.shape[1]:
        raise IclError(f"A predicted class has no column among the {scores.shape[1]} scores.")
    if not bool((torch.isfinite(scores) & (scores >= 0)).all()):
        raise IclError("Scores must be attention: finite and not negative.")
    present = predicted.unique()
    if len(present) < 2:
        return float("nan")
    kept, truth = scores[:, present].double().cpu(), predicted.cpu().numpy()
    if len(present) == 2:
        return float(roc_auc_score(truth, kept[:, 1].numpy()))
    total = kept.sum(-1, keepdim=True)
    even = torch.full_like(kept, 1 / len(present))
    shares = torch.where(total > 0, kept / total, even)
    return float(roc_auc_score(truth, shares.numpy(), multi_class="ovo", average="macro"))


def auc_by_layer(
    attention: Float[Tensor, "batch layer cls"], predicted: Predicted
) -> Float[Tensor, "layer"]:
    """AUCROC_l: ``auc`` of every layer; all NaN if only one class is ever predicted.

    Example:
        >>> aucs = extraction.auc_by_layer(attention, predicted)
        >>> len(aucs) == net.cfg.n_layers, bool(((aucs >= 0) & (aucs <= 1)).all())
        (True, True)
    """
    values = [auc(attention[:, layer], predicted) for layer in range(attention.shape[1])]
    return torch.tensor(values, dtype=torch.float64)


def cumulative(aucs: Float[Tensor, "layer"]) -> Float[Tensor, "layer"]:
    """R_l: share of all AUC above chance that the layers up to l hold; R of the last is 1.

    Average AUCs over seeds and data sets first. NaN where they are, or if they sum to chance.

    Example:
        >>> extraction.cumulative(torch.tensor([0.5, 0.6, 0.8])).round(decimals=2)
        tensor([0.0000, 0.2500, 1.0000])
    """
    above = aucs - 0.5
    total = above.sum()
    if not bool(torch.isfinite(total)) or float(total) == 0:
        return torch.full_like(aucs, float("nan"))
    return above.cumsum(0) / total


def scrambled(attention: Float[Tensor, "batch layer cls"]) -> Float[Tensor, "batch layer cls"]:
    """What the released notebook reads, with one demonstration per class, for ``attention``.

    The released code stores every row class-major, (class, layer), whatever the number of
    demonstrations; the notebook unpacks it as (layer, class) when there is one per class. So
    "layer l, class c" holds entry l C + c of the class-major list, mostly of another layer; the
    first and the last are always right. Kept to show what the slip does to the curves.

    Example:
        >>> bool((extraction.scrambled(attention)[:, 0, 0] == attention[:, 0, 0]).all())
        True
    """
    batch, layers, classes = attention.shape
    return attention.transpose(1, 2).reshape(batch, layers, classes)
