"""The dual model of softmax attention: a linear model of features, after one gradient step.

Keys fall into demonstrations D and the rest T, which has the query's own token. With features such
that φ(k)·φ(q) = exp(k·q/√d), and D_q = Σ φ(k_j)·φ(q) over all keys, attention's output is

    h'_q = W_0 φ(q) + ΔW φ(q),   W_0 = (1/D_q) Σ_T v_j φ(k_j)ᵀ,   ΔW = (1/D_q) Σ_D v_i φ(k_i)ᵀ,

the *query term* and the *demonstration update*. ΔW is one step of gradient descent, at the rate η,
on

    L(W) = -(1 / (η D_q)) Σ_D v_i · W φ(k_i),

with D_q held fixed: minimising L *raises* the similarity between the model's answer to a key and
the value of the same token. Key and value are two views of one token, a positive pair, as in
contrastive learning, but no pair is pushed apart. L is linear in W: it has no minimum, and the one
step of the size η is all there is. D_q depends on q, so each query has a model of its own
({cite}`ren2024`, section 3; the sign as derived here).

Changes of the loss are changes of attention ({cite}`ren2024`, section 4; derivations ours):
``regularised`` adds (α/(2η)) |W|²; ``negative_samples`` takes β times the mean similarity to the
other demonstrations off; views that are not linear put g_1(k_i) and g_2(v_i) in the places of k_i
and v_i, in D_q too. ``layer_model`` is the same for a whole layer, feed-forward part included.

Shapes as in ``features``; ``demos`` (…, key) are the keys of D. Without one, the update is 0.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import dual, features
    >>> generator = torch.Generator().manual_seed(0)
    >>> keys, values = torch.randn(2, 5, 3, generator=generator).double()
    >>> queries = torch.randn(4, 3, generator=generator).double()
    >>> demos = torch.tensor([True, True, True, False, False])
    >>> softmax = features.attention(queries, keys, values)
    >>> before = dual.initial_model(queries[0], keys, values, demos)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError
from ...models.lsa import Layer
from .features import Allowed, Keys, Queries, Values, attention, log_normaliser, scores

Query = Float[Tensor, "*query_batch query_channel"]
Demos = Bool[Tensor, "*demos"]
SMALLEST = 1e-290  # D in scaled features; below, float64 begins to lose digits


class DualForm(NamedTuple):
    """What the dual model of each query says to it, W_0 φ(q), and what the step adds, ΔW φ(q)."""

    query_term: Float[Tensor, "*batch query value"]
    demonstration_update: Float[Tensor, "*batch query value"]


def dual_form(
    queries: Queries, keys: Keys, values: Values, demos: Demos, allowed: Allowed | None = None
) -> DualForm:
    """Query term and demonstration update of all queries; their sum is softmax attention.

    Args:
        queries: (*batch, query, channel); for heads, let the batch be (batch, head).
        demos: which keys are demonstrations, (…, key), broadcast over the batch.
        allowed: which keys a query may look at, (…, query, key), such as a causal mask.

    Example:
        >>> torch.allclose(sum(dual.dual_form(queries, keys, values, demos)), softmax)
        True
    """
    weights = scores(queries, keys, allowed).softmax(-1)
    chosen = checked_demos(demos, keys)[..., None, :]
    return DualForm((weights * ~chosen) @ values, (weights * chosen) @ values)


def trajectory(
    query: Query, keys: Keys, values: Values, demos: Demos, allowed: Allowed | None = None
) -> Float[Tensor, "*batch time value"]:
    """What the dual model says to its query as it learns one demonstration after the other.

    The gradient of L is a sum over demonstrations and does not depend on W, so its parts can be
    added one by one. Entry 0 is the query term; entry n has learned the demonstrations among the
    first n keys; the last is attention's output. ``allowed`` is (…, key).

    Example:
        >>> torch.allclose(dual.trajectory(queries[0], keys, values, demos)[-1], softmax[0])
        True
    """
    seen = None if allowed is None else allowed[..., None, :]
    parts = scores(query[..., None, :], keys, seen).softmax(-1).mT * values
    chosen = checked_demos(demos, keys)[..., None]
    first = parts.masked_fill(chosen, 0.0).sum(-2, keepdim=True)
    return torch.cat([first, first + parts.masked_fill(~chosen, 0.0).cumsum(-2)], -2)


@dataclass(frozen=True)
class DualModel:
    """A linear model of features, z ↦ W φ(z), for one query of each context.

    W = exp(log_scale) Σ_i c_i v_i φ(k_i)ᵀ, with exp(log_scale) = 1/D_q: held by its coefficients,
    so no features are needed.
    """

    keys: Float[Tensor, "*batch key channel"]
    values: Float[Tensor, "*batch key value"]
    coefficients: Float[Tensor, "*batch key"]
    log_scale: Float[Tensor, "*batch"]

    def __call__(
        self, points: Float[Tensor, "*batch point channel"]
    ) -> Float[Tensor, "*batch point value"]:
        """W φ(z) for every z."""
        exponent = scores(points, self.keys) + self.log_scale[..., None, None]
        found = (exponent.exp() * self.coefficients[..., None, :]) @ self.values
        if not bool(found.isfinite().all()):
            raise IclError(
                f"The dual model's answer to a key is beyond the numbers of {found.dtype}: use "
                "float64 or smaller keys. Its answer to the query itself (dual_form) never "
                "overflows."
            )
        return found

    def updated(self, demos: Demos, size: float = 1.0) -> DualModel:
        """The model after a gradient step, ``size`` times as long as the one of attention."""
        chosen = checked_demos(demos, self.keys).to(self.coefficients)
        return replace(self, coefficients=self.coefficients + size * chosen)

    def similarities(self) -> Float[Tensor, "*batch key"]:
        """v_i·W φ(k_i) of every key: a step on L raises their sum over demonstrations.

        A property of the model, not of attention's output: one vector added to all keys leaves
        attention as it is and changes φ(k_i)·φ(k_j).
        """
        return (self(self.keys) * self.values).sum(-1)

    def loss(self, demos: Demos, rate: float = 1.0) -> Float[Tensor, "*batch"]:
        """L(W) = -(1 / (η D_q)) Σ_D v_i · W φ(k_i), for the rate η."""
        chosen = checked_demos(demos, self.keys)
        return -(self.similarities() * chosen).sum(-1) * self.log_scale.exp() / rate

    def info_nce(self, demos: Demos, temperature: float = 1.0) -> Float[Tensor, "*batch"]:
        """-(1/D_q) Σ_D [v_i·u_i - τ log Σ_{j∈D} exp(v_j·u_i/τ)], with u_i = W φ(k_i).

        What L would be with negatives: every other demonstration's value is pushed from the
        answer. The bracket is τ times a log-probability, so this loss cannot fall below 0.
        """
        chosen = checked_demos(demos, self.keys)
        logits = self(self.keys) @ self.values.mT / temperature
        log_p = logits.masked_fill(~chosen[..., None, :], -torch.inf).log_softmax(-1)
        own = torch.where(chosen, log_p.diagonal(dim1=-2, dim2=-1), 0.0)
        return -temperature * own.sum(-1) * self.log_scale.exp()


def initial_model(query: Query, keys: Keys, values: Values, demos: Demos) -> DualModel:
    """The model W_0 of one query (*batch, channel): all keys that are no demonstration.

    Example:
        >>> after = before.updated(demos)(queries[:1])
        >>> torch.allclose(after, softmax[:1])
        True
    """
    total = log_normaliser(query[..., None, :], keys)[..., 0]
    return DualModel(keys, values, (~checked_demos(demos, keys)).to(keys), -total)


# The same step without a closed form -------------------------------------------------------------


def gradient_steps(
    loss: Callable[[Tensor], Tensor],
    matrix: Float[Tensor, "*shape"],
    rate: float,
    steps: int = 1,
) -> Float[Tensor, "*shape"]:
    """W ← W - rate ∂loss/∂W by autograd, so many times; the loss may sum over a batch.

    Example:
        >>> dual.gradient_steps(lambda w: (w**2).sum() / 2, torch.tensor([[3.0]]), rate=0.5)
        tensor([[1.5000]])
    """
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
    rate: float = 1.0,
    steps: int = 1,
    alpha: float = 0.0,
    beta: float = 0.0,
) -> tuple[Float[Tensor, "*batch value"], Float[Tensor, "*batch value"]]:
    """What the model answers before and after gradient steps from W_0, with W a matrix.

    The loss is, with u_i = W φ(k_i),

        (1/(η D_q)) Σ_D [-v_i·u_i + β mean_{j∈D, j≠i} v_j·u_i] + (α/(2η)) |W|².

    Args:
        query: features of one query of each context, ``features.gram`` or ``features.taylor``.
        demos: which keys are demonstrations; the rest make W_0.
        allowed: (…, key), which keys the query may look at; all if omitted.
        alpha: α, of the squared norm.
        beta: β, of the negatives.

    Example:
        >>> said = dual.explicit_steps(*features.gram(queries[0], keys), values, demos)
        >>> torch.allclose(said[1], softmax[0])
        True
    """
    seen = torch.ones_like(keys[..., 0], dtype=torch.bool) if allowed is None else allowed
    chosen = checked_demos(demos, keys) & seen
    values = values.to(keys)
    total = ((keys @ query[..., None])[..., 0] * seen).sum(-1)
    if not bool((total > SMALLEST).all()):
        raise IclError(
            "Queries and keys are too long or too far apart for features in float64: subtract the "
            "mean key from all keys, or use dual_form, which needs no features."
        )

    targets = contrasted(values, chosen, beta)

    def loss(matrix: Tensor) -> Tensor:
        towards = ((keys @ matrix.mT) * targets).sum(-1) * chosen
        return (
            -(towards.sum(-1) / (rate * total)).sum() + alpha / (2 * rate) * matrix.square().sum()
        )

    first = (values * (seen & ~chosen)[..., None]).mT @ keys / total[..., None, None]
    both = first, gradient_steps(loss, first, rate, steps)
    before, after = ((matrix @ query[..., None])[..., 0] for matrix in both)
    return before, after


# Variants ----------------------------------------------------------------------------------------


def regularised(
    queries: Queries, keys: Keys, values: Values, demos: Demos, alpha: float, steps: int = 1
) -> Float[Tensor, "*batch query value"]:
    """(1-α)^t W_0 φ(q) + [1 + (1-α) + … + (1-α)^(t-1)] ΔW φ(q), after t steps.

    Only the query term is scaled by one step. For 0 < α < 2 the steps go to a minimum, ΔW/α.

    Example:
        >>> torch.allclose(dual.regularised(queries, keys, values, demos, alpha=0.0), softmax)
        True
    """
    first, update = dual_form(queries, keys, values, demos)
    return (1 - alpha) ** steps * first + sum((1 - alpha) ** s for s in range(steps)) * update


def contrasted(values: Values, demos: Demos, beta: float) -> Float[Tensor, "*batch key value"]:
    """v_i - β mean_{j∈D, j≠i} v_j for demonstrations i; the values of other keys stay."""
    chosen = demos[..., None].to(values)
    others = (values * chosen).sum(-2, keepdim=True) - values
    return values - beta * chosen * others / (chosen.sum(-2, keepdim=True) - 1).clamp(min=1)


def negative_samples(
    queries: Queries, keys: Keys, values: Values, demos: Demos, beta: float
) -> Float[Tensor, "*batch query value"]:
    """Softmax attention with ``contrasted`` values: the loss is linear in W again.

    Example:
        >>> torch.allclose(dual.negative_samples(queries, keys, values, demos, beta=0.0), softmax)
        True
    """
    return attention(queries, keys, contrasted(values, checked_demos(demos, keys), beta))


# A whole layer -----------------------------------------------------------------------------------


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
        return [torch.einsum("...pc,hci->...hpi", tokens, part) for part in self.attention[:3]]


def layer_model(
    tokens: Float[Tensor, "*batch pos channel"], block: Block, demos: Demos
) -> tuple[DualModel, Float[Tensor, "*batch channel"]]:
    """The dual model of a whole layer for its last token, one part a head, and a constant.

    With a the token after attention, a layer gives a + W_2 act(W_1 a + b_1) + b_2. An activation is
    a gate times its input, act(u) = g(u) u. Given the gates G the layer is linear in a, M a + c
    with M = I + W_2 G W_1 and c = W_2 G b_1 + b_2, and a = x_q + Σ_h O_h h'_h is what the heads'
    dual models say. So the output is the sum over heads of ``model.updated(demos)`` at the head's
    query, with M O_h v_i in the place of v_i, plus the constant M x_q + c. The gates are those of
    the answer *after* the step: M is known only once the answer is. Derivation ours, after the
    extension in {cite}`ren2024`.
    """
    queries, keys, values = block.heads(tokens)
    chosen = checked_demos(demos, tokens)[..., None, :]
    own, out = tokens[..., -1, :], block.attention.out
    mixed = attention(queries[..., -1:, :], keys, values)[..., 0, :]
    hidden = (own + torch.einsum("...hi,hic->...c", mixed, out)) @ block.up + block.up_bias
    gates = torch.where(hidden == 0, 0.0, block.activation(hidden) / hidden)[..., None, :]

    def linear(rows: Tensor) -> Tensor:
        return rows + (rows @ block.up * gates) @ block.down

    mapped = torch.einsum("...hki,hic->...hkc", values, out)
    mapped = linear(mapped.flatten(-3, -2)).unflatten(-2, mapped.shape[-3:-1])
    constant = linear(own[..., None, :]) + (block.up_bias * gates) @ block.down + block.down_bias
    return initial_model(queries[..., -1, :], keys, mapped, chosen), constant[..., 0, :]


def checked_demos(demos: Demos, keys: Keys) -> Bool[Tensor, "*batch key"]:
    """The mask of demonstrations, of the shape of the keys."""
    try:
        return demos.expand(keys.shape[:-1])
    except RuntimeError as error:
        raise IclError(
            f"Need a mask of demonstrations (…, key) that fits keys {tuple(keys.shape)}; got "
            f"{tuple(demos.shape)}. For heads, give it an axis of length 1."
        ) from error
