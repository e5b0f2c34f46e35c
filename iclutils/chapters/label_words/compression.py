"""Compression: answer a query from a few of the demonstrations' tokens, and what that saves.

The demonstrations are read once. Of all that they leave behind, one key and one value per layer
and token, only what stands at the anchors is kept (label words and formatting), and the query is
answered from that. What was kept goes on standing at its original position, and so does the query
with ``offset=True``; with ``offset=False`` the query starts at position 0, as the script released
with the paper does for GPT-2 XL. With everything kept and the offset on, the answer is the one of
the whole prompt.

Source: Wang et al. 2023, section 3.2, Tables 2, 3 and 6 and footnote 6, and their released code.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from ...interp.readout import batches, target_logits
from ...models import TransformerBridge
from ...progress import bar
from ...tasks.prompts import Prompts, Role
from .answers import Answers, label_loyalty

Rule = Callable[[Prompts], Keep]


def everything(prompts: Prompts) -> Keep:
    """Keep all demonstration tokens: plain prefix caching, and the exactness test."""
    return demonstrations(prompts)


def hidden_anchor(prompts: Prompts) -> Keep:
    """Hidden_anchor: formatting and label words, all their sub-tokens."""
    return (prompts.roles == Role.FORMAT) | (prompts.roles == Role.LABEL)


def label_only(prompts: Prompts) -> Keep:
    """Label words without the formatting (footnote 6 of the paper)."""
    return prompts.roles == Role.LABEL


def hidden_random(prompts: Prompts, generator: torch.Generator) -> Keep:
    """Hidden_random: formatting, and in place of each label word random text before it.

    A label word of k sub-tokens gives way to k tokens of its own demonstration's text, drawn
    without replacement; where the text has fewer, to all of them (ours: the paper has no such
    case). A label is never kept. Every row has its own draw.
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
    """
    keep = prompts.kept & (prompts.roles != Role.TEXT)
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
    keep: Rule | Keep,
    offset: bool = True,
    batch_size: int | None = None,
) -> Answers:
    """Answers after compression; demonstrations that all prompts share are read once.

    Args:
        model: the model.
        prompts: the prompts.
        keep: the mask of what is kept, or a rule that makes it, as ``hidden_anchor``.
        offset: whether the query stays at its position. Where nothing at all is kept there is
            nothing to keep a distance from, and the query begins at position 0.
        batch_size: prompts per forward pass (over queries alone, where the demonstrations are
            shared); all if omitted.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.label_words import compression
        >>> from iclutils.tasks import topics
        >>> asked = topics.sample(8, torch.Generator().manual_seed(0), classes=2)
        >>> answered = compression.compress(
        ...     models.load("anchors-0"), asked, compression.hidden_anchor
        ... )
        >>> answered.predicted.shape
        torch.Size([8])
    """
    if not callable(keep):
        same_shape(prompts, keep)
    shared, held, parts = shares_demonstrations(prompts), None, []
    for rows in batches(prompts, batch_size, "compression"):
        part = prompts[rows]
        shown = prompts[:1] if shared else part
        if held is None or not shared:
            mask = keep(shown) if callable(keep) else keep[:1] if shared else keep[rows]
            held = cache_demonstrations(model, shown, mask[:, : shown.tokens.shape[1]])
            stays = offset and bool(mask.any())
        parts.append(Answers.of(part, answer_from_cache(model, held, part, stays)))
    return Answers.join(parts)


def hidden_random_top(
    model: TransformerBridge,
    prompts: Prompts,
    clean: Answers,
    generator: torch.Generator,
    draws: int = 20,
    offset: bool = True,
    batch_size: int | None = None,
) -> tuple[Answers, Float[Tensor, "draw"]]:
    """Hidden_random-top: of several draws, the one with the highest label loyalty to ``clean``.

    Arguments as for ``compress``. (The released code never clears its mask, so that a draw also
    keeps the random tokens of all draws before it, which favours this control.)

    Returns:
        Answers of the best draw, and the label loyalty of every draw.
    """
    shared = shares_demonstrations(prompts)
    shown = prompts[:1] if shared else prompts
    masks = [hidden_random(shown, generator) for _ in range(draws)]
    found: list[list[Answers]] = [[] for _ in masks]
    full = None
    for rows in batches(prompts, batch_size, "random words"):
        part = prompts[rows]
        head = shown if shared else part
        if full is None or not shared:
            full = cache_demonstrations(model, head, everything(head))
        for mask, answered in zip(bar(masks, "draws"), found, strict=True):
            kept = full.keep((mask if shared else mask[rows])[:, : full.held.shape[1]])
            answered.append(Answers.of(part, answer_from_cache(model, kept, part, offset)))
    whole = [Answers.join(answered) for answered in found]
    loyal = torch.stack([label_loyalty(one, clean).float().mean() for one in whole])
    return whole[int(loyal.argmax())], loyal


# What it saves


@dataclass(frozen=True)
class Cost:
    """What one query costs, on average.

    Attributes:
        fed: tokens that go through the model.
        memory: keys and values per layer and head that it holds besides.
        multiply_adds: of all matrix products; two floating-point operations each.
    """

    fed: float
    memory: float
    multiply_adds: float


def multiply_adds(model: TransformerBridge, fed: int, memory: int = 0) -> int:
    """Multiply-adds of one forward pass over ``fed`` tokens with ``memory`` tokens cached.

    Weights, attention scores and weighted values (causal entries only), and one row of the
    unembedding.
    """
    cfg = model.cfg
    inner = cfg.n_heads * cfg.d_head
    shared = (getattr(cfg, "n_key_value_heads", None) or cfg.n_heads) * cfg.d_head
    mlp = (3 if cfg.gated_mlp else 2) * cfg.d_model * (cfg.d_mlp or 0)
    weights = fed * (2 * cfg.d_model * (inner + shared) + mlp)
    edges = fed * memory + fed * (fed + 1) // 2
    return cfg.n_layers * (weights + 2 * inner * edges) + cfg.d_model * cfg.d_vocab


def costs(model: TransformerBridge, prompts: Prompts, keep: Keep) -> dict[str, Cost]:
    """Mean cost of a query in three ways, the same on every machine.

    ``re-encoded``: the whole prompt (the paper's baseline); ``prefix``: keys and values of all
    demonstration tokens re-used, as any library does (the fair baseline); ``compressed``: of
    those in ``keep`` alone.
    """
    same_shape(prompts, keep)
    shown, kept = demonstrations(prompts).sum(1), keep.sum(1)
    total, none = prompts.target + 1, torch.zeros_like(kept)

    def mean(fed: Tensor, memory: Tensor) -> Cost:
        pairs = list(zip(fed.tolist(), memory.tolist(), strict=True))
        adds = [multiply_adds(model, *pair) for pair in pairs]
        return Cost(*map(statistics.fmean, (*zip(*pairs, strict=True), adds)))

    return {
        "re-encoded": mean(total, none),
        "prefix": mean(total - shown, shown),
        "compressed": mean(total - shown, kept),
    }


def seconds(
    model: TransformerBridge,
    prompts: Prompts,
    rule: Rule = hidden_anchor,
    batch: int = 1,
    repeats: int = 5,
    warm_up: int = 1,
) -> dict[str, float]:
    """Median wall-clock seconds per query, for the three ways of ``costs``.

    The demonstrations must be shared; reading them once is not counted, as in the paper. All
    three ways compute logits at the target only, the repeats take turns, and a GPU is waited for.
    """
    if not shares_demonstrations(prompts):
        raise IclError("A speed-up needs prompts that share their demonstrations.")
    chunks = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    prefix, small = (
        cache_demonstrations(model, prompts[:1], keep(prompts[:1])) for keep in (everything, rule)
    )
    ways: dict[str, Callable[[Prompts], Tensor]] = {
        "re-encoded": lambda chunk: target_logits(model, chunk),
        "prefix": lambda chunk: answer_from_cache(model, prefix, chunk),
        "compressed": lambda chunk: answer_from_cache(model, small, chunk),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in bar(range(warm_up + repeats), "turns"):
        for name, way in ways.items():
            _finish(prompts.tokens.device)
            began = time.perf_counter()
            for chunk in chunks:
                way(chunk)
            _finish(prompts.tokens.device)
            if turn >= warm_up:
                taken[name].append((time.perf_counter() - began) / len(prompts))
    return {name: statistics.median(values) for name, values in taken.items()}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
