"""Isolation: label words that may not look back, and what the model loses by it.

In chosen layers a position is cut off from everything before it, in every head. As in the paper's
code, scores are set to -10,000 before the softmax, so the row becomes one-hot on the position
itself; the text sets A[p, i] to 0 for i < p (``hooks.cut_attention`` with ``renormalise=False``).
Source: Wang et al. 2023, section 2.2, figure 4."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...interp.hooks import Hook, cut_attention
from ...interp.kv_cache import demonstrations, sets
from ...interp.readout import target_logits
from ...models import TransformerBridge
from ...tasks.prompts import Prompts, Role
from .answers import Answers, answers_by_set, collect, demonstrations_alone

Positions = Int[Tensor, "batch isolated"]


def isolation(model: TransformerBridge, prompts: Prompts, layers: Iterable[int]) -> list[Hook]:
    """Make hooks that isolate the label words in each of the ``layers``."""
    return cut_attention(model, dict.fromkeys(layers, cut_edges(prompts)))


def _places(prompts: Prompts) -> tuple[Int[Tensor, "pos"], Bool[Tensor, "batch pos"]]:
    """Return the number of each place, and whether it holds a label word."""
    place = torch.arange(prompts.tokens.shape[1], device=prompts.label_pos.device)
    return place, (place == prompts.label_pos[..., None]).any(1)


def cut_edges(prompts: Prompts) -> Bool[Tensor, "batch dest src"]:
    """Return the edges that isolation cuts: from everything before a label word into it."""
    place, is_label = _places(prompts)
    return is_label[:, :, None] & (place < place[:, None])


def isolate(
    model: TransformerBridge,
    prompts: Prompts,
    layers: Iterable[int],
    positions: Positions | None = None,
    batch_size: int | None = None,
) -> Answers:
    """Return the answers under ``isolation`` of the label words, or of other ``positions``: the
    controls ``random_positions``, ``random_by_set`` and ``wrong_positions``."""
    layers = list(layers)
    cut = prompts if positions is None else replace(prompts, label_pos=positions)

    def hooks(some: Prompts) -> list[Hook]:
        return isolation(model, some, layers)

    groups, size = sets(prompts), demonstrations(prompts).sum(1, keepdim=True)
    alike = all(bool((cut.label_pos[rows] == cut.label_pos[rows[0]]).all()) for rows in groups)
    if len(groups) < len(prompts) and alike and bool((cut.label_pos < size).all()):
        return answers_by_set(model, cut, hooks, batch_size=batch_size)
    passes = batch_size, "isolation"
    return collect(cut, *passes, lambda some, _: target_logits(model, some, hooks(some)))


def read_edges(prompts: Prompts) -> Bool[Tensor, "batch dest src"]:
    """Return the edges from the label words to the last token."""
    place, is_label = _places(prompts)
    return is_label[:, None] & (place == prompts.target[:, None])[..., None]


def hide(
    model: TransformerBridge,
    prompts: Prompts,
    layers: Iterable[int],
    positions: Positions | None = None,
    batch_size: int | None = None,
) -> Answers:
    """Return the answers when the last token cannot look at the label words, or at other
    ``positions``, in each of the ``layers``. ``isolate`` stops what label words gather; this stops
    only what is read from them."""
    layers = list(layers)
    cut = prompts if positions is None else replace(prompts, label_pos=positions)

    def passes(some: Prompts, _: object) -> Tensor:
        unseen = dict.fromkeys(layers, read_edges(some))
        return target_logits(model, some, cut_attention(model, unseen))

    return collect(cut, batch_size, "hiding", passes)


def random_positions(prompts: Prompts, generator: torch.Generator) -> Positions:
    """Draw the control: for each prompt as many random positions as it has label words, none of
    them one, from 0 .. q-2 without replacement. The paper's code draws anew for every layer, so
    that it cuts each word in few of them."""
    tokens, labels = prompts.tokens.cpu(), prompts.label_pos.cpu()
    free = torch.arange(tokens.shape[1]) <= prompts.target.cpu()[:, None] - 2
    free = free.scatter(1, labels, False)
    drawn = torch.multinomial(free.double(), labels.shape[1], generator=generator)
    return drawn.to(prompts.tokens.device)


def random_by_set(prompts: Prompts, generator: torch.Generator) -> Positions:
    """Draw ``random_positions`` of the demonstrations, the same for all prompts that share them."""
    drawn = torch.empty_like(prompts.label_pos)
    for rows in sets(prompts):
        drawn[rows] = random_positions(demonstrations_alone(prompts[rows[:1]]), generator)
    return drawn


def wrong_positions(prompts: Prompts, generator: torch.Generator) -> dict[str, Positions]:
    """Return other tokens of each demonstration that could be taken for its label word: the null
    of the data, where flow or cut are said to be about label words."""
    text, label = map(prompts.in_demonstrations, (Role.TEXT, Role.LABEL))
    drawn = torch.multinomial(text.flatten(0, 1).double().cpu(), 1, generator=generator)
    return {
        "first word": text.int().argmax(-1),
        "random word": drawn.view(text.shape[:2]).to(text.device),
        "cue": prompts.cue_pos,
        "token after": prompts.label_pos + label.sum(-1),
    }
