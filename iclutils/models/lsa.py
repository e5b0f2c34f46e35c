"""Solvers: small attention networks that answer one query about a regression.

A context is N pairs and a query. Its tokens are e_i = (x_i, y_i), and (x_q, 0) for the query; the
answer is read from the query's last channel, times -1 ({cite}`vonoswald2023`, section 3). There is
no causal mask, and the query is no key unless asked for. ``learners`` reads pairs in order and
predicts every y; a solver sees its context whole, as the theory of gradient descent in context
does.

As in ``learners``, several members of one shape, differing in seed or data, have weights with a
leading member axis and run as one batched program.

Example:
    >>> import torch
    >>> from iclutils.models import lsa
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from .. import zoo
from ..errors import IclError, unknown
from .storage import restore, store

Kind = Literal["linear", "softmax"]
Variant = Literal["plain", "regularised", "values", "both", "negatives"]
Labels = Float[Tensor, "ys_member ys_batch ys_n"]  # a mismatch is refused with a cure
POSITIONS = 10  # channels that tell positions apart, where x and y are tokens of their own


@dataclass(frozen=True)
class Shape:
    """What decides the sizes of a solver, and what its layers do."""

    dim: int
    pairs: int  # N, without the query
    layers: int = 1
    heads: int = 1
    attention: tuple[Kind, ...] = ("linear",)  # of each layer, or one for all
    shared: bool = False  # every layer has the same weights
    sees_query: bool = False  # the query is among the keys
    separate: bool = False  # x and y are tokens of their own
    norm: bool = False  # LayerNorm before attention
    hidden: int = 0  # neurons of an MLP before attention; 0 for none
    clip: float = 0.0  # channels are kept within this after every layer; 0 for no bound
    width: int = 0  # channels after a linear map of the tokens; 0 for no such map
    variant: Variant = "plain"
    strength: float = 0.0  # of the variant: α if regularised, β with negatives

    def __post_init__(self) -> None:
        if min(self.dim, self.pairs, self.layers, self.heads) < 1:
            raise IclError(f"A solver needs sizes of at least 1; got {self}.")
        for name in self.attention:
            if name not in get_args(Kind):
                raise unknown("kind of attention", name, get_args(Kind))
        if self.variant not in get_args(Variant):
            raise unknown("variant", self.variant, get_args(Variant))
        if not 0 <= self.clip < math.inf:
            raise IclError(f"clip is a bound above 0, or 0 for none; got {self.clip}.")
        if len(self.attention) not in (1, self.layers):
            raise IclError(f"Name one kind of attention, or one for each of {self.layers} layers.")
        if self.variant != "plain" and (self.layers > 1 or self.attention[0] != "softmax"):
            raise IclError("The variants are made for a single softmax layer.")
        if self.variant == "regularised" and not self.sees_query:
            raise IclError("Regularisation weakens the query's own key: set sees_query=True.")
        if self.variant == "negatives" and self.pairs < 2:
            raise IclError("Negative samples need at least two pairs.")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of attention of every layer."""
        return self.attention * (self.layers // len(self.attention))

    @property
    def read(self) -> int:
        """Channels of a token as it is read."""
        return self.dim + 1 + (POSITIONS if self.separate else 0)

    @property
    def channels(self) -> int:
        """Channels of a token inside."""
        return self.width or self.read


class Layer(NamedTuple):
    """Weights of one attention layer, for row vectors: keys are ``tokens @ key``."""

    query: Float[Tensor, "*member head channel inner"]
    key: Float[Tensor, "*member head channel inner"]
    value: Float[Tensor, "*member head channel inner"]
    out: Float[Tensor, "*member head inner channel"]


def attend(
    tokens: Float[Tensor, "*member batch pos channel"],
    layer: Layer,
    keys: int,
    kind: Kind = "linear",
) -> Float[Tensor, "*member batch pos channel"]:
    """What a layer adds to every token: Σ_heads P Σ_i V e_i a(K e_i, Q e_j) over the first keys.

    ``linear``: a is the inner product, neither scaled nor normalised. ``softmax``: the usual one,
    scaled by the square root of the inner width.

    Example:
        >>> eye = torch.eye(2)[None]
        >>> layer = lsa.Layer(eye, eye, eye, eye)
        >>> lsa.attend(torch.tensor([[[1.0, 0.0], [2.0, 0.0]]]), layer, keys=1)
        tensor([[[1., 0.],
                 [2., 0.]]])
    """
    split = "...btc,...hck->...bhtk"
    seen = tokens[..., :keys, :]
    query = torch.einsum(split, tokens, layer.query)
    key, value = (torch.einsum(split, seen, part) for part in (layer.key, layer.value))
    pattern = query @ key.mT
    if kind == "softmax":
        pattern = (pattern / math.sqrt(query.shape[-1])).softmax(-1)
    return torch.einsum("...bhtk,...hkc->...btc", pattern @ value, layer.out)


class Solvers(nn.Module):
    """Members of one shape: weights (member, layer, head, ...), run side by side.

    The weights start normal, ``scale`` / sqrt(channels · layers) apart.
    """

    def __init__(self, shape: Shape, seeds: Sequence[int], scale: float = 0.045) -> None:
        super().__init__()
        self.shape, self.seeds = shape, tuple(seeds)
        self.tasks: list[dict[str, Any]] = []  # what each member was trained on, if it was
        sources = [torch.Generator().manual_seed(seed) for seed in seeds]

        def draw(*size: int, std: float) -> nn.Parameter:
            drawn = [torch.randn(size, generator=source) for source in sources]
            return nn.Parameter(torch.stack(drawn) * std)

        c, h = shape.channels, shape.heads
        own = 1 if shape.shared else shape.layers
        std = scale / math.sqrt(c * shape.layers)
        names = ("query", "key", "value", "out")
        self.attention = nn.ParameterDict({n: draw(own, h, c, c, std=std) for n in names})
        others: dict[str, nn.Parameter] = {}
        if shape.width:
            others["read_in"] = draw(shape.read, c, std=1 / math.sqrt(shape.read))
            others["read_out"] = draw(c, 1, std=1 / math.sqrt(c))
        if shape.norm:
            ones = torch.ones(len(sources), own, c)
            others |= {"gain": nn.Parameter(ones), "shift": nn.Parameter(0 * ones)}
        if shape.hidden:
            others["up"] = draw(own, c, shape.hidden, std=1 / math.sqrt(c))
            others["bias"] = draw(own, 1, shape.hidden, std=1.0)
            others["down"] = draw(own, shape.hidden, c, std=0.3 / math.sqrt(shape.hidden))
        for part in {"values": ("values",), "both": ("values", "keys")}.get(shape.variant, ()):
            others[f"{part}_up"] = draw(c, 2 * c, std=1 / math.sqrt(c))
            others[f"{part}_down"] = draw(2 * c, c, std=1 / math.sqrt(2 * c))
        self.others = nn.ParameterDict(others)

    def forward(
        self, xs: Float[Tensor, "member batch n d"], ys: Labels
    ) -> Float[Tensor, "member_out batch"]:
        """The predicted y of the last x; the last y is not read.

        The same contexts go to every member if their ``member`` axis has length 1.
        """
        last = self.resid(xs, ys)[-1][..., -1, :]
        if self.shape.width:
            return torch.einsum("mbc,mco->mb", last, self.others["read_out"])
        return -last[..., self.shape.dim]

    def resid(
        self, xs: Float[Tensor, "member batch n d"], ys: Labels
    ) -> list[Float[Tensor, "member_out batch pos channel"]]:
        """The tokens before the first layer, and after each."""
        self._check(xs, ys)
        tokens = as_tokens(xs, ys, self.shape.separate)
        x = tokens.expand(len(self.seeds), *tokens.shape[1:])
        if self.shape.width:
            x = torch.einsum("mbtr,mrc->mbtc", x, self.others["read_in"])
        stream = [x]
        for number in range(self.shape.layers):
            x = self._transformed(x, number)
            x = x + self._attention(self._normed(x, number), number)
            x = x.clamp(-self.shape.clip, self.shape.clip) if self.shape.clip else x
            stream.append(x)
        return stream

    def layer(self, number: int = 0) -> Layer:
        """The attention weights of a layer."""
        at = 0 if self.shape.shared else number
        names = ("query", "key", "value", "out")
        return Layer(*(self.attention[name][:, at] for name in names))

    def _attention(self, x: Tensor, number: int) -> Tensor:
        keys = x.shape[-2] - (not self.shape.sees_query)
        if self.shape.variant != "plain":
            return self._varied(x, keys)
        return attend(x, self.layer(number), keys, self.shape.kinds[number])

    def _varied(self, x: Tensor, keys: int) -> Tensor:
        """One softmax layer with a change; see ``lenses.duality.variants`` for where it is from."""
        split = "mbtc,mhck->mbhtk"
        layer, shape = self.layer(), self.shape
        query = torch.einsum(split, x, layer.query)
        key = self._augmented(torch.einsum(split, x[..., :keys, :], layer.key), "keys")
        value = self._augmented(torch.einsum(split, x[..., :keys, :], layer.value), "values")
        count = x.shape[-2] - 1
        weight = x.new_ones(keys)
        if shape.variant == "regularised":
            weight[count:] = 1 - shape.strength
        if shape.variant == "negatives":
            demos = value[..., :count, :]
            others = (demos.sum(-2, keepdim=True) - demos) / (count - 1)
            value = torch.cat([demos - shape.strength * others, value[..., count:, :]], -2)
        pattern = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1) * weight
        return torch.einsum("mbhtk,mhkc->mbtc", pattern @ value, layer.out)

    def _augmented(self, z: Tensor, part: str) -> Tensor:
        if f"{part}_up" not in self.others:
            return z
        up, down = self.others[f"{part}_up"], self.others[f"{part}_down"]
        hidden = functional.gelu(torch.einsum("mbhtk,mkj->mbhtj", z, up))
        return z + torch.einsum("mbhtj,mjk->mbhtk", hidden, down)

    def _transformed(self, x: Tensor, number: int) -> Tensor:
        if not self.shape.hidden:
            return x
        at = 0 if self.shape.shared else number
        up, bias, down = (self.others[name][:, at] for name in ("up", "bias", "down"))
        hidden = functional.gelu(torch.einsum("mbtc,mcj->mbtj", x, up) + bias[:, None])
        return x + torch.einsum("mbtj,mjc->mbtc", hidden, down)

    def _normed(self, x: Tensor, number: int) -> Tensor:
        if not self.shape.norm:
            return x
        at = 0 if self.shape.shared else number
        gain, shift = (self.others[name][:, at, None, None] for name in ("gain", "shift"))
        return functional.layer_norm(x, x.shape[-1:]) * gain + shift

    def _check(self, xs: Tensor, ys: Tensor) -> None:
        members, pairs, dim = xs.shape[0], *xs.shape[2:]
        if ys.shape != xs.shape[:-1]:
            raise IclError(
                f"Need a y for each of {tuple(xs.shape[:-1])} xs; got {tuple(ys.shape)}."
            )
        if dim != self.shape.dim:
            raise IclError(f"These solvers read x of {self.shape.dim} dimensions; got {dim}.")
        if pairs < 2:
            raise IclError("A solver needs at least one pair and a query: no pair was given.")
        if members not in (1, len(self.seeds)):
            raise IclError(f"Give contexts for 1 or for all {len(self.seeds)} members.")
        if not (xs.isfinite().all() and ys[..., :-1].isfinite().all()):
            raise IclError("The contexts hold NaN or infinite numbers: leave those pairs out.")

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and single-precision weights; they are few."""
        store(self, folder, "solvers", torch.float32)


def as_tokens(
    xs: Float[Tensor, "*batch n d"], ys: Float[Tensor, "*batch n"], separate: bool = False
) -> Float[Tensor, "*batch pos channel"]:
    """The tokens of a context whose last pair is the query, with 0 in the place of its y.

    Joint: (x_i, y_i). Separate: (x_i, 0) and (0, y_i) take turns, the query's x last, and ten
    channels more hold sines and cosines of the position.
    """
    labels = torch.cat([ys[..., :-1], torch.zeros_like(ys[..., -1:])], -1)[..., None]
    if not separate:
        return torch.cat([xs, labels], -1)
    x_tokens = torch.cat([xs, torch.zeros_like(labels)], -1)
    y_tokens = torch.cat([torch.zeros_like(xs), labels], -1)
    both = torch.stack([x_tokens, y_tokens], -2).flatten(-3, -2)[..., :-1, :]
    place = positions(both.shape[-2]).to(both)
    return torch.cat([both, place.expand(*both.shape[:-1], POSITIONS)], -1)


def positions(count: int) -> Float[Tensor, "pos channel"]:
    """Sines and cosines of the position, at five frequencies.

    Example:
        >>> lsa.positions(3)[0, :2]
        tensor([0., 1.])
    """
    rates = 10000.0 ** (-torch.arange(0, POSITIONS, 2) / POSITIONS)
    angles = torch.arange(count)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def load(
    name_or_path: str | Path, *, step: int | None = None, device: str | torch.device = "cpu"
) -> Solvers:
    """Load solvers, frozen, ready to be looked into.

    Args:
        name_or_path: a shipped name (``"lsa-1"``), the name of one that was trained here
            (``python -m iclutils train NAME``), or a folder that ``Solvers.save`` wrote.
        step: of a name, one of its training checkpoints; the final one if omitted.
        device: where to put them.

    Example:
        >>> nets = lsa.load("lsa-1")
        >>> xs, ys = torch.randn(1, 4, 11, 10), torch.randn(1, 4, 11)
        >>> nets(xs, ys).shape
        torch.Size([5, 4])
    """
    return restore(
        zoo.find(name_or_path, step),
        lambda shape, seeds: Solvers(
            Shape(**shape | {"attention": tuple(shape["attention"])}), seeds
        ),
        "solvers",
        "Learners are loaded with iclutils.models.regressors.load, models that read tokens with "
        "iclutils.models.load.",
        device,
    )
