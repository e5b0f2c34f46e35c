"""Heads of a real transformer as linear models that learn from demonstrations in one step.

Every head, at one position of every prompt (``at``; the last if omitted), is taken apart as in
``dual``: its output z, before ``W_O``, is the query term plus one gradient step on the
demonstrations, a mask of tokens. Queries, keys and values are the actual activations, after any
rotation; products are in float64. What the updates do to the prediction: ``ablation``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ...errors import IclError
from ...interp.hooks import Head, check_editable, check_head
from ...interp.kv_cache import demonstrations as before_query
from ...interp.rotary import angle_names, angles, placed
from ...models import TransformerBridge, bos, cached, check_tokens, get_act_name
from ...progress import bar
from ...tasks.prompts import Prompts
from ...tasks.repeated import RepeatedTokens
from .dual import dual_form, explicit_steps, trajectory
from .features import gram, kernel_error, scores

Tokens = Int[Tensor, "batch pos"]
Mask = Shaped[Tensor, "..."]  # (batch, pos), bool; anything else is refused with a cure
Place = Int[Tensor, "..."] | None  # (batch), the query's position; None: the last
Ids = Int[Tensor, "..."]  # tokens: answers (batch), or those they are compared with (batch or 1, k)
SCORE_TOLERANCE = 1e-4  # of the largest score: the model's float32 against our float64
LOGIT_TOLERANCE = 1e-3  # of the parts' absolute sum


def first_copy(batch: RepeatedTokens) -> Bool[Tensor, "batch pos"]:
    """The demonstrations of repeated tokens: the first copy, without BOS."""
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return ((place >= 1) & (place <= batch.length)).expand(batch.tokens.shape)


def demonstration_tokens(model: TransformerBridge, prompts: Prompts) -> Bool[Tensor, "batch pos"]:
    """The demonstrations of few-shot prompts: all before the query but BOS, which shows nothing."""
    shown = before_query(prompts).clone()
    if getattr(model.cfg, "bos_token_id", None) is not None:
        shown[:, 0] &= prompts.tokens[:, 0] != bos(model)
    return shown


class DualHeads(NamedTuple):
    """The dual model of every head at the query: W_0 φ(q), ΔW φ(q), and what the head gives."""

    query_term: Float[Tensor, "batch layer head d_head"]
    demonstration_update: Float[Tensor, "batch layer head d_head"]
    z: Float[Tensor, "batch layer head d_head"]
    attention_share: Float[Tensor, "batch layer head"]  # on the demonstrations


def dual_heads(
    model: TransformerBridge, tokens: Tokens, demonstrations: Mask, at: Place = None
) -> DualHeads:
    """The dual models of all heads at one query of every prompt; after it may be padding.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.gradient_descent import heads
        >>> from iclutils.tasks.repeated import repeated_tokens
        >>> net = models.load("induction-0")
        >>> batch = repeated_tokens(net, 2, 10, torch.Generator().manual_seed(0))
        >>> found = heads.dual_heads(net, batch.tokens, heads.first_copy(batch))
        >>> gap = found.query_term + found.demonstration_update - found.z
        >>> bool(gap.abs().max() < 1e-3)
        True
    """
    at, seen = checked_query(tokens, demonstrations, at)
    masks = demonstrations[:, None], seen[:, None, None]
    parts = []
    for query, key, value, z in bar(read_heads(model, tokens, at), "layers", model.cfg.n_layers):
        values = torch.cat([value, torch.ones_like(value[..., :1])], -1)  # 1 sums the attention
        first, update = (p[:, :, 0] for p in dual_form(query[:, :, None], key, values, *masks))
        parts.append((first[..., :-1], update[..., :-1], z, update[..., -1]))
    return DualHeads(*(torch.stack(part, 1) for part in zip(*parts, strict=True)))


def head_trajectory(
    model: TransformerBridge, tokens: Tokens, demonstrations: Mask, head: Head, at: Place = None
) -> Float[Tensor, "batch shown d_head"]:
    """What one head's dual model says to the query while it learns token by token, up to z."""
    at, seen = checked_query(tokens, demonstrations, at)
    query, key, value = _of_head(model, tokens, head, at)
    return trajectory(query, key, value, demonstrations, seen)


def explicit_head_step(
    model: TransformerBridge, tokens: Tokens, demonstrations: Mask, head: Head, at: Place = None
) -> tuple[Float[Tensor, "batch d_head"], Float[Tensor, "batch d_head"]]:
    """One head's dual model before and after a gradient step by autograd, in exact features."""
    at, seen = checked_query(tokens, demonstrations, at)
    query, key, value = _of_head(model, tokens, head, at)
    return explicit_steps(*gram(query, key), value, demonstrations, seen)


