"""Influence of earlier tokens on a prediction, and attention as a stand-in for it.

Influence is what a prediction loses when a token is drawn anew (occlusion; Zeiler and Fergus 2014;
Li et al. 2016). Attention answers the same question by multiplying patterns (``rollout``) or by the
size of what it carries (``norm_weighted``), and intervenes on nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ...errors import IclError
from ...interp.head_scores import attention_patterns
from ...interp.hooks import logits_at
from ...interp.kv_cache import States, keys_values, read_with_cache
from ...interp.statistics import benjamini_hochberg, sign_flip_p
from ...models import TransformerBridge, cached, get_act_name
from ...progress import bar

BATCH = 512  # altered sequences in a forward pass, at most
ROWS = 16384  # rows of d_model held at once
LOGITS = 2**25  # logits held at once: 134 MB
RATE = 0.05  # of false discoveries
FEWEST = 6  # sequences behind a source; signs of fewer cannot reach 5 %

Tokens = Int[Tensor, "batch pos"]
Entries = Int[Tensor, "batch entry"]
Patterns = Float[Tensor, "batch layer dest src"]


class Influence(NamedTuple):
    """Expected KL(p clean || p altered), and change of log p(answer), below 0 where a token helps,
    of each position on the prediction at each entry, in nats; 0 after the entry."""

    kl: Float[Tensor, "batch entry pos"]
    signed: Float[Tensor, "batch entry pos"]


def influence(
    model: TransformerBridge,
    tokens: Tokens,
    at: Entries,
    answer: Entries,
    generator: Generator,
    draws: int = 16,
) -> Influence:
    """Influence of every token on the predictions at ``at``, whose right tokens are ``answer``.
    Each token is replaced ``draws`` times, all others but BOS being as likely."""
    drawn = replacements(model, tokens, generator, draws)
    clean = _logits(model, tokens[:, : int(at.max()) + 1], at).log_softmax(-1)
    right = answer[..., None]
    before = clean.gather(-1, right)[..., 0]
    size = len(tokens), draws, at.shape[1], tokens.shape[1]
    kl, signed = torch.zeros(2, *size, device=tokens.device)
    for position, row, draw, altered in _altered(model, tokens, at, drawn):
        after, p = altered.log_softmax(-1), clean[row]
        kl[row, draw, :, position] = (p.exp() * (p - after)).sum(-1).clamp_min(0)
        signed[row, draw, :, position] = after.gather(-1, right[row])[..., 0] - before[row]
    later = torch.arange(tokens.shape[1], device=tokens.device) > at[..., None]
    return Influence(*(values.mean(1).masked_fill(later, 0) for values in (kl, signed)))


def replacements(
    model: TransformerBridge, tokens: Tokens, generator: Generator, draws: int
) -> Int[Tensor, "draw batch pos"]:
    """Tokens drawn in place of each token: any but the token itself and BOS."""
    weight = torch.ones(model.cfg.d_vocab, dtype=torch.float64)
    start = getattr(model.cfg, "bos_token_id", None)
    if start is not None and start < len(weight):
        weight[start] = 0
    rows = []
    for row in tokens.cpu():
        rest = weight.repeat(len(row), 1).scatter_(1, row[:, None], 0.0)
        rows.append(torch.multinomial(rest, draws, replacement=True, generator=generator))
    return torch.stack(rows, 1).permute(2, 1, 0).to(tokens.device)


def _altered(
    model: TransformerBridge, tokens: Tensor, at: Tensor, drawn: Tensor
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Position, rows, draws and logits (rows, entry, vocab; meaningless before the position) of
    altered sequences, in chunks. What stands before is read once, where it can be kept."""
    last, draws = int(at.max()) + 1, len(drawn)
    past: tuple[States, ...] = ()
    with suppress(IclError, AttributeError):  # keys and values cannot be cut: whole rows, then
        past = keys_values(model, tokens[:, :last])
    row = torch.arange(len(tokens), device=tokens.device).repeat_interleave(draws)
    draw = torch.arange(draws, device=tokens.device).repeat(len(tokens))
    for position in bar(range(last), "altered positions"):
        start = position if past else 0
        logits_fit = LOGITS // (at.shape[1] * model.cfg.d_vocab)
        chunk = max(1, min(BATCH, ROWS // (last - start), logits_fit))
        for r, d in zip(row.split(chunk), draw.split(chunk), strict=True):
            fed = tokens[r, start:last]
            fed[:, position - start] = drawn[d, r, position]
            before = [tuple(s[r, :, :start] for s in part) for part in past]
            yield position, r, d, _logits(model, fed, at[r], start, before)


def _logits(
    model: TransformerBridge,
    fed: Tensor,
    at: Tensor,
    start: int = 0,
    past: Sequence[States] = (),
) -> Float[Tensor, "rows entry vocab"]:
    """Logits at ``at`` when ``fed`` is read from position ``start`` on, after ``past``."""
    at = (at - start).clamp_min(0)
    if not start:
        return logits_at(model, fed, at)
    held, own = (fed.new_ones(len(fed), n, dtype=torch.bool) for n in (start, fed.shape[1]))
    places = (start + torch.arange(fed.shape[1], device=fed.device)).expand_as(fed)
    keys, values = past
    with torch.no_grad():
        return read_with_cache(model, keys, values, held, fed, own, places, at)


def sources(
    signed: Float[Tensor, "batch entry pos"],
    at: Entries,
    source: Entries,
    generator: Generator,
) -> Int[Tensor, "offset"]:
    """Offsets from the source at which tokens help, at a false-discovery rate of 5 % (sign flips
    over sequences; Benjamini and Hochberg 1995). ``signed``: of ``influence``; entries are averaged
    within a sequence, offsets that fewer than six sequences show left out."""
    lost = -signed.double()
    place = torch.arange(signed.shape[-1], device=signed.device)
    known = (place <= at[..., None]) & ~lost.isnan()
    relative = place - source[..., None]
    worth = {}
    for offset in relative[known].unique().tolist():
        here = known & (relative == offset)
        count = here.sum((1, 2))
        value = torch.where(here, lost, 0.0).sum((1, 2))[count > 0] / count[count > 0]
        if len(value) >= FEWEST:
            worth[offset] = value
    p = torch.stack([sign_flip_p(value, generator) for value in worth.values()])
    mean = torch.stack([value.mean() for value in worth.values()])
    return torch.tensor([*worth]).to(at)[benjamini_hochberg(p, RATE) & (mean > 0)]


def mean_patterns(model: TransformerBridge, tokens: Tokens) -> Patterns:
    """Attention of every layer, averaged over its heads."""
    return torch.stack([p.mean(1) for p in attention_patterns(model, tokens)], 1)


def rollout(patterns: Patterns) -> Float[Tensor, "batch dest src"]:
    """Product over layers of half attention, half residual stream (Abnar and Zuidema 2020, 3)."""
    rolled = torch.eye(patterns.shape[-1]).to(patterns).expand(len(patterns), -1, -1)
    for pattern in patterns.unbind(1):
        rolled = 0.5 * (pattern @ rolled + rolled)
    return rolled


def norm_weighted(model: TransformerBridge, tokens: Tokens) -> Patterns:
    """Norm of what all heads of a layer together move from src to dest (Kobayashi et al. 2020)."""
    names = [get_act_name("v", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    chunk = max(1, ROWS // tokens.shape[1] ** 2)
    norms = []
    for layer, pattern in enumerate(bar(attention_patterns(model, tokens), "layers")):
        moved = cache[names[layer]].transpose(1, 2) @ model.blocks[layer].attn.W_O
        parts = zip(pattern.split(chunk), moved.split(chunk), strict=True)
        of_parts = [torch.einsum("bhts,bhsd->btsd", *pair).norm(dim=-1) for pair in parts]
        norms.append(torch.cat(of_parts))
    return torch.stack(norms, 1)
