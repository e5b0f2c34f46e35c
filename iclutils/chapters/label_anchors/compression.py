"""Compression: answer a query from a few of the demonstrations' tokens, and what that saves.

Of the keys and values that demonstrations leave behind, only those at the anchors (label words and
formatting) are kept, at their positions, and the query is answered from them. Source: Wang et al.
2023, section 3.2, Tables 2, 3 and 6 and footnote 6, and their released code."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from ...interp import kv_cache
from ...interp.kv_cache import Keep, answer_from_cache, cache_demonstrations, demonstrations
from ...interp.readout import in_batches
from ...models import TransformerBridge
from ...tasks.prompts import Prompts, Role
from .answers import Answers

Rule = Callable[[Prompts], Keep]  # which tokens are kept


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
    Formatting, label words and query are the same tokens; positions start again at 0. As wide as
    the longest of them. What was read among the texts, and is kept, is ``compress``."""
    keep = prompts.real & (prompts.roles != Role.TEXT)
    index, held = kv_cache.pack(keep)
    moved = keep.cumsum(1) - 1
    return replace(
        prompts,
        tokens=prompts.tokens.gather(1, index),  # what stands after the target, nothing reads
        roles=prompts.roles.gather(1, index).masked_fill(~held, int(Role.PAD)),
        target=moved.gather(1, prompts.target[:, None])[:, 0],
        label_pos=moved.gather(1, prompts.label_pos),
        cue_pos=moved.gather(1, prompts.cue_pos),
    )


def compress(
    model: TransformerBridge,
    prompts: Prompts,
    keeps: Sequence[Rule | Keep],
    offset: bool = True,
    batch_size: int | None = None,
) -> list[Answers]:
    """Return the answers from what each rule (``hidden_anchor``) or mask (batch, pos) keeps. With
    ``offset`` the query stays at its position; without, or where nothing is kept, it begins at 0,
    as in the released script for GPT-2 XL."""
    groups = kv_cache.sets(prompts)
    read = prompts[:1] if len(groups) == 1 else prompts
    masks = [keep(read) if callable(keep) else keep for keep in keeps]
    if 1 < len(groups) < len(prompts):
        by_set = [
            compress(model, prompts[rows], [m[rows] for m in masks], offset, batch_size)
            for rows in groups
        ]
        order = torch.cat(groups).argsort()
        return [Answers.join(of_mask)[order] for of_mask in zip(*by_set, strict=True)]
    shared = cache_demonstrations(model, read, demonstrations(read)) if len(groups) == 1 else None

    def measure(batch: Prompts, rows: Tensor) -> Iterator[Tensor]:
        whole = shared or cache_demonstrations(model, batch, demonstrations(batch))
        for mask in masks:
            part = whole.keep((mask if len(mask) == 1 else mask[rows])[:, : whole.held.shape[1]])
            logits = answer_from_cache(model, part, batch, offset and bool(part.held.any()))
            yield from vars(Answers.of(batch, logits)).values()

    columns = iter(in_batches(prompts, batch_size, "compression", measure))
    return [Answers(*fields) for fields in zip(columns, columns, columns, strict=True)]


def tokens_read(
    prompts: Prompts, keep: Keep
) -> dict[str, tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]]:
    """Return how many tokens go through the model for a query, and how many it holds besides:
    ``re-encoded``, the whole prompt (the paper's baseline); ``prefix``, keys and values of all
    demonstrations re-used (the fair baseline); ``compressed``, of those in ``keep`` alone."""
    before, total = demonstrations(prompts).sum(1), prompts.target + 1
    return {
        "re-encoded": (total, torch.zeros_like(total)),
        "prefix": (total - before, before),
        "compressed": (total - before, keep.sum(1)),
    }


def multiply_adds(
    model: TransformerBridge, fed: Int[Tensor, "batch"], memory: Int[Tensor, "batch"]
) -> Int[Tensor, "batch"]:
    """Return the multiply-adds of all matrix products of a pass over ``fed`` tokens with ``memory``
    cached ones (``tokens_read``): weights, causal attention, one row of the unembedding."""
    cfg = model.cfg
    inner = cfg.n_heads * cfg.d_head
    mlp = (3 if cfg.gated_mlp else 2) * cfg.d_model * (cfg.d_mlp or 0)
    weights = fed * (4 * cfg.d_model * inner + mlp)
    edges = fed * memory + fed * (fed + 1) // 2
    return cfg.n_layers * (weights + 2 * inner * edges) + cfg.d_model * cfg.d_vocab
