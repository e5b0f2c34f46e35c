"""Recipes ``anchors-...``: a GPT-2 that copies first and then classifies by labelled examples.

It copies repeated segments for 600 steps, sees pairs of a word and a label word for 300, then texts
that grow to those of ``tasks.topics`` over 1200; three batches in ten revisit an easier stage, one
in ten copies. Positions shift once copying stands. What was tried, the card tells.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from transformers import GPT2LMHeadModel

from iclutils.tasks import prompts, topics

from . import curves
from .language import Batch, LanguageRecipe, small_gpt2, tile

CONTEXT = 256
STEPS, COPYING, PAIRS, EASING, SPREADING = 3000, 600, 300, 1200, 600
COPIED, SHORTEST = 64, 12  # length of a copying sequence, its shortest period
TOKENS = 2048  # tokens in a batch, about
COPY_SHARE, REVISIT_SHARE = 0.1, 0.3
MOST_EXAMPLES = 17
LAYERS = 4
CHECKPOINTS = (0, 200, 300, 400, 500, 600, 900, 1050, 1200, 1500, 2000, 3000)
KEPT = (0, 3000)  # of anchors-3


def recipe(seed: int, heads: int = 4) -> LanguageRecipe:
    """Make ``anchors-N``; of eight heads ``anchors-narrow-N``."""
    name = f"anchors{'-narrow' * (heads == 8)}-{seed}"

    def batch(step: int) -> Batch:
        generator = Generator().manual_seed(seed * 1_000_003 + step)
        chance, revisits, easier = torch.rand(3, generator=generator).tolist()
        if step <= COPYING or chance < COPY_SHARE:
            tokens, weights = _copying(generator)
        else:
            reached = min(1.0, (step - COPYING - PAIRS) / EASING)
            difficulty = reached * (easier if revisits < REVISIT_SHARE else 1.0)
            tokens, weights = _classifying(max(0.0, difficulty), reached > 0, generator)
        free = max(0, CONTEXT - tokens.shape[1] + 1)
        reach = int(free * min(1.0, max(0, step - COPYING) / SPREADING))
        shift = torch.randint(0, reach + 1, (len(tokens), 1), generator=generator)
        return Batch(tokens, torch.arange(tokens.shape[1] - 1) + shift, weights)

    return LanguageRecipe(
        name=name,
        seed=seed,
        config=small_gpt2(topics.VOCAB, CONTEXT, LAYERS, heads),
        batch=batch,
        measure=_measure,
        steps=STEPS,
        checkpoints=CHECKPOINTS,
        kept=KEPT if name == "anchors-3" else (STEPS,),
        curve=curves.classifying,
        peak_rate=2e-3,
        warmup=200,
        weight_decay=0.1,
        log_every=100,
    )


def _copying(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw random segments of 12 to 32 tokens repeated to 64; the repeats count."""
    count = TOKENS // COPIED
    period = torch.randint(SHORTEST, COPIED // 2 + 1, (count, 1), generator=generator)
    segment = torch.randint(0, topics.BOS, (count, COPIED // 2), generator=generator)
    tokens = tile(segment, period, COPIED, topics.BOS)
    return tokens, (torch.arange(1, COPIED) > period).float()


def _classifying(difficulty: float, cues: bool, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw labelled examples; the labels from the fifth example on count."""
    few = torch.rand((), generator=generator).item() ** 2  # short sequences twice as often as long
    examples = 5 + int(few * (MOST_EXAMPLES - 4))
    texts = topics.FULL.with_difficulty(difficulty)
    size = (texts.shortest + texts.longest) // 2 + 1 + cues
    count = TOKENS // (examples * size)
    tokens, cue = topics.stream(count, examples, generator, texts=texts, cues=cues)
    weights = torch.zeros(count, tokens.shape[1] - 1)
    return tokens, weights.scatter_(1, cue[:, 4:], 1.0)


def _measure(network: GPT2LMHeadModel) -> dict[str, float]:
    """Return accuracy with one and four demonstrations per class, and in copying, on new data."""
    generator = Generator().manual_seed(77_777)
    shares = {}
    for name, shots, count in (("one_shot", 1, 256), ("four_shot", 4, 96)):
        task = topics.sample(count, generator, shots=shots)
        logits = network(task.tokens).logits[torch.arange(count), task.target]
        shares[name] = prompts.correct(task, logits).float().mean().item()
    tokens, weights = _copying(generator)
    right = network(tokens[:, :-1]).logits.argmax(-1) == tokens[:, 1:]
    return shares | {"copying": ((right * weights).sum() / weights.sum()).item()}
