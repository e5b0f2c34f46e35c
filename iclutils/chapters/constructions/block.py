"""Block: the forward pass of a standard transformer block, whose weights are given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

Gelu = Literal["gelu", "gelu_new"]  # exact, or by tanh; the names are those of GPT-2's config
LN_EPSILON = 1e-5  # as in GPT-2


@dataclass(frozen=True)
class Block:
    """A GPT-2 block: x + attention(LN(x)), then + MLP(LN(·)). Nothing is left out.

    ``weights`` has the names and shapes of a block in GPT-2's checkpoints (matrices (in, out)), so
    that it can be loaded there and run.
    """

    weights: dict[str, Tensor]
    heads: int
    gelu: Gelu = "gelu"

    def __call__(self, x: Float[Tensor, "*batch pos width"]) -> Float[Tensor, "*batch pos width"]:
        """The residual stream after the block, in the precision of the weights."""
        x = x + self._attention(self._norm(x, "ln_1"))
        kind = "none" if self.gelu == "gelu" else "tanh"
        hidden = functional.gelu(self._linear(self._norm(x, "ln_2"), "mlp.c_fc"), approximate=kind)
        return x + self._linear(hidden, "mlp.c_proj")

    def to(self, dtype: torch.dtype) -> Block:
        """The same block with every weight rounded to ``dtype``."""
        weights = {name: weight.to(dtype) for name, weight in self.weights.items()}
        return Block(weights, self.heads, self.gelu)

    @property
    def hidden(self) -> int:
        """Neurons of the MLP."""
        return self.weights["mlp.c_fc.weight"].shape[1]

    @property
    def largest(self) -> float:
        """Largest absolute value of a weight or bias, gains of the LayerNorms included."""
        return max(float(weight.abs().max()) for weight in self.weights.values())

    def _norm(self, x: Tensor, name: str) -> Tensor:
        gain, shift = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], gain, shift, LN_EPSILON)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _attention(self, x: Tensor) -> Tensor:
        *batch, pos, width = x.shape
        parts = self._linear(x, "attn.c_attn").chunk(3, -1)
        split = [part.reshape(*batch, pos, self.heads, -1).transpose(-2, -3) for part in parts]
        query, key, value = split
        scores = query @ key.mT / math.sqrt(width // self.heads)
        future = torch.ones(pos, pos, dtype=torch.bool, device=x.device).triu(1)
        pattern = scores.masked_fill(future, -math.inf).softmax(-1)
        mixed = (pattern @ value).transpose(-2, -3).reshape(*batch, pos, width)
        return self._linear(mixed, "attn.c_proj")
