"""The dual model of softmax attention: a linear model of features, after one gradient step.

With D the demonstrations, T the other keys, φ(k)·φ(q) = exp(k·q/√d) and D_q = Σ φ(k_j)·φ(q),
attention gives W_0 φ(q) + ΔW φ(q), *query term* and *demonstration update*: W_0 = Σ_T v_j
φ(k_j)ᵀ / D_q, ΔW = Σ_D v_i φ(k_i)ᵀ / D_q. ΔW is a step of gradient descent, D_q held fixed, on
L(W) = -Σ_D v_i · W φ(k_i) / D_q ({cite}`ren2024`; the sign as derived here), which raises
similarities and has no minimum. Shapes as in ``features``; ``demos`` (…, key) are the keys of D."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError
from ...interp.at_query import Allowed, Keys, Queries, scores
from ...models.lsa import Layer
from .features import Values, attention, log_normaliser

Query = Float[Tensor, "*batch channel"]
Demos = Bool[Tensor, "*#batch key"]
SMALLEST = 1e-290  # D in scaled features; below, float64 begins to lose digits


def dual_form(
    queries: Queries, keys: Keys, values: Values, demos: Demos, allowed: Allowed | None = None
) -> tuple[Float[Tensor, "*batch query value"], Float[Tensor, "*batch query value"]]:
    """Query term and demonstration update of all queries; their sum is softmax attention.

    Example:
        >>> import torch
        >>> from iclutils.chapters.contrastive_kernel import dual, features
        >>> tokens = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        >>> demos = torch.tensor([True, True, True, False, False])
        >>> first, update = dual.dual_form(tokens, tokens, tokens, demos)
        >>> torch.allclose(first + update, features.attention(tokens, tokens, tokens))
        True
    """
    weights = scores(queries, keys, allowed).softmax(-1)
    chosen = demos[..., None, :]
    return (weights * ~chosen) @ values, (weights * chosen) @ values


def trajectory(
    query: Query, keys: Keys, values: Values, demos: Demos, allowed: Allowed | None = None
) -> Float[Tensor, "*batch time value"]:
    """Answers of the dual model to its query as it learns one demonstration after the other: entry
    0 is the query term, entry n has learned those among the first n keys, the last is attention's
    output. ``allowed`` is (…, key)."""
    seen = None if allowed is None else allowed[..., None, :]
    by_key = scores(query[..., None, :], keys, seen).softmax(-1).mT * values
    first = (by_key * ~demos[..., None]).sum(-2, keepdim=True)
    return torch.cat([first, first + (by_key * demos[..., None]).cumsum(-2)], -2)


@dataclass(frozen=True)
class DualModel:
    """A linear model of features, z ↦ W φ(z), for one query of each context, held by its
    coefficients: W = exp(log_scale) Σ_i c_i v_i φ(k_i)ᵀ, with exp(log_scale) = 1/D_q."""

    keys: Float[Tensor, "*batch key channel"]
    values: Float[Tensor, "*batch key value"]
    coefficients: Float[Tensor, "*batch key"]
    log_scale: Float[Tensor, "*batch"]

    def __call__(
        self, points: Float[Tensor, "*batch point channel"]
    ) -> Float[Tensor, "*batch point value"]:
        """W φ(z) for every z; far from the query it may overflow, which ``dual_form`` cannot."""
        exponent = scores(points, self.keys) + self.log_scale[..., None, None]
        return (exponent.exp() * self.coefficients[..., None, :]) @ self.values

    def updated(self, demos: Demos, size: float | int = 1.0) -> DualModel:
        """The model after a gradient step, ``size`` times as long as the one of attention."""
        return replace(self, coefficients=self.coefficients + size * demos.to(self.keys))

    def similarities(self) -> Float[Tensor, "*batch key"]:
        """v_i·W φ(k_i) of every key: a step on L raises their sum over demonstrations. No property
        of attention's output: one vector added to all keys changes them."""
        return (self(self.keys) * self.values).sum(-1)

    def loss(self, demos: Demos) -> Float[Tensor, "*batch"]:
        """L(W) = -(1/D_q) Σ_D v_i · W φ(k_i)."""
        return -(self.similarities() * demos).sum(-1) * self.log_scale.exp()

    def info_nce(self, demos: Demos) -> Float[Tensor, "*batch"]:
        """-(1/D_q) Σ_D [v_i·u_i - log Σ_{j∈D} exp(v_j·u_i)], with u_i = W φ(k_i): what L would be
        with negatives. The bracket is a log-probability, so it cannot fall below 0."""
        logits = (self(self.keys) @ self.values.mT).masked_fill(~demos[..., None, :], -torch.inf)
        own = logits.log_softmax(-1).diagonal(dim1=-2, dim2=-1)
        return -torch.where(demos, own, 0.0).sum(-1) * self.log_scale.exp()


def initial_model(query: Query, keys: Keys, values: Values, demos: Demos) -> DualModel:
    """The model W_0 of one query of each context: all keys that are no demonstration."""
    total = log_normaliser(query[..., None, :], keys)[..., 0]
    return DualModel(keys, values, (~demos).to(keys).expand(keys.shape[:-1]), -total)


def gradient_steps(
    loss: Callable[[Tensor], Tensor], matrix: Float[Tensor, "*shape"], rate: float, steps: int = 1
) -> Float[Tensor, "*shape"]:
    """W ← W - rate ∂loss/∂W by autograd, so many times."""
    for _ in range(steps):
        with torch.enable_grad():
            at = matrix.detach().requires_grad_()
            (slope,) = torch.autograd.grad(loss(at), at)
        matrix = matrix - rate * slope
    return matrix


