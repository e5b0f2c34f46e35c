"""A whole layer as a dual model: residual stream, several heads, output matrices, feed-forward.

With a the token q after attention, a layer gives a + W_2 act(W_1 a + b_1) + b_2. An activation is
a gate times its input, act(u) = g(u) u: for ReLU g is 0 or 1, for GELU g(u) = gelu(u)/u. Given the
gates G, the layer is linear in a,

    M a + c,   M = I + W_2 G W_1,   c = W_2 G b_1 + b_2,

and a = x_q + Σ_h O_h h'_h is what the heads' dual models say. So the layer's output is W' φ(q) plus
a constant, in the features of all heads side by side, and W' is one step on the loss of
``contrastive`` with M O_h v_i in the place of v_i. LayerNorm, given its scale, is linear as well.

The gates are those of the answer *after* the step: M is known only once the answer is. With the
gates of W_0's answer (``early``) the identity is broken, and by how much can be measured.
Derivation ours, after the extension in {cite}`ren2024`.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import blocks
    >>> from iclutils.models.lsa import Layer
    >>> eye = torch.eye(2, dtype=torch.float64)[None]
    >>> flat = torch.zeros(2, 1, dtype=torch.float64)
    >>> zero = torch.zeros(2, dtype=torch.float64)
    >>> block = blocks.Block(Layer(eye, eye, eye, eye), flat, zero[:1], flat.T, zero)
    >>> tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    >>> demos = torch.tensor([True, True, False])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError, unknown
from ...models.lsa import Layer
from .contrastive import Demos, Dual, checked_demos, dual_step, start
from .features import Allowed

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda u: (u > 0).to(u.dtype),
    "gelu": lambda u: (1 + torch.erf(u / math.sqrt(2))) / 2,
    "gelu_new": lambda u: (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))) / 2,
}  # g(u) = act(u) / u
EPSILON = 1e-5  # of LayerNorm


@dataclass(frozen=True)
class Block:
    """Weights of a layer, for row vectors: ``tokens @ up``.

    ``normed``: attention and feed-forward read LayerNorm of the stream, its gain and shift folded
    into the weights that follow.
    """

    attention: Layer  # (head, channel, inner), and ``out`` (head, inner, channel)
    up: Float[Tensor, "channel hidden"]
    up_bias: Float[Tensor, "hidden"]
    down: Float[Tensor, "hidden channel"]
    down_bias: Float[Tensor, "channel"]
    activation: str = "relu"
    normed: bool = False

    def __post_init__(self) -> None:
        if self.activation not in GATES:
            raise unknown("activation", self.activation, GATES)


class Halves(NamedTuple):
    """What the dual models of a layer say to every token; their sum is the layer's output."""

    start: Float[Tensor, "*batch pos channel"]
    step: Float[Tensor, "*batch pos channel"]


def dual_block(
    tokens: Float[Tensor, "*batch pos channel"],
    block: Block,
    demos: Demos,
    allowed: Allowed | None = None,
    *,
    early: bool = False,
) -> Halves:
    """Start and step of a whole layer, for every token as a query.

    The start holds all that is not from demonstrations: the token itself, biases, other keys.

    Args:
        tokens: the residual stream before the layer; all positions are keys.
        block: the layer.
        demos: which positions are demonstrations, (…, pos).
        allowed: which keys a query may look at, (pos, pos).
        early: take the gates, and the scale of LayerNorm, before the step.
    """
    queries, keys, values = heads(tokens, block)
    chosen = checked_demos(demos, tokens)[..., None, :]
    split = dual_step(queries, keys, values, chosen, allowed)
    base = tokens + _merged(split.start, block)
    gain = _merged(split.step, block)
    linear, constant = _linear(base if early else base + gain, block)
    return Halves(linear(base) + constant, linear(gain))


def dual_stack(
    tokens: Float[Tensor, "*batch pos channel"],
    blocks: Sequence[Block],
    demos: Demos,
    allowed: Allowed | None = None,
) -> list[Halves]:
    """Start and step of each layer of a stack.

    A layer's keys, values and queries are made of what the layers before gave, steps included.
    So its model has learnt from demonstrations that earlier steps have changed, and with more than
    one layer what is in a token's start has come from demonstrations, too.
    """
    found = []
    for block in blocks:
        found.append(dual_block(tokens, block, demos, allowed))
        tokens = found[-1].start + found[-1].step
    return found


class LayerModel(NamedTuple):
    """W' before the step, one part for each head (*batch, head), and what is not of features."""

    model: Dual
    constant: Float[Tensor, "*batch channel"]


def layer_model(
    tokens: Float[Tensor, "*batch pos channel"], block: Block, demos: Demos
) -> LayerModel:
    """The dual model of a whole layer for its last token: values are M O_h v_j.

    The layer's output is the sum over heads of ``model.stepped(demos)`` at the head's query, plus
    the constant M x_q + c.

    Example:
        >>> found = blocks.layer_model(tokens, block, demos)
        >>> found.constant.shape
        torch.Size([2])
    """
    queries, keys, values = heads(tokens, block)
    chosen = checked_demos(demos, tokens)[..., None, :]
    split = dual_step(queries[..., -1:, :], keys, values, chosen)
    last = tokens[..., -1:, :]
    linear, constant = _linear(last + _merged(split.start + split.step, block), block)
    out = torch.einsum("...hki,hic->...hkc", values, block.attention.out)
    mapped = linear(out.flatten(-3, -2)).unflatten(-2, out.shape[-3:-1])
    model = start(queries[..., -1, :], keys, mapped, chosen)
    return LayerModel(model, (linear(last) + constant)[..., 0, :])


def heads(
    tokens: Float[Tensor, "*batch pos channel"], block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads, (*batch, head, pos, inner).

    Example:
        >>> queries, keys, values = blocks.heads(tokens, block)
        >>> queries.shape
        torch.Size([1, 3, 2])
    """
    layer = block.attention
    if tokens.shape[-1] != layer.query.shape[-2] or tokens.shape[-1] != block.up.shape[0]:
        raise IclError(
            f"Tokens of {tokens.shape[-1]} channels do not fit a layer of "
            f"{layer.query.shape[-2]} with a feed-forward part of {block.up.shape[0]}."
        )
    read = _centred(tokens) / _scale(tokens) if block.normed else tokens
    query, key, value = (
        torch.einsum("...pc,hci->...hpi", read, part)
        for part in (layer.query, layer.key, layer.value)
    )
    return query, key, value


def _merged(split: Tensor, block: Block) -> Tensor:
    """Σ_h O_h of what each head says."""
    return torch.einsum("...hpi,hic->...pc", split, block.attention.out)


def _linear(attended: Tensor, block: Block) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """M as a function of rows, and c, with the gates that tokens after attention set."""
    scale = _scale(attended) if block.normed else torch.ones_like(attended[..., :1])
    read = _centred if block.normed else (lambda rows: rows)
    gates = GATES[block.activation](read(attended) / scale @ block.up + block.up_bias)

    def linear(rows: Tensor) -> Tensor:
        return rows + (read(rows) / scale @ block.up * gates) @ block.down

    return linear, (block.up_bias * gates) @ block.down + block.down_bias


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(-1, keepdim=True)


def _scale(rows: Tensor) -> Tensor:
    return (rows.var(-1, keepdim=True, correction=0) + EPSILON).sqrt()