def rising_similarities(
    model: TransformerBridge, tokens: Tokens, demonstrations: Mask, at: Place = None
) -> Float[Tensor, "batch layer head"]:
    """Share of the demonstrations i whose v_i·W φ(k_i) rises with a head's step.

    It rises by (1/D_q) Σ_j v_i·v_j φ(k_i)·φ(k_j) over the demonstrations j ({cite}`ren2024`).
    """
    at, seen = checked_query(tokens, demonstrations, at)
    shown, shares = (demonstrations & seen)[:, None], []
    for _, key, value, _ in read_heads(model, tokens, at):
        near = scores(key, key, shown[:, :, None]).softmax(-1)  # a positive factor for each i
        rises = (near * (value @ value.mT)).sum(-1) > 0
        shares.append((rises & shown).sum(-1) / shown.sum(-1))
    return torch.stack(shares, 1)


def feature_errors(
    model: TransformerBridge,
    tokens: Tokens,
    size: int,
    at: Place = None,
    *,
    method: str = "iid",
    draws: int = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "batch"]:
    """The relative error of attention by ``size`` random features at the query: median over heads.

    ``method``, ``draws`` and ``generator`` as in ``features.kernel_error``.
    """
    at, _ = checked_query(tokens, torch.zeros_like(tokens, dtype=torch.bool), at)
    given: dict[str, Any] = {"method": method, "draws": draws, "generator": generator}
    errors = []
    for row, last in zip(tokens, at, strict=True):
        layers = read_heads(model, row[None, : int(last) + 1], last[None])
        each = [
            kernel_error(query[0, h, None], key[0, h], value[0, h], [size], **given)
            for query, key, value, _ in layers
            for h in range(model.cfg.n_heads)
        ]
        errors.append(torch.cat(each).median())
    return torch.stack(errors)


# Direct logit attribution ------------------------------------------------------------------------


class LogitAttribution(NamedTuple):
    """Parts of a logit, in nats: they sum to ``logit``."""

    query_term: Float[Tensor, "batch layer head"]
    demonstration_update: Float[Tensor, "batch layer head"]
    mlp: Float[Tensor, "batch layer"]
    embedding: Float[Tensor, "batch"]
    constant: Float[Tensor, "batch"]  # biases of attention outputs, final norm, unembedding
    logit: Float[Tensor, "batch"]

    @property
    def update_share(self) -> Float[Tensor, ""]:
        """Mean of what all updates add, divided by the mean logit."""
        return self.demonstration_update.sum((1, 2)).mean() / self.logit.mean()


def direct_logit_attribution(
    model: TransformerBridge,
    tokens: Tokens,
    duals: DualHeads,
    answer: Ids,
    against: Ids | None = None,
    at: Place = None,
) -> LogitAttribution:
    """What query terms and updates add to the answer's logit, beside the MLPs and the embedding.

    The scale of the final norm is held fixed; what a head feeds to later layers counts for those.
    The mean logit of the tokens ``against``, (batch, k) or one row for all, is subtracted: a logit
    alone means little, as softmax ignores a constant.
    """
    at, _ = checked_query(tokens, torch.zeros_like(tokens, dtype=torch.bool), at)
    check_answers(model, tokens, answer, against)
    layers, rows = range(model.cfg.n_layers), torch.arange(len(tokens), device=tokens.device)
    ends = ("resid_post", "attn_out", "mlp_out")
    names = {get_act_name(end, la) for la in layers for end in ends}
    norm = {f"ln_final.hook_{part}" for part in ("scale", "normalized")}
    logits, cache = cached(model, tokens, names | norm | {get_act_name("resid_pre", 0)})

    def read(name: str, layer: int | None = None) -> Tensor:
        return cache[name if layer is None else get_act_name(name, layer)][rows, at].double()

    unembed, bias = model.W_U.double(), model.b_U.double()
    direction, offset = unembed[:, answer].T, bias[answer]
    logit = logits[rows, at].double()
    value = logit.gather(1, answer[:, None])[:, 0]
    if against is not None:
        value = value - logit.gather(1, against.expand(len(tokens), -1)).mean(1)
        direction = direction - torch.stack([unembed[:, each].mean(1) for each in against])
        offset = offset - bias[against].mean(1)
    weight = model.ln_final.weight.double() + getattr(model.ln_final, "uses_weight_offset", False)
    shift = getattr(model.ln_final, "bias", None)
    if shift is not None:
        offset = offset + (direction * shift.double()).sum(1)
    resid, scale = read("resid_post", layers[-1]), read("ln_final.hook_scale")
    toward = direction * weight / scale
    centred = (resid - read("ln_final.hook_normalized") * scale).norm() > 1e-3 * resid.norm()
    if bool(centred):  # LayerNorm; RMSNorm does not subtract the mean
        toward = toward - toward.mean(1, keepdim=True)
    each = torch.einsum("lhde,be->blhd", model.W_O.double(), toward)
    first, update, z = ((part * each).sum(-1) for part in duals[:3])
    attention, mlp = (
        torch.stack([(read(name, la) * toward).sum(1) for la in layers], 1) for name in ends[1:]
    )
    embedding = (read("resid_pre", 0) * toward).sum(1)
    constant = attention.sum(1) - z.sum((1, 2)) + offset
    parts = torch.cat([first.flatten(1), update.flatten(1), mlp, embedding[:, None]], 1)
    gap = parts.sum(1) + constant - value
    if not bool((gap.abs() <= LOGIT_TOLERANCE * (parts.abs().sum(1) + constant.abs())).all()):
        raise IclError(
            "Direct logit attribution does not fit this model: the parts do not sum to the logit, "
            "because its residual stream or final norm is not of the usual kind. Use a model like "
            "GPT-2, GPT-NeoX or Llama."
        )
    return LogitAttribution(first, update, mlp, embedding, constant, value)


