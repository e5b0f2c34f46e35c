"""The six lenses side by side: a score of every head from each, and sets of heads to take away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ...interp.head_scores import same_layers
from ...interp.hooks import How, ablate_sets, logits_at, logits_under
from ...models import TransformerBridge
from .marks import LENSES, Marks
from .question import Answered, Question
from .smoothers import beyond_counting

Heads = frozenset[int]  # numbers of heads in order of depth


def head_scores(
    marked: Marks,
    prefix: Float[Tensor, "sequence layer head"],
    contexts: tuple[Float[Tensor, "context choice"], Tensor, Float[Tensor, "context _ _ demo"]],
    shows: Int[Tensor, "context demo"],
    part: slice = slice(None),
) -> dict[str, Float[Tensor, "layer head"]]:
    """Score of every head by each lens, from all prompts, sequences and contexts or a part of each;
    ``contexts`` as of ``smoothers.read_examples``."""
    logits, _, looks = contexts
    other = {
        "induction": prefix[part].mean(0).cpu(),
        "algorithm": beyond_counting(looks[part], shows[part], logits[part]).float(),
    }
    return {k: other[k] if k in other else getattr(marked, k)[part].mean(0) for k in LENSES}


def sets_to_remove(top: Mapping[str, Set[int]]) -> dict[str, Heads]:
    """The heads that each lens marks, and what matching prefixes, reading answers and writing the
    vector share or have alone. The last two leave out what the other marks ({cite}`yin2025`)."""
    match, read, write = (frozenset(top[k]) for k in ("induction", "anchors", "vector"))
    return {k: frozenset(v) for k, v in top.items()} | {
        "match and read": match & read,
        "match only": match - read,
        "read only": read - match,
        "match, not vector": match - write,
        "vector, not match": write - match,
    }


def redrawn(
    heads: Heads, width: int, draws: int, generator: Generator, again: bool = False
) -> list[Heads]:
    """``head_scores.same_layers`` of heads by their numbers, ``width`` of them in a layer."""
    drawn = same_layers((divmod(i, width) for i in heads), width, draws, generator, again)
    return [frozenset(layer * width + head for layer, head in some) for some in drawn]


def sides(model: TransformerBridge, question: Question, wrong: Question) -> dict[str, Answered]:
    """The answers after the examples, with these permuted (``wrong``), after the rival's examples
    likewise, and without any."""
    bare, end = question.bare
    read = {
        "examples": (question.task.clean, question.task.at),
        "wrong pairs": (wrong.task.clean, question.task.at),
        "rival": (question.task.corrupt, question.task.at),
        "rival, wrong pairs": (wrong.task.corrupt, question.task.at),
        "none": (bare, end[:, None]),
    }
    return {k: question.said(logits_at(model, *side)[:, 0]) for k, side in read.items()}


def without(
    model: TransformerBridge, question: Question, sets: Sequence[Heads], how: How
) -> Answered:
    """The answers without each set of heads at all positions, (set, batch): resampled (as on the
    corrupt side), by their mean over prompts and positions, or zero."""
    task, width = question.task, model.cfg.n_heads
    heads = [[divmod(i, width) for i in sorted(some)] for some in sets]
    hooks = ablate_sets(model, task.clean, heads, how, task.corrupt)
    logits = logits_under(model, task.clean, hooks, task.at)
    return question.said(torch.stack([x[:, 0] for x in logits]))
