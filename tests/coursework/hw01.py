"""Wrong answers to homework 1: for each question, what the message must say, and the answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from iclutils.interp.hooks import ablate_heads, run_with_hooks
from iclutils.models import get_act_name


def _gain(logits: Tensor, tokens: Tensor, first: int = 1, ahead: int = 1) -> Tensor:
    length = tokens.shape[1] // 2
    log_p = torch.log_softmax(logits, -1)
    of = tokens[:, 1:] if ahead else tokens[:, :-1]
    right = log_p[:, :-1].gather(-1, of[..., None])[..., 0]
    return right[:, length + first :].mean(1) - right[:, :length].mean(1)


def _raw_gain(logits: Tensor, tokens: Tensor) -> Tensor:
    length = tokens.shape[1] // 2
    right = logits[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    return right[:, length + 1 :].mean(1) - right[:, :length].mean(1)


def _profile(pattern: Tensor) -> Tensor:
    length = pattern.shape[-1] // 2
    query = torch.arange(length + 1, 2 * length + 1)
    return torch.stack([pattern[..., query, query - d].mean(-1) for d in range(length + 2)], -1)


def _everywhere(pattern: Tensor) -> Tensor:
    length = pattern.shape[-1] // 2
    mean = [pattern.diagonal(-d, -2, -1).sum((0, 2)) for d in range(length + 2)]
    return torch.stack(mean, -1).argmax(-1)


def _matching(
    pattern: Tensor, tokens: Tensor, after: bool = True, bos: bool = False, asked: bool = True
) -> Tensor:
    same = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    same[:, :, 0] &= bos
    matching = torch.zeros_like(same)
    matching[:, :, 1:] = same[:, :, :-1]
    hit = (pattern * (matching if after else same)[:, None]).sum((-2, -1))
    return hit / (matching.any(-1).sum(-1)[:, None] if asked else tokens.shape[1])


def _values(reads: Tensor, values: Tensor, output: Tensor, unembed: Tensor) -> Tensor:
    return torch.linalg.eigvals(output @ unembed @ reads @ values)


def _kept(
    model: Any, induction: Any, tokens: Tensor, other: Tensor, how: Any = "mean", back: int = -1
) -> tuple[Tensor, Tensor]:
    layer, head = induction
    length = tokens.shape[1] // 2
    query = torch.arange(length + 1, 2 * length + 1)

    def score(hooks: list) -> Tensor:
        _, seen = run_with_hooks(model, tokens, hooks, [get_act_name("pattern", layer)])
        return seen[get_act_name("pattern", layer)][:, head][:, query, query - length - back].mean()

    heads = range(model.cfg.n_heads)
    cut = [score(ablate_heads(model, tokens, [(0, h)], how, other)) for h in heads]
    return torch.stack(cut), score([])


def _right_kept(model: Any, induction: Any, tokens: Tensor, other: Tensor) -> Tensor:
    after, before = _kept(model, induction, tokens, other)
    return after / before


def _zeroed(model: Any, induction: Any, tokens: Tensor, other: Tensor) -> Tensor:
    after, before = _kept(model, induction, tokens, other, "zero")
    return after / before


def _same_token(model: Any, induction: Any, tokens: Tensor, other: Tensor) -> Tensor:
    after, before = _kept(model, induction, tokens, other, back=0)
    return after / before


def _start(copy: Tensor, bos: int) -> Tensor:
    return torch.full((len(copy), 1), bos)


WRONG: dict[str, list[tuple[str, Any]]] = {
    "q1": [
        ("first, not last", lambda copy, bos: torch.cat([copy, copy, _start(copy, bos)], 1)),
        ("BOS is missing", lambda copy, bos: torch.cat([copy, copy], 1)),
        ("not before each copy", lambda copy, bos: torch.cat([_start(copy, bos), copy] * 2, 1)),
        (
            "AABBCC",
            lambda copy, bos: torch.cat([_start(copy, bos), copy.repeat_interleave(2, 1)], 1),
        ),
        ("shape", lambda copy, bos: torch.cat([_start(copy, bos), copy], 1)),
        (
            "whole numbers",
            lambda copy, bos: torch.cat([_start(copy, bos), copy, copy], 1).float(),
        ),
    ],
    "q2": [
        ("L + 1", lambda logits, tokens: _gain(logits, tokens, first=0)),
        ("token i + 1", lambda logits, tokens: _gain(logits, tokens, ahead=0)),
        ("turned around", lambda logits, tokens: -_gain(logits, tokens)),
        ("log-softmax", _raw_gain),
        ("shape", lambda logits, tokens: _gain(logits, tokens).mean()),
    ],
    "q3": [
        ("second copy", _everywhere),
        ("too many", lambda pattern: _profile(pattern).mean(0).argmax(-1) + 1),
        ("first", lambda pattern: _profile(pattern).argmax(-1)),
        ("shape", lambda pattern: _profile(pattern).mean((0, 1)).argmax(-1)),
        ("whole numbers", lambda pattern: _profile(pattern).mean(0).max(-1).values),
    ],
    "q4": [
        ("duplicate-token", lambda pattern, tokens: _matching(pattern, tokens, after=False)),
        ("BOS", lambda pattern, tokens: _matching(pattern, tokens, bos=True, asked=True)),
        ("not over all", lambda pattern, tokens: _matching(pattern, tokens, asked=False)),
        ("shape", lambda pattern, tokens: _matching(pattern, tokens).mean(1)),
    ],
    "q5": [
        ("Singular values", lambda *weights: 1.0),
        (
            "absolute value, not",
            lambda *weights: (
                _values(*weights).real.sum() / _values(*weights).real.abs().sum()
            ).item(),
        ),
        ("Divide by", lambda *weights: _values(*weights).sum().real.item()),
        (
            "upside down",
            lambda *weights: (_values(*weights).abs().sum() / _values(*weights).sum().real).item(),
        ),
    ],
    "q6": [
        ("divide by the score", (lambda *given: _kept(*given)[0], "c")),
        ("what is lost", (lambda *given: 1 - _right_kept(*given), "c")),
        ("zero ablation", (_zeroed, "c")),
        ("to the same token", (_same_token, "c")),
        ("Reason (a)", (_right_kept, "a")),
        ("Reason (b)", (_right_kept, "b")),
        ("Reason (d)", (_right_kept, "d")),
        ("one of the letters", (_right_kept, "because of redundancy")),
    ],
}
