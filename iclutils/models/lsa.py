"""Linear self-attention: small networks that answer one query about a regression.

A context is N pairs and a query. Its tokens are e_i = (x_i, y_i), and (x_q, 0) for the query; the
answer is read from the query's last channel, times -1 ({cite}`vonoswald2023`, section 3). There is
no causal mask, and the query is no key unless asked for. Softmax attention, LayerNorm, an MLP and
the variants of {cite}`ren2024` are options of the ``Shape``.

Networks of one shape that differ in seed or data are an ensemble: their weights have a leading
axis, and they run as one batched program.

Example:
    >>> import torch
    >>> from iclutils.models import lsa
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
Inputs = Float[Tensor, "*xs_batch n d"]  # (batch, n, d), or with an ensemble axis in front
Labels = Float[Tensor, "*ys_batch ys_n"]  # a mismatch is refused with a cure
POSITIONS = 10  # channels that tell positions apart, where x and y are tokens of their own


@dataclass(frozen=True)
class Shape:
    """What decides the sizes of a network, and what its layers do."""

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
        for name in self.attention:
            if name not in get_args(Kind):
                raise unknown("kind of attention", name, get_args(Kind))
        if self.variant not in get_args(Variant):
            raise unknown("variant", self.variant, get_args(Variant))
        problems = {
            "All sizes are at least 1.": min(self.dim, self.pairs, self.layers, self.heads) < 1,
            "clip is a bound above 0, or 0 for none.": not 0 <= self.clip < math.inf,
            "Name one kind of attention, or one for each layer.": (
                len(self.attention) not in (1, self.layers)
            ),
            "The variants are made for a single softmax layer.": (
                self.variant != "plain" and (self.layers > 1 or self.attention[0] != "softmax")
            ),
            "Regularisation weakens the query's own key: set sees_query=True.": (
                self.variant == "regularised" and not self.sees_query
            ),
            "Negative samples need at least two pairs.": (
                self.variant == "negatives" and self.pairs < 2
            ),
        }
        for message, wrong in problems.items():
            if wrong:
                raise IclError(f"{message} Got {self}.")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of attention of every layer."""
        return self.attention * (self.layers // len(self.attention))

    @property
    def own(self) -> int:
        """Layers that have weights of their own."""
        return 1 if self.shared else self.layers

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
) -> Float[Tensor, "*ensemble batch pos channel"]:
    """What a layer adds to every token: Σ_heads P Σ_i V e_i a(K e_i, Q e_j) over the first keys.

    ``linear``: a is the inner product, neither scaled nor normalised. ``softmax``: the usual one,
    scaled by the square root of the inner width. ``change`` is applied to keys and values.

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
    if change is not None:
        key, value = change(key, value)
    pattern = query @ key.mT
    if kind == "softmax":
        pattern = (pattern / math.sqrt(query.shape[-1])).softmax(-1)
    return torch.einsum("...bhtk,...hkc->...btc", pattern @ value, layer.out)


class LinearSelfAttention(nn.Module):
    """An ensemble of networks of one shape: weights (ensemble, layer, head, ...), side by side.

    The weights start normal, ``scale`` / sqrt(channels · layers) apart, one draw for each seed.
    """

    def __init__(self, shape: Shape, seeds: Sequence[int], scale: float = 0.045) -> None:
        super().__init__()
        self.shape, self.seeds = shape, tuple(seeds)
        self.tasks: list[dict[str, Any]] = []  # what each network was trained on, if it was
        sources = [torch.Generator().manual_seed(seed) for seed in seeds]

        def draw(*size: int, std: float) -> nn.Parameter:
            drawn = [torch.randn(size, generator=source) for source in sources]
            return nn.Parameter(torch.stack(drawn) * std)

        c, h, own = shape.channels, shape.heads, shape.own
        std = scale / math.sqrt(c * shape.layers)
        self.attention = nn.ParameterDict({n: draw(own, h, c, c, std=std) for n in Layer._fields})
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

    @classmethod
    def from_layers(
        cls, shape: Shape, layers: Sequence[Layer], others: Mapping[str, Tensor] | None = None
    ) -> LinearSelfAttention:
        """Networks with given weights, frozen, in the precision of these.

        Args:
            shape: what the weights are for.
            layers: of each layer with weights of its own; without an ensemble axis, one network.
            others: the weights of a read-in, an MLP or a variant, by their names in ``others``;
                a LayerNorm that is left out has gain 1 and shift 0.

        Example:
            >>> net = lsa.load("lsa-1")
            >>> same = lsa.LinearSelfAttention.from_layers(net.shape, [net.layer()])
            >>> torch.equal(same.attention["key"], net.attention["key"])
            True
        """
        parts = zip(Layer._fields, zip(*layers, strict=True), strict=True)
        weights = {f"attention.{name}": torch.stack(part, -4) for name, part in parts}
        weights = {name: part if part.ndim == 5 else part[None] for name, part in weights.items()}
        weights |= {f"others.{name}": part for name, part in (others or {}).items()}
        first = next(iter(weights.values()))
        network = cls(shape, range(len(first))).to(first)
        try:
            missing = set(network.load_state_dict(weights, strict=False).missing_keys)
        except RuntimeError as error:
            raise IclError(f"These weights do not fit {shape}: {error}") from error
        if missing := missing - {"others.gain", "others.shift"}:
            raise IclError(f"Give these weights as others, too: {', '.join(sorted(missing))}.")
        return network.eval().requires_grad_(False)

    def forward(self, xs: Inputs, ys: Labels) -> Float[Tensor, "networks batch"]:
        """The predicted y of the last x; the last y is not read.

        Without an ensemble axis, or with one of length 1, every network gets the same contexts.
        """
        return self._answer(self.resid(xs, ys)[-1])

    def resid(self, xs: Inputs, ys: Labels) -> list[Float[Tensor, "networks batch pos channel"]]:
        """The tokens before the first layer, and after each."""
        stream = [self._embedded(xs, ys)]
        for number in range(self.shape.layers):
            stream.append(self._bounded(self._advanced(stream[-1], number), self.shape.clip))
        return stream

    def iterated(
        self, xs: Inputs, ys: Labels, times: int, damping: float = 1.0, clip: float = 0.0
    ) -> Float[Tensor, "times networks batch"]:
        """Answers after the first layer was applied once, twice, ...

        Args:
            xs: inputs, the query's last.
            ys: labels; the last is not read.
            times: how often.
            damping: the part of what the layer adds that is kept; 1 for all.
            clip: channels are kept within this; 0 for no bound.
        """
        tokens, answers = self._embedded(xs, ys), []
        for _ in range(times):
            tokens = self._bounded(self._advanced(tokens, 0, damping), clip)
            answers.append(self._answer(tokens))
        return torch.stack(answers)

    def layer(self, number: int = 0) -> Layer:
        """The attention weights of a layer."""
        at = 0 if self.shape.shared else number
        return Layer(*(self.attention[name][:, at] for name in Layer._fields))

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and single-precision weights; they are few."""
        store(self, folder, "solvers", torch.float32)

    def _embedded(self, xs: Tensor, ys: Tensor) -> Tensor:
        if xs.ndim not in (3, 4) or ys.shape != xs.shape[:-1] or xs.shape[-2] < 2:
            raise IclError(
                "Need xs of (batch, N + 1, d) and ys of (batch, N + 1), with at least one pair and "
                "the query last, or both with an ensemble axis in front; got "
                f"{tuple(xs.shape)} and {tuple(ys.shape)}."
            )
        if xs.shape[-1] != self.shape.dim:
            raise IclError(
                f"These networks read x of {self.shape.dim} dimensions; got {xs.shape[-1]}."
            )
        if xs.ndim == 4 and len(xs) not in (1, len(self.seeds)):
            raise IclError(f"Give contexts for 1 or for all {len(self.seeds)} networks.")
        if not (xs.isfinite().all() and ys[..., :-1].isfinite().all()):
            raise IclError("The contexts hold NaN or infinite numbers: leave those pairs out.")
        tokens = as_tokens(xs, ys, self.shape.separate)
        tokens = tokens.expand(len(self.seeds), *tokens.shape[-3:])
        if self.shape.width:
            return torch.einsum("mbtr,mrc->mbtc", tokens, self.others["read_in"])
        return tokens

    def _answer(self, tokens: Tensor) -> Tensor:
        last = tokens[..., -1, :]
        if self.shape.width:
            return torch.einsum("mbc,mco->mb", last, self.others["read_out"])
        return -last[..., self.shape.dim]

    def _advanced(self, x: Tensor, number: int, damping: float = 1.0) -> Tensor:
        """After the MLP and the attention of a layer."""
        at = 0 if self.shape.shared else number
        if self.shape.hidden:
            up, bias, down = (self.others[name][:, at] for name in ("up", "bias", "down"))
            hidden = functional.gelu(torch.einsum("mbtc,mcj->mbtj", x, up) + bias[:, None])
            x = x + torch.einsum("mbtj,mjc->mbtc", hidden, down)
        added = self._attention(x, number)
        return x + (added if damping == 1 else damping * added)

    def _attention(self, x: Tensor, number: int) -> Tensor:
        at = 0 if self.shape.shared else number
        if self.shape.norm:
            gain, shift = (self.others[name][:, at, None, None] for name in ("gain", "shift"))
            x = functional.layer_norm(x, x.shape[-1:]) * gain + shift
        keys = x.shape[-2] - (not self.shape.sees_query)
        change = None if self.shape.variant == "plain" else self._varied
        return attend(x, self.layer(number), keys, self.shape.kinds[number], change)

    def _varied(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the variants, which ``chapters.gradient_descent.dual`` derives."""
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

    @staticmethod
    def _bounded(x: Tensor, clip: float) -> Tensor:
        return x.clamp(-clip, clip) if clip else x


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
    """Sines and cosines of the position, at five frequencies."""
    rates = 10000.0 ** (-torch.arange(0, POSITIONS, 2) / POSITIONS)
    angles = torch.arange(count)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def load(
    name_or_path: str | Path, *, step: int | None = None, device: str | torch.device = "cpu"
) -> LinearSelfAttention:
    """Load networks, frozen, ready to be looked into.

    Args:
        name_or_path: a shipped name (``"lsa-1"``), the name of one that was trained here
            (``python -m iclutils train NAME``), or a folder that ``save`` wrote.
        step: of a name, one of its training checkpoints; the final one if omitted.
        device: where to put them.

    Example:
        >>> nets = lsa.load("lsa-1")
        >>> nets(torch.randn(4, 11, 10), torch.randn(4, 11)).shape
        torch.Size([5, 4])
    """
    return restore(
        zoo.find(name_or_path, step),
        lambda shape, seeds: LinearSelfAttention(
            Shape(**shape | {"attention": tuple(shape["attention"])}), seeds
        ),
        "solvers",
        "Regressors that read pairs in order are loaded with iclutils.models.regressors.load, "
        "models that read tokens with iclutils.models.load.",
        device,
    )
