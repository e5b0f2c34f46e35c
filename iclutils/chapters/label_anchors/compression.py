"""Compression: answer a query from a few of the demonstrations' tokens, and what that saves.

Of the keys and values that demonstrations leave behind, only those at the anchors (label words and
formatting) are kept, at their positions, and the query is answered from them. Source: Wang et al.
2023, section 3.2, Tables 2, 3 and 6 and footnote 6, and their released code."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import IclError
from ...interp import kv_cache
from ...interp.kv_cache import Keep, answer_from_cache, cache_demonstrations, demonstrations
from ...interp.readout import in_batches, target_logits
from ...models import TransformerBridge
from ...tasks.prompts import Prompts, Role
from .answers import Answers, label_loyalty

Rule = Callable[[Prompts], Keep]  # which tokens are kept


def everything(prompts: Prompts) -> Keep:
    """Keep all demonstration tokens: plain prefix caching, which changes no answer."""
    return demonstrations(prompts)


def hidden_anchor(prompts: Prompts) -> Keep:
    """Keep formatting and label words, all their sub-tokens: Hidden_anchor."""
    return (prompts.roles == Role.FORMAT) | (prompts.roles == Role.LABEL)


def label_only(prompts: Prompts) -> Keep:
    """Keep label words without the formatting (footnote 6 of the paper)."""
    return prompts.roles == Role.LABEL


def hidden_random(prompts: Prompts, generator: torch.Generator) -> Keep:
    """Keep formatting, and in place of a label word of k sub-tokens k random tokens of its
    demonstration's text (or all where there are fewer: ours): Hidden_random."""
    roles, (text, label) = prompts.roles, map(prompts.in_demonstrations, (Role.TEXT, Role.LABEL))
    # On the generator's device, so that the draw does not depend on where the model is.
    priority = torch.rand(roles.shape, generator=generator, device=generator.device)
    order = priority.to(roles.device)[:, None].masked_fill(~text, torch.inf).argsort(-1)
    words = text & (order.argsort(-1) < label.sum(-1, keepdim=True))
    return (roles == Role.FORMAT) | words.any(1)


def text_anchor(prompts: Prompts) -> Prompts:
    """Return the prompts without their demonstrations' texts, to be read from scratch: Text_anchor.
    Formatting, label words and query are the same tokens; positions start again at 0."""
    keep = prompts.kept & (prompts.roles != Role.TEXT)
    index, held = kv_cache.packed(keep)
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
    """Return the answers from what a rule, as ``hidden_anchor``, or a mask (batch, pos) keeps.

    With ``offset`` the query stays at its position; without, or where nothing is kept, it begins
    at 0, as in the released script for GPT-2 XL.
    """
    return compress_each(model, prompts, [keep], offset, batch_size)[0]


def compress_each(
    model: TransformerBridge,
    prompts: Prompts,
    keeps: Sequence[Rule | Keep],
    offset: bool = True,
    batch_size: int | None = None,
) -> list[Answers]:
    """Return ``compress`` for each rule or mask, with every demonstration read only once for all:
    also where some prompts share theirs."""
    groups = kv_cache.sets(prompts)
    shown = prompts[:1] if len(groups) == 1 else prompts
    masks = [keep(shown) if callable(keep) else keep for keep in keeps]
    if 1 < len(groups) < len(prompts):
        by_set = [
            compress_each(model, prompts[rows], [m[rows] for m in masks], offset, batch_size)
            for rows in groups
        ]
        order = torch.cat(groups).argsort()
        return [Answers.join(of_mask)[order] for of_mask in zip(*by_set, strict=True)]
    shared = cache_demonstrations(model, shown, everything(shown)) if len(groups) == 1 else None

    def measure(batch: Prompts, rows: Tensor) -> Iterator[Tensor]:
        cache = shared or cache_demonstrations(model, batch, everything(batch))
        for mask in masks:
            kept = cache.keep((mask if len(mask) == 1 else mask[rows])[:, : cache.held.shape[1]])
            stays = offset and bool(kept.held.any())
            yield from vars(
                Answers.of(batch, answer_from_cache(model, kept, batch, stays))
            ).values()

    columns = iter(in_batches(prompts, batch_size, "compression", measure))
    return [Answers(*fields) for fields in zip(columns, columns, columns, strict=True)]


