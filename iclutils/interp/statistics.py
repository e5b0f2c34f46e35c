"""What a model predicts, position by position: log-probability and accuracy of the next token.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> from iclutils.interp import statistics
    >>> scores = torch.zeros(1, 3, 4)
    >>> scores[0, 0, 2] = 2.0
    >>> tokens = torch.tensor([[0, 2, 1]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from ..models import TransformerBridge, logits


def log_prob(
    scores: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch entry"]:
    """log p of each next token, in nats; entry i is about token i + 1, so there are pos - 1.

    Example:
        >>> statistics.log_prob(scores, tokens).round(decimals=2)
        tensor([[-0.3400, -1.3900]])
    """
    chosen = tokens[:, 1:, None]
    return scores[:, :-1].gather(-1, chosen)[..., 0] - scores[:, :-1].logsumexp(-1)


def hits(
    scores: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"]
) -> Bool[Tensor, "batch entry"]:
    """Whether the most probable next token is the true one.

    Example:
        >>> statistics.hits(scores, torch.tensor([[0, 2, 0]]))
        tensor([[True, True]])
    """
    return scores[:, :-1].argmax(-1) == tokens[:, 1:]


def predict(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> tuple[Float[Tensor, "batch entry"], Bool[Tensor, "batch entry"]]:
    """log p (nats) and correctness of every next-token prediction.

    Example:
        >>> net = models.load("induction-0")
        >>> task = repeated_tokens(net, 8, 20, torch.Generator().manual_seed(0))
        >>> _, right = statistics.predict(net, task.tokens)
        >>> bool(right[:, task.clean_half].float().mean() > 0.9)
        True
    """
    scores = logits(model, tokens)
    return log_prob(scores, tokens), hits(scores, tokens)


def icl_score(
    log_probs: Float[Tensor, "batch entry"], early: int, late: int
) -> Float[Tensor, "batch"]:
    """In-context-learning score: loss at entry ``late`` minus loss at entry ``early``, in nats.

    Negative when context helps. Olsson et al. 2022 take the 50th and 500th token of texts.
    """
    return log_probs[:, early] - log_probs[:, late]


def mean_se(values: Float[Tensor, "sample"]) -> tuple[float, float]:
    """Mean and standard error over independent samples.

    Example:
        >>> statistics.mean_se(torch.tensor([1.0, 3.0]))
        (2.0, 1.0)
    """
    if len(values) < 2:
        return values.mean().item(), 0.0
    return values.mean().item(), (values.std() / len(values) ** 0.5).item()


def bootstrap(
    samples: Float[Tensor, "sample *rest"],
    of: Callable[[Float[Tensor, "*rest"]], Float[Tensor, ""]],
    generator: Generator,
    draws: int = 200,
) -> tuple[float, float]:
    """A function of the mean over samples, and its standard error.

    For what is no mean itself, such as a ratio of means: the samples are drawn anew, with
    replacement, ``draws`` times (Efron 1979).

    Example:
        >>> samples = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> ratio = lambda mean: mean[0] / mean[1]
        >>> value, spread = statistics.bootstrap(samples, ratio, torch.Generator().manual_seed(0))
        >>> round(value, 3), 0 < spread < 0.2
        (0.667, True)
    """
    count = len(samples)
    pick = torch.randint(0, count, (draws, count), generator=generator)
    again = torch.stack([of(samples[rows].mean(0)) for rows in pick])
    return of(samples.mean(0)).item(), again.std().item()


def worst(
    seeds: Mapping[Hashable, tuple[float, float]], high_is_good: bool = True
) -> tuple[float, float]:
    """(value, spread) of the least favourable of several cases.

    Undefined values (NaN) are passed over, unless there is no other.

    Example:
        >>> statistics.worst({"seed 0": (0.9, 0.01), "seed 1": (0.7, 0.02)})
        (0.7, 0.02)
    """
    pick = min if high_is_good else max
    defined = [pair for pair in seeds.values() if not math.isnan(pair[0])]
    return pick(defined or seeds.values(), key=lambda pair: pair[0])
