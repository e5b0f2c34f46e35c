"""Wrong answers to homework 2: for each question, what the message must say, and the answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from iclutils.interp.hooks import run_with_hooks


def _counts(
    label_pos: Tensor, target: Tensor, self_too: int = 0, rest: bool = True, labels: bool = True
) -> Tensor:
    into_label = label_pos.sum(1) + self_too * label_pos.shape[1]
    if not labels:  # earlier label words left out
        into_label = into_label - torch.arange(label_pos.shape[1]).sum()
    into_target = torch.full_like(target, label_pos.shape[1])
    everything = target * (target + 1) // 2 + self_too * (target + 1)
    other = everything - (label_pos.sum(1) + self_too * label_pos.shape[1]) - into_target
    return torch.stack([into_label, into_target, other if rest else everything], 1)


def _kinds(importance: Tensor, label_pos: Tensor, target: Tensor, stop: bool = True) -> Tensor:
    place = torch.arange(importance.shape[-1])
    label = (label_pos[:, :, None] == place).any(1)
    edge = (place[:, None] > place).expand(importance.shape)
    if stop:
        edge = edge & (place <= target[:, None])[:, :, None]
    into_label = edge & label[:, :, None]
    into_target = edge & (place == target[:, None])[:, :, None] & label[:, None, :]
    return torch.stack([into_label, into_target, edge & ~into_label & ~into_target], 1)


def _flow(importance: Tensor, kinds: Tensor, mean: bool = True) -> Tensor:
    total = (importance[:, None] * kinds).sum((-2, -1))
    return total / kinds.sum((-2, -1)) if mean else total


def _all_in_ww(importance: Tensor, label_pos: Tensor, target: Tensor) -> Tensor:
    kinds = _kinds(importance, label_pos, target)
    kinds[:, 2] = kinds.any(1)
    return _flow(importance, kinds)


def _isolated(scores: Tensor, label_pos: Tensor, how: str) -> Tensor:
    place = torch.arange(scores.shape[-1])
    label = (label_pos[:, :, None] == place).any(1)
    before, causal = place[:, None] > place, place[:, None] >= place
    rows = (label[:, :, None] & before)[:, None]
    columns = (label[:, None, :] & before)[:, None]
    if how == "not causal":
        return torch.softmax(scores.masked_fill(rows, -1e4), -1)
    seen = scores.masked_fill(~causal, float("-inf"))
    if how == "after":
        return torch.softmax(seen, -1).masked_fill(rows, 0.0)
    if how == "columns":
        return torch.softmax(seen.masked_fill(columns, float("-inf")), -1)
    if how == "itself":
        return torch.softmax(seen, -1) * ~label[:, None, :, None]
    return torch.softmax(seen, -1)


def _pairs(scores: Tensor, predicted: Tensor, tie: float) -> float:
    ones, zeros = scores[predicted == 1][:, None], scores[predicted == 0]
    return ((ones > zeros) + tie * (ones == zeros)).float().mean().item()


def _loyalty(model: Any, prompts: Any, layer: int, how: str = "") -> float:
    place = torch.arange(prompts.tokens.shape[1])
    label = (prompts.label_pos[:, :, None] == place).any(1)
    rows = label[:, None, :] if how == "columns" else label[:, :, None]
    cut = rows & (place[:, None] > place)

    def edit(scores: Tensor, hook: object) -> Tensor:
        return scores.masked_fill(cut[:, None], -10_000.0)

    def predicted(hooks: list) -> Tensor:
        logits, _ = run_with_hooks(model, prompts.tokens, hooks)
        last = logits[torch.arange(len(cut)), prompts.target]
        return last.gather(1, prompts.label_words).argmax(-1)

    after = predicted([(f"blocks.{layer}.attn.hook_attn_scores", edit)])
    reference = prompts.gold if how == "accuracy" else predicted([])
    share = (after == reference).float().mean().item()
    return 1 - share if how == "changed" else share


WRONG: dict[str, list[tuple[str, Any]]] = {
    "q1": [
        ("diagonal", lambda label_pos, target: _counts(label_pos, target, self_too=1)),
        ("all *other* edges", lambda label_pos, target: _counts(label_pos, target, rest=False)),
        ("Earlier label words", lambda label_pos, target: _counts(label_pos, target, labels=False)),
        (
            "q + 1 words",
            lambda label_pos, target: (
                _counts(label_pos, target) - target[:, None] * torch.tensor([0, 0, 1])
            ),
        ),
        ("whole numbers", lambda label_pos, target: _counts(label_pos, target).float()),
    ],
    "q2": [
        ("heads may cancel", lambda a, g: (a * g).abs().sum(1)),
        ("their mean", lambda a, g: (a * g).mean(1).abs()),
        ("no sign", lambda a, g: (a * g).sum(1)),
        ("gradient alone", lambda a, g: g.sum(1).abs()),
        ("entry by entry", lambda a, g: (a @ g).sum(1).abs()),
        ("shape", lambda a, g: (a * g).abs()),
    ],
    "q3": [
        ("divide by the number", lambda i, p, q: _flow(i, _kinds(i, p, q), mean=False)),
        ("wrong way round", lambda i, p, q: _flow(i.mT, _kinds(i, p, q))),
        ("neither wp nor pq", _all_in_ww),
        ("stop at q", lambda i, p, q: _flow(i, _kinds(i, p, q, stop=False))),
    ],
    "q4": [
        ("before* the softmax", lambda scores, places: _isolated(scores, places, "after")),
        ("read *from*", lambda scores, places: _isolated(scores, places, "columns")),
        ("attend to itself", lambda scores, places: _isolated(scores, places, "itself")),
        ("Nothing is cut", lambda scores, places: _isolated(scores, places, "")),
        ("causal", lambda scores, places: _isolated(scores, places, "not causal")),
    ],
    "q5": [
        ("as lost", lambda scores, predicted: _pairs(scores, predicted, 0)),
        ("as won", lambda scores, predicted: _pairs(scores, predicted, 1)),
        ("other way round", lambda scores, predicted: _pairs(-scores, predicted, 0.5)),
        (
            "threshold",
            lambda scores, predicted: ((scores > 0.5) == predicted).float().mean().item(),
        ),
        ("rank correlation", lambda scores, predicted: 2 * _pairs(scores, predicted, 0.5) - 1),
    ],
    "q6": [
        ("same* as", (lambda *given: _loyalty(*given, how="accuracy"), "b")),
        ("that change", (lambda *given: _loyalty(*given, how="changed"), "b")),
        ("their columns", (lambda *given: _loyalty(*given, how="columns"), "b")),
        ("Reason (a)", (_loyalty, "a")),
        ("Reason (c)", (_loyalty, "c")),
        ("Reason (d)", (_loyalty, "d")),
    ],
}
