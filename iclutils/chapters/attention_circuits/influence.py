"""Influence of earlier tokens: what a prediction loses when a token is drawn anew (occlusion;
Zeiler and Fergus 2014; Li et al. 2016)."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ...errors import IclError
from ...interp.hooks import logits_at
from ...interp.kv_cache import States, keys_values, read_with_cache
from ...models import TransformerBridge
from ...progress import bar

BATCH = 512  # altered sequences in a forward pass, at most
ROWS = 16384  # rows of d_model held at once
NEIGHBOURS = 8  # altered positions in a pass; what stands before the first of them is read once
LOGITS = 2**25  # logits held at once: 134 MB

Tokens = Int[Tensor, "batch pos"]
Entries = Int[Tensor, "batch entry"]


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
    """Return the influence of every token, replaced ``draws`` times, on the predictions at ``at``,
    whose right tokens are ``answer``."""
    drawn, last = replacements(model, tokens, generator, draws), int(at.max()) + 1
    clean, right = _logits(model, tokens[:, :last], at).log_softmax(-1), answer[..., None]
    before = clean.gather(-1, right)[..., 0]
    kl, signed = torch.zeros(2, len(tokens), draws, at.shape[1], tokens.shape[1]).to(clean)
    past: tuple[States, ...] = ()
    with suppress(IclError, AttributeError):  # keys and values cannot be cut: whole rows, then
        past = keys_values(model, tokens[:, :last])
    many = torch.arange(len(tokens)), torch.arange(draws)
    for altered in bar(torch.arange(last).split(NEIGHBOURS), "altered positions"):
        start = int(altered[0]) if past else 0
        logits_fit = LOGITS // (at.shape[1] * model.cfg.d_vocab)
        chunk = max(1, min(BATCH, ROWS // (last - start), logits_fit))
        every = torch.cartesian_prod(altered, *many).to(tokens.device)
        for position, row, draw in (some.unbind(1) for some in every.split(chunk)):
            fed = tokens[row, start:last]
            fed[torch.arange(len(fed)), position - start] = drawn[draw, row, position]
            prefix = [tuple(s[row, :, :start] for s in part) for part in past]
            after = _logits(model, fed, at[row], start, prefix).log_softmax(-1)  # row, entry, vocab
            p = clean[row]
            kl[row, draw, :, position] = (p.exp() * (p - after)).sum(-1).clamp_min(0)
            signed[row, draw, :, position] = after.gather(-1, right[row])[..., 0] - before[row]
    later = torch.arange(tokens.shape[1], device=tokens.device) > at[..., None]
    return Influence(*(values.mean(1).masked_fill(later, 0) for values in (kl, signed)))


def replacements(
    model: TransformerBridge, tokens: Tokens, generator: Generator, draws: int
) -> Int[Tensor, "draw batch pos"]:
    """Draw tokens in place of each token: any but the token itself and BOS, all as likely."""
    weight = torch.ones(model.cfg.d_vocab, dtype=torch.float64)
    start = getattr(model.cfg, "bos_token_id", None)
    if start is not None and start < len(weight):
        weight[start] = 0
    rows = []
    for row in tokens.cpu():
        rest = weight.repeat(len(row), 1).scatter_(1, row[:, None], 0.0)
        rows.append(torch.multinomial(rest, draws, replacement=True, generator=generator))
    return torch.stack(rows, 1).permute(2, 1, 0).to(tokens.device)


def _logits(
    model: TransformerBridge, fed: Tensor, at: Tensor, start: int = 0, past: Sequence[States] = ()
) -> Float[Tensor, "row entry vocab"]:
    """Return logits at ``at``, from ``start`` on, when ``fed`` is read there after ``past``."""
    at = (at - start).clamp_min(0)
    if not start:
        return logits_at(model, fed, at)
    held, own = (fed.new_ones(len(fed), n, dtype=torch.bool) for n in (start, fed.shape[1]))
    places = (start + torch.arange(fed.shape[1], device=fed.device)).expand_as(fed)
    keys, values = past
    with torch.no_grad():
        return read_with_cache(model, keys, values, held, fed, own, places, at)
