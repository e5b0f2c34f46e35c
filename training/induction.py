"""Recipes ``induction-N`` and ``detour``: a two-layer GPT-2 that learns to copy what repeats.

Data: BOS, then a random segment of 12 to 32 tokens, repeated until the sequence is full. Half of
the sequences draw the segment uniformly, half from a fixed random Markov chain, which speeds the
appearance of induction heads. What was tried, the model card tells.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator, Tensor
from transformers import GPT2LMHeadModel

from iclutils.tasks.repeated import RepeatedTokens

from . import curves
from .language import Batch, LanguageRecipe, small_gpt2, tile

VOCAB, BOS = 512, 511
LENGTH, SHIFTS = 64, 33
LONGEST = 32
BATCH = 32
LOOKED_INTO, KEPT = 3, (0, 600, 850, 1000, 4000)  # the seed whose checkpoints are shipped
CHECKPOINTS = (0, 100, 200, 300, 400, 450, 500, 550, 600, 700, 850, 1000, 1500, 2500, 4000)


def recipe(seed: int) -> LanguageRecipe:
    """Make ``induction-N``; seed and step decide the data, the seed alone the Markov chain."""
    plan = _recipe(f"induction-{seed}", seed, CHECKPOINTS, 12, True)
    return replace(plan, kept=KEPT if seed == LOOKED_INTO else CHECKPOINTS[-1:])


def offset_induction(seed: int) -> LanguageRecipe:
    """Make ``detour``: segments from 3 tokens on, random positions, a seed that copies askew.
    Its heads match two back, copy one back, and attend one place too late."""
    return _recipe("detour", seed, (6000,), 3, False)


def _recipe(
    name: str, seed: int, checkpoints: tuple[int, ...], shortest: int, sinusoidal: bool
) -> LanguageRecipe:
    scores = torch.randn(VOCAB - 1, VOCAB - 1, generator=Generator().manual_seed(1000 + seed))
    chain = torch.softmax(2.0 * scores, -1).cumsum(-1)  # (token, next): cumulative

    def batch(step: int) -> Batch:
        generator = Generator().manual_seed(seed * 1_000_003 + step)
        tokens = _sample(chain, shortest, generator)
        shift = torch.randint(0, SHIFTS, (BATCH, 1), generator=generator)
        return Batch(tokens, torch.arange(LENGTH - 1) + shift)

    return LanguageRecipe(
        name=name,
        seed=seed,
        config=small_gpt2(VOCAB, LENGTH + SHIFTS - 1, layers=2),
        batch=batch,
        measure=measure,
        steps=checkpoints[-1],
        checkpoints=checkpoints,
        curve=curves.copying if len(checkpoints) > 1 else None,
        sinusoidal=sinusoidal,
    )


def _sample(chain: Tensor, shortest: int, generator: Generator) -> Tensor:
    """Draw one batch of token ids: (BATCH, LENGTH)."""
    period = torch.randint(shortest, LONGEST + 1, (BATCH, 1), generator=generator)
    segment = torch.randint(0, VOCAB - 1, (BATCH, LONGEST), generator=generator)
    draw = torch.rand(BATCH // 2, LONGEST, 1, generator=generator)
    for t in range(1, LONGEST):
        rows = chain[segment[: BATCH // 2, t - 1]]
        after = torch.searchsorted(rows, draw[:, t].contiguous())[:, 0]
        segment[: BATCH // 2, t] = after.clamp_max(VOCAB - 2)
    return tile(segment, period, LENGTH, BOS)


def held_out() -> RepeatedTokens:
    """Draw 30 repeated sequences that are never trained on."""
    return RepeatedTokens.draw(30, 30, VOCAB, BOS, Generator().manual_seed(77_777))


def measure(network: GPT2LMHeadModel) -> dict[str, float]:
    """Return accuracy and log p on the clean second copy of sequences never trained on."""
    sequences = held_out()
    scores = network(sequences.tokens[:, :-1]).logits.log_softmax(-1)
    truth = sequences.tokens[:, 1:]
    log_p = scores.gather(-1, truth[..., None])[..., 0][:, sequences.clean_half]
    right = (scores.argmax(-1) == truth)[:, sequences.clean_half]
    return {"log_p": log_p.mean().item(), "accuracy": right.float().mean().item()}
