"""Homework 2, on chapter 02: kinds of edges, saliency, isolation, extraction, loyalty."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...models import load
from ...tasks import topics
from .answers import compare, generator, letter

CASES = (("anchors-0", 0), ("anchors-1", 1))  # model and layer: public, first hidden
CUT = -10_000.0


def q1(edge_counts: Callable[..., Tensor], seed: int) -> None:
    """Every edge visited."""
    label_pos, target = _places(seed)
    counts = {
        name: torch.tensor(
            [
                [
                    sum(
                        _kind(d, s, places, q, into) == k
                        for d in range(q + 1)
                        for s in range(last(d))
                    )
                    for k in ("wp", "pq", "ww")
                ]
                for places, q in zip(label_pos.tolist(), target.tolist(), strict=True)
            ]
        )
        for name, into, last in (
            ("right", True, lambda d: d),
            ("diagonal", True, lambda d: d + 1),
            ("out", False, lambda d: d),
        )
    }
    truth = counts["right"]
    everything = torch.stack([truth[:, 0], truth[:, 1], target * (target + 1) // 2], 1)
    inside = truth.clone()
    inside[:, 0] -= torch.arange(label_pos.shape[1]).sum()
    off_by_one = truth.clone()
    off_by_one[:, 2] = target * (target - 1) // 2 - truth[:, 0] - truth[:, 1]
    compare(
        edge_counts(label_pos, target),
        truth,
        {
            "A word's attention to itself is no edge between words: leave the diagonal "
            "out.": counts["diagonal"],
            "wp are the edges *into* a label word, from everything before it; you count those "
            "that leave it.": counts["out"],
            "ww are all *other* edges: subtract wp and pq from q (q + 1) / 2.": everything,
            "Earlier label words are sources of a label word, too: label word k has p_k "
            "sources.": inside,
            "Positions 0 to q are q + 1 words, so there are q (q + 1) / 2 edges.": off_by_one,
        },
    )


def _places(seed: int, size: int = 14) -> tuple[Tensor, Tensor]:
    """Label positions in order, and a target after them, for three prompts."""
    draw = generator(seed)
    places = [torch.randperm(size - 4, generator=draw)[: 2 + seed % 3] + 1 for _ in range(3)]
    target = torch.randint(size - 2, size, (3,), generator=draw)
    return torch.stack(places).sort(-1).values, target


def _kind(dest: int, src: int, places: list[int], target: int, into: bool = True) -> str:
    if (dest if into else src) in places and not (not into and dest == target):
        return "wp"
    return "pq" if dest == target and src in places else "ww"


def q2(saliency: Callable[..., Tensor], seed: int) -> None:
    """Head by head."""
    draw = generator(seed)
    size = 5 + seed
    attention = torch.rand(2, 3, size, size, generator=draw).tril()
    gradient = torch.randn(2, 3, size, size, generator=draw)
    joined, apart = torch.zeros(2, size, size), torch.zeros(2, size, size)
    for head in range(3):
        joined += attention[:, head] * gradient[:, head]
        apart += (attention[:, head] * gradient[:, head]).abs()
    compare(
        saliency(attention, gradient),
        joined.abs(),
        {
            "Sum over the heads first, then take the absolute value: heads may cancel.": apart,
            "Sum over the heads; that is their mean.": joined.abs() / 3,
            "Saliency has no sign: take the absolute value of the sum.": joined,
            "That is the gradient alone: multiply by the attention.": gradient.sum(1).abs(),
            "That is a matrix product; attention and gradient are multiplied entry by entry.": (
                attention @ gradient
            )
            .sum(1)
            .abs(),
        },
    )


def q3(flow: Callable[..., Tensor], seed: int) -> None:
    """Edge by edge."""
    label_pos, target = _places(seed)
    draw = generator(seed + 100)
    importance = torch.rand(3, 14, 14, generator=draw)  # above the diagonal, too

    def averaged(into: bool = True, diagonal: bool = False, after: bool = False) -> Any:
        total, count = torch.zeros(3, 3), torch.zeros(3, 3)
        for b, (places, q) in enumerate(zip(label_pos.tolist(), target.tolist(), strict=True)):
            for dest in range(14 if after else q + 1):
                for src in range(dest + diagonal):
                    kind = ("wp", "pq", "ww").index(_kind(dest, src, places, q, into))
                    total[b, kind] += importance[b, dest, src]
                    count[b, kind] += 1
        return total, count

    total, count = averaged()
    turned, swapped = torch.zeros(3, 3), averaged(into=False)
    for b, (places, q) in enumerate(zip(label_pos.tolist(), target.tolist(), strict=True)):
        for dest in range(q + 1):
            for src in range(dest):
                kind = ("wp", "pq", "ww").index(_kind(dest, src, places, q))
                turned[b, kind] += importance[b, src, dest]
    everything = total / count
    everything = torch.stack([*everything.T[:2], total.sum(1) / count.sum(1)], 1)
    with_diagonal, beyond = averaged(diagonal=True), averaged(after=True)
    compare(
        flow(importance, label_pos, target),
        total / count,
        {
            "Those are sums: divide by the number of edges of each kind.": total,
            "Rows are destinations and columns are sources: you have them the wrong way "
            "round.": turned / count,
            "S_wp is about the edges *into* the label words, not out of them.": swapped[0]
            / swapped[1],
            "S_ww is the mean of the edges that are neither wp nor pq.": everything,
            "Leave the diagonal out.": with_diagonal[0] / with_diagonal[1],
            "Nothing after the target belongs to the prompt: stop at q.": beyond[0] / beyond[1],
        },
    )


def q4(isolated: Callable[..., Tensor], seed: int) -> None:
    """The softmax row by row, over what may be seen."""
    draw = generator(seed)
    label_pos, _ = _places(seed)
    scores = torch.randn(3, 2, 14, 14, generator=draw)

    def pattern(cut: Any, renormalise: bool = True) -> Tensor:
        made = torch.zeros_like(scores)
        for b, places in enumerate(label_pos.tolist()):
            for q in range(14):
                seen = [k for k in range(q + 1) if not (renormalise and cut(q, k, places))]
                if seen:
                    made[b, :, q, seen] = torch.softmax(scores[b][:, q, seen], -1)
                gone = [k for k in range(q + 1) if cut(q, k, places)]
                made[b, :, q, gone] = 0.0
        return made

    def into(q: int, k: int, places: list[int]) -> bool:
        return q in places and k < q

    nothing = pattern(lambda q, k, places: False)
    compare(
        isolated(scores, label_pos),
        pattern(into),
        {
            "The rows of the label words do not sum to 1: cut the scores *before* the "
            "softmax.": pattern(into, renormalise=False),
            "That cuts what others read *from* the label words. Isolation cuts what the label "
            "words read: their rows.": pattern(lambda q, k, places: k in places and k < q),
            "A label word may still attend to itself: cut only the sources before it.": pattern(
                lambda q, k, places: q in places
            ),
            "Nothing is cut in that pattern.": nothing,
            "Attention is causal: a word sees only itself and what came before.": torch.softmax(
                _filled(scores, label_pos), -1
            ),
        },
    )


def _filled(scores: Tensor, label_pos: Tensor) -> Tensor:
    """Label words cut off, and no causal mask."""
    made = scores.clone()
    for b, places in enumerate(label_pos.tolist()):
        for q in places:
            made[b, :, q, :q] = CUT
    return made


def q5(auc: Callable[..., float], seed: int) -> None:
    """Pair by pair, with ties."""
    draw = generator(seed)
    count = 12 + 3 * seed
    scores = torch.randint(0, 5, (count,), generator=draw) / 5
    chosen = (scores + torch.rand(count, generator=draw) > 0.8 + 0.1 * (seed % 2)).long()
    chosen[:2] = torch.tensor([0, 1])
    pairs = [
        (s, t)
        for s, c in zip(scores.tolist(), chosen.tolist(), strict=True)
        for t, d in zip(scores.tolist(), chosen.tolist(), strict=True)
        if c == 1 and d == 0
    ]
    above = sum(s > t for s, t in pairs) / len(pairs)
    level = sum(s == t for s, t in pairs) / len(pairs)
    compare(
        auc(scores, chosen),
        above + level / 2,
        {
            "A tie counts one half; you count it as lost.": above,
            "A tie counts one half; you count it as won.": above + level,
            "That is the area the other way round: a pair is won when the row of class 1 has "
            "the *higher* score.": 1 - above - level / 2,
            "That is the accuracy at a threshold of one half: the area compares all pairs and "
            "needs no threshold.": ((scores > 0.5).long() == chosen).float().mean().item(),
            "That is won minus lost (a rank correlation): the area is a share of pairs.": 2 * above
            + level
            - 1,
        },
    )


def q6(label_loyalty: Callable[..., float], reason: str, seed: int) -> None:
    """One model and layer in the public check, another in the hidden ones."""
    answered = letter("reason", reason)
    if seed:  # the public check does not tell
        compare(
            answered,
            "b",
            {
                "Reason (a): the target reads the label words in the second layer most, and "
                "isolating the label words there cuts nothing that the target reads.": "a",
                "Reason (c): isolation cuts the same number of edges in every layer.": "c",
                "Reason (d): isolating an early layer hurts, so the label words do not know "
                "the answer by themselves: the words that are dealt out change from prompt to "
                "prompt.": "d",
            },
        )
    if seed < len(CASES):
        given, truth, mistakes = _loyalty(seed)
        compare(label_loyalty(*given), truth, mistakes)


@cache
def _loyalty(seed: int) -> tuple[tuple[Any, ...], float, dict[str, float]]:
    """Isolation written out on the scores of one layer."""
    name, layer = CASES[seed]
    model = load(name)
    prompts = topics.sample(24, generator(seed))

    def chosen(where: int | None, out: bool = False) -> Tensor:
        def cut(scores: Tensor, hook: object) -> Tensor:
            scores = scores.clone()
            for b, places in enumerate(prompts.label_pos.tolist()):
                for p in places:
                    if out:
                        scores[b, :, p + 1 :, p] = CUT
                    else:
                        scores[b, :, p, :p] = CUT
            return scores

        name = f"blocks.{where}.attn.hook_attn_scores"
        hooks = [] if where is None else [(name, cut)]
        with torch.no_grad():
            logits = model.run_with_hooks(prompts.tokens, fwd_hooks=[*hooks])
        rows = torch.arange(len(prompts))
        return logits[rows, prompts.target].gather(1, prompts.label_words).argmax(-1)

    before, after = chosen(None), chosen(layer)
    share = (before == after).float().mean().item()
    mistakes = {
        "That is the accuracy under isolation. Loyalty asks whether the answer is the *same* as "
        "without isolation, right or wrong.": (after == prompts.gold).float().mean().item(),
        "That is the share of answers that change; loyalty is the share that stays.": 1 - share,
        "Isolation cuts the rows of the label words (what they read), not their columns (what "
        "is read from them).": (before == chosen(layer, out=True)).float().mean().item(),
    }
    return (model, prompts, layer), share, mistakes
