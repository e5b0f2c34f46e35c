"""The six lenses side by side: the heads that each marks, what these cost when they are taken away,
and what a vector does that is added at the target of a prompt without examples.

Sources: Yin and Steinhardt 2025 (sets that leave out another's); Hendel et al. 2023 (the state of a
layer as a vector); Todd et al. 2024 (what heads write as a vector)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ...interp.head_scores import same_layers
from ...interp.hooks import How, ablate_sets, logits_at, logits_under
from ...models import TransformerBridge, get_act_name
from ..attention_circuits.stability import top
from .marks import LENSES, Marks
from .question import Answered, Question
from .smoothers import beyond_counting

Heads = frozenset[int]  # numbers of heads in order of depth
Cost = Float[Tensor, "set draw"]


def head_scores(
    marked: Marks,
    prefix: Float[Tensor, "sequence layer head"],
    contexts: tuple[Float[Tensor, "context choice"], Tensor, Float[Tensor, "context _ _ demo"]],
    shows: Int[Tensor, "context demo"],
    part: slice = slice(None),
) -> dict[str, Float[Tensor, "layer head"]]:
    """Return every head's score by each lens, from all prompts, sequences and contexts or a part of
    each; ``contexts`` as of ``smoothers.read_examples``."""
    logits, _, looks = contexts
    other = {
        "induction": prefix[part].mean(0).cpu(),
        "algorithm": beyond_counting(looks[part], shows[part], logits[part]).float(),
    }
    return {k: other[k] if k in other else getattr(marked, k)[part].mean(0) for k in LENSES}


def strongest(scores: Mapping[str, Float[Tensor, "layer head"]], many: int) -> dict[str, Heads]:
    """Return the heads that each lens marks: those that it scores highest, so many."""
    return {k: frozenset(top(x.flatten(), many)) for k, x in scores.items()}


def sets_to_remove(top: Mapping[str, Set[int]]) -> dict[str, Heads]:
    """Return the heads that each lens marks, and what matching prefixes, reading answers and
    writing the vector share or have alone. The last two leave out what the other marks."""
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
    """Draw as many other heads of the same layers, ``width`` in a layer, or with ``again`` of all:
    ``head_scores.same_layers`` of heads by their numbers."""
    drawn = same_layers((divmod(i, width) for i in heads), width, draws, generator, again)
    return [frozenset(layer * width + head for layer, head in some) for some in drawn]


def accuracy(model: TransformerBridge, question: Question) -> float:
    """Return the share of prompts whose answer is the likeliest of all tokens."""
    logits = logits_at(model, question.task.clean, question.task.at)
    return question.said(logits[:, 0]).right.mean().item()


def sides(model: TransformerBridge, question: Question, wrong: Question) -> dict[str, Answered]:
    """Return the answers after the examples, with these permuted (``wrong``), after the rival's
    examples likewise, and without any."""
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
    """Return the answers without each set of heads at all positions, (set, batch): resampled (as on
    the corrupt side), by their mean over prompts and positions, or zero."""
    task, width = question.task, model.cfg.n_heads
    heads = [[divmod(i, width) for i in sorted(some)] for some in sets]
    hooks = ablate_sets(model, task.clean, heads, how, task.corrupt)
    logits = logits_under(model, task.clean, hooks, task.at)
    return question.said(torch.stack([x[:, 0] for x in logits]))


def lost(whole: Answered, less: Answered, gap: float) -> tuple[Cost, Cost]:
    """Return what removals (set, draw, batch) cost of ``whole``, of which they have the first
    prompts: share of the gap (in nats), and accuracy; the means over prompts."""
    margin, right = (
        x[: y.shape[-1]].mean().cpu() - y.mean(-1) for x, y in zip(whole[:2], less[:2], strict=True)
    )
    return (margin / gap).double(), right.double()


def steered(
    model: TransformerBridge,
    question: Question,
    vectors: Iterable[tuple[int, Float[Tensor, "d_model"]]],
) -> Answered:
    """Return the answers without examples when a vector is added at the target after a layer,
    (pair, batch): for each pair of layer and vector."""
    tokens, target = question.bare
    rows = torch.arange(len(tokens), device=tokens.device)

    def added(value: Tensor, hook: object, vector: Tensor) -> Tensor:
        return value.index_put((rows, target), vector.to(value), accumulate=True)

    ways = [
        [(get_act_name("resid_post", layer), partial(added, vector=vector))]
        for layer, vector in vectors
    ]
    logits = [x[:, 0] for x in logits_under(model, tokens, ways, target[:, None])]
    return question.said(torch.stack(logits))


def random_like(vector: Float[Tensor, "*lead d_model"], generator: Generator) -> Tensor:
    """Draw a vector of the same length in a random direction: the control of ``steered``."""
    drawn = torch.randn(vector.shape, generator=generator).to(vector)
    return drawn * vector.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)


def record(cases: Mapping[str, tuple[Any, ...]], single: Answered) -> dict[str, Any]:
    """Return what live figure 7 shows. Of each case: model, prompts, sets, answers and, by way of
    removal, answers without the sets; ``single``: without each head. Written are probabilities
    (thousandths) and margins (tenths of a nat) of three prompts a case, each set and a control."""

    def written(p: Tensor, margin: Tensor) -> str:
        pairs = zip(p.flatten().tolist(), margin.flatten().tolist(), strict=True)
        return " ".join(f"{1000 * x:.0f} {10 * y:.0f}" for x, y in pairs)

    def prompt(case: str, row: int) -> dict[str, Any]:
        model, here, _, whole, less = cases[case]
        decode = model.tokenizer.decode
        text = {"case": case, "text": decode(here.task.clean[row]).strip("\n")}
        text["answers"] = [decode(i).strip() for i in here.task.choices[row]]
        text["whole"] = written(whole.p[row], whole.margin[row])
        first = {way: (x.p[:, :2, row], x.margin[:, :2, row]) for way, x in less.items()}
        return text | {way: written(*x) for way, x in first.items()}

    sets = {c: x[2].items() for c, x in cases.items()}
    return {
        "sets": {c: {k: " ".join(map(str, sorted(s))) for k, s in x} for c, x in sets.items()},
        "prompts": [prompt(c, row) for c, x in cases.items() for row in range(min(3, len(x[1])))],
        "single": written(single.p[:, 0], single.margin[:, 0]),
    }
