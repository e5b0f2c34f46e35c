"""Influence of earlier tokens on a prediction: what if another token stood there?

I(i -> t) is the expected KL divergence, in nats, from the prediction at t to the one made when
the token at i is drawn anew; beside it stands the signed change of the right answer's log p. The
token at t itself is an earlier token of the prediction and counts; positions after t cannot have
any influence, because attention is causal.

Two clashes of names. *Self-influence* usually means what a training example does to its own loss
(Koh and Liang 2017; Pruthi et al. 2020), not this. And "earlier outputs" act only where a model
reads its own text; what is measured here are the tokens it reads.

Source: occlusion (Zeiler and Fergus 2014; Li et al. 2016), with the replacement averaged out and
a divergence of predictions in place of a norm of logits, which the softmax ignores in part
(``note_influence`` and ``raised`` show it).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import influence
    >>> from iclutils.interp import clean_corrupt
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task = clean_corrupt.copying(net, 2, 5, generator)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import DynamicCache

from ...errors import IclError
from ...interp.hooks import Hook
from ...interp.kv_cache import keys_values
from ...models import TransformerBridge, check_tokens
from ...models import logits as read_logits
from ...progress import bar

ROWS = 16384  # rows of d_model held at once (altered sequences x positions)
LOGITS = 2**25  # logits held at once: 134 MB
LIFTED = "unembed.hook_out"  # the only hook that may be set while prefixes are read once

Held = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # keys and values of every layer
Tokens = Int[Tensor, "batch pos"]
Entries = Int[Tensor, "batch entry"]
Answers = Int[Tensor, "answers answer_entry"]  # must match; a mismatch is refused with a cure


@dataclass(frozen=True)
class Influence:
    """Influence of position i on the prediction at each entry, (batch, entry, pos), in nats.

    NaN at positions that were not asked for, 0 at positions after the entry.

    Attributes:
        kl, kl_se: expected KL(p clean || p altered), and its standard error over the draws.
        signed, signed_se: log p(answer) altered minus clean: negative where the token helps.
    """

    kl: Float[Tensor, "batch entry pos"]
    kl_se: Float[Tensor, "batch entry pos"]
    signed: Float[Tensor, "batch entry pos"]
    signed_se: Float[Tensor, "batch entry pos"]


def influence(
    model: TransformerBridge,
    tokens: Tokens,
    at: Entries,
    answer: Answers,
    generator: Generator,
    draws: int = 16,
    unigram: Float[Tensor, "vocab"] | None = None,
    positions: Sequence[int] | None = None,
    together: int = 512,
    hooks: Sequence[Hook] = (),
) -> Influence:
    """Expected KL and signed change of log p for every position and entry.

    What stands before an altered position is read once, where the model's memory can be cut.

    Args:
        model: the model.
        tokens: the sequences.
        at: positions whose next-token prediction is looked at.
        answer: the right next token there.
        generator: source of randomness, on the CPU.
        draws: replacements of each token; all entries of a row share them.
        unigram: how likely each token is as a replacement; all alike if None. The token itself
            and BOS are left out.
        positions: positions to alter; all if None. The draws do not depend on it.
        together: altered sequences per forward pass, at most.
        hooks: hooks on the logits (``raised``), for the clean and the altered passes.

    Example:
        >>> found = influence.influence(net, task.clean, task.at, task.answer, generator, draws=2)
        >>> bool((found.kl[~found.kl.isnan()] > -1e-5).all())
        True
    """
    if answer.shape != at.shape:
        raise IclError("Give one answer for each entry: answer and at must have one shape.")
    if draws < 2:
        raise IclError(f"A standard error needs at least two draws; got {draws}.")
    _check(model, tokens, at, hooks)
    asked = _asked(tokens, positions)
    drawn = replacements(model, tokens, generator, draws, unigram)
    clean = _read(model, tokens[:, : int(at.max()) + 1], at, hooks).log_softmax(-1)
    right = answer[..., None]
    before = clean.gather(-1, right)[..., 0]
    size = len(tokens), draws, *at.shape[1:], tokens.shape[1]
    kl, signed = (torch.full(size, torch.nan, device=tokens.device) for _ in range(2))
    for position, row, draw, logits in _altered(model, tokens, at, drawn, asked, together, hooks):
        after, p = logits.log_softmax(-1), clean[row]
        lost = (p.exp() * (p - after)).sum(-1)
        kl[row, draw, :, position] = lost.clamp_min(0)  # below 0 only by rounding
        signed[row, draw, :, position] = after.gather(-1, right[row])[..., 0] - before[row]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    later = (place > at[..., None])[:, None].expand_as(kl)
    kl[later] = signed[later] = 0.0
    kl_mean, kl_se = _over_draws(kl)
    return Influence(kl_mean, kl_se, *_over_draws(signed))


def future_influence(
    model: TransformerBridge, tokens: Tokens, generator: Generator
) -> Float[Tensor, "batch"]:
    """Largest |KL| of any position on an earlier prediction, by brute force, in nats.

    Every position is drawn anew once and the whole sequence read again, as if nothing were known
    about the mask. 0 but for rounding.

    Example:
        >>> influence.future_influence(net, task.clean, generator).max() < 1e-4
        tensor(True)
    """
    if not len(tokens) or tokens.shape[1] < 2:
        raise IclError("Give at least one sequence of at least two tokens.")
    drawn = replacements(model, tokens, generator, 1)[0]
    clean = read_logits(model, tokens).log_softmax(-1)
    largest = clean.new_zeros(len(tokens))
    steps = range(1, tokens.shape[1])
    for position in bar(steps, "later positions"):
        altered = tokens.clone()
        altered[:, position] = drawn[:, position]
        after = read_logits(model, altered)[:, :position].log_softmax(-1)
        before = clean[:, :position]
        kl = (before.exp() * (before - after)).sum(-1).abs()
        largest = largest.maximum(kl.amax(1))
    return largest


def note_influence(
    model: TransformerBridge,
    tokens: Tokens,
    at: Entries,
    generator: Generator,
    draws: int,
    together: int = 512,
    hooks: Sequence[Hook] = (),
) -> Float[Tensor, "draw batch entry pos"]:
    """The seed note's score: norm of the difference of the logits, one replacement a draw.

    The replacement is any token, the original among them. NaN from the entry's own position on,
    which the note leaves out. Other arguments and errors as in ``influence``.

    Example:
        >>> influence.note_influence(net, task.clean, task.at, generator, draws=2).shape[:2]
        torch.Size([2, 2])
    """
    if draws < 1:
        raise IclError(f"Give at least one draw; got {draws}.")
    _check(model, tokens, at, hooks)
    shape = draws, *tokens.shape
    drawn = torch.randint(0, model.cfg.d_vocab, shape, generator=generator).to(tokens.device)
    clean = _read(model, tokens[:, : int(at.max()) + 1], at, hooks)
    out = clean.new_full((len(tokens), draws, at.shape[1], tokens.shape[1]), torch.nan)
    asked = list(range(tokens.shape[1]))
    for position, row, draw, logits in _altered(model, tokens, at, drawn, asked, together, hooks):
        out[row, draw, :, position] = (logits - clean[row]).norm(dim=-1)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    left_out = (place >= at[..., None])[:, None].expand_as(out)
    return out.masked_fill(left_out, torch.nan).transpose(0, 1)


def raised(model: TransformerBridge, generator: Generator) -> Hook:
    """Hook that makes a twin of the model: other logits, the same probabilities.

    All logits of a position are raised by one number, a random linear function of them (and so of
    the final residual stream) that is as large as a typical logit. No softmax can tell.

    Example:
        >>> twin = influence.raised(net, generator)
        >>> logits = net.run_with_hooks(task.clean, fwd_hooks=[twin])
        >>> same = models.logits(net, task.clean).softmax(-1)
        >>> bool((logits.softmax(-1) - same).abs().max() < 1e-3)
        True
    """
    size = model.cfg.d_vocab
    weight = torch.randn(size, generator=generator) / size**0.5

    def lift(logits: Tensor, hook: object) -> Tensor:
        return logits + (logits @ weight.to(logits))[..., None]

    return LIFTED, lift


def replacements(
    model: TransformerBridge,
    tokens: Tokens,
    generator: Generator,
    draws: int,
    unigram: Float[Tensor, "vocab"] | None = None,
) -> Int[Tensor, "draw batch pos"]:
    """Tokens drawn in place of each token, from ``unigram`` without the token itself and BOS.

    Example:
        >>> drawn = influence.replacements(net, task.clean, generator, draws=3)
        >>> bool((drawn == task.clean).any())
        False
    """
    size = model.cfg.d_vocab
    if unigram is None:
        weight = torch.ones(size, dtype=torch.float64)
    else:
        weight = unigram.detach().double().cpu().clone()
    if len(weight) != size or not math.isfinite(weight.sum()) or bool((weight < 0).any()):
        raise IclError(f"unigram needs {size} numbers, one for each token, none of them negative.")
    start = getattr(model.cfg, "bos_token_id", None)
    if start is not None and start < size:
        weight[start] = 0
    rows = []
    for row in tokens.cpu():
        rest = weight.repeat(len(row), 1).scatter_(1, row[:, None], 0.0)
        if not bool((rest.sum(1) > 0).all()):
            raise IclError("Nothing can be drawn in place of a token: unigram allows only itself.")
        rows.append(torch.multinomial(rest, draws, replacement=True, generator=generator))
    return torch.stack(rows, 1).permute(2, 1, 0).to(tokens.device)


def _check(model: TransformerBridge, tokens: Tensor, at: Tensor, hooks: Sequence[Hook]) -> None:
    check_tokens(model, tokens)
    if not len(tokens) or len(at) != len(tokens) or not at.shape[1]:
        raise IclError("Give at least one sequence, and for each at least one entry.")
    if int(at.min()) < 0 or int(at.max()) >= tokens.shape[1]:
        raise IclError("An entry lies outside the sequence.")
    if any(name != LIFTED for name, _ in hooks):
        raise IclError(f"Only hooks on the logits, {LIFTED}, can be set here.")


def _asked(tokens: Tensor, positions: Sequence[int] | None) -> list[int]:
    size = tokens.shape[1]
    asked = list(range(size) if positions is None else positions)
    if not all(0 <= p < size for p in asked):
        raise IclError(f"Positions must lie in 0..{size - 1}; got {asked}.")
    return asked


def _altered(
    model: TransformerBridge,
    tokens: Tensor,
    at: Tensor,
    drawn: Tensor,
    positions: Sequence[int],
    together: int,
    hooks: Sequence[Hook],
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Position, rows, draws and logits (rows, entry, vocab) of altered sequences, in chunks.

    At entries before the altered position the logits mean nothing.
    """
    if together < 1:
        raise IclError(f"together must be at least 1; got {together}.")
    last, draws = int(at.max()) + 1, len(drawn)
    held: Held | None = None
    with suppress(IclError, AttributeError):  # no memory that can be cut: whole rows, then
        held = keys_values(model, tokens[:, :last])
    row = torch.arange(len(tokens), device=tokens.device).repeat_interleave(draws)
    draw = torch.arange(draws, device=tokens.device).repeat(len(tokens))
    readable = LOGITS // (at.shape[1] * model.cfg.d_vocab)
    positions = [p for p in positions if p < last]
    for position in bar(positions, "altered positions"):
        start = position if held is not None else 0
        chunk = max(1, min(together, ROWS // (last - start), readable))
        for part in torch.arange(len(row), device=row.device).split(chunk):
            r, d = row[part], draw[part]
            fed = tokens[r, start:last]
            fed[:, position - start] = drawn[d, r, position]
            yield position, r, d, _read(model, fed, at[r], hooks, start, held, r)


def _read(
    model: TransformerBridge,
    fed: Tensor,
    at: Tensor,
    hooks: Sequence[Hook],
    start: int = 0,
    held: Held | None = None,
    rows: Tensor | None = None,
) -> Float[Tensor, "rows entry vocab"]:
    """Logits at ``at`` when ``fed`` is read from position ``start`` on, after a held prefix."""
    each = torch.arange(len(fed), device=fed.device)[:, None]
    where = (at - start).clamp_min(0)

    def narrow(resid: Tensor, hook: object) -> Tensor:
        return resid[each, where]

    more: dict[str, Any] = {}
    if held is not None and start:
        states = ((k[rows, :, :start], v[rows, :, :start]) for k, v in zip(*held, strict=True))
        size = start + fed.shape[1]
        more = {
            "past_key_values": DynamicCache(list(states)),
            "attention_mask": fed.new_ones(len(fed), size),
            "position_ids": torch.arange(start, size, device=fed.device).expand(len(fed), -1),
        }
    with torch.no_grad():
        return model.run_with_hooks(fed, fwd_hooks=[("unembed.hook_in", narrow), *hooks], **more)


def _over_draws(values: Float[Tensor, "batch draw entry pos"]) -> tuple[Tensor, Tensor]:
    return values.mean(1), values.std(1) / values.shape[1] ** 0.5