# Activations -------------------------------------------------------------------------------------


def read_heads(
    model: TransformerBridge, tokens: Tokens, at: Tensor, layers: Sequence[int] | None = None
) -> Iterator[list[Tensor]]:
    """Query, keys, values and z of every head at one query of each prompt, layer by layer, float64.

    Query and z are (batch, head, d_head), keys and values (batch, head, pos, d_head).
    """
    check_tokens(model, tokens)
    check_editable(model)
    layers = range(model.cfg.n_layers) if layers is None else layers
    parts = ("q", "k", "v", "attn_scores", "z")
    names = {get_act_name(part, layer) for layer in layers for part in parts}
    _, cache = cached(model, tokens, names | angle_names(model.cfg.n_layers))
    rows = torch.arange(len(at), device=at.device)
    later = torch.arange(tokens.shape[1], device=at.device) > at[:, None, None]

    for layer in layers:
        q, k, v, scores, z = (cache[get_act_name(part, layer)] for part in parts)
        q, k = (placed(model, layer, c, x, angles(cache, layer)) for c, x in (("q", q), ("k", k)))
        key, value = (each.transpose(1, 2).double() for each in (k, v))
        query, z = (each[rows, at].double() for each in (q, z))
        ours = (key @ query[..., None])[..., 0] / math.sqrt(query.shape[-1])
        theirs = scores[rows, :, at].masked_fill(later, 0.0)
        gap = (ours.masked_fill(later, 0.0) - theirs).abs().max()
        if not gap <= SCORE_TOLERANCE * (1 + theirs.abs().max()):
            raise IclError(
                "Heads of this model cannot be taken as dual models: attention scores are not "
                "q·k / sqrt(d_head) of the queries and keys that it shows (another scale, other "
                "positions, a window). Use one like GPT-2 or Llama."
            )
        yield [query, key, value, z]


def _of_head(model: TransformerBridge, tokens: Tensor, head: Head, at: Tensor) -> list[Tensor]:
    """Query at ``at``, keys and values of one head."""
    check_head(model, head)
    (parts,) = read_heads(model, tokens, at, [head[0]])
    return [part[:, head[1]] for part in parts[:3]]


def checked_query(tokens: Tokens, demonstrations: Mask, at: Place) -> tuple[Tensor, Tensor]:
    """The query's position and which tokens it sees; refuses masks that do not fit."""
    if demonstrations.dtype != torch.bool or demonstrations.shape != tokens.shape:
        raise IclError(
            f"The demonstrations must be a bool mask of the tokens' shape, {tuple(tokens.shape)}; "
            f"got {demonstrations.dtype} of {tuple(demonstrations.shape)}."
        )
    size = tokens.shape[1]
    if at is None:
        at = torch.full((len(tokens),), size - 1, device=tokens.device)
    if at.shape != tokens.shape[:1] or not bool(((at >= 0) & (at < size)).all()):
        raise IclError(f"Need one query position per prompt, in 0..{size - 1}.")
    return at, torch.arange(size, device=tokens.device) <= at[:, None]


def check_answers(
    model: TransformerBridge, tokens: Tensor, answer: Tensor, others: Tensor | None
) -> None:
    """Refuse answers, or tokens that they are compared with, that do not fit the prompts."""
    rows, size = len(tokens), model.cfg.d_vocab
    given = [answer] if others is None else [answer, others]
    fit = answer.shape == (rows,) and (others is None or len(others) in (1, rows))
    if not fit or not all(bool(((ids >= 0) & (ids < size)).all()) for ids in given):
        raise IclError(
            f"Need one answer for each of {rows} prompts, and other tokens of (batch, k) or one "
            f"row for all prompts, in the vocabulary, 0..{size - 1}."
        )
