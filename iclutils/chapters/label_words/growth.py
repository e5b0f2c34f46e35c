"""Growth: copying heads and label anchors in one model, and at which training step each is there.

Copying is measured as in chapter 01, on random tokens shown twice; classification and the
aggregation into label words on prompts.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.label_words import growth
    >>> from iclutils.tasks import topics
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> net = models.load("anchors-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> asked = topics.sample(20, generator, classes=2)
    >>> copied = repeated_tokens(net, 4, 20, generator)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError
from ...interp.head_scores import head_scores
from ...interp.hooks import Head, ablate_heads
from ...interp.readout import predictions, target_logits
from ...models import TransformerBridge, cached
from ...tasks.prompts import Prompts, correct, predicted_class
from ...tasks.repeated import RepeatedTokens
from .isolation import first_layers, isolated_logits, label_loyalty


@dataclass(frozen=True)
class State:
    """What a model can do at one step of its training; shares and scores from 0 to 1.

    Attributes:
        copying: accuracy on the second copy of random tokens.
        prefix: prefix-matching score of the best head.
        accuracy: share of prompts classified right.
        aggregation: share of the predictions that change when the label words are isolated in
            the first layers.
    """

    copying: float
    prefix: float
    accuracy: float
    aggregation: float


def state(model: TransformerBridge, prompts: Prompts, copied: RepeatedTokens, layers: int) -> State:
    """Measure one checkpoint; ``layers`` is how many first layers are isolated.

    Example:
        >>> measured = growth.state(net, asked, copied, layers=2)
        >>> measured.copying > 0.5
        True
    """
    _, right = predictions(model, copied.tokens)
    clean = target_logits(model, prompts)
    cut = isolated_logits(model, prompts, first_layers(model, layers))
    return State(
        copying=right[:, copied.clean_half].float().mean().item(),
        prefix=prefix_scores(model, copied).max().item(),
        accuracy=correct(prompts, clean).float().mean().item(),
        aggregation=1 - label_loyalty(prompts, cut, clean).float().mean().item(),
    )


def prefix_scores(model: TransformerBridge, copied: RepeatedTokens) -> Float[Tensor, "layer head"]:
    """Clean prefix-matching score of every head on tokens shown twice (chapter 01).

    Example:
        >>> growth.prefix_scores(net, copied).max() > 0.5
        tensor(True)
    """
    return head_scores(model, copied.tokens, copied.length)["prefix"].mean(0)


def copying_heads(model: TransformerBridge, copied: RepeatedTokens, count: int) -> list[Head]:
    """The ``count`` heads with the highest clean prefix-matching score, best first.

    Example:
        >>> scores = growth.prefix_scores(net, copied)
        >>> best = growth.copying_heads(net, copied, 2)
        >>> bool(scores[best[0]] == scores.max())
        True
    """
    prefix = prefix_scores(model, copied)
    if not 1 <= count <= prefix.numel():
        raise IclError(f"The model has {prefix.numel()} heads; got count={count}.")
    best = prefix.flatten().topk(count).indices.tolist()
    return [divmod(index, prefix.shape[1]) for index in best]


def label_reading(model: TransformerBridge, prompts: Prompts) -> Float[Tensor, "layer head"]:
    """Mean attention of every head from the target to the label words of the predicted class.

    Example:
        >>> growth.label_reading(net, asked).shape == (net.cfg.n_layers, net.cfg.n_heads)
        True
    """
    logits, cache = cached(model, prompts.tokens, lambda name: name.endswith("attn.hook_pattern"))
    each = torch.arange(len(prompts), device=prompts.tokens.device)
    predicted = predicted_class(prompts, logits[each, prompts.target])
    shown = (prompts.demo_class == predicted[:, None])[:, None].float()  # (batch, 1, demo)
    rows = []
    for layer in range(model.cfg.n_layers):
        row = cache["pattern", layer][each, :, prompts.target]  # (batch, head, src)
        places = prompts.label_pos[:, None].expand(-1, row.shape[1], -1)
        rows.append((row.gather(2, places) * shown).sum(-1).mean(0))
    return torch.stack(rows)


def without_heads(
    model: TransformerBridge, prompts: Prompts, heads: list[Head]
) -> Bool[Tensor, "batch"]:
    """Which prompts are classified right when ``heads`` write their mean instead.

    The mean is over the prompts and their positions, padding included.

    Example:
        >>> growth.without_heads(net, asked, growth.copying_heads(net, copied, 2)).shape
        torch.Size([20])
    """
    hooks = ablate_heads(model, prompts.tokens, heads, "mean", prompts.tokens)
    return correct(prompts, target_logits(model, prompts, hooks))
