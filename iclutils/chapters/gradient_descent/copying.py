"""Copying: whether the first layer brings x and y of a pair into one token, where they are apart.

{cite}`vonoswald2023`, section 5: a layer that copies makes tokens (x_i, y_i) of those next to each
other, and the layers above can take a step of gradient descent, which needs them so.

Example:
    >>> import torch
    >>> from iclutils.models import lsa
    >>> from iclutils.chapters.gradient_descent import copying
    >>> from iclutils.tasks import regression
    >>> net = lsa.load("lsa-separate")
    >>> generator = torch.Generator().manual_seed(0)
    >>> drawn = regression.sample(regression.Task(10, inputs="uniform"), 2, 11, generator)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...models.lsa import Layer, Shape, Solvers


class Shares(NamedTuple):
    """Of the squared norms of what a token depends on: itself, its pair's other token, the rest."""

    own: Float[Tensor, "member"]
    partner: Float[Tensor, "member"]
    others: Float[Tensor, "member"]

    @property
    def copied(self) -> Float[Tensor, "member"]:
        """Of what is not itself, the share of the partner; 0 if there is nothing else."""
        return self.partner / (self.partner + self.others).clamp(min=1e-12)


class Copying(NamedTuple):
    """How much the token at a row, after the first layer, depends on each token before it.

    ``of_x`` and ``of_y`` are means over the tokens of x and of y, the query's x left out.
    """

    dependence: Float[Tensor, "member pos pos"]
    of_x: Shares
    of_y: Shares


def copying(
    network: Solvers,
    xs: Float[Tensor, "batch n d"],
    ys: Float[Tensor, "batch n"],
    added: bool = False,
) -> Copying:
    """The norm of the mean Jacobian, over contexts, of each token after the first layer.

    The mean is taken before the norm, so what depends on the context at random cancels.

    Args:
        network: reads x and y as tokens of their own.
        xs: inputs, the query's last.
        ys: labels; the last is not read.
        added: only what the layer adds, without the token's own way past it.

    Example:
        >>> found = copying.copying(net, drawn.xs, drawn.ys)
        >>> bool((found.dependence >= 0).all())
        True
    """
    shape = network.shape
    if not shape.separate:
        raise IclError("Copying is for solvers that read x and y as tokens of their own.")
    if shape.norm or shape.hidden or shape.clip or shape.variant != "plain":
        raise IclError(f"Copying needs a first layer that is plain attention alone; got {shape}.")
    weight = network.attention["query"]
    with torch.no_grad():
        tokens = network.resid(xs.to(weight)[None], ys.to(weight)[None])[0]
        jacobian = _jacobian(tokens, network.layer(0), shape)
        if not added:
            unit = torch.eye(tokens.shape[-1]).to(jacobian)
            jacobian.diagonal(dim1=1, dim2=2).add_(unit[..., None])
        squares = jacobian.square().sum((-2, -1))
    count = squares.shape[-1]
    pairs = squares[:, :-1]
    whole = pairs.sum(-1).clamp(min=torch.finfo(pairs.dtype).tiny)
    place = torch.arange(count - 1, device=pairs.device)
    own, partner = (pairs[:, place, at] / whole for at in (place, place ^ 1))
    others = pairs.sum(-1) / whole - own - partner
    of = [Shares(*(part[:, k::2].mean(-1) for part in (own, partner, others))) for k in (0, 1)]
    return Copying(squares.sqrt(), *of)


def _jacobian(tokens: Tensor, layer: Layer, shape: Shape) -> Tensor:
    """The mean over contexts of ∂(added to token j) / ∂(token i): (member, j, i, in, out).

    A token writes a_ji u_i with u_i = e_i PV, and a_ji follows from the score z_ji. So z_ji, which
    both tokens change, moves what is written by u_i, or by a_ji (u_i - Σ a_jl u_l) with softmax.
    """
    keys = tokens.shape[-2] - (not shape.sees_query)
    query = torch.einsum("mbtc,mhck->mbhtk", tokens, layer.query)
    key = torch.einsum("mbtc,mhck->mbhtk", tokens[..., :keys, :], layer.key)
    pv = layer.value @ layer.out
    writes = torch.einsum("mbtc,mhcd->mbhtd", tokens[..., :keys, :], pv)
    weights = query @ key.mT
    moved = writes[..., None, :, :].expand(*weights.shape, -1)
    if shape.kinds[0] == "softmax":
        scale = query.shape[-1] ** 0.5
        query, key = query / scale, key / scale
        weights = (weights / scale).softmax(-1)
        moved = weights[..., None] * (moved - (weights @ writes)[..., None, :])
    contexts = tokens.shape[1]
    by_key = query @ layer.key.mT[:, None]  # of a score, by its key's token
    by_query = key @ layer.query.mT[:, None]
    jacobian = torch.einsum("mbhjc,mbhjid->mjicd", by_key, moved)
    jacobian = jacobian + torch.einsum("mbhji,mhcd->mjicd", weights, pv)
    jacobian = torch.nn.functional.pad(jacobian, (0, 0, 0, 0, 0, tokens.shape[-2] - keys))
    own = torch.einsum("mbhic,mbhjid->mjcd", by_query, moved)
    jacobian.diagonal(dim1=1, dim2=2).add_(own.movedim(1, -1))
    return jacobian / contexts
