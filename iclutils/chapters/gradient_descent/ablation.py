"""Ablate the demonstration updates of heads, run the model on, and see what it still knows.

Zeroing the attention on the demonstrations leaves z at the query term of the running model;
renormalised, the demonstrations are hidden from the heads. The same for the query term. With the
MLPs held at their values of the unchanged run, the effect that is left does not pass through them.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.gradient_descent import ablation, heads
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> net = models.load("induction-0")
    >>> batch = repeated_tokens(net, 8, 10, torch.Generator().manual_seed(0))
    >>> tokens, answer = batch.tokens[:, :-1], batch.tokens[:, -1]
    >>> mask = heads.first_copy(batch)[:, :-1]
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
HOW = ("", ", renormalised", ", MLPs held")
WAYS = ("whole", *(f"no {part}{how}" for part in PARTS for how in HOW))
Rows = Bool[Tensor, "..."] | None  # (batch, pos)


class Predictions(NamedTuple):
    """How the model answers at the query: log p of the answer (nats), and whether it wins."""

    log_prob: Float[Tensor, "batch"]
    is_correct: Bool[Tensor, "batch"]


def after(demonstrations: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """All positions after the last demonstration; where there is none, all positions."""
    return demonstrations.flip(1).long().cumsum(1).flip(1) == 0


def ablate(
    model: TransformerBridge,
    tokens: Tokens,
    demonstrations: Mask,
    part: str = "update",
    heads: Iterable[Head] | None = None,
    rows: Rows = None,
    renormalise: bool = False,
) -> list[Hook]:
    """Hooks that take the update, or the query term, out of heads.

    Args:
        tokens: the prompts that will be run under the hooks.
        part: what is taken out, "update" or "query term".
        heads: (layer, head) pairs; all heads if omitted.
        rows: (batch, pos), at which positions; the last if omitted.
        renormalise: whether the attention that is left is scaled to sum to 1, as if the tokens
            that are cut were not there.

    Example:
        >>> hooks = ablation.ablate(net, tokens, mask)
        >>> whole = ablation.predict(net, tokens, answer).log_prob.mean()
        >>> bool(ablation.predict(net, tokens, answer, hooks=hooks).log_prob.mean() < whole - 1)
        True
    """
    at, _ = checked_query(tokens, demonstrations, None)
    if part not in PARTS:
        raise unknown("part of a head", part, PARTS)
    rows = _rows(tokens, at) if rows is None else rows
    cut = demonstrations if part == "update" else ~demonstrations
    if renormalise and not _is_something_left(cut, rows):
        raise IclError(
            f"At some position nothing is left once the {part} is out, so nothing can be "
            "renormalised: set renormalise=False or choose later rows."
        )
    edges = (rows[:, :, None] & cut[:, None])[:, None]  # (batch, 1, dest, src)
    cfg, chosen = model.cfg, dict[int, Tensor]()
    every = [(la, h) for la in range(cfg.n_layers) for h in range(cfg.n_heads)]
    for layer, head in every if heads is None else heads:
        check_head(model, (layer, head))
        none = torch.zeros(1, cfg.n_heads, 1, 1, dtype=torch.bool, device=tokens.device)
        chosen.setdefault(layer, none)[:, head] = True
    return cut_attention(model, {la: edges & mask for la, mask in chosen.items()}, renormalise)


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
    """How the model answers at the query, under hooks.

    Args:
        choices: (batch, k) tokens among which the model chooses; all tokens if omitted. log p
            is then among these, too.
        at: (batch), the position of the query; the last if omitted.
        hooks: such as ``ablate`` makes.

    Example:
        >>> ablation.predict(net, tokens, answer).is_correct.float().mean() > 0.7
        tensor(True)
    """
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
    heads: Iterable[Head] | None = None,
    rows: Rows = None,
    ways: Sequence[str] = WAYS,
) -> dict[str, Predictions]:
    """What is left of the answers without the updates, and without the query terms.

    Args:
        choices: as for ``predict``.
        at: (batch), the position of the query; the last if omitted.
        heads: the heads to take them out of; all if omitted.
        rows: (batch, pos), at which positions; at the query alone if omitted. ``after`` gives all
            positions after the demonstrations.
        ways: "whole", and for each part, for example "no update": taken out; "no update,
            renormalised": the rest scaled to sum to 1, left out where nothing would be left;
            "no update, MLPs held": taken out with the MLPs at their values of the whole run.

    Example:
        >>> found = ablation.ablations(net, tokens, mask, answer)
        >>> sorted(name for name in found if "," not in name)
        ['no query term', 'no update', 'whole']
    """
    at, _ = checked_query(tokens, demonstrations, at)
    rows = _rows(tokens, at) if rows is None else rows
    chosen = None if heads is None else list(heads)
    held = frozen_mlps(model, tokens) if any(way.endswith("held") for way in ways) else []
    found = {}
    for way in bar(ways, "ablations"):
        if way not in WAYS:
            raise unknown("ablation", way, WAYS)
        part, _, how = way.removeprefix("no ").partition(", ")
        hooks = []
        if way != "whole":
            cut = demonstrations if part == "update" else ~demonstrations
            if how == "renormalised" and not _is_something_left(cut, rows):
                continue
            given = (model, tokens, demonstrations, part, chosen, rows)
            hooks = ablate(*given, renormalise=how == "renormalised")
        hooks = [*hooks, *held] if how == "MLPs held" else hooks
        found[way] = predict(model, tokens, answer, choices, at, hooks)
    return found


def _rows(tokens: Tensor, at: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device) == at[:, None]


def _is_something_left(cut: Tensor, rows: Tensor) -> bool:
    return bool(((~cut).cumsum(1) > 0)[rows].all())