def hidden_random_top(
    model: TransformerBridge,
    prompts: Prompts,
    clean: Answers,
    generator: torch.Generator,
    draws: int = 20,
    batch_size: int | None = None,
) -> Answers:
    """Return Hidden_random-top: of several draws of ``hidden_random`` the answers of the one with
    the highest label loyalty to ``clean``."""
    shown = prompts[:1] if kv_cache.shares_demonstrations(prompts) else prompts
    masks = [hidden_random(shown, generator) for _ in range(draws)]
    by_draw = compress_each(model, prompts, masks, batch_size=batch_size)
    return max(by_draw, key=lambda one: label_loyalty(one, clean).float().mean())


@dataclass(frozen=True)
class Cost:
    """Mean cost of a query: tokens that go through the model, keys and values per layer and head
    that it holds besides, and multiply-adds of all matrix products."""

    fed: float
    memory: float
    multiply_adds: float


def multiply_adds(model: TransformerBridge, fed: int, memory: int = 0) -> int:
    """Return the multiply-adds of a pass over ``fed`` tokens with ``memory`` cached ones: weights,
    causal attention, and one row of the unembedding."""
    cfg = model.cfg
    inner = cfg.n_heads * cfg.d_head
    mlp = (3 if cfg.gated_mlp else 2) * cfg.d_model * (cfg.d_mlp or 0)
    weights = fed * (4 * cfg.d_model * inner + mlp)
    edges = fed * memory + fed * (fed + 1) // 2
    return cfg.n_layers * (weights + 2 * inner * edges) + cfg.d_model * cfg.d_vocab


def costs(model: TransformerBridge, prompts: Prompts, keep: Keep) -> dict[str, Cost]:
    """Return the mean cost of a query in three ways. ``re-encoded``: the whole prompt (the paper's
    baseline); ``prefix``: keys and values of all demonstration tokens re-used (the fair baseline);
    ``compressed``: of those in ``keep`` alone."""
    shown, kept = demonstrations(prompts).sum(1), keep.sum(1)
    total, none = prompts.target + 1, torch.zeros_like(kept)
    found = {}
    for way, fed, memory in (
        ("re-encoded", total, none),
        ("prefix", total - shown, shown),
        ("compressed", total - shown, kept),
    ):
        pairs = list(zip(fed.tolist(), memory.tolist(), strict=True))
        adds = [multiply_adds(model, *pair) for pair in pairs]
        found[way] = Cost(*map(statistics.fmean, (*zip(*pairs, strict=True), adds)))
    return found


def seconds(
    model: TransformerBridge, prompts: Prompts, batch: int = 1, repeats: int = 5
) -> dict[str, float]:
    """Return median wall-clock seconds per query, for the three ways of ``costs`` in turns, of
    which the first is not counted; shared demonstrations are read before, as in the paper."""
    if not kv_cache.shares_demonstrations(prompts):
        raise IclError("A speed-up needs prompts that share their demonstrations.")
    chunks = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    prefix, small = (
        cache_demonstrations(model, prompts[:1], rule(prompts[:1]))
        for rule in (everything, hidden_anchor)
    )
    ways: dict[str, Callable[[Prompts], Tensor]] = {
        "re-encoded": lambda chunk: target_logits(model, chunk),
        "prefix": lambda chunk: answer_from_cache(model, prefix, chunk),
        "compressed": lambda chunk: answer_from_cache(model, small, chunk),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for name in [*ways] * (1 + repeats):
        began = time.perf_counter()
        for chunk in chunks:
            ways[name](chunk).sum().item()  # waits for a GPU
        taken[name].append((time.perf_counter() - began) / len(prompts))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}
