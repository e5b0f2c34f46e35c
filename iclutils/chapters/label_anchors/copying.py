"""Copying heads in a model that classifies: what they carry, and when in training they come.

Heads are removed with ``interp.hooks.ablate_sets``: each writes its mean over the prompts, or what
is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata
from torch import Tensor

from ...interp.head_scores import score_heads
from ...interp.hooks import Head, How, ablate_sets, logits_under
from ...interp.readout import predictions
from ...models import TransformerBridge
from ...tasks.prompts import Prompts
from ...tasks.repeated import RepeatedTokens
from .answers import Answers, answers, answers_by_set, label_loyalty
from .isolation import isolated


def checkpoint_metrics(
    model: TransformerBridge, prompts: Prompts, copied: RepeatedTokens, layers: int
) -> dict[str, float]:
    """Return scores of a model at one step of its training, 0 to 1.

    ``aggregation`` is the share of predictions that change when the label words are isolated in
    the first ``layers`` layers.
    """
    _, right = predictions(model, copied.tokens)
    clean = answers(model, prompts)
    cut = isolated(model, prompts, range(layers))
    return {
        "copying": right[:, copied.clean_half].float().mean().item(),
        "prefix": prefix_scores(model, copied).max().item(),
        "accuracy": clean.correct.float().mean().item(),
        "aggregation": 1 - label_loyalty(cut, clean).float().mean().item(),
    }


def prefix_scores(model: TransformerBridge, copied: RepeatedTokens) -> Float[Tensor, "layer head"]:
    """Return the mean prefix-matching score of every head on repeated tokens (chapter 01)."""
    return score_heads(model, copied.tokens, copied.length)["prefix"].mean(0)


def correlation_within_layers(
    one: Float[Tensor, "layer head"], other: Float[Tensor, "layer head"]
) -> float:
    """Return the rank correlation of two scores over heads, the mean rank of each layer taken out:
    that both rise with depth does not count."""
    a, b = (rankdata(x.cpu()).reshape(x.shape) for x in (one, other))
    a, b = (x - x.mean(1, keepdims=True) for x in (a, b))
    return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


def answers_without(
    model: TransformerBridge,
    prompts: Prompts,
    sets: Sequence[Sequence[Head]],
    how: How = "mean",
    other: Tensor | None = None,
) -> list[Answers]:
    """Return the answers without each set of heads, which write their mean over these prompts, or
    nothing, or what they write on ``other`` tokens of the same shape."""
    hooks = ablate_sets(
        model, prompts.tokens, sets, how, prompts.tokens if other is None else other
    )
    scores = logits_under(model, prompts.tokens, hooks, prompts.target[:, None])
    return [Answers.of(prompts, one[:, 0]) for one in scores]


def answers_by_set_without(
    model: TransformerBridge, prompts: Prompts, sets: Sequence[Sequence[Head]], others: Prompts
) -> list[Answers]:
    """Return the same where prompts share demonstrations, which are read once; heads write their
    mean over ``others``."""
    every = ablate_sets(model, others.tokens, sets, "mean", others.tokens)
    always = [lambda _, hooks=hooks: hooks for hooks in every]
    return [answers_by_set(model, prompts, hooks, hooks) for hooks in always]
