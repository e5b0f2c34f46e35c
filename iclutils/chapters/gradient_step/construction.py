"""Gradient descent as weights of linear self-attention ({cite}`vonoswald2023`, proposition 1).

Tokens are (x_i, y_i), of d + 1 channels, and (x_q, 0) for the query, from the weights W_0 = 0;
another W_0 is taken off the labels beforehand. A layer adds -ΔW x_j to every y_j: labels become
what is left of them, so K layers are K steps, and the answer is -1 times the query's y."""

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...models.lsa import Layer, LinearSelfAttention, Shape, attend
from .descent import Labels, Settings


def gradient_layer(dim: int, rate: float, pairs: int) -> Layer:
    """Build one step of GD as a head of d + 1 channels, in float64: W_K = W_Q = [[I, 0], [0, 0]],
    W_V = [[0, 0], [0, -1]] and P = η/N on the y-channel."""
    x = torch.tensor([1.0] * dim + [0.0], dtype=torch.float64)  # (d + 1)
    y = 1 - x
    return Layer(*(channels.diag()[None] for channels in (x, x, -y, y * rate / pairs)))


def stack_layers(
    xs: Float[Tensor, "*batch n d"], ys: Labels, rates: Settings
) -> Float[Tensor, "step *batch"]:
    """Return the answers after 0 .. K layers, equal to ``descent.descend(...).predictions``. For a
    network to train or to compare weights with, take ``construct``."""
    pairs, dim = xs.shape[-2] - 1, xs.shape[-1]
    labels = ys.to(xs).clone()
    labels[..., -1] = 0  # the query's is to be answered
    stream = [torch.cat([xs, labels[..., None]], -1)]  # (*batch, n, d + 1)
    for rate in rates:
        layer = Layer(*(part.to(xs) for part in gradient_layer(dim, float(rate), pairs)))
        added = attend(stream[-1].reshape(-1, pairs + 1, dim + 1), layer, pairs)
        stream.append(stream[-1] + added.reshape(stream[-1].shape))
    return -torch.stack(stream)[..., -1, dim]


def construct(
    shape: Shape, rates: Settings, dtype: torch.dtype = torch.float32
) -> LinearSelfAttention:
    """Build one network of one head whose layers are the steps. A clip bounds what is exact; for
    the answers after each layer ``stack_layers`` is enough."""
    plain = Shape(shape.dim, shape.pairs, shape.layers, shared=shape.shared, clip=shape.clip)
    steps = [float(rate) for rate in rates]
    if shape != plain or len(steps) != shape.layers or (shape.shared and len({*steps}) > 1):
        raise IclError(
            "Only single heads of linear attention over joint tokens are built, with a rate for "
            f"each layer, one if they share weights; got {shape} and {steps}."
        )
    built = [gradient_layer(shape.dim, rate, shape.pairs) for rate in steps]
    layers = [Layer(*(matrix.to(dtype) for matrix in layer)) for layer in built]
    return LinearSelfAttention.from_layers(shape, layers[: shape.own])
