"""Compression: answer a query from a few of the demonstrations' tokens.

The demonstrations are read once. Of all that they leave behind, one key and one value per layer
and token, only what stands at the anchors is kept (label words and formatting), and the query is
answered from that. What was kept goes on standing at its original position, and so does the query
with ``offset=True``; with ``offset=False`` the query starts at position 0, as the script released
with the paper does for GPT-2 XL. With everything kept and the offset on, the answer is the one of
the whole prompt. ``Keep`` masks are made here; ``memory`` reads with them, ``speed`` counts and
measures what they save.

Source: Wang et al. 2023, section 3.2, Table 2 and footnote 6, and their released code.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.label_words import compression
    >>> from iclutils.interp import kv_cache
    >>> from iclutils.interp.readout import target_logits
    >>> from iclutils.tasks import topics
    >>> net = models.load("anchors-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> asked = topics.sample(8, generator, classes=2, shared=True)
    >>> whole = target_logits(net, asked)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...interp.kv_cache import (
    Keep,
    answer_from_cache,
    cache_demonstrations,
    demonstrations,
    packed,
    same_shape,
    shares_demonstrations,
)
from ...interp.readout import batches
from ...models import TransformerBridge
from ...progress import bar
from ...tasks.prompts import Prompts, Role
from .isolation import label_loyalty

Rule = Callable[[Prompts], Keep]


def everything(prompts: Prompts) -> Keep:
    """Keep all demonstration tokens: plain prefix caching, and the exactness test.

    Example:
        >>> torch.equal(compression.everything(asked), kv_cache.demonstrations(asked))
        True
    """
    return demonstrations(prompts)


def nothing(prompts: Prompts) -> Keep:
    """Keep no demonstration token: the query alone.

    Example:
        >>> compression.nothing(asked).sum()
        tensor(0)
    """
    return torch.zeros_like(demonstrations(prompts))


def hidden_anchor(prompts: Prompts) -> Keep:
    """Hidden_anchor: formatting and label words, all their sub-tokens.

    Example:
        >>> bool(compression.hidden_anchor(asked).gather(1, asked.label_pos).all())
        True
    """
    return (prompts.roles == Role.FORMAT) | (prompts.roles == Role.LABEL)


def label_only(prompts: Prompts) -> Keep:
    """Label words without the formatting (footnote 6 of the paper).

    Example:
        >>> compression.label_only(asked).sum(-1)[0]
        tensor(2)
    """
    return prompts.roles == Role.LABEL


def hidden_random(prompts: Prompts, generator: torch.Generator) -> Keep:
    """Hidden_random: formatting, and in place of each label word random text before it.

    A label word of k sub-tokens gives way to k tokens of its own demonstration's text, drawn
    without replacement; where the text has fewer, to all of them (ours: the paper has no such
    case). A label is never kept. Every row has its own draw.

    Example:
        >>> kept = compression.hidden_random(asked, generator)
        >>> bool(kept.gather(1, asked.label_pos).any())
        False
    """
    roles, device = prompts.roles, prompts.roles.device
    place = torch.arange(roles.shape[1], device=device)
    begun = (prompts.label_pos[:, :, None] <= place).sum(1)  # label words begun so far
    # On the generator's device, so that the draw does not depend on where the model is.
    priority = torch.rand(roles.shape, generator=generator, device=generator.device).to(device)
    keep = roles == Role.FORMAT
    for demo in range(prompts.label_pos.shape[1]):
        wanted = ((roles == Role.LABEL) & (begun == demo + 1)).sum(1, keepdim=True)
        text = (roles == Role.TEXT) & (begun == demo)
        rank = priority.masked_fill(~text, torch.inf).argsort(1).argsort(1)
        keep |= text & (rank < wanted)
    return keep


def text_anchor(prompts: Prompts) -> Prompts:
    """Text_anchor: the prompts without their demonstrations' texts, to be read from scratch.

    Formatting, label words and query are the same tokens; positions start again at 0.

    Example:
        >>> compression.text_anchor(asked).tokens.shape[1] < asked.tokens.shape[1]
        True
    """
    return compact(prompts, prompts.kept & (prompts.roles != Role.TEXT))


def compact(prompts: Prompts, keep: Keep) -> Prompts:
    """Prompts of the tokens in ``keep`` alone, moved together."""
    same_shape(prompts, keep)
    needed = torch.cat([prompts.label_pos, prompts.cue_pos, prompts.target[:, None]], 1)
    if not bool(keep.gather(1, needed).all()):
        raise IclError("A prompt without its label words, cues or target is none: keep them.")
    index, held = packed(keep)
    moved = keep.cumsum(1) - 1
    padding = int(prompts.tokens[~prompts.kept][0]) if bool((~prompts.kept).any()) else 0
    return replace(
        prompts,
        tokens=prompts.tokens.gather(1, index).masked_fill(~held, padding),
        roles=prompts.roles.gather(1, index).masked_fill(~held, int(Role.PAD)),
        target=moved.gather(1, prompts.target[:, None])[:, 0],
        label_pos=moved.gather(1, prompts.label_pos),
        cue_pos=moved.gather(1, prompts.cue_pos),
    )


def compress(
    model: TransformerBridge,
    prompts: Prompts,
    rule: Rule,
    offset: bool = True,
    batch_size: int | None = None,
) -> Float[Tensor, "batch vocab"]:
    """Logits at the target after compression by ``rule``; shared demonstrations are read once.

    Args:
        model: the model.
        prompts: the prompts.
        rule: makes the mask of what is kept, for example ``hidden_anchor``.
        offset: as for ``kv_cache.answer_from_cache``.
        batch_size: prompts per forward pass (over queries alone, where the demonstrations are
            shared); all if omitted.

    Example:
        >>> exact = compression.compress(net, asked, compression.everything)
        >>> bool((exact - whole).abs().max() < 1e-3)
        True
    """
    if shares_demonstrations(prompts):
        shown = prompts[:1]
        return answer_from_cache(
            model, cache_demonstrations(model, shown, rule(shown)), prompts, offset, batch_size
        )
    parts = []
    for rows in batches(prompts, batch_size, "compression"):
        part = prompts[rows]
        parts.append(
            answer_from_cache(model, cache_demonstrations(model, part, rule(part)), part, offset)
        )
    return torch.cat(parts)


def hidden_random_top(
    model: TransformerBridge,
    prompts: Prompts,
    whole: Float[Tensor, "batch vocab"],
    generator: torch.Generator,
    draws: int = 20,
    union: bool = False,
    offset: bool = True,
    batch_size: int | None = None,
) -> tuple[Float[Tensor, "batch vocab"], Float[Tensor, "draw"]]:
    """Hidden_random-top: of several draws, the one with the highest label loyalty.

    Args:
        model: the model.
        prompts: the prompts.
        whole: logits of the uncompressed prompts, which loyalty compares with.
        generator: for the draws.
        draws: how many.
        union: what the released code does: its mask is never cleared, so a draw also keeps the
            random tokens of all draws before it, which favours this control.
        offset: as for ``kv_cache.answer_from_cache``.
        batch_size: prompts per forward pass over queries; all if omitted.

    Returns:
        Logits of the best draw, and the label loyalty of every draw.

    Example:
        >>> _, loyalty = compression.hidden_random_top(net, asked, whole, generator, draws=2)
        >>> bool(((loyalty >= 0) & (loyalty <= 1)).all())
        True
    """
    if draws < 1:
        raise IclError(f"Draw at least once; got draws={draws}.")
    shared = shares_demonstrations(prompts)
    shown = prompts[:1] if shared else prompts
    mask, masks = nothing(shown), []
    for _ in range(draws):
        drawn = hidden_random(shown, generator)
        mask = mask | drawn if union else drawn
        masks.append(mask)
    loyal = torch.zeros(draws, device=whole.device)
    parts = [slice(0, len(prompts))]
    if not shared:
        parts = list(batches(prompts, batch_size, "random words"))
    for rows in parts:
        part = prompts[rows]
        head = part[:1] if shared else part
        full = cache_demonstrations(model, head, everything(head))
        for draw, mask in enumerate(bar(masks, "draws")):
            own = mask if shared else mask[rows]
            memory = full.keep(own[:, : full.held.shape[1]])
            logits = answer_from_cache(model, memory, part, offset, batch_size)
            loyal[draw] += label_loyalty(part, logits, whole[rows]).sum()
    best, lucky = masks[int(loyal.argmax())], []
    for rows in parts:
        part = prompts[rows]
        head, own = (part[:1], best) if shared else (part, best[rows])
        memory = cache_demonstrations(model, head, own[:, : head.tokens.shape[1]])
        lucky.append(answer_from_cache(model, memory, part, offset, batch_size))
    return torch.cat(lucky), loyal / len(prompts)
