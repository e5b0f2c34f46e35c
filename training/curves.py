"""Curves of a training: what chapters draw along it, measured from its checkpoints as stored, on
data of seed 0. They stay in ``curves.jsonl`` (``zoo.curves``) when the checkpoints go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from iclutils.chapters.attention_circuits import stability
from iclutils.chapters.label_anchors.answers import answers, label_loyalty
from iclutils.chapters.label_anchors.isolation import isolate
from iclutils.interp import attribution, clean_corrupt
from iclutils.interp.head_scores import score_heads
from iclutils.interp.readout import predictions
from iclutils.models import TransformerBridge, load
from iclutils.tasks import generator, topics
from iclutils.tasks.repeated import repeated_tokens

from .loop import Rows

SEQUENCES, LENGTH, BEST = 24, 20, 20  # behind the likeness of checkpoints, and edges compared


def copying(work: Path, steps: Sequence[int]) -> Rows:
    """Measure a model that copies: the scores of chapter 01, and how alike its circuits are.

    Best head scores; loss (nats) and accuracy on the clean second copy; and the in-context-learning
    score of entries 10 and 50 of segments of 15 tokens repeated four times (Olsson et al. 2022:
    tokens 50 and 500 of texts).
    """

    def measure(net: TransformerBridge) -> dict[str, float]:
        few = repeated_tokens(net, 32, 30, generator("history"))
        scores = {k: v.mean(0) for k, v in score_heads(net, few.tokens, few.length).items()}
        log_probs, right = predictions(net, few.tokens)
        long = repeated_tokens(net, 32, 15, generator("icl"), times=4)
        known = predictions(net, long.tokens)[0]
        icl = known[:, 10] - known[:, 50]  # loss late minus loss early: below 0 if context helps
        return {
            "prefix": scores["prefix"].max().item(),
            "previous": scores["previous"].max().item(),
            "loss": -log_probs[:, few.clean_half].mean().item(),
            "accuracy": right[:, few.clean_half].float().mean().item(),
            "icl": icl.mean().item(),
        }

    return _along(work, steps, measure)


def classifying(work: Path, steps: Sequence[int]) -> Rows:
    """Measure a model that classifies: shares of chapter 02, and how alike its circuits are.

    ``aggregation`` is the share of predictions that change when the label words are isolated in the
    first two layers.
    """
    few = topics.sample(200, generator("evaluation", 1), shots=1)[:64]

    def measure(net: TransformerBridge) -> dict[str, float]:
        copied = repeated_tokens(net, 32, 24, generator("copied"))
        _, right = predictions(net, copied.tokens)
        prefix = score_heads(net, copied.tokens, copied.length)["prefix"].mean(0)
        clean, cut = answers(net, few), isolate(net, few, range(2))
        return {
            "copying": right[:, copied.clean_half].float().mean().item(),
            "prefix": prefix.max().item(),
            "accuracy": clean.correct.float().mean().item(),
            "aggregation": 1 - label_loyalty(cut, clean).float().mean().item(),
        }

    return _along(work, steps, measure)


def _along(
    work: Path, steps: Sequence[int], measure: Callable[[TransformerBridge], dict[str, float]]
) -> Rows:
    """Take the measures at every step, and three of chapter 06: ``gap``, what the corruption of
    repeated tokens costs (nats); ``similarity``, the Jaccard index of the best 20 edges and those
    before, on other sequences; ``floor``, that of two halves of one step's sequences."""
    rows, before, half = [], None, SEQUENCES // 2
    for step in steps:
        net = load(work / f"step-{step:05d}", tokenizer="numbers")
        row: dict[str, Any] = {"step": step} | measure(net)
        task = clean_corrupt.copying(net, SEQUENCES, LENGTH, generator("history"))
        clean, corrupt = (
            task.score(clean_corrupt.scored_logits(net, task, corrupt=c)).mean().item()
            for c in (False, True)
        )
        effects = attribution.edge_attribution(net, task, steps=5).flatten(0, 1)
        row |= {"gap": clean - corrupt, "similarity": None, "floor": None}
        if before is not None:
            row["similarity"] = stability.top_overlap(before[:, :half], effects[:, half:], BEST)
            row["floor"] = stability.reextraction_floor(effects, BEST, generator("floor"))
        before = effects
        rows.append(row)
    return rows
