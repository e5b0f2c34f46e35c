"""Linear self-attention: small networks that answer one query about a regression.

Tokens are e_i = (x_i, y_i), and (x_q, 0) for the query; the answer is the query's last channel,
times -1 ({cite}`vonoswald2023`). No mask; the query is no key unless asked for. Softmax attention,
LayerNorm, an MLP and the variants of {cite}`ren2024` are options of the ``Shape``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ..errors import IclError
from .storage import Ensemble, draw_stacked

Kind = Literal["linear", "softmax"]
Variant = Literal["plain", "regularised", "values", "both", "negatives"]
Inputs = Float[Tensor, "*xs_batch n d"]  # (batch, n, d), or with an ensemble axis in front
Labels = Float[Tensor, "*ys_batch ys_n"]  # a mismatch is refused with a cure
EVERY = slice(None)  # token
POSITIONS = 10  # channels that tell positions apart, where x and y are tokens of their own


@dataclass(frozen=True)
class Shape:
    """Sizes of a network, and the kinds of its layers."""

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
        plain = self.variant == "plain"
        needed = {
            "Attention is linear or softmax.": {*self.attention} <= {*get_args(Kind)},
            "Name one kind, or one for each layer.": len(self.attention) in (1, self.layers),
            f"A variant is one of {get_args(Variant)}.": self.variant in get_args(Variant),
            "Variants have one softmax layer.": plain or self.kinds == ("softmax",),
            "Regularised: set sees_query=True.": self.sees_query or self.variant != "regularised",
        }
        for message, holds in needed.items():
            if not holds:
                raise IclError(f"{message} Got {self}.")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kind of attention of every layer."""
        return self.attention * (self.layers // len(self.attention))

    @property
    def own(self) -> int:
        """Count the layers that have weights of their own."""
        return 1 if self.shared else self.layers

    @property
    def read(self) -> int:
        """Count the channels of a token as it is read."""
        return self.dim + 1 + (POSITIONS if self.separate else 0)

    @property
    def channels(self) -> int:
        """Count the channels of a token inside."""
        return self.width or self.read


class Layer(NamedTuple):
    """Weights of one attention layer, for row vectors: keys are ``tokens @ key``."""

    query: Float[Tensor, "*ensemble head channel inner"]
    key: Float[Tensor, "*ensemble head channel inner"]
    value: Float[Tensor, "*ensemble head channel inner"]
    out: Float[Tensor, "*ensemble head inner channel"]


def attend(
    tokens: Float[Tensor, "*ensemble batch pos channel"],
    layer: Layer,
    keys: int,
    kind: Kind = "linear",
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    some: slice = EVERY,
) -> Float[Tensor, "*ensemble batch pos_out channel"]:
    """Return what a layer adds to ``some`` tokens e_j: Σ_heads P Σ_i V e_i a(K e_i, Q e_j), i <
    ``keys``.

    ``linear``: a is the inner product, neither scaled nor normalised. ``softmax``: the usual one,
    scaled by the square root of the inner width. ``change`` is applied to keys and values.
    """
    split = "...btc,...hck->...bhtk"
    seen = tokens[..., :keys, :]
    if change is None:  # two maps in place of four: keys and values are the tokens themselves
        ask, write = layer.query @ layer.key.mT, layer.value @ layer.out
        key = value = seen[..., None, :, :]
    else:
        ask, write = layer.query, layer.out
        key, value = change(*(torch.einsum(split, seen, x) for x in (layer.key, layer.value)))
    pattern = torch.einsum(split, tokens[..., some, :], ask) @ key.mT
    if kind == "softmax":
        pattern = (pattern / math.sqrt(layer.query.shape[-1])).softmax(-1)
    return torch.einsum("...bhtk,...hkc->...btc", pattern @ value, write)


class LinearSelfAttention(Ensemble):
    """Networks of one shape, side by side: weights (ensemble, layer, head, ...).

    The weights start normal, ``scale`` / sqrt(channels · layers) apart, one draw for each seed.
    """

    shape_type, kind = Shape, "solvers"

    def __init__(self, shape: Shape, seeds: Sequence[int], scale: float = 0.045) -> None:
        super().__init__(shape, seeds)
        normal = draw_stacked(torch.randn, seeds)

        def draw(*size: int, std: float) -> nn.Parameter:
            return nn.Parameter(normal(*size) * std)

        c, h, own = shape.channels, shape.heads, shape.own
        std = scale / math.sqrt(c * shape.layers)
        self.attention = nn.ParameterDict({n: draw(own, h, c, c, std=std) for n in Layer._fields})
        others: dict[str, nn.Parameter] = {}
        if shape.width:
            others["read_in"] = draw(shape.read, c, std=1 / math.sqrt(shape.read))
            others["read_out"] = draw(c, 1, std=1 / math.sqrt(c))
        if shape.norm:
            ones = torch.ones(len(self.seeds), own, c)
            others |= {"gain": nn.Parameter(ones), "shift": nn.Parameter(0 * ones)}
        if shape.hidden:
            others["up"] = draw(own, c, shape.hidden, std=1 / math.sqrt(c))
            others["bias"] = draw(own, 1, shape.hidden, std=1.0)
            others["down"] = draw(own, shape.hidden, c, std=0.3 / math.sqrt(shape.hidden))
        for part in {"values": ("values",), "both": ("values", "keys")}.get(shape.variant, ()):
            others[f"{part}_up"] = draw(c, 2 * c, std=1 / math.sqrt(c))
            others[f"{part}_down"] = draw(2 * c, c, std=1 / math.sqrt(2 * c))
        self.others = nn.ParameterDict(others)

    @classmethod
    def from_layers(cls, shape: Shape, layers: Sequence[Layer]) -> LinearSelfAttention:
        """Make networks of these weights, frozen, one ``Layer`` for each that has its own. Layers
        without an ensemble axis make one network; a LayerNorm has gain 1 and shift 0."""
        parts = [torch.stack(part, -4) for part in zip(*layers, strict=True)]
        of_all = Layer(*(part if part.ndim == 5 else part[None] for part in parts))
        gain = torch.ones_like(of_all.key[:, :, 0, :, 0])
        weights = {f"attention.{name}": part for name, part in of_all._asdict().items()}
        norm = {"others.gain": gain, "others.shift": 0 * gain} if shape.norm else {}
        return cls.from_weights(shape, weights | norm)

    def forward(self, xs: Inputs, ys: Labels) -> Float[Tensor, "networks batch"]:
        """Predict the y of the last x; the last y is not read.

        Without an ensemble axis, or with one of length 1, every network gets the same contexts.
        """
        last = self.resid(xs, ys, slice(-1, None))[-1][..., 0, :]
        if self.shape.width:
            return torch.einsum("mbc,mco->mb", last, self.others["read_out"])
        return -last[..., self.shape.dim]

    def resid(
        self, xs: Inputs, ys: Labels, some: slice = EVERY
    ) -> list[Float[Tensor, "networks batch _ channel"]]:
        """Return the tokens before the first layer, and after each; after the last only ``some``,
        where no more are needed."""
        xs, ys = self.contexts(xs, ys)
        if xs.shape[-2] < 2:
            raise IclError("A context needs at least one pair, and the query last.")
        tokens = as_tokens(xs, ys, self.shape.separate)
        tokens = tokens.expand(len(self.seeds), *tokens.shape[1:])
        if self.shape.width:
            tokens = torch.einsum("mbtr,mrc->mbtc", tokens, self.others["read_in"])
        stream = [tokens]
        for number in range(self.shape.layers):
            is_last = number == self.shape.layers - 1
            stream.append(self._advanced(stream[-1], number, some if is_last else EVERY))
        return stream

    def layer(self, number: int = 0) -> Layer:
        """Return the attention weights of a layer."""
        return Layer(*self._of_layer(number, self.attention, *Layer._fields))

    def _of_layer(self, number: int, among: nn.ParameterDict, *names: str) -> list[Tensor]:
        at = 0 if self.shape.shared else number
        return [among[name][:, at] for name in names]

    def _advanced(self, x: Tensor, number: int, some: slice) -> Tensor:
        """Send tokens (ensemble, batch, pos, channel) through the MLP and attention of a layer, and
        return ``some`` of them."""
        if self.shape.hidden:
            up, bias, down = self._of_layer(number, self.others, "up", "bias", "down")
            hidden = functional.gelu(torch.einsum("mbtc,mcj->mbtj", x, up) + bias[:, None])
            x = x + torch.einsum("mbtj,mjc->mbtc", hidden, down)
        seen = x
        if self.shape.norm:
            gain, shift = self._of_layer(number, self.others, "gain", "shift")
            seen = functional.layer_norm(x, x.shape[-1:]) * gain[:, None, None]
            seen = seen + shift[:, None, None]
        keys = x.shape[-2] - (not self.shape.sees_query)
        change = None if self.shape.variant == "plain" else self._varied
        added = attend(seen, self.layer(number), keys, self.shape.kinds[number], change, some)
        x = x[..., some, :] + added
        return x.clamp(-self.shape.clip, self.shape.clip) if self.shape.clip else x

    def _varied(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Change keys and values as the variant does (``contrastive_kernel.dual``)."""
        key, value = self._augmented(key, "keys"), self._augmented(value, "values")
        count = value.shape[-2] - self.shape.sees_query
        demos, query = value[..., :count, :], value[..., count:, :]
        if self.shape.variant == "regularised":
            query = (1 - self.shape.strength) * query
        if self.shape.variant == "negatives":
            others = (demos.sum(-2, keepdim=True) - demos) / (count - 1)
            demos = demos - self.shape.strength * others
        return key, torch.cat([demos, query], -2)

    def _augmented(self, z: Tensor, part: str) -> Tensor:
        if f"{part}_up" not in self.others:
            return z
        up, down = self.others[f"{part}_up"], self.others[f"{part}_down"]
        hidden = functional.gelu(torch.einsum("mbhtk,mkj->mbhtj", z, up))
        return z + torch.einsum("mbhtj,mjk->mbhtk", hidden, down)


def as_tokens(
    xs: Float[Tensor, "*batch n d"], ys: Float[Tensor, "*batch n"], separate: bool = False
) -> Float[Tensor, "*batch pos channel"]:
    """Make the tokens of a context whose last pair is the query, with 0 in the place of its y.

    Separate: (x_i, 0) and (0, y_i) take turns, the query's x last, and ten channels more hold
    sines and cosines of the position, at five frequencies.
    """
    labels = torch.cat([ys[..., :-1], torch.zeros_like(ys[..., -1:])], -1)[..., None]
    if not separate:
        return torch.cat([xs, labels], -1)
    x_tokens = torch.cat([xs, torch.zeros_like(labels)], -1)
    y_tokens = torch.cat([torch.zeros_like(xs), labels], -1)
    both = torch.stack([x_tokens, y_tokens], -2).flatten(-3, -2)[..., :-1, :]
    rates = 10000.0 ** (-torch.arange(0, POSITIONS, 2) / POSITIONS)
    angles = torch.arange(both.shape[-2])[:, None] * rates
    place = torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(both)
    return torch.cat([both, place.expand(*both.shape[:-1], POSITIONS)], -1)


load = LinearSelfAttention.load
