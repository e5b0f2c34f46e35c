"""Gradient descent as weights of linear self-attention ({cite}`vonoswald2023`, proposition 1).

Tokens are (x_i, y_i), of d + o channels, and (x_q, -W_0 x_q). A layer adds -ΔW x_j to every y_j:
labels become what is left of them, so K layers are K steps, and the answer is -1 times the query's
y-block. The *note* that the chapter starts from has P = -η/n and (x_q, +W_0 x_q): one layer answers
the same, but adds +ΔW x_i to the labels, and a second goes astray."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ...errors import IclError
from ...models.lsa import Layer, LinearSelfAttention, Shape, attend
from .descent import Labels, Settings, each_step, split_query

SIGNS = {"stacking": -1, "note": 1}  # convention, and the sign of the answer in the query's y-block


def gradient_layer(
    dim: int,
    rate: float,
    pairs: int,
    start: Float[Tensor, "o d"] | None = None,
    outputs: int = 1,
    gamma: float = 0.0,
) -> Layer:
    """One step of GD from W_0 (``start``) as a head of d + o channels, float64: W_K = W_Q = [[I,
    0], [0, 0]], W_V = [[0, 0], [W_0, -I]] and P = η/N on the y-block. For GD++, W_V and P also hold
    I and -γ I on the x-block. The note's layer has the rate -η."""
    y = torch.cat([torch.zeros(dim), torch.ones(outputs)]).double()
    x = 1 - y
    value = torch.diag(x * bool(gamma) - y)
    if start is not None:
        value[:dim, dim:] = start.mT
    out = torch.diag(y * rate / pairs - x * gamma)
    return Layer(*(matrix[None] for matrix in (x.diag(), x.diag(), value, out)))


def tokens(
    xs: Float[Tensor, "*batch n d"],
    ys: Labels,
    start: Float[Tensor, "o dim"] | None = None,
    convention: str = "stacking",
) -> Float[Tensor, "*batch n channel"]:
    """(x_i, y_i), and the query's x with -W_0 x_q, or +W_0 x_q in the convention "note"."""
    _, query, labels = split_query(xs, ys)
    guess = torch.zeros_like(labels[..., 0, :])
    if start is not None:
        guess = SIGNS[convention] * query @ start.to(xs).mT
    return torch.cat([xs, torch.cat([labels, guess[..., None, :]], -2)], -1)


def stacked(
    xs: Float[Tensor, "*batch n d"],
    ys: Labels,
    rates: Settings,
    gammas: Settings | None = None,
    start: Float[Tensor, "o dim"] | None = None,
    convention: str = "stacking",
) -> Float[Tensor, "step ..."]:
    """The answers after 0 .. K layers, in the shape of ``descent.descend(...).predictions``: equal
    to them with the convention "stacking"; with "note", after the first layer alone."""
    stream = [tokens(xs, ys, start, convention)]
    dim, pairs, outputs = xs.shape[-1], xs.shape[-2] - 1, stream[0].shape[-1] - xs.shape[-1]
    sign = SIGNS[convention]
    for rate, gamma in each_step(rates, gammas):
        layer = gradient_layer(dim, -sign * rate, pairs, start, outputs, gamma)
        flat = stream[-1].reshape(-1, *xs.shape[-2:-1], dim + outputs)
        added = attend(flat, Layer(*(part.to(xs) for part in layer)), pairs)
        stream.append(stream[-1] + added.reshape(stream[-1].shape))
    answers = sign * torch.stack(stream)[..., -1, dim:]
    return answers if ys.ndim == xs.ndim else answers[..., 0]


def constructed(
    shape: Shape,
    rates: Settings,
    gammas: Settings | None = None,
    dtype: torch.dtype = torch.float32,
) -> LinearSelfAttention:
    """One network whose layers are the steps from W_0 = 0, for one output; of several heads the
    first does the work. A clip bounds what is exact."""
    more = shape.norm or shape.hidden or shape.width or shape.variant != "plain"
    if set(shape.attention) != {"linear"} or more or shape.sees_query or shape.separate:
        raise IclError(f"Only linear attention over joint tokens alone is built; got {shape}.")
    steps = each_step(rates, gammas)
    if len(steps) != shape.layers or (shape.shared and len({*steps}) > 1):
        raise IclError(
            f"Need a rate (and gamma) for each of {shape.layers} layers, the same for all if they "
            f"share their weights; got {steps}."
        )
    idle = (0, 0, 0, 0, 0, shape.heads - 1)  # heads of zeros
    layers = [
        Layer(*(functional.pad(matrix.to(dtype), idle) for matrix in layer))
        for layer in (gradient_layer(shape.dim, r, shape.pairs, gamma=g) for r, g in steps)
    ]
    return LinearSelfAttention.from_layers(shape, layers[: shape.own])


