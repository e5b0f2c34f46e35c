"""Homework 2, on chapter 02: kinds of edges, saliency, isolation, extraction, loyalty."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...interp.hooks import run_with_hooks
from ...models import load
from ...tasks import topics
from .answers import Function, Value, generator

CASES = (("anchors-0", 0), ("anchors-1", 1))  # model and layer: public, first hidden


def _places(seed: int, size: int = 14) -> tuple[Tensor, Tensor]:
    """Label positions in order, and a target after them, for three prompts."""
    draw = generator(seed)
    places = [torch.randperm(size - 4, generator=draw)[: 2 + seed % 3] + 1 for _ in range(3)]
    target = torch.randint(size - 2, size, (3,), generator=draw)
    return torch.stack(places).sort(-1).values, target


def edge_counts(
    label_pos: Tensor, target: Tensor, self_too: int = 0, labels: bool = True, out: bool = False
) -> Tensor:
    """Number of edges wp, pq, ww."""
    count = label_pos.shape[1]
    into_label = label_pos.sum(1) + self_too * count
    if out:
        into_label = (target[:, None] - label_pos - 1).sum(1)
    everything = target * (target + 1) // 2 + self_too * (target + 1)
    rest = everything - into_label - count
    if not labels:
        into_label = into_label - torch.arange(count).sum()
    return torch.stack([into_label, torch.full_like(target, count), rest], 1)


def _all_edges(label_pos: Tensor, target: Tensor) -> Tensor:
    found = edge_counts(label_pos, target)
    found[:, 2] = found.sum(1)
    return found


EDGE_COUNTS = {
    "A word's attention to itself is no edge between words: leave the diagonal out.": {
        "self_too": 1
    },
    "wp are the edges *into* a label word, from everything before it; you count those that leave "
    "it.": {"out": True},
    "ww are all *other* edges: subtract wp and pq from q (q + 1) / 2.": _all_edges,
    "Earlier label words are sources of a label word, too: label word k has p_k sources.": {
        "labels": False
    },
    "Positions 0 to q are q "
    "+ 1 words, so there are q (q + 1) / 2 edges.": lambda label_pos, target: (
        edge_counts(label_pos, target) - target[:, None] * torch.tensor([0, 0, 1])
    ),
}
q1 = (Function(edge_counts, _places, EDGE_COUNTS),)


def saliency(attention: Tensor, gradient: Tensor) -> Tensor:
    """|sum over heads of attention times gradient|."""
    return (attention * gradient).sum(1).abs()


def _attention(seed: int) -> tuple[Tensor, Tensor]:
    draw, size = generator(seed), 5 + seed
    attention = torch.rand(2, 3, size, size, generator=draw).tril()
    return attention, torch.randn(2, 3, size, size, generator=draw)


SALIENCY = {
    "Sum over the heads first, then take the absolute value: heads may cancel.": lambda a, g: (
        (a * g).abs().sum(1)
    ),
    "Sum over the heads; that is their mean.": lambda a, g: (a * g).mean(1).abs(),
    "Saliency has no sign: take the absolute value of the sum.": lambda a, g: (a * g).sum(1),
    "That is the gradient alone: multiply by the attention.": lambda a, g: g.sum(1).abs(),
    "That is a matrix product; attention "
    "and gradient are multiplied entry by entry.": lambda a, g: (a @ g).sum(1).abs(),
}
q2 = (Function(saliency, _attention, SALIENCY),)


def flow(
    importance: Tensor, label_pos: Tensor, target: Tensor, mean: bool = True, **how: bool
) -> Tensor:
    """Mean saliency of the edges wp, pq, ww."""
    kinds = _kinds(importance, label_pos, target, **how)
    total = (importance[:, None] * kinds).sum((-2, -1))
    return total / kinds.sum((-2, -1)) if mean else total


def _kinds(
    importance: Tensor,
    label_pos: Tensor,
    target: Tensor,
    stop: bool = True,
    out: bool = False,
    diagonal: bool = False,
    rest: bool = True,
) -> Tensor:
    place = torch.arange(importance.shape[-1])
    label = (label_pos[:, :, None] == place).any(1)
    edge = (place[:, None] > place - int(diagonal)).expand(importance.shape)
    if stop:
        edge = edge & (place <= target[:, None])[:, :, None]
    asked = (place == target[:, None])[:, :, None]
    into_target = edge & asked & label[:, None, :]
    into_label = edge & (label[:, None, :] & ~asked if out else label[:, :, None])
    others = edge & ~into_label & ~into_target if rest else edge
    return torch.stack([into_label, into_target, others], 1)


def _importance(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(3, 14, 14, generator=generator(seed + 100)), *_places(seed)


FLOW = {
    "Those are sums: divide by the number of edges of each kind.": {"mean": False},
    "Rows are destinations and columns are "
    "sources: you have them the wrong way round.": lambda importance, *given: flow(
        importance.mT, *given
    ),
    "S_wp is about the edges *into* the label words, not out of them.": {"out": True},
    "S_ww is the mean of the edges that are neither wp nor pq.": {"rest": False},
    "Leave the diagonal out.": {"diagonal": True},
    "Nothing after the target belongs to the prompt: stop at q.": {"stop": False},
}
q3 = (Function(flow, _importance, FLOW),)


def isolated(scores: Tensor, label_pos: Tensor, how: str = "") -> Tensor:
    """Attention pattern in which label words read nothing before them."""
    place = torch.arange(scores.shape[-1])
    label = (label_pos[:, :, None] == place).any(1)
    before = place[:, None] > place
    rows, columns = label[:, :, None] & before, label[:, None, :] & before
    if how == "not causal":
        return scores.masked_fill(rows[:, None], -torch.inf).softmax(-1)
    seen = scores.masked_fill(place[:, None] < place, -torch.inf)
    if how == "after":
        return seen.softmax(-1).masked_fill(rows[:, None], 0.0)
    if how == "itself":
        return seen.softmax(-1) * ~label[:, None, :, None]
    cut = {"": rows, "columns": columns, "nothing": rows & False}[how]
    return seen.masked_fill(cut[:, None], -torch.inf).softmax(-1)


def _raw_scores(seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 2, 14, 14, generator=generator(seed)), _places(seed)[0]


ISOLATED = {
    "The rows of the label words do not sum to 1: cut the scores *before* the softmax.": {
        "how": "after"
    },
    "That cuts what others read *from* the label words. Isolation cuts what the label words "
    "read: their rows.": {"how": "columns"},
    "A label word may still attend to itself: cut only the sources before it.": {"how": "itself"},
    "Nothing is cut in that pattern.": {"how": "nothing"},
    "Attention is causal: a word sees only itself and what came before.": {"how": "not causal"},
}
q4 = (Function(isolated, _raw_scores, ISOLATED),)


def auc(scores: Tensor, predicted: Tensor, tie: float = 0.5) -> float:
    """Area under the ROC curve: the share of pairs that are won."""
    ones, zeros = scores[predicted == 1][:, None], scores[predicted == 0]
    return ((ones > zeros) + tie * (ones == zeros)).float().mean().item()


def _classes(seed: int) -> tuple[Tensor, Tensor]:
    """Scores with ties, of two classes."""
    draw, count = generator(seed), 12 + 3 * seed
    scores = torch.randint(0, 5, (count,), generator=draw) / 5
    chosen = (scores + torch.rand(count, generator=draw) > 0.8 + 0.1 * (seed % 2)).long()
    chosen[:2] = torch.tensor([0, 1])
    return scores, chosen


AUC = {
    "A tie counts one half; you count it as lost.": {"tie": 0.0},
    "A tie counts one half; you count it as won.": {"tie": 1.0},
    "That is the area the other way round: a pair is won when the row of class 1 has the "
    "*higher* score.": lambda scores, predicted: auc(-scores, predicted),
    "That is the accuracy at a threshold of one half: the area compares all pairs and needs no "
    "threshold.": lambda scores, predicted: ((scores > 0.5) == predicted).float().mean().item(),
    "That is won minus lost (a rank correlation): the area is a share of pairs.": lambda *given: (
        2 * auc(*given) - 1
    ),
}
q5 = (Function(auc, _classes, AUC),)


def label_loyalty(model: Any, prompts: Any, layer: int, how: str = "") -> float:
    """Share of predictions that isolation of one layer leaves the same."""
    place = torch.arange(prompts.tokens.shape[1])
    label = (prompts.label_pos[:, :, None] == place).any(1)
    rows = label[:, None, :] if how == "columns" else label[:, :, None]
    cut = rows & (place[:, None] > place)

    def edit(scores: Tensor, hook: object) -> Tensor:
        return scores.masked_fill(cut[:, None], -10_000.0)

    def predicted(hooks: Any) -> Tensor:
        logits, _ = run_with_hooks(model, prompts.tokens, hooks)
        last = logits[torch.arange(len(cut)), prompts.target]
        return last.gather(1, prompts.label_words).argmax(-1)

    after = predicted([(f"blocks.{layer}.attn.hook_attn_scores", edit)])
    reference = prompts.gold if how == "accuracy" else predicted([])
    share = (after == reference).float().mean().item()
    return 1 - share if how == "changed" else share


@cache
def _prompts(seed: int) -> tuple[Any, ...] | None:
    if seed >= len(CASES):
        return None
    name, layer = CASES[seed]
    return load(name), topics.sample(24, generator(seed)), layer


LABEL_LOYALTY = {
    "That is the accuracy under isolation. Loyalty asks whether the answer is the *same* as "
    "without isolation, right or wrong.": {"how": "accuracy"},
    "That is the share of answers that change; loyalty is the share that stays.": {
        "how": "changed"
    },
    "Isolation cuts the rows of the label words (what they read), not their columns (what is "
    "read from them).": {"how": "columns"},
}
REASON = {
    "Reason (a): the target reads the label words in the second layer most, and isolating the "
    "label words there cuts nothing that the target reads.": "a",
    "Reason (c): isolation cuts the same number of edges in every layer.": "c",
    "Reason (d): isolating an early layer hurts, so the label words do not know the answer by "
    "themselves: the words that are dealt out change from prompt to prompt.": "d",
}
q6 = (
    Function(label_loyalty, _prompts, LABEL_LOYALTY),
    Value("reason", "b", REASON),
)
