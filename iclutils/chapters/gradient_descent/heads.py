"""Heads of a real transformer as linear models that learn from demonstrations in one step.

Every head, at one position of every prompt (the last if not said otherwise), is taken apart as
in ``contrastive``: its output z, before ``W_O``, is what W_0 says, made from the query's side,
plus one gradient step on the demonstrations. Queries, keys and values are the actual
activations, after rotation where positions are rotary; products are computed in float64 and
compared with the model's own z. Which tokens are demonstrations is a mask: ``first_copy`` makes
it for doubled sequences, ``demonstration_tokens`` for few-shot prompts.

How much of the prediction the steps carry: ``attribution`` (directly), ``removal`` (causally).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> from iclutils.chapters.gradient_descent import heads
    >>> from iclutils.tasks import topics
    >>> net = models.load("induction-0")
    >>> task = repeated_tokens(net, 2, 10, torch.Generator().manual_seed(0))
    >>> mask = heads.first_copy(task)
    >>> asked = topics.sample(2, torch.Generator().manual_seed(0), classes=2)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ...errors import IclError
from ...interp.hooks import Head
from ...interp.kv_cache import demonstrations
from ...models import TransformerBridge, bos
from ...progress import bar
from ...tasks.prompts import Prompts, Role
from ...tasks.repeated import RepeatedTokens
from .activations import read_heads
from .contrastive import Alignment, Dual, alignment, dual_step
from .features import log_normaliser, scores
from .gram import Learned, learned

Tokens = Int[Tensor, "batch pos"]
Mask = Shaped[Tensor, "..."]  # (batch, pos), bool; anything else is refused with a cure
Place = Int[Tensor, "..."] | None  # (batch), the query's position; None: the last


class DualHeads(NamedTuple):
    """The dual model of every head at the query: W_0 φ(q), ΔW φ(q), and what the head gives.

    ``share_of_attention`` is that on the demonstrations; ``error`` is |start + step - z| / |z|.
    """

    start: Float[Tensor, "batch layer head d_head"]
    step: Float[Tensor, "batch layer head d_head"]
    z: Float[Tensor, "batch layer head d_head"]
    share_of_attention: Float[Tensor, "batch layer head"]
    error: Float[Tensor, "batch layer head"]


def first_copy(batch: RepeatedTokens) -> Bool[Tensor, "batch pos"]:
    """The demonstrations of a doubled sequence: its first copy, without BOS.

    Example:
        >>> mask[0].nonzero()[[0, -1], 0]
        tensor([ 1, 10])
    """
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return ((place >= 1) & (place <= batch.length)).expand(batch.tokens.shape)


def demonstration_tokens(
    model: TransformerBridge, prompts: Prompts, with_bos: bool = False
) -> Bool[Tensor, "batch pos"]:
    """The demonstrations of few-shot prompts: all before the query, BOS left out if there is one.

    BOS shows nothing, and takes much attention where a head has nothing to look for.

    Example:
        >>> reader = models.load("anchors-0")
        >>> heads.demonstration_tokens(reader, asked)[0, :2]
        tensor([False,  True])
    """
    mine = demonstrations(prompts)
    first = getattr(model.cfg, "bos_token_id", None)
    if with_bos or first is None:
        return mine
    starts = torch.zeros_like(mine)
    starts[:, 0] = prompts.tokens[:, 0] == bos(model)
    return mine & ~starts


def demonstration_of(prompts: Prompts) -> Int[Tensor, "batch pos"]:
    """Number of the demonstration that each token belongs to; the query's, too, have the last.

    A demonstration ends with the last sub-token of its label word.
    """
    place = torch.arange(prompts.tokens.shape[1], device=prompts.tokens.device)
    begun = (prompts.label_pos[:, :, None] <= place).sum(1)
    number = begun - (prompts.roles == Role.LABEL).long()
    return number.clamp(0, prompts.label_pos.shape[1] - 1)


def dual_heads(
    model: TransformerBridge, tokens: Tokens, demonstrations: Mask, at: Place = None
) -> DualHeads:
    """The dual models of all heads at one query of every prompt.

    Without demonstrations before the query the step is 0; where all that the query sees are
    demonstrations, itself included, the start is.

    Args:
        model: the model.
        tokens: the prompts; what comes after the query may be padding.
        demonstrations: (batch, pos), which tokens are demonstrations.
        at: (batch), the position of the query; the last if omitted.

    Example:
        >>> found = heads.dual_heads(net, task.tokens, mask)
        >>> bool((found.start + found.step - found.z).abs().max() < 1e-3)
        True
    """
    shown, at, seen = checked(tokens, demonstrations, at)
    parts = []
    for layer in bar(read_heads(model, tokens), "layers", model.cfg.n_layers):
        query, z = pick(layer.query, at)[:, :, None], pick(layer.z, at)
        ones = torch.ones_like(layer.value[..., :1])  # a value of 1 gathers the attention
        values = torch.cat([layer.value, ones], -1)
        both = dual_step(query, layer.key, values, shown[:, None], seen[:, None, None])
        start, step = both.start[:, :, 0, :-1], both.step[:, :, 0, :-1]
        size = z.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        error = (start + step - z).norm(dim=-1) / size
        parts.append((start, step, z, both.step[:, :, 0, -1], error))
    return DualHeads(*(torch.stack(part, 1) for part in zip(*parts, strict=True)))


def path_of_head(
    model: TransformerBridge,
    tokens: Tokens,
    demonstrations: Mask,
    head: Head,
    at: Place = None,
    groups: Int[Tensor, "..."] | None = None,
) -> Float[Tensor, "batch shown d_head"]:
    """What one head's dual model says to the query while it learns demonstration by demonstration.

    The gradient is a sum over the demonstrations, so they can be learned one at a time: entry 0
    is the start, the last entry is z.

    Args:
        model: the model.
        tokens: the prompts.
        demonstrations: (batch, pos), which tokens are demonstrations.
        head: (layer, head).
        at: (batch), the position of the query; the last if omitted.
        groups: (batch, pos), which demonstration a token is part of, from 0; entry n then has
            learned n of them. If omitted, entry n has learned all those before position n.

    Example:
        >>> walked = heads.path_of_head(net, task.tokens, mask, head=(1, 0))
        >>> found = heads.dual_heads(net, task.tokens, mask)
        >>> bool((walked[:, -1] - found.z[:, 1, 0]).abs().max() < 1e-3)
        True
    """
    shown, at, seen = checked(tokens, demonstrations, at)
    query, key, value = _of_head(model, tokens, head, at)
    each = scores(query[:, None], key, seen[:, None])[:, 0].softmax(-1)[..., None] * value
    start = each.masked_fill(shown[..., None], 0.0).sum(1)
    each = each.masked_fill(~shown[..., None], 0.0)
    if groups is not None:
        if groups.shape != tokens.shape or not bool((groups >= 0).all()):
            raise IclError(
                f"groups must hold a number from 0 for each of {tuple(tokens.shape)} tokens; got "
                f"{tuple(groups.shape)}."
            )
        member = groups[..., None] == torch.arange(int(groups.max()) + 1, device=groups.device)
        each = member.mT.double() @ each
    return start[:, None] + torch.cat([torch.zeros_like(start[:, None]), each.cumsum(1)], 1)


def step_of_head(
    model: TransformerBridge,
    tokens: Tokens,
    demonstrations: Mask,
    head: Head,
    at: Place = None,
    rate: float = 1.0,
    centre: bool = False,
) -> Learned:
    """One head's dual model by an explicit gradient step with autograd (``gram.learned``).

    Similarities are v_i·W φ(k_i) of demonstrations that the query sees, NaN elsewhere. They
    depend on ``centre``, see ``contrastive.alignment``; the answers to the query do not.

    Args:
        model: the model.
        tokens: the prompts.
        demonstrations: (batch, pos), which tokens are demonstrations.
        head: (layer, head).
        at: (batch), the position of the query; the last if omitted.
        rate: learning rate, which the loss is divided by.
        centre: subtract the mean of the keys that the query sees from all keys.

    Example:
        >>> found = heads.step_of_head(net, task.tokens, mask, head=(1, 0))
        >>> found.after.shape
        torch.Size([2, 32])
    """
    shown, at, seen = checked(tokens, demonstrations, at)
    query, key, value = _of_head(model, tokens, head, at)
    key = _centred(key, seen) if centre else key
    found = learned(query, key, value, shown, seen, rate)
    hidden = ~(shown & seen)
    return found._replace(
        similarity_before=found.similarity_before.masked_fill(hidden, torch.nan),
        similarity_after=found.similarity_after.masked_fill(hidden, torch.nan),
    )


def alignment_of_head(
    model: TransformerBridge,
    tokens: Tokens,
    demonstrations: Mask,
    head: Head,
    at: Place = None,
    centre: bool = False,
) -> tuple[Alignment, Alignment]:
    """How near W φ(k_i) is to v_i before and after the step, from kernels alone; NaN elsewhere.

    The inner products are the similarities of ``step_of_head``. They are large, as D is that of
    one query; cosines compare heads better.
    """
    shown, at, seen = checked(tokens, demonstrations, at)
    query, key, value = _of_head(model, tokens, head, at)
    key = _centred(key, seen) if centre else key
    total = log_normaliser(query[:, None], key, seen[:, None])[:, 0]
    start = Dual(key, value, (seen & ~shown).double(), -total)
    hidden = ~(shown & seen)
    before, after = (
        Alignment(*(x.masked_fill(hidden, torch.nan) for x in alignment(learner)))
        for learner in (start, start.stepped(~hidden))
    )
    return before, after


def checked(tokens: Tokens, demonstrations: Mask, at: Place) -> tuple[Tensor, Tensor, Tensor]:
    """The mask, the query's position and which tokens it sees.

    Example:
        >>> _, at, seen = heads.checked(task.tokens, mask, None)
        >>> at, bool(seen.all())
        (tensor([20, 20]), True)
    """
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
    return demonstrations, at, torch.arange(size, device=tokens.device) <= at[:, None]


def pick(states: Float[Tensor, "batch head pos d"], at: Tensor) -> Float[Tensor, "batch head d"]:
    """Every prompt's row at its own position.

    Example:
        >>> states = torch.arange(6.0).view(1, 1, 3, 2)
        >>> heads.pick(states, torch.tensor([1]))
        tensor([[[2., 3.]]])
    """
    return states[torch.arange(len(states), device=states.device), :, at]


def check_head(model: TransformerBridge, head: Head) -> Head:
    """Refuse a head that the model lacks."""
    if not (0 <= head[0] < model.cfg.n_layers and 0 <= head[1] < model.cfg.n_heads):
        raise IclError(
            f"There is no head {head[0]}.{head[1]}: the model has {model.cfg.n_layers} layers of "
            f"{model.cfg.n_heads} heads, counted from 0."
        )
    return head


def _of_head(
    model: TransformerBridge, tokens: Tensor, head: Head, at: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query at ``at``, keys and values of one head."""
    layer, number = check_head(model, head)
    (found,) = read_heads(model, tokens, [layer])
    return pick(found.query, at)[:, number], found.key[:, number], found.value[:, number]


def _centred(key: Tensor, seen: Tensor) -> Tensor:
    mean = (key * seen[..., None]).sum(1, keepdim=True) / seen.sum(1)[:, None, None]
    return key - mean
