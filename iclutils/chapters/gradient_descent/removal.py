"""Take the gradient steps out of heads, run the model on, and see what it still knows.

``removal`` sets z to the start of the running model by zeroing the attention on the
demonstrations, or, renormalised, hides the demonstrations from the heads. The same for the start.
With the MLPs held at their values of the unchanged run, the effect that is left does not pass
through them.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> from iclutils.chapters.gradient_descent import heads, removal
    >>> net = models.load("induction-0")
    >>> task = repeated_tokens(net, 8, 10, torch.Generator().manual_seed(0))
    >>> tokens, answer = task.tokens[:, :-1], task.tokens[:, -1]
    >>> mask = heads.first_copy(task)[:, :-1]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import IclError, unknown
from ...interp.hooks import Head, Hook, at_positions, cut_attention
from ...models import TransformerBridge, cached, get_act_name
from ...progress import bar
from .heads import Mask, Place, Tokens, check_head, checked

PARTS = ("step", "start")
Rows = Bool[Tensor, "..."] | None  # (batch, pos)


class Answers(NamedTuple):
    """How the model answers at the query: log p of the answer (nats), and whether it wins."""

    log_prob: Float[Tensor, "batch"]
    right: Bool[Tensor, "batch"]


def after(demonstrations: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """All positions after the last demonstration; where there is none, all positions.

    Example:
        >>> removal.after(mask)[0].nonzero()[0]
        tensor([11])
    """
    return demonstrations.flip(1).long().cumsum(1).flip(1) == 0


def removal(
    model: TransformerBridge,
    tokens: Tokens,
    demonstrations: Mask,
    part: str = "step",
    heads: Iterable[Head] | None = None,
    rows: Rows = None,
    renormalise: bool = False,
) -> list[Hook]:
    """Hooks that take the step, or the start, out of heads.

    Args:
        model: the model.
        tokens: the prompts that will be run under the hooks.
        demonstrations: (batch, pos), which tokens are demonstrations.
        part: what is taken out.
        heads: (layer, head) pairs; all heads if omitted.
        rows: (batch, pos), at which positions; the last if omitted.
        renormalise: whether the attention that is left is scaled to sum to 1, as if the tokens
            that are cut were not there.

    Example:
        >>> hooks = removal.removal(net, tokens, mask)
        >>> whole = removal.answers(net, tokens, answer).log_prob.mean()
        >>> bool(removal.answers(net, tokens, answer, hooks=hooks).log_prob.mean() < whole - 1)
        True
    """
    shown, _, _ = checked(tokens, demonstrations, None)
    if part not in PARTS:
        raise unknown("part of a head", part, PARTS)
    if rows is None:
        rows = torch.zeros_like(shown)
        rows[:, -1] = True
    if rows.dtype != torch.bool or rows.shape != tokens.shape:
        raise IclError(f"rows must be a bool mask of the tokens' shape, {tuple(tokens.shape)}.")
    cut = shown if part == "step" else ~shown
    left = (~cut).cumsum(1) > 0
    if renormalise and not bool(left[rows].all()):
        raise IclError(
            f"At some position nothing is left once the {part} is out, so nothing can be "
            "renormalised: set renormalise=False or choose later rows."
        )
    edges = (rows[:, :, None] & cut[:, None])[:, None]  # (batch, 1, dest, src)
    count, chosen = model.cfg.n_heads, dict[int, Tensor]()
    every = [(la, h) for la in range(model.cfg.n_layers) for h in range(count)]
    for layer, head in every if heads is None else heads:
        check_head(model, (layer, head))
        chosen.setdefault(layer, torch.zeros(1, count, 1, 1, dtype=torch.bool))[:, head] = True
    cut_in = {layer: edges & mask.to(edges.device) for layer, mask in chosen.items()}
    return cut_attention(model, cut_in, renormalise)


def frozen_mlps(model: TransformerBridge, tokens: Tokens) -> list[Hook]:
    """Hooks that hold every MLP at its outputs in the unchanged run, at every position."""
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)

    def hook_for(name: str) -> Hook:
        def hold(value: Tensor, hook: object) -> Tensor:
            return cache[name]

        return name, hold

    return [hook_for(name) for name in names]


def answers(
    model: TransformerBridge,
    tokens: Tokens,
    answer: Int[Tensor, "..."],
    choices: Int[Tensor, "..."] | None = None,
    at: Place = None,
    hooks: Iterable[Hook] = (),
) -> Answers:
    """How the model answers at the query, under hooks.

    Args:
        model: the model.
        tokens: the prompts.
        answer: (batch), the right token.
        choices: (batch, k) tokens among which the model chooses; all tokens if omitted. log p
            is then among these, too.
        at: (batch), the position of the query; the last if omitted.
        hooks: such as ``removal`` makes.

    Example:
        >>> removal.answers(net, tokens, answer).right.float().mean() > 0.7
        tensor(True)
    """
    _, at, _ = checked(tokens, torch.zeros_like(tokens, dtype=torch.bool), at)
    check_answers(model, tokens, answer, choices)
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=[*hooks, at_positions(at[:, None])])
    log_prob = logits[:, 0].log_softmax(-1)
    if choices is not None:
        if not bool((choices == answer[:, None]).any(1).all()):
            raise IclError("Every answer must be among its choices.")
        among = log_prob.gather(1, choices.expand(len(tokens), -1)).logsumexp(1)
        best = log_prob.gather(1, choices.expand(len(tokens), -1)).amax(1)
    else:
        among, best = torch.zeros_like(log_prob[:, 0]), log_prob.amax(1)
    chosen = log_prob.gather(1, answer[:, None])[:, 0]
    return Answers(chosen - among, chosen == best)


def carried(
    model: TransformerBridge,
    tokens: Tokens,
    demonstrations: Mask,
    answer: Int[Tensor, "..."],
    choices: Int[Tensor, "..."] | None = None,
    at: Place = None,
    heads: Iterable[Head] | None = None,
    rows: Rows = None,
) -> dict[str, Answers]:
    """What is left of the answers without the steps, and without the starts.

    Args:
        model: the model.
        tokens: the prompts.
        demonstrations: (batch, pos), which tokens are demonstrations.
        answer: (batch), the right token.
        choices: as for ``answers``.
        at: (batch), the position of the query; the last if omitted.
        heads: the heads to take them out of; all if omitted.
        rows: (batch, pos), at which positions; at the query alone if omitted. ``after`` gives all
            positions after the demonstrations.

    Returns:
        ``"whole"``, and for each part, for example ``"no step"``: taken out; ``"no step,
        renormalised"``: the rest scaled to sum to 1, left out where nothing would be left;
        ``"no step, MLPs held"``: taken out with the MLPs at their values of the whole run.

    Example:
        >>> found = removal.carried(net, tokens, mask, answer)
        >>> [name for name in sorted(found) if "," not in name]
        ['no start', 'no step', 'whole']
    """
    shown, at, _ = checked(tokens, demonstrations, at)
    if rows is None:
        rows = torch.arange(tokens.shape[1], device=tokens.device) == at[:, None]
    chosen = None if heads is None else list(heads)
    held = frozen_mlps(model, tokens)
    found = {"whole": answers(model, tokens, answer, choices, at)}
    for part in bar(PARTS, "parts"):
        plain = removal(model, tokens, shown, part, chosen, rows)
        for name, hooks in ((f"no {part}", plain), (f"no {part}, MLPs held", [*plain, *held])):
            found[name] = answers(model, tokens, answer, choices, at, hooks)
        left = (shown if part == "start" else ~shown).cumsum(1) > 0
        if bool(left[rows].all()):
            hooks = removal(model, tokens, shown, part, chosen, rows, renormalise=True)
            found[f"no {part}, renormalised"] = answers(model, tokens, answer, choices, at, hooks)
    return found


def check_answers(
    model: TransformerBridge, tokens: Tensor, answer: Tensor, others: Tensor | None
) -> None:
    """Refuse answers, or tokens that they are compared with, that do not fit the prompts."""
    if answer.shape != tokens.shape[:1]:
        raise IclError(f"Need one answer for each of {len(tokens)} prompts.")
    if others is not None and (others.ndim != 2 or len(others) not in (1, len(tokens))):
        raise IclError("Other tokens must be (batch, k), or one row for all prompts.")
    for ids in (answer,) if others is None else (answer, others):
        if not bool(((ids >= 0) & (ids < model.cfg.d_vocab)).all()):
            raise IclError(f"Answers must lie in the vocabulary, 0..{model.cfg.d_vocab - 1}.")
