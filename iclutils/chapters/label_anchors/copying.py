"""Copying heads in a model that classifies: what they carry, and when in training they come.

Copying is measured as in chapter 01, on repeated tokens; classification on prompts.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from ...interp.head_scores import score_heads
from ...interp.hooks import Head, ablate_heads
from ...interp.readout import predictions
from ...models import TransformerBridge
from ...tasks.prompts import Prompts
from ...tasks.repeated import RepeatedTokens
from .answers import Answers, answers, answers_by_set, label_loyalty
from .isolation import isolated


def checkpoint_metrics(
    model: TransformerBridge, prompts: Prompts, copied: RepeatedTokens, layers: int
) -> dict[str, float]:
    """Scores of a model at one step of its training, 0 to 1, as logged curves hold them.

    Accuracy in copying, best prefix-matching score, accuracy in classification, and as
    ``aggregation`` the share of predictions that change when the label words are isolated in the
    first ``layers`` layers.
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
    """Mean prefix-matching score of every head on repeated tokens (chapter 01)."""
    return score_heads(model, copied.tokens, copied.length)["prefix"].mean(0)


def without_heads(
    model: TransformerBridge, prompts: Prompts, heads: list[Head]
) -> Bool[Tensor, "batch"]:
    """Which prompts are classified right when ``heads`` write their mean over all positions."""
    hooks = ablate_heads(model, prompts.tokens, heads, "mean", prompts.tokens)
    return answers(model, prompts, hooks).correct


def without_heads_by_set(
    model: TransformerBridge, prompts: Prompts, heads: list[Head], others: Prompts
) -> Answers:
    """Answers when ``heads`` write their mean over ``others``, where many prompts share their
    demonstrations, which are read once."""
    hooks = ablate_heads(model, others.tokens, heads, "mean", others.tokens)
    return answers_by_set(model, prompts, lambda _: hooks, hooks)