class Copying(NamedTuple):
    """How much the token at a row, after the first layer, depends on each token before it. The
    shares are, of what a token of x (or y) depends on beside itself, that of its pair's y (x), by
    squared norms; means over the pairs."""

    dependence: Float[Tensor, "ensemble pos pos"]
    x_on_y: Float[Tensor, "ensemble"]
    y_on_x: Float[Tensor, "ensemble"]


def copying(
    network: LinearSelfAttention,
    xs: Float[Tensor, "*network batch n d"],
    ys: Float[Tensor, "*network batch n"],
) -> Copying:
    """The norm of the mean Jacobian, over contexts, of each token after the first layer: where x
    and y are tokens of their own, a layer has to bring them together first ({cite}`vonoswald2023`).
    What depends on the context at random cancels in the mean."""
    shape = network.shape
    if not shape.separate or shape.norm or shape.hidden or shape.clip or shape.variant != "plain":
        raise IclError(f"Copying needs x and y as tokens of their own, plain; got {shape}.")
    weight = network.attention["query"]
    with torch.no_grad():
        tokens = network.resid(xs.to(weight), ys.to(weight))[0]
        squares = _jacobian(tokens, network).square().sum((-2, -1))
    pairs = squares[:, :-1]
    place = torch.arange(pairs.shape[-2], device=pairs.device)
    on_others = pairs.clone()
    on_others[:, place, place] = 0
    partner, others = (
        each / pairs.sum(-1) for each in (pairs[:, place, place ^ 1], on_others.sum(-1))
    )
    least = torch.finfo(others.dtype).tiny
    x_on_y, y_on_x = (
        partner[:, k::2].mean(-1) / others[:, k::2].mean(-1).clamp(min=least) for k in (0, 1)
    )
    return Copying(squares.sqrt(), x_on_y, y_on_x)


def _jacobian(tokens: Tensor, network: LinearSelfAttention) -> Tensor:
    """The mean over contexts of ∂(token j after the layer) / ∂(token i): (ensemble, j, i, in, out).
    A token writes a_ji u_i with u_i = e_i PV; the score z_ji, which both tokens change, moves what
    is written by u_i, or with softmax by a_ji (u_i - Σ a_jl u_l)."""
    layer, keys = network.layer(0), tokens.shape[-2] - (not network.shape.sees_query)
    query = torch.einsum("mbtc,mhck->mbhtk", tokens, layer.query)
    key = torch.einsum("mbtc,mhck->mbhtk", tokens[..., :keys, :], layer.key)
    pv = layer.value @ layer.out
    writes = torch.einsum("mbtc,mhcd->mbhtd", tokens[..., :keys, :], pv)
    weights = query @ key.mT
    moved = writes[..., None, :, :].expand(*weights.shape, -1)
    if network.shape.kinds[0] == "softmax":
        scale = query.shape[-1] ** 0.5
        query, key = query / scale, key / scale
        weights = (weights / scale).softmax(-1)
        moved = weights[..., None] * (moved - (weights @ writes)[..., None, :])
    by_key = query @ layer.key.mT[:, None]  # of a score, by its key's token
    by_query = key @ layer.query.mT[:, None]
    jacobian = torch.einsum("mbhjc,mbhjid->mjicd", by_key, moved)
    jacobian = jacobian + torch.einsum("mbhji,mhcd->mjicd", weights, pv)
    jacobian = functional.pad(jacobian, (0, 0, 0, 0, 0, tokens.shape[-2] - keys))
    own = torch.einsum("mbhic,mbhjid->mjcd", by_query, moved)
    jacobian.diagonal(dim1=1, dim2=2).add_(own.movedim(1, -1))
    jacobian = jacobian / tokens.shape[1]
    jacobian.diagonal(dim1=1, dim2=2).add_(torch.eye(tokens.shape[-1]).to(jacobian)[..., None])
    return jacobian
