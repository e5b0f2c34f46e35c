"""In-context regressors: small transformers that predict each y from the pairs before it.

The block is ``standard`` (pre-norm, as GPT-2), ``post-norm`` ({cite}`vaswani2017`), or
``released``, that of the code released with {cite}`akyurek2023`: the residual stream itself passes
through each LayerNorm, a head is ``width / heads**2`` wide, and no LayerNorm precedes the read-out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ..errors import IclError
from .storage import Ensemble, stacked

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
    block: Literal["standard", "post-norm", "released"] = "standard"

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads ** (2 if self.block == "released" else 1)

    @property
    def places(self) -> int:
        """Tokens of the longest context, whose last y is never read."""
        return self.pairs if self.format == "one" else 2 * self.pairs - 1

    @property
    def channels(self) -> int:
        """Channels of a token."""
        return 2 * self.dim + 1 if self.format == "one" else self.dim + 1


class InContextRegressors(Ensemble):
    """Networks of one shape, drawn from ``seeds``, side by side: weights (ensemble, in, out)."""

    shape_type, kind = Shape, "in-context regressors"

    def __init__(self, shape: Shape, seeds: Sequence[int]) -> None:
        super().__init__(shape, seeds)
        if shape.head < 1 or shape.width % shape.heads:
            raise IclError(f"A width of {shape.width} cannot be cut into {shape.heads} heads.")
        uniform = stacked(torch.rand, seeds)

        def draw(*size: int, fan: int) -> nn.Parameter:
            return nn.Parameter((uniform(*size) * 2 - 1) / math.sqrt(fan))

        def linear(n_in: int, n_out: int, bias_fan: int | None = None) -> nn.ParameterDict:
            weight, bias = draw(n_in, n_out, fan=n_in), draw(1, n_out, fan=bias_fan or n_out)
            return nn.ParameterDict({"weight": weight, "bias": bias})

        def norm() -> nn.ParameterDict:
            flat = torch.zeros(len(seeds), 1, shape.width)
            return nn.ParameterDict({"weight": flat + 1, "bias": flat})

        width, inner = shape.width, shape.head * shape.heads
        # The released code draws q, k and v apart, each bias with a fan of its own size. The
        # shipped networks, all of the standard block, were drawn with that of all three.
        qkv_fan = inner if shape.block == "released" else 3 * inner
        self.read_in = linear(shape.channels, width)
        self.positions = draw(shape.places, width, fan=shape.places)
        self.blocks = nn.ModuleList()
        for _ in range(shape.layers):
            parts = {"norm_1": norm(), "qkv": linear(width, 3 * inner, qkv_fan)}
            parts |= {"out": linear(inner, width), "norm_2": norm(), "up": linear(width, 4 * width)}
            self.blocks.append(nn.ModuleDict(parts | {"down": linear(4 * width, width)}))
        self.norm = norm()
        self.read_out = linear(width, 1)

    def select(self, index: int) -> InContextRegressors:
        """One network of the ensemble, as an ensemble of its own."""
        at = range(len(self.seeds))[index]
        weights = {name: weight[at : at + 1] for name, weight in self.state_dict().items()}
        one = self.from_weights(self.shape, weights)
        one.seeds, one.tasks = self.seeds[at : at + 1], self.tasks[at : at + 1]
        return one

    def forward(self, xs: Xs, ys: Labels) -> Float[Tensor, "ensemble_out batch n"]:
        """The prediction of each y from the pairs before it and its own x.

        The same contexts go to every network without an ``ensemble`` axis, or with one of 1.
        """
        resid = self.resid(xs, ys)[-1]
        if self.shape.block == "standard":
            resid = _norm(resid, self.norm)
        answers = _linear(resid, self.read_out)[..., 0]  # at the tokens of y, too
        return answers[..., :: 2 if self.shape.format == "two" else 1]

    def resid(self, xs: Xs, ys: Labels) -> list[Float[Tensor, "ensemble_out batch pos width"]]:
        """The residual stream: embedding, then after each block."""
        xs, ys = self.contexts(xs, ys)
        if not 1 <= xs.shape[-2] <= self.shape.pairs:
            raise IclError(
                f"These networks read 1 to {self.shape.pairs} pairs, the last without its y; "
                f"got {xs.shape[-2]}. Cut the contexts, or train with longer ones."
            )
        tokens = as_tokens(xs, ys, self.shape.format)
        tokens = tokens.expand(len(self.seeds), *tokens.shape[1:])
        stream = [_linear(tokens, self.read_in) + self.positions[:, None, : tokens.shape[2]]]
        for block in self.blocks:
            stream.append(self._block(stream[-1], block))
        return stream

    def save(self, folder: Path, dtype: torch.dtype = torch.float16) -> None:
        """Write ``config.json`` and the weights, in half precision unless told otherwise."""
        super().save(folder, dtype)

    def _block(self, x: Tensor, block: Any) -> Tensor:
        if self.shape.block == "post-norm":
            x = _norm(x + self._attention(x, block), block["norm_1"])
            return _norm(x + _mlp(x, block), block["norm_2"])
        released = self.shape.block == "released"
        seen = _norm(x, block["norm_1"])
        x = (seen if released else x) + self._attention(seen, block)
        seen = _norm(x, block["norm_2"])
        return (seen if released else x) + _mlp(seen, block)

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


def _mlp(x: Tensor, block: Any) -> Tensor:
    hidden = functional.gelu(_linear(x, block["up"]), approximate="tanh")
    return _linear(hidden, block["down"])


def as_tokens(
    xs: Float[Tensor, "*batch n d"], ys: Float[Tensor, "*batch n"], form: Format
) -> Float[Tensor, "*batch pos channel"]:
    """Tokens that the network reads, so that the token of x_i has seen y_1 .. y_{i-1} and not y_i.

    In the format ``one`` token i is (x_i, x_{i-1}, y_{i-1}), and the first has zeros for the pair
    before it. In the format ``two``, the paper's, (0, x_i) and (y_i, 0) take turns; the last y is
    left out.
    """
    if form == "one":
        pairs = torch.cat([xs, ys[..., None]], -1)
        before = torch.cat([torch.zeros_like(pairs[..., :1, :]), pairs[..., :-1, :]], -2)
        return torch.cat([xs, before], -1)
    x_tokens = torch.cat([torch.zeros_like(ys[..., None]), xs], -1)
    y_tokens = torch.cat([ys[..., None], torch.zeros_like(xs)], -1)
    return torch.stack([x_tokens, y_tokens], -2).flatten(-3, -2)[..., :-1, :]


load = InContextRegressors.load
