"""What a measure will cost, in time and memory, said before it starts."""

from __future__ import annotations

import time

from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from ..progress import quiet, say
from .language import logits

FLOAT = 4  # bytes


def announce(
    model: TransformerBridge,
    what: str,
    tokens: Int[Tensor, "batch pos"],
    passes: float | int,
    *,
    patterns: int = 3,
    streams: int = 12,
    vocab: int = 2,
    more: int = 0,
) -> None:
    """Say what comes, for how long (one of the ``passes`` over ``tokens`` is timed), and in how
    much memory: attention patterns, residual streams and logits held at once, and ``more`` bytes.
    """
    if quiet():
        return
    start, cfg = time.perf_counter(), model.cfg
    logits(model, tokens)
    seconds = passes * (time.perf_counter() - start)
    held = vocab * cfg.d_vocab + streams * cfg.d_model + patterns * cfg.n_heads * tokens.shape[1]
    memory = amount(FLOAT * tokens.numel() * held + more)
    say(f"{what}: {duration(seconds)}, {memory} of memory beside the weights")


def amount(size: float | int) -> str:
    """Bytes in words."""
    if size < 1e6:
        return "less than 1 MB"
    return f"about {_rounded(size / 1e9)} GB" if size >= 1e9 else f"about {_rounded(size / 1e6)} MB"


def duration(seconds: float | int) -> str:
    """Seconds in words."""
    if seconds < 2:
        return "less than 2 seconds"
    if seconds < 100:
        return f"about {_rounded(seconds)} seconds"
    if seconds < 6000:
        return f"about {_rounded(seconds / 60)} minutes"
    return f"about {_rounded(seconds / 3600)} hours"


def _rounded(value: float | int) -> str:
    """Two significant digits, no more than an estimate is worth."""
    return f"{float(f'{value:.1e}'):g}"
