"""In-context regressors: small transformers that predict each y from the pairs before it.

The block is that of GPT-2: a LayerNorm before the attention, the MLP and the read-out.
Source: {cite}`akyurek2023`. For one query and linear attention, see ``lsa``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ..errors import IclError
from .storage import Ensemble, draw_stacked

Format = Literal["one", "two"]
Xs = Float[Tensor, "*ensemble batch n d"]
Labels = Float[Tensor, "*label_batch label_n"]  # one for each x; a mismatch is refused with a cure


@dataclass(frozen=True)
class Shape:
    """Sizes of a network; ``pairs`` is the longest context it can read."""

    dim: int
    pairs: int
    format: Format  # "one" token for each pair, or "two", x and y apart, as in the paper
    layers: int
    width: int
    heads: int

    @property
    def places(self) -> int:
        """Count the tokens of the longest context, whose last y is never read."""
        return self.pairs if self.format == "one" else 2 * self.pairs - 1

    @property
    def channels(self) -> int:
        """Count the channels of a token."""
        return 2 * self.dim + 1 if self.format == "one" else self.dim + 1


class InContextRegressors(Ensemble):
    """Networks of one shape, drawn from ``seeds``, side by side: weights (ensemble, in, out)."""

    shape_type, kind, precision = Shape, "in-context regressors", torch.float16

    def __init__(self, shape: Shape, seeds: Sequence[int]) -> None:
        super().__init__(shape, seeds)
        if shape.width % shape.heads:
            raise IclError(f"A width of {shape.width} cannot be cut into {shape.heads} heads.")
        uniform = draw_stacked(torch.rand, seeds)

        def draw(*size: int, fan: int) -> nn.Parameter:
            return nn.Parameter((uniform(*size) * 2 - 1) / math.sqrt(fan))

        def linear(n_in: int, n_out: int) -> nn.ParameterDict:
            weight, bias = draw(n_in, n_out, fan=n_in), draw(1, n_out, fan=n_out)
            return nn.ParameterDict({"weight": weight, "bias": bias})

        def norm() -> nn.ParameterDict:
            flat = torch.zeros(len(seeds), 1, shape.width)
            return nn.ParameterDict({"weight": flat + 1, "bias": flat})

        width = shape.width
        self.read_in = linear(shape.channels, width)
        self.positions = draw(shape.places, width, fan=shape.places)
        self.blocks = nn.ModuleList()
        for _ in range(shape.layers):
            parts = {"norm_1": norm(), "qkv": linear(width, 3 * width)}
            parts |= {"out": linear(width, width), "norm_2": norm(), "up": linear(width, 4 * width)}
            self.blocks.append(nn.ModuleDict(parts | {"down": linear(4 * width, width)}))
        self.norm = norm()
        self.read_out = linear(width, 1)

    def select(self, index: int) -> InContextRegressors:
        """Return one network as an ensemble of its own."""
        at = range(len(self.seeds))[index]
        weights = {name: weight[at : at + 1] for name, weight in self.state_dict().items()}
        one = self.from_weights(self.shape, weights)
        one.seeds, one.tasks = self.seeds[at : at + 1], self.tasks[at : at + 1]
        return one

    def forward(self, xs: Xs, ys: Labels) -> Float[Tensor, "ensemble_out batch n"]:
        """Predict each y from the pairs before it and its own x.

        The same contexts go to every network without an ``ensemble`` axis, or with one of 1.
        """
        resid = _norm(self.resid(xs, ys)[-1], self.norm)
        answers = _linear(resid, self.read_out)[..., 0]  # at the tokens of y, too
        return answers[..., :: 2 if self.shape.format == "two" else 1]

    def resid(self, xs: Xs, ys: Labels) -> list[Float[Tensor, "ensemble_out batch pos width"]]:
        """Return the residual stream: the embedding, then after each block."""
        xs, ys = self.contexts(xs, ys)
        if not 1 <= xs.shape[-2] <= self.shape.pairs:
            raise IclError(
                f"These networks read 1 to {self.shape.pairs} pairs, the last without its y; "
                f"got {xs.shape[-2]}. Cut the contexts, or train with longer ones."
            )
        tokens = as_tokens(xs, ys, self.shape.format)
        tokens = tokens.expand(len(self.seeds), *tokens.shape[1:])
        stream = [_linear(tokens, self.read_in) + self.positions[:, None, : tokens.shape[2]]]
        block: Any
        for block in self.blocks:
            x = stream[-1]  # (ensemble, batch, pos, width)
            x = x + self._attention(_norm(x, block["norm_1"]), block)
            hidden = _linear(_norm(x, block["norm_2"]), block["up"])  # (..., 4 width)
            hidden = functional.gelu(hidden, approximate="tanh")
            stream.append(x + _linear(hidden, block["down"]))
        return stream

    def _attention(self, x: Tensor, block: Any) -> Tensor:
        qkv = _linear(x, block["qkv"]).flatten(0, 1).unflatten(-1, (3, self.shape.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (ensemble * batch, head, pos, inner) each
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return _linear(mixed.transpose(1, 2).reshape(*x.shape[:3], -1), block["out"])


def _linear(x: Tensor, at: Any) -> Tensor:
    flat = torch.baddbmm(at["bias"], x.flatten(1, 2), at["weight"])
    return flat.unflatten(1, x.shape[1:3])


def _norm(x: Tensor, at: Any) -> Tensor:
    flat = functional.layer_norm(x, x.shape[-1:])
    return flat * at["weight"][:, None] + at["bias"][:, None]


def as_tokens(
    xs: Float[Tensor, "*batch n d"], ys: Float[Tensor, "*batch n"], form: Format
) -> Float[Tensor, "*batch pos channel"]:
    """Make the tokens that are read, so that the token of x_i has seen y_1 .. y_{i-1}, not y_i.

    In the format ``one`` token i is (x_i, x_{i-1}, y_{i-1}), and the first has zeros for the pair
    before it. In ``two``, the paper's, (0, x_i) and (y_i, 0) take turns, without the last y.
    """
    if form == "one":
        pairs = torch.cat([xs, ys[..., None]], -1)
        before = torch.cat([torch.zeros_like(pairs[..., :1, :]), pairs[..., :-1, :]], -2)
        return torch.cat([xs, before], -1)
    x_tokens = torch.cat([torch.zeros_like(ys[..., None]), xs], -1)
    y_tokens = torch.cat([ys[..., None], torch.zeros_like(xs)], -1)
    return torch.stack([x_tokens, y_tokens], -2).flatten(-3, -2)[..., :-1, :]


load = InContextRegressors.load
