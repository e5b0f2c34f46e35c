"""Recipe ``induction-N``: a two-layer GPT-2 that learns to copy what repeats.

Data: BOS, then a random segment of 3 to 32 tokens, repeated until the sequence is full. Half of
the sequences draw the segment uniformly, half from a fixed random Markov chain, so that there
are bigram statistics to learn as well. Three choices matter, each found by measurement:

- every sequence starts at a random position embedding (0 .. 32). Without this, absolute
  positions let the model store pairs of neighbours far away from where they stand, and it
  predicts the second copy with hardly any prefix matching;
- the Markov half speeds the appearance of induction heads several times;
- wide heads (32) make the previous-token head sharp.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ..tasks.repeated import doubled, markov_chain
from .loop import Batch, Recipe

VOCAB, BOS = 512, 511
LENGTH, SHIFTS = 64, 33
SEGMENT = 3, 32
BATCH = 32
CHECKPOINTS = (0, 100, 200, 300, 400, 500, 600, 700, 800, 1000, 1300, 2000, 3500, 6000)


def recipe(seed: int) -> Recipe:
    """The recipe of one seed; seed and step decide the data, the seed alone the Markov chain."""
    chain = markov_chain(VOCAB - 1, 2.0, seed=1000 + seed)

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        tokens = _sample(chain, generator)
        shift = torch.randint(0, SHIFTS, (BATCH, 1), generator=generator)
        return tokens, torch.arange(LENGTH - 1) + shift

    return Recipe(
        name=f"induction-{seed}",
        seed=seed,
        config=GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH + SHIFTS - 1,
            n_embd=128,
            n_layer=2,
            n_head=4,
            n_inner=256,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=BOS,
            eos_token_id=BOS,
            use_cache=False,
        ),
        batch=batch,
        steps=CHECKPOINTS[-1],
        checkpoints=CHECKPOINTS,
        held_out=_held_out,
        card=_CARD.format(seed=seed),
    )


def _sample(chain: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One batch of token ids: (BATCH, LENGTH)."""
    period = torch.randint(SEGMENT[0], SEGMENT[1] + 1, (BATCH, 1), generator=generator)
    segment = torch.randint(0, VOCAB - 1, (BATCH, SEGMENT[1]), generator=generator)
    draw = torch.rand(BATCH // 2, SEGMENT[1], 1, generator=generator)
    for t in range(1, SEGMENT[1]):
        rows = chain[segment[: BATCH // 2, t - 1]]
        found = torch.searchsorted(rows, draw[:, t].contiguous())[:, 0]
        segment[: BATCH // 2, t] = found.clamp_max(VOCAB - 2)
    repeat = segment.gather(1, torch.arange(LENGTH - 1)[None] % period)
    return torch.cat([torch.full((BATCH, 1), BOS), repeat], 1)


def _held_out(network: GPT2LMHeadModel) -> dict[str, float]:
    """Accuracy and log p on the clean second copy of 30 doubled sequences never trained on."""
    held = doubled(30, 30, VOCAB, BOS, torch.Generator().manual_seed(77_777))
    with torch.no_grad():
        scores = network(held.tokens[:, :-1]).logits.log_softmax(-1)
    truth = held.tokens[:, 1:]
    log_p = scores.gather(-1, truth[..., None])[..., 0][:, held.clean_half]
    right = (scores.argmax(-1) == truth)[:, held.clean_half]
    return {"log_p": log_p.mean().item(), "accuracy": right.float().mean().item()}


_CARD = """\
# induction-{seed}

A GPT-2-architecture model of 2 layers (4 heads of 32, width 128, MLP 256, vocabulary 512 with
BOS = 511, 96 positions) trained from scratch by the recipe `iclutils.training.induction`, seed
{seed}, to be looked into: it learns to copy what repeats, and grows a previous-token head and
induction heads.

- **Data**: synthetic. Random segments of 3 to 32 tokens repeated to 64; half uniform, half from
  a fixed random Markov chain. No text, no personal data.
- **Training**: 6000 steps of 32 sequences, AdamW (betas .9, .98; weight decay .01 on matrices),
  peak rate 1e-3, 100 warm-up steps, cosine to 5 %, clipping at 1. `training.jsonl` is the log,
  `step-*` are checkpoints along the way.
- **Storage**: weights in half precision (safetensors), computed in single.
- **Rebuild**: `python -m iclutils train induction-{seed}`. The same machine and versions give
  the same weights bit for bit, also after an interruption; others give a different model of the
  same kind.
- **Limits**: it knows no language. Sequences longer than 96 tokens are refused; positions
  beyond 64 were seen only as shifts.
- **Licence**: MIT, as the package.
"""
