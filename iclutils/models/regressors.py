"""Learners: small transformers that learn a regression from the pairs in their context.

One ``Learners`` holds several members of one shape, which differ in seed or in the data they
were trained on; every weight has a leading axis for the member, and all run as one batched
program. Two blocks are offered: ``standard`` (pre-norm, as GPT-2) and ``released``, the block of
the code released with Akyurek et al. 2023, which differs from their Eq. 4: the residual stream
itself passes through each LayerNorm, and a head is ``width / heads**2`` wide.

Example:
    >>> import torch
    >>> from iclutils.models import regressors
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

from .. import zoo
from ..errors import IclError
from .storage import restore, store

Format = Literal["one", "two"]


@dataclass(frozen=True)
class Shape:
    """What decides the sizes of a learner: ``pairs`` is the longest context it can read."""

    dim: int
    pairs: int
    format: Format  # "one" token for each pair, or "two", x and y apart, as in the paper
    layers: int
    width: int
    heads: int
    block: Literal["standard", "released"] = "standard"

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


class Learners(nn.Module):
    """Members of one shape: weights (member, in, out), run side by side."""

    def __init__(self, shape: Shape, seeds: Sequence[int]) -> None:
        super().__init__()
        if shape.head < 1 or shape.width % shape.heads:
            raise IclError(f"A width of {shape.width} cannot be cut into {shape.heads} heads.")
        self.shape, self.seeds = shape, tuple(seeds)
        self.tasks: list[dict[str, Any]] = []  # what each member was trained on, if it was
        sources = [torch.Generator().manual_seed(seed) for seed in seeds]

        def draw(*size: int, fan: int) -> nn.Parameter:
            drawn = [torch.rand(size, generator=source) for source in sources]
            return nn.Parameter((torch.stack(drawn) * 2 - 1) / math.sqrt(fan))

        def linear(n_in: int, n_out: int) -> nn.ParameterDict:
            weight, bias = draw(n_in, n_out, fan=n_in), draw(1, n_out, fan=n_out)
            return nn.ParameterDict({"weight": weight, "bias": bias})

        def norm() -> nn.ParameterDict:
            flat = torch.zeros(len(seeds), 1, shape.width)
            return nn.ParameterDict({"weight": flat + 1, "bias": flat})

        width, inner = shape.width, shape.head * shape.heads
        self.read_in = linear(shape.channels, width)
        self.positions = draw(shape.places, width, fan=shape.places)
        self.blocks = nn.ModuleList()
        for _ in range(shape.layers):
            parts = {"norm_1": norm(), "qkv": linear(width, 3 * inner), "out": linear(inner, width)}
            parts |= {"norm_2": norm(), "up": linear(width, 4 * width)}
            self.blocks.append(nn.ModuleDict(parts | {"down": linear(4 * width, width)}))
        self.norm = norm()
        self.read_out = linear(width, 1)

    def forward(
        self, xs: Float[Tensor, "member batch n d"], ys: Float[Tensor, "member batch n"]
    ) -> Float[Tensor, "member_out batch n"]:
        """The prediction of each y from the pairs before it and its own x.

        The same contexts go to every member if their ``member`` axis has length 1.
        """
        resid = self.resid(xs, ys)[-1]
        if self.shape.block == "standard":
            resid = _norm(resid, self.norm)
        out = _linear(resid, self.read_out)[..., 0]
        return out[..., :: 2 if self.shape.format == "two" else 1]

    def resid(
        self, xs: Float[Tensor, "member batch n d"], ys: Float[Tensor, "member batch n"]
    ) -> list[Float[Tensor, "member_out batch pos width"]]:
        """The residual stream: embedding, then after each block."""
        self._check(xs, ys)
        tokens = as_tokens(xs, ys, self.shape.format)
        tokens = tokens.expand(len(self.seeds), *tokens.shape[1:])
        x = _linear(tokens, self.read_in) + self.positions[:, None, : tokens.shape[2]]
        stream = [x]
        for block in self.blocks:
            x = self._block(x, block)
            stream.append(x)
        return stream

    def _check(self, xs: Tensor, ys: Tensor) -> None:
        members, pairs, dim = xs.shape[0], *xs.shape[2:]
        if dim != self.shape.dim:
            raise IclError(f"These learners read x of {self.shape.dim} dimensions; got {dim}.")
        if not 1 <= pairs <= self.shape.pairs:
            raise IclError(
                f"These learners read 1 to {self.shape.pairs} pairs, the last without its y; "
                f"got {pairs}. Cut the contexts, or train with longer ones."
            )
        if members not in (1, len(self.seeds)):
            raise IclError(f"Give contexts for 1 or for all {len(self.seeds)} members.")
        if not (xs.isfinite().all() and ys[..., :-1].isfinite().all()):
            raise IclError("The contexts hold NaN or infinite numbers: leave those pairs out.")

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and half-precision weights."""
        store(self, folder, "learners", torch.float16)

    def _block(self, x: Tensor, block: Any) -> Tensor:
        released = self.shape.block == "released"
        seen = _norm(x, block["norm_1"])
        x = (seen if released else x) + self._attention(seen, block)
        seen = _norm(x, block["norm_2"])
        hidden = functional.gelu(_linear(seen, block["up"]), approximate="tanh")
        return (seen if released else x) + _linear(hidden, block["down"])

    def _attention(self, x: Tensor, block: Any) -> Tensor:
        member, batch, pos, _ = x.shape
        qkv = _linear(x, block["qkv"]).view(member * batch, pos, 3, self.shape.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return _linear(mixed.transpose(1, 2).reshape(member, batch, pos, -1), block["out"])


def _linear(x: Tensor, at: Any) -> Tensor:
    member, batch, pos, width = x.shape
    flat = torch.baddbmm(at["bias"], x.reshape(member, batch * pos, width), at["weight"])
    return flat.view(member, batch, pos, -1)


def _norm(x: Tensor, at: Any) -> Tensor:
    flat = functional.layer_norm(x, x.shape[-1:])
    return flat * at["weight"][:, None] + at["bias"][:, None]


def as_tokens(
    xs: Float[Tensor, "*batch n d"], ys: Float[Tensor, "*batch n"], form: Format
) -> Float[Tensor, "*batch pos channel"]:
    """What the network reads, so that the token of x_i has seen y_1 .. y_{i-1} and not y_i.

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


def load(
    name_or_path: str | Path, *, step: int | None = None, device: str | torch.device = "cpu"
) -> Learners:
    """Load learners, frozen, ready to be looked into.

    Args:
        name_or_path: a shipped name (``"regression-d8"``), the name of one that was trained here
            (``python -m iclutils train NAME``), or a folder that ``Learners.save`` wrote.
        step: of a name, one of its training checkpoints; the final one if omitted.
        device: where to put them.

    Example:
        >>> nets = regressors.load("regression-d8")
        >>> xs, ys = torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5)
        >>> nets(xs, ys).shape[1:]
        torch.Size([3, 5])
    """
    return restore(
        zoo.find(name_or_path, step),
        lambda shape, seeds: Learners(Shape(**shape), seeds),
        "learners",
        "Models that read tokens are loaded with iclutils.models.load.",
        device,
    )
