"""Gradient descent as weights of linear self-attention ({cite}`vonoswald2023`, proposition 1).

Tokens are (x_i, y_i), of d + o channels, and (x_q, -W_0 x_q). A layer adds -ΔW x_j to every y_j:
labels become what is left of them, so K layers are K steps, and the answer is -1 times the query's
y-block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...models.lsa import Layer, LinearSelfAttention, Shape, attend
from .descent import Labels, Settings, each_step, split_query


def gradient_layer(
    dim: int,
    rate: float,
    pairs: int,
    start: Float[Tensor, "o d"] | None = None,
    outputs: int = 1,
    gamma: float = 0.0,
) -> Layer:
    """Build one step of GD from W_0 (``start``) as a head of d + o channels, in float64: W_K = W_Q
    = [[I, 0], [0, 0]], W_V = [[0, 0], [W_0, -I]] and P = η/N on the y-block. For GD++, W_V and P
    also hold I and -γ I on the x-block."""
    y = torch.cat([torch.zeros(dim), torch.ones(outputs)]).double()  # (d + o)
    x = 1 - y
    value = torch.diag(x * bool(gamma) - y)
    if start is not None:
        value[:dim, dim:] = start.mT
    out = torch.diag(y * rate / pairs - x * gamma)
    return Layer(*(matrix[None] for matrix in (x.diag(), x.diag(), value, out)))


def stacked(
    xs: Float[Tensor, "*batch n d"],
    ys: Labels,
    rates: Settings,
    gammas: Settings | None = None,
    start: Float[Tensor, "o dim"] | None = None,
) -> Float[Tensor, "step ..."]:
    """Return the answers after 0 .. K layers, equal to ``descent.descend(...).predictions`` and in
    its shape. For a network to train or to compare weights with, take ``constructed``."""
    _, query, labels = split_query(xs, ys)  # (*batch, d), (*batch, N, o)
    guess = torch.zeros_like(labels[..., 0, :])  # (*batch, o)
    if start is not None:
        guess = -query @ start.to(xs).mT
    stream = [torch.cat([xs, torch.cat([labels, guess[..., None, :]], -2)], -1)]
    (pairs, outputs), dim = labels.shape[-2:], xs.shape[-1]
    for rate, gamma in each_step(rates, gammas):
        layer = gradient_layer(dim, rate, pairs, start, outputs, gamma)
        flat = stream[-1].reshape(-1, pairs + 1, dim + outputs)
        added = attend(flat, Layer(*(part.to(xs) for part in layer)), pairs)
        stream.append(stream[-1] + added.reshape(stream[-1].shape))
    answers = -torch.stack(stream)[..., -1, dim:]  # (step, *batch, o)
    return answers if ys.ndim == xs.ndim else answers[..., 0]


def constructed(
    shape: Shape,
    rates: Settings,
    gammas: Settings | None = None,
    dtype: torch.dtype = torch.float32,
) -> LinearSelfAttention:
    """Build one network of one head whose layers are the steps from W_0 = 0, for one output. A clip
    bounds what is exact; for the answers after each layer ``stacked`` is enough."""
    plain = Shape(shape.dim, shape.pairs, shape.layers, shared=shape.shared, clip=shape.clip)
    steps = each_step(rates, gammas)
    if shape != plain or len(steps) != shape.layers or (shape.shared and len({*steps}) > 1):
        raise IclError(
            "Only single heads of linear attention over joint tokens are built, with a rate (and "
            f"gamma) for each layer, one if they share weights; got {shape} and {steps}."
        )
    built = [gradient_layer(shape.dim, rate, shape.pairs, gamma=gamma) for rate, gamma in steps]
    layers = [Layer(*(matrix.to(dtype) for matrix in layer)) for layer in built]
    return LinearSelfAttention.from_layers(shape, layers[: shape.own])
