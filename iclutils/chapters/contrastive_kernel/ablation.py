"""Change what heads take from the examples and from the rest, and see what is still known.

At the query, a head's output is a sum over tokens: those of the examples make its update, the
others its start (see ``dual``). Every change here is one of attention weights, made while the query
alone is read again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...interp.at_query import AtQuery, Mask
from ...interp.hooks import Head, Hook, check_head
from ...models import get_act_name
from ...progress import bar
from .heads import Ids

Weights = Float[Tensor, "*shape mem"]  # of attention: (batch, head, 1, mem) in heads at the query
Demos = Bool[Tensor, "*#shape mem"]  # which tokens belong to examples
Change = Callable[[Weights, Demos], Weights]


def no_update(weights: Weights, demos: Demos) -> Weights:
    """Return weights that leave W_0 φ(q) alone."""
    return weights * ~demos


def no_start(weights: Weights, demos: Demos) -> Weights:
    """Return weights that leave ΔW φ(q) alone."""
    return weights * demos


PARTS: Mapping[str, Change] = {"update": no_update, "start": no_start}


class Predictions(NamedTuple):
    """How the model answers at the query: log p of the answer (nats), and whether it wins."""

    log_prob: Float[Tensor, "batch"]
    is_correct: Bool[Tensor, "batch"]


def change_heads(
    query: AtQuery, demonstrations: Mask, change: Change, heads: Iterable[Head] | None = None
) -> list[Hook]:
    """Return hooks for ``query.reread`` that change weights of attention in heads, all or some."""
    demos = query.in_reread_order(query.mask(demonstrations))[:, None, None]  # (batch, 1, 1, mem)
    cfg = query.model.cfg
    chosen = torch.zeros(cfg.n_layers, cfg.n_heads, 1, 1, dtype=torch.bool, device=demos.device)
    for head in [divmod(i, cfg.n_heads) for i in range(chosen.numel())] if heads is None else heads:
        check_head(query.model, head)
        chosen[head] = True

    def edit(weights: Tensor, hook: object, some: Tensor) -> Tensor:
        return torch.where(some, change(weights, demos), weights)

    return [
        (get_act_name("pattern", layer), partial(edit, some=some))
        for layer, some in enumerate(chosen)
        if some.any()
    ]


def replace_part(
    query: AtQuery,
    demonstrations: Mask,
    part: str,
    vectors: Float[Tensor, "#batch layer head d_head"],
) -> list[Hook]:
    """Return hooks that put vectors in the place of every head's ``"update"`` or ``"start"``."""
    return [*change_heads(query, demonstrations, PARTS[part]), *add_vectors(vectors)]


def add_vectors(vectors: Float[Tensor, "#batch layer head d_head"]) -> list[Hook]:
    """Return hooks that add a vector to every head's output."""

    def add(z: Tensor, hook: object, layer: int) -> Tensor:
        return z + vectors[:, layer, None].to(z)

    return [(get_act_name("z", la), partial(add, layer=la)) for la in range(vectors.shape[1])]


def mean_of_others(parts: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch *shape"]:
    """Return for each prompt the mean of a part over the other prompts; NaN where there is one.
    Where prompts may ask the same word, see ``exchange.mean_elsewhere``."""
    return (parts.sum(0) - parts) / (len(parts) - 1)


def predict(
    query: AtQuery,
    answer: Ids,
    choices: Ids | None = None,
    hooks: Sequence[Hook] = (),
    *,
    centred: bool = False,
) -> Predictions:
    """Answer at the query, under hooks; with ``choices`` (batch, k), of which the answer is one,
    among these. ``centred`` takes off the mean logit of every choice over the prompts, so that no
    label wins because the model likes its word."""
    if choices is None:
        choices = torch.arange(query.model.cfg.d_vocab, device=answer.device)[None]
    is_answer = choices == answer[:, None]
    logits = query.reread(hooks) if hooks else query.logits
    logits = logits.gather(1, choices.expand(len(answer), -1))  # (batch, choice)
    logits = logits - logits.mean(0) if centred else logits
    right = (logits * is_answer).sum(1)
    return Predictions(right - logits.logsumexp(1), right == logits.amax(1))


def ablations(
    query: AtQuery,
    demonstrations: Mask,
    answer: Ids,
    choices: Ids | None = None,
    heads: Sequence[Head] | None = None,
    ways: Sequence[str] = ("whole", "no update", "no start"),
    *,
    centred: bool = False,
) -> dict[str, Predictions]:
    """Answer as it is (``whole``) and without the updates or starts of heads, by way; other
    arguments as for ``predict``."""
    by_way = {}
    for way in bar(ways, "ablations"):
        change = PARTS.get(way.removeprefix("no "))  # none for the whole
        hooks = change_heads(query, demonstrations, change, heads) if change else []
        by_way[way] = predict(query, answer, choices, hooks, centred=centred)
    return by_way


def falls_without(query: AtQuery, left_out: Mask, answer: Ids) -> Float[Tensor, "2"]:
    """Return how far the answer falls without the updates that come from some tokens: its log p,
    and its log-odds log p - log (1 - p), in nats, means over the prompts."""
    hooks = change_heads(query, left_out, no_update)
    ways = (predict(query, answer, hooks=some) for some in ([], hooks))
    logs = torch.stack([way.log_prob.double() for way in ways])
    log_odds = logs - (-logs.expm1()).log()
    whole, without = torch.stack([logs, log_odds], 2).mean(1)
    return whole - without


def chance(choices: Ids | None) -> float:
    """Return the accuracy of a guess among the choices, 0 among all tokens."""
    return 0.0 if choices is None else 1 / choices.shape[1]