def explicit_steps(
    query: Float[Tensor, "*batch feature"],
    keys: Float[Tensor, "*batch key feature"],
    values: Float[Tensor, "*batch key value"],
    demos: Demos,
    allowed: Allowed | None = None,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
) -> tuple[Float[Tensor, "*batch value"], Float[Tensor, "*batch value"]]:
    """Answers before and after a gradient step from W_0, with W a matrix: what ``dual_form`` is
    checked against. Query and keys are given by their features, ``features.gram`` or
    ``features.taylor``; ``allowed`` is (…, key). With u_i = W φ(k_i) the loss is (1/D_q) Σ_D
    [-v_i·u_i + β mean_{j∈D, j≠i} v_j·u_i] + (α/2) |W|²."""
    seen = torch.ones_like(keys[..., 0], dtype=torch.bool) if allowed is None else allowed
    chosen = demos & seen
    values = values.to(keys)
    total = ((keys @ query[..., None])[..., 0] * seen).sum(-1)
    if not bool((total > SMALLEST).all()):
        raise IclError(
            "Queries and keys are too far apart for features in float64: subtract the mean key "
            "from all keys, or use dual_form."
        )
    targets = contrasted(values, chosen, beta)

    def loss(matrix: Tensor) -> Tensor:
        towards = ((keys @ matrix.mT) * targets).sum(-1) * chosen
        return -(towards.sum(-1) / total).sum() + alpha / 2 * matrix.square().sum()

    first = (values * (seen & ~chosen)[..., None]).mT @ keys / total[..., None, None]
    both = first, gradient_steps(loss, first, 1.0)
    before, after = ((matrix @ query[..., None])[..., 0] for matrix in both)
    return before, after


def regularised(
    queries: Queries, keys: Keys, values: Values, demos: Demos, alpha: float
) -> Float[Tensor, "*batch query value"]:
    """(1-α) W_0 φ(q) + ΔW φ(q): the step on L + (α/2) |W|² weakens the query term alone."""
    first, update = dual_form(queries, keys, values, demos)
    return (1 - alpha) * first + update


def contrasted(values: Values, demos: Demos, beta: float) -> Float[Tensor, "*batch key value"]:
    """v_i - β mean_{j∈D, j≠i} v_j for demonstrations i; the values of other keys stay."""
    chosen = demos[..., None].to(values)
    others = (values * chosen).sum(-2, keepdim=True) - values
    return values - beta * chosen * others / (chosen.sum(-2, keepdim=True) - 1).clamp(min=1)


def negative_samples(
    queries: Queries, keys: Keys, values: Values, demos: Demos, beta: float
) -> Float[Tensor, "*batch query value"]:
    """The step on L less β times the mean similarity to other demonstrations: other values."""
    return attention(queries, keys, contrasted(values, demos, beta))


@dataclass(frozen=True)
class Block:
    """Weights of a layer, for row vectors: attention, then a feed-forward part."""

    attention: Layer  # (head, channel, inner), and ``out`` (head, inner, channel)
    up: Float[Tensor, "channel hidden"]
    up_bias: Float[Tensor, "hidden"]
    down: Float[Tensor, "hidden channel"]
    down_bias: Float[Tensor, "channel"]
    activation: Callable[[Tensor], Tensor] = torch.relu

    def heads(self, tokens: Float[Tensor, "*batch pos channel"]) -> list[Tensor]:
        """Queries, keys and values of all heads, (*batch, head, pos, inner)."""
        return [torch.einsum("...pc,hci->...hpi", tokens, weight) for weight in self.attention[:3]]


def layer_model(
    tokens: Float[Tensor, "*batch pos channel"], block: Block, demos: Bool[Tensor, "*#batch pos"]
) -> tuple[DualModel, Float[Tensor, "*batch channel"]]:
    """The dual model of a whole layer for its last token, one part a head, and a constant. A layer
    gives a + W_2 act(W_1 a + b_1) + b_2 for a = x_q + Σ_h O_h h'_h; with act(u) = g(u) u and the
    gates G of the answer *after* the step it is linear in a, M a + c with M = I + W_2 G W_1 and
    c = W_2 G b_1 + b_2. So the output is the sum over heads of ``model.updated(demos)`` at the
    head's query, with M O_h v_i in the place of v_i, plus M x_q + c. Derivation ours, after
    {cite}`ren2024`."""
    queries, keys, values = block.heads(tokens)
    own, out = tokens[..., -1, :], block.attention.out
    mixed = attention(queries[..., -1:, :], keys, values)[..., 0, :]
    hidden = (own + torch.einsum("...hi,hic->...c", mixed, out)) @ block.up + block.up_bias
    gates = torch.where(hidden == 0, 0.0, block.activation(hidden) / hidden)[..., None, :]

    def linear(rows: Tensor) -> Tensor:
        return rows + (rows @ block.up * gates) @ block.down

    mapped = torch.einsum("...hki,hic->...hkc", values, out)
    mapped = linear(mapped.flatten(-3, -2)).unflatten(-2, mapped.shape[-3:-1])
    constant = linear(own[..., None, :]) + (block.up_bias * gates) @ block.down + block.down_bias
    model = initial_model(queries[..., -1, :], keys, mapped, demos[..., None, :])
    return model, constant[..., 0, :]
