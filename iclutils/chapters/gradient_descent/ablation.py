"""Ablate the demonstration updates of heads, run the model on, and see what it still knows.

Zeroing the attention on the demonstrations leaves z at the query term of the running model, and
zeroing the rest leaves the update. With the MLPs held at their values of the unchanged run, the
effect that is left does not pass through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError, unknown
from ...interp.hooks import Head, Hook, at_positions, check_head, cut_attention
from ...models import TransformerBridge, cached, get_act_name
from ...progress import bar
from .heads import Ids, Mask, Place, Tokens, check_answers, checked_query

PARTS = ("update", "query term")
WAYS = ("whole", *(f"no {part}{how}" for part in PARTS for how in ("", ", MLPs held")))


class Predictions(NamedTuple):
    """How the model answers at the query: log p of the answer (nats), and whether it wins."""

    log_prob: Float[Tensor, "batch"]
    is_correct: Bool[Tensor, "batch"]


def ablate(
    model: TransformerBridge,
    tokens: Tokens,
    demonstrations: Mask,
    part: str = "update",
    heads: Iterable[Head] | None = None,
    at: Place = None,
) -> list[Hook]:
    """Hooks that take the "update" or the "query term" out of heads, all or some, at the query."""
    at, _ = checked_query(tokens, demonstrations, at)
    if part not in PARTS:
        raise unknown("part of a head", part, PARTS)
    cfg = model.cfg
    chosen = torch.zeros(cfg.n_layers, cfg.n_heads, 1, 1, dtype=torch.bool, device=tokens.device)
    for head in [divmod(i, cfg.n_heads) for i in range(chosen.numel())] if heads is None else heads:
        check_head(model, head)
        chosen[head] = True
    rows = torch.arange(tokens.shape[1], device=tokens.device) == at[:, None]
    cut = demonstrations if part == "update" else ~demonstrations
    edges = (rows[:, :, None] & cut[:, None])[:, None]  # (batch, 1, dest, src)
    layers = {layer: edges & some for layer, some in enumerate(chosen) if some.any()}
    return cut_attention(model, layers, renormalise=False)


def frozen_mlps(model: TransformerBridge, tokens: Tokens) -> list[Hook]:
    """Hooks that hold every MLP at its outputs in the unchanged run, at every position."""
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    return [(name, lambda value, hook, name=name: cache[name]) for name in names]


def predict(
    model: TransformerBridge,
    tokens: Tokens,
    answer: Ids,
    choices: Ids | None = None,
    at: Place = None,
    hooks: Iterable[Hook] = (),
) -> Predictions:
    """How the model answers at the query, under hooks; with ``choices`` (batch, k), among these."""
    at, _ = checked_query(tokens, torch.zeros_like(tokens, dtype=torch.bool), at)
    check_answers(model, tokens, answer, choices)
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=[*hooks, at_positions(at[:, None])])[:, 0]
    chosen = logits.gather(1, answer[:, None])[:, 0]
    if choices is not None:
        if not bool((choices == answer[:, None]).any(1).all()):
            raise IclError("Every answer must be among its choices.")
        logits = logits.gather(1, choices.expand(len(tokens), -1))
    return Predictions(chosen - logits.logsumexp(1), chosen == logits.amax(1))


def ablations(
    model: TransformerBridge,
    tokens: Tokens,
    demonstrations: Mask,
    answer: Ids,
    choices: Ids | None = None,
    at: Place = None,
    heads: Sequence[Head] | None = None,
    ways: Sequence[str] = WAYS,
) -> dict[str, Predictions]:
    """What is left of the answers of the ``whole`` model without updates, or query terms, of heads.

    "no update, MLPs held" and the like: with the MLPs at their values of the whole run. Other
    arguments as for ``ablate`` and ``predict``.
    """
    found = {}
    for way in bar(ways, "ablations"):
        part, _, held = way.removeprefix("no ").partition(", ")
        hooks = [] if way == "whole" else ablate(model, tokens, demonstrations, part, heads, at)
        hooks += frozen_mlps(model, tokens) if held else []
        found[way] = predict(model, tokens, answer, choices, at, hooks)
    return found
