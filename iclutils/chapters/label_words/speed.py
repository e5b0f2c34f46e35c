"""What compression saves: tokens, multiply-adds, and seconds where they are measured.

Three ways to answer many queries on the same demonstrations: re-encode the whole prompt for each
(the paper's baseline), re-use the keys and values of all demonstration tokens (which any library
does: the fair baseline), or of the anchors alone. Counts are the same on every machine; seconds
are not.

Source: Wang et al. 2023, section 3.2, Tables 3 and 6.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.label_words import compression, speed
    >>> from iclutils.tasks import topics
    >>> net = models.load("anchors-0")
    >>> asked = topics.sample(4, torch.Generator().manual_seed(0), classes=2, shared=True)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import IclError
from ...interp.kv_cache import (
    Keep,
    answer_from_cache,
    cache_demonstrations,
    demonstrations,
    same_shape,
    shares_demonstrations,
)
from ...interp.readout import target_logits
from ...models import TransformerBridge
from ...progress import bar
from ...tasks.prompts import Prompts
from .compression import Rule, everything, hidden_anchor


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


def work(model: TransformerBridge, fed: int, memory: int = 0) -> int:
    """Multiply-adds of one forward pass over ``fed`` tokens with ``memory`` tokens remembered.

    Weights, attention scores and weighted values (causal entries only), and one row of the
    unembedding.

    Example:
        >>> speed.work(net, fed=20) > speed.work(net, fed=5, memory=15)
        True
    """
    cfg = model.cfg
    inner = cfg.n_heads * cfg.d_head
    shared = (getattr(cfg, "n_key_value_heads", None) or cfg.n_heads) * cfg.d_head
    mlp = (3 if cfg.gated_mlp else 2) * cfg.d_model * (cfg.d_mlp or 0)
    weights = fed * (2 * cfg.d_model * (inner + shared) + mlp)
    edges = fed * memory + fed * (fed + 1) // 2
    return cfg.n_layers * (weights + 2 * inner * edges) + cfg.d_model * cfg.d_vocab


def costs(model: TransformerBridge, prompts: Prompts, keep: Keep) -> dict[str, Cost]:
    """Mean cost of a query: ``re-encoded``, with all of the ``prefix``, and ``compressed``.

    Example:
        >>> found = speed.costs(net, asked, compression.hidden_anchor(asked))
        >>> found["compressed"].memory < found["prefix"].memory
        True
    """
    same_shape(prompts, keep)
    shown = demonstrations(prompts).sum(1).tolist()
    kept = keep.sum(1).tolist()
    total = (prompts.target + 1).tolist()

    def mean(pairs: list[tuple[int, int]]) -> Cost:
        adds = [work(model, fed, memory) for fed, memory in pairs]
        fed, memory = zip(*pairs, strict=True)
        return Cost(*(statistics.fmean(each) for each in (fed, memory, adds)))

    rows = list(zip(total, shown, kept, strict=True))
    return {
        "re-encoded": mean([(n, 0) for n, _, _ in rows]),
        "prefix": mean([(n - d, d) for n, d, _ in rows]),
        "compressed": mean([(n - d, k) for n, d, k in rows]),
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

    Example:
        >>> taken = speed.seconds(net, asked, repeats=1)
        >>> sorted(taken)
        ['compressed', 'prefix', 're-encoded']
    """
    if not shares_demonstrations(prompts):
        raise IclError("A speed-up needs prompts that share their demonstrations.")
    chunks = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    prefix = cache_demonstrations(model, prompts[:1], everything(prompts[:1]))
    small = cache_demonstrations(model, prompts[:1], rule(prompts[:1]))
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
