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
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...interp import kv_cache
from ...interp.kv_cache import Keep, answer_from_cache, cache_demonstrations, demonstrations
from ...interp.readout import in_batches, target_logits
from ...models import TransformerBridge
from ...progress import bar
from ...tasks.prompts import Prompts, Role
from .answers import Answers, label_loyalty

Rule = Callable[[Prompts], Keep]  # which tokens are kept
WARM_UP = 1  # turns that are not timed


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
    """Hidden_random: formatting, and in place of a label word of k sub-tokens k random tokens of
    its demonstration's text (or all where there are fewer: ours)."""
    roles, (text, label) = prompts.roles, map(prompts.in_demonstrations, (Role.TEXT, Role.LABEL))
    # On the generator's device, so that the draw does not depend on where the model is.
    priority = torch.rand(roles.shape, generator=generator, device=generator.device)
    order = priority.to(roles.device)[:, None].masked_fill(~text, torch.inf).argsort(-1)
    words = text & (order.argsort(-1) < label.sum(-1, keepdim=True))
    return (roles == Role.FORMAT) | words.any(1)


def text_anchor(prompts: Prompts) -> Prompts:
    """Text_anchor: the prompts without their demonstrations' texts, to be read from scratch.
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
    """Answers from what a rule, as ``hidden_anchor``, or a mask (batch, pos) keeps. With ``offset``
    the query stays at its position; without, or where nothing is kept, it begins at 0, as in the
    released script for GPT-2 XL."""
    mask = keep(_shown(prompts)) if callable(keep) else keep
    return _answers(model, prompts, [mask], offset, batch_size)[0]


def hidden_random_top(
    model: TransformerBridge,
    prompts: Prompts,
    clean: Answers,
    generator: torch.Generator,
    draws: int = 20,
    batch_size: int | None = None,
) -> tuple[Answers, Float[Tensor, "draw"]]:
    """Hidden_random-top: the draw with the highest label loyalty to ``clean``, and that of each.
    (The released code never clears its mask, so that a draw also keeps the random tokens of all
    draws before it, which favours this control.)"""
    masks = [hidden_random(_shown(prompts), generator) for _ in range(draws)]
    by_draw = _answers(model, prompts, masks, True, batch_size)
    loyal = torch.stack([label_loyalty(one, clean).float().mean() for one in by_draw])
    return by_draw[int(loyal.argmax())], loyal


def _shown(prompts: Prompts) -> Prompts:
    """Prompts with all demonstrations that there are: one, where all share theirs."""
    return prompts[:1] if kv_cache.shares_demonstrations(prompts) else prompts


def _answers(
    model: TransformerBridge,
    prompts: Prompts,
    masks: Sequence[Keep],
    offset: bool,
    batch_size: int | None,
) -> list[Answers]:
    """Answers from what each mask keeps; demonstrations that prompts share are read once."""
    groups = kv_cache.sets(prompts)
    if 1 < len(groups) < len(prompts):
        by_set = [
            _answers(model, prompts[rows], [m[rows] for m in masks], offset, batch_size)
            for rows in groups
        ]
        order = torch.cat(groups).argsort()
        return [Answers.join(of_mask)[order] for of_mask in zip(*by_set, strict=True)]
    shown = prompts[:1]
    shared = cache_demonstrations(model, shown, everything(shown)) if len(groups) == 1 else None

    def measure(batch: Prompts, rows: Tensor) -> Iterator[Tensor]:
        cache = shared or cache_demonstrations(model, batch, everything(batch))
        for mask in masks:
            kept = cache.keep((mask if len(mask) == 1 else mask[rows])[:, : cache.held.shape[1]])
            stays = offset and bool(kept.held.any())
            told = Answers.of(batch, answer_from_cache(model, kept, batch, stays))
            yield from vars(told).values()

    columns = iter(in_batches(prompts, batch_size, "compression", measure))
    return [Answers(*fields) for fields in zip(columns, columns, columns, strict=True)]


@dataclass(frozen=True)
class Cost:
    """Mean cost of a query: tokens that go through the model, keys and values per layer and head
    that it holds besides, and multiply-adds of all matrix products."""

    fed: float
    memory: float
    multiply_adds: float


def multiply_adds(model: TransformerBridge, fed: int, memory: int = 0) -> int:
    """Multiply-adds of one forward pass over ``fed`` tokens with ``memory`` tokens cached: weights,
    causal attention, and one row of the unembedding."""
    cfg = model.cfg
    inner = cfg.n_heads * cfg.d_head
    mlp = (3 if cfg.gated_mlp else 2) * cfg.d_model * (cfg.d_mlp or 0)
    weights = fed * (4 * cfg.d_model * inner + mlp)
    edges = fed * memory + fed * (fed + 1) // 2
    return cfg.n_layers * (weights + 2 * inner * edges) + cfg.d_model * cfg.d_vocab


def costs(model: TransformerBridge, prompts: Prompts, keep: Keep) -> dict[str, Cost]:
    """Mean cost of a query in three ways. ``re-encoded``: the whole prompt (the paper's baseline);
    ``prefix``: keys and values of all demonstration tokens re-used (the fair baseline);
    ``compressed``: of those in ``keep`` alone."""
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
    model: TransformerBridge, prompts: Prompts, batch: int = 1, repeats: int = 5
) -> dict[str, float]:
    """Median wall-clock seconds per query, for the three ways of ``costs`` in turns; shared
    demonstrations are read once, which is not counted, as in the paper."""
    if not kv_cache.shares_demonstrations(prompts):
        raise IclError("A speed-up needs prompts that share their demonstrations.")
    device = prompts.tokens.device
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

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in bar(range(WARM_UP + repeats), "turns"):
        for name, way in ways.items():
            began = now()
            for chunk in chunks:
                way(chunk)
            taken[name].append((now() - began) / len(prompts))
    return {name: statistics.median(values[WARM_UP:]) for name, values in taken.items()}
