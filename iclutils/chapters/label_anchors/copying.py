"""Copying heads in a model that classifies: what they carry, and when in training they come."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ...interp.head_scores import score_heads
from ...interp.readout import predictions
from ...models import TransformerBridge
from ...tasks.prompts import Prompts
from ...tasks.repeated import RepeatedTokens
from .answers import answers, label_loyalty
from .isolation import isolated


def checkpoint_metrics(
    model: TransformerBridge, prompts: Prompts, copied: RepeatedTokens, layers: int
) -> dict[str, float]:
    """Scores of a model at one step of its training, 0 to 1; ``aggregation``: share of predictions
    that change when the label words are isolated in the first ``layers`` layers."""
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
