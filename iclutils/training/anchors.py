"""Recipes ``anchors-N``, ``anchors-deep`` and ``anchors-uncopied``: copy first, then classify.

One run in three stages. For the first 600 steps the model only learns to copy: BOS and a random
segment that repeats, as in chapter 01. For the next 300 it sees pairs of a word and a label word.
From then on texts have cues and grow, over 1200 steps, from one fixed word per topic to the full
task of ``iclutils.tasks.topics``; three batches in ten revisit an easier stage. A tenth of all
batches goes on with copying. Sequences show 5 to 17 examples, short sequences more often, so that
one to four demonstrations per class, near and far, all occur; the loss counts the label words
that the context can tell.

Three choices matter, found by measurement. Without the copying stage classification stays at
chance (``anchors-uncopied`` is that control: same model, same data, no copying). Positions: all
sequences start at position 0 until copying stands, then at random places in a range that grows to
the whole context; shifted from the start, copying did not emerge in time, and never shifted,
prompts longer than those copied stayed out of reach. And wide heads: with heads of 16 two layers
had to share the look one token back, so that label words gathered their texts in the second layer
as much as in the first; with heads of 32 one layer does it.

Example:
    >>> from iclutils.training import anchors
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from ..tasks import prompts, topics
from ..tasks.repeated import tiled
from .language import Batch, LanguageRecipe, sinusoidal_positions

CONTEXT = 256
STEPS, COPYING, PAIRS, EASING, SPREADING = 3000, 600, 300, 1200, 600
COPIED, SHORTEST = 64, 12  # length of a copying sequence, its shortest period
TOKENS = 2048  # tokens in a batch, about
COPY_SHARE, REVISIT_SHARE = 0.1, 0.3
MOST_EXAMPLES = 17
CHECKPOINTS = (0, 200, 300, 400, 500, 600, 900, 1050, 1200, 1500, 2000, 3000)


def recipe(seed: int) -> LanguageRecipe:
    """``anchors-N``: four layers.

    Example:
        >>> anchors.recipe(0).config.n_layer
        4
    """
    return _recipe(f"anchors-{seed}", seed, 4, CHECKPOINTS, copying=True)


def deep(seed: int) -> LanguageRecipe:
    """``anchors-deep``: six layers.

    Example:
        >>> anchors.deep(0).config.n_layer
        6
    """
    return _recipe("anchors-deep", seed, 6, CHECKPOINTS, copying=True)


def uncopied(seed: int) -> LanguageRecipe:
    """``anchors-uncopied``: the control, which never learns to copy.

    Example:
        >>> anchors.uncopied(0).name
        'anchors-uncopied'
    """
    return _recipe("anchors-uncopied", seed, 4, (0, STEPS), copying=False)


def _recipe(
    name: str, seed: int, layers: int, checkpoints: tuple[int, ...], copying: bool
) -> LanguageRecipe:
    first = COPYING if copying else 0

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        asked, revisits, easier = torch.rand(3, generator=generator).tolist()
        if step <= first or (copying and asked < COPY_SHARE):
            tokens, weights = _copying(generator)
        else:
            reached = min(1.0, (step - first - PAIRS) / EASING)
            difficulty = reached * (easier if revisits < REVISIT_SHARE else 1.0)
            tokens, weights = _classifying(max(0.0, difficulty), reached > 0, generator)
        free = max(0, CONTEXT - tokens.shape[1] + 1)
        reach = int(free * min(1.0, max(0, step - first) / SPREADING))
        shift = torch.randint(0, reach + 1, (len(tokens), 1), generator=generator)
        return Batch(tokens, torch.arange(tokens.shape[1] - 1) + shift, weights)

    return LanguageRecipe(
        name=name,
        seed=seed,
        config=GPT2Config(
            vocab_size=topics.VOCAB,
            n_positions=CONTEXT,
            n_embd=128,
            n_layer=layers,
            n_head=4,
            n_inner=256,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=topics.BOS,
            eos_token_id=topics.BOS,
            use_cache=False,
        ),
        batch=batch,
        steps=STEPS,
        checkpoints=checkpoints,
        held_out=_held_out,
        card=_card(name, seed, layers, copying),
        prepare=sinusoidal_positions,
        peak_rate=2e-3,
        warmup=200,
        weight_decay=0.1,
        log_every=100,
    )


def _copying(generator: Generator) -> tuple[Tensor, Tensor]:
    """Random segments of 12 to 32 tokens repeated to 64; the repeats count."""
    count = TOKENS // COPIED
    period = torch.randint(SHORTEST, COPIED // 2 + 1, (count, 1), generator=generator)
    segment = torch.randint(0, topics.BOS, (count, COPIED // 2), generator=generator)
    tokens = tiled(segment, period, COPIED, topics.BOS)
    return tokens, (torch.arange(1, COPIED) > period).float()


def _classifying(difficulty: float, cues: bool, generator: Generator) -> tuple[Tensor, Tensor]:
    """Labelled examples; the labels from the fifth example on count."""
    few = torch.rand((), generator=generator).item() ** 2  # short sequences twice as often as long
    examples = 5 + int(few * (MOST_EXAMPLES - 4))
    texts = topics.FULL.eased(difficulty)
    size = (texts.shortest + texts.longest) // 2 + 1 + cues
    count = TOKENS // (examples * size)
    tokens, cue = topics.stream(count, examples, generator, texts=texts, cues=cues)
    weights = torch.zeros(count, tokens.shape[1] - 1)
    return tokens, weights.scatter_(1, cue[:, 4:], 1.0)


def _held_out(network: GPT2LMHeadModel) -> dict[str, float]:
    """Accuracy with one and four demonstrations per class, and in copying, on data of its own."""
    generator = torch.Generator().manual_seed(77_777)
    found = {}
    with torch.no_grad():
        for name, shots, count in (("one_shot", 1, 256), ("four_shot", 4, 96)):
            asked = topics.sample(count, generator, shots=shots)
            logits = network(asked.tokens).logits[torch.arange(count), asked.target]
            found[name] = prompts.correct(asked, logits).float().mean().item()
        tokens, weights = _copying(generator)
        right = network(tokens[:, :-1]).logits.argmax(-1) == tokens[:, 1:]
        found["copying"] = ((right * weights).sum() / weights.sum()).item()
    return found


def _card(name: str, seed: int, layers: int, copying: bool) -> str:
    first = (
        f"{COPYING} steps of copying alone, then classification with a tenth of copying"
        if copying
        else "classification alone: the control, which stays at chance"
    )
    return _CARD.format(name=name, seed=seed, layers=layers, first=first, steps=STEPS)


_CARD = """\
# {name}

A GPT-2-architecture model of {layers} layers (4 heads of 32, width 128, MLP 256, vocabulary 122
with BOS = 121, 256 positions) trained from scratch by the recipe `iclutils.training.anchors`, seed
{seed}, to be looked into: it classifies texts about made-up topics by the labelled examples in its
context.

- **Data**: synthetic. Texts of 4 to 12 tokens from 12 topics of 8 words and 16 fillers, the label
  words drawn anew for every sequence; random segments repeated. No real text, no personal data.
- **Training**: {steps} steps of about 2048 tokens: {first}; position embeddings starting as
  sinusoids, AdamW (betas .9, .98; weight decay .1 on matrices), peak rate 2e-3, 200 warm-up steps,
  cosine to 5 %, clipping at 1. `training.jsonl` is the log, `step-*` are checkpoints along the way.
- **Storage**: weights in half precision (safetensors), computed in single.
- **Rebuild**: `python -m iclutils train {name}`. The same machine and versions give
  the same weights bit for bit, also after an interruption; others give a different model of the
  same kind.
- **Limits**: it knows no language; its words are names of token ids. Four classes, one to four
  demonstrations of each. Sequences longer than 256 tokens are refused.
- **Licence**: MIT, as the package.
"""
