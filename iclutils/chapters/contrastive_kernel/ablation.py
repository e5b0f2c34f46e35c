"""Change what heads take from the examples and from the rest, and see what is still known.

At the query, a head's output is a sum over tokens: those of the examples make its update, the
others its start (see ``dual``). Both are linear in the attention weights. So every change here is
one of weights, made while the query alone is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...interp.at_query import AtQuery, Mask, read_heads, scores
from ...interp.hooks import Head, Hook, check_head, set_activation
from ...interp.statistics import mean_se
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


def regularised(weights: Weights, demos: Demos, alpha: float) -> Weights:
    """Return weights of (1-α) W_0 φ(q) + ΔW φ(q), after a step on L + (α/2) |W|²."""
    return torch.where(demos, weights, (1 - alpha) * weights)


def negative_samples(weights: Weights, demos: Demos, beta: float) -> Weights:
    """Return weights that take β times the mean of the others off each: ``dual.contrast``."""
    chosen = weights * demos
    others = (chosen.sum(-1, keepdim=True) - chosen) / (demos.sum(-1, keepdim=True) - 1).clamp(1)
    return weights - beta * others * demos


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
    """Return for each prompt the mean of a part over the other prompts."""
    return (parts.sum(0) - parts) / (len(parts) - 1)


def removed_by(
    query: AtQuery, demonstrations: Mask, change: Change
) -> Float[Tensor, "batch layer head d_head"]:
    """Return what a change of the weights takes off every head's output, in float64."""
    demos, seen = query.mask(demonstrations)[:, None, None], query.seen[:, None, None]
    layers = []
    for q, key, value, _ in read_heads(query):
        weights = scores(q[:, :, None], key, seen).softmax(-1)  # (batch, head, 1, pos)
        layers.append(((weights - change(weights, demos)) @ value)[:, :, 0])
    return torch.stack(layers, 1)


def predict(
    query: AtQuery,
    answer: Ids,
    choices: Ids | None = None,
    hooks: Sequence[Hook] = (),
    *,
    centred: bool = False,
) -> Predictions:
    """Answer at the query, under hooks; with ``choices`` (batch, k), of which the answer is one,
    among these.

    ``centred`` takes off the mean logit of every choice over the prompts, so that no label wins
    because the model likes its word.
    """
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
    """Answer as it is (``whole``) and without the updates or starts of heads, by way.

    ``"no update, MLPs held"`` leaves the MLPs at their values of the whole run, so that what is
    lost does not pass through them. Other arguments as for ``predict``.
    """
    by_way = {}
    for way in bar(ways, "ablations"):
        part, _, held = way.removeprefix("no ").partition(", ")
        hooks = [] if way == "whole" else change_heads(query, demonstrations, PARTS[part], heads)
        if held:
            names = (get_act_name("mlp_out", layer) for layer in range(query.model.cfg.n_layers))
            hooks += [set_activation(name, query.found[name]) for name in names]
        by_way[way] = predict(query, answer, choices, hooks, centred=centred)
    return by_way


def chance(choices: Ids | None) -> float:
    """Return the accuracy of a guess among the choices, 0 among all tokens."""
    return 0.0 if choices is None else 1 / choices.shape[1]


def is_able(whole: Predictions, choices: Ids | None) -> bool:
    """Tell whether a model answers two standard errors better than a guess."""
    mean, error = mean_se(whole.is_correct.double())
    return mean - 2 * error > chance(choices)


def still_right(
    changed: Predictions, whole: Predictions, choices: Ids | None
) -> Float[Tensor, "answers"]:
    """Tell of the right answers which stay right; the mean is a share, with a guess put to 0."""
    still = changed.is_correct[whole.is_correct].double()
    return (still - chance(choices)) / (1 - chance(choices))
