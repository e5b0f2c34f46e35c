"""What a model predicts, position by position: log-probability and accuracy of the next token."""

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
    """log p of each next token, in nats; entry i is about token i + 1, so there are pos - 1."""
    chosen = tokens[:, 1:, None]
    return scores[:, :-1].gather(-1, chosen)[..., 0] - scores[:, :-1].logsumexp(-1)


def hits(
    scores: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"]
) -> Bool[Tensor, "batch entry"]:
    """Whether the most probable next token is the true one."""
    return scores[:, :-1].argmax(-1) == tokens[:, 1:]


def predict(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> tuple[Float[Tensor, "batch entry"], Bool[Tensor, "batch entry"]]:
    """log p (nats) and correctness of every next-token prediction.

    Raises:
        IclError: if the tokens do not fit the model.
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
    """Mean and standard error over independent samples."""
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
    """
    pick = min if high_is_good else max
    defined = [pair for pair in seeds.values() if not math.isnan(pair[0])]
    return pick(defined or seeds.values(), key=lambda pair: pair[0])
