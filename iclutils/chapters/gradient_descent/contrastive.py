"""The dual model of softmax attention: a linear model of features, after one gradient step.

Keys fall into demonstrations D and the rest T, which has the query's own token. With features such
that φ(k)·φ(q) = exp(k·q/√d), and D_q = Σ φ(k_j)·φ(q) over all keys, attention's output is

    h'_q = W_0 φ(q) + ΔW φ(q),   W_0 = (1/D_q) Σ_T v_j φ(k_j)ᵀ,   ΔW = (1/D_q) Σ_D v_i φ(k_i)ᵀ.

ΔW is one step of gradient descent, at the rate η, on

    L(W) = -(1 / (η D_q)) Σ_D v_i · W φ(k_i),

with D_q held fixed: minimising L *raises* the similarity between the model's answer to a key and
the value of the same token. Key and value are two views of one token, a positive pair, as in
contrastive learning, but no pair is pushed apart. L is linear in W: it has no minimum, and the one
step of the size η is all there is. D_q depends on q, so each query has a model of its own
({cite}`ren2024`, section 3; the sign as derived here).

W is held by its coefficients on the pairs (v_i, k_i), so no features are needed. Exponents are
shifted by log D_q. Shapes as in ``features``; ``demos`` (…, key) are the keys of D. Without one,
the step is 0.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import contrastive
    >>> from iclutils.chapters.gradient_descent.features import attention
    >>> generator = torch.Generator().manual_seed(0)
    >>> keys, values = torch.randn(2, 5, 3, generator=generator).double()
    >>> queries = torch.randn(4, 3, generator=generator).double()
    >>> demos = torch.tensor([True, True, True, False, False])
    >>> before = contrastive.start(queries[0], keys, values, demos)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from ...errors import IclError
from .features import Allowed, Keys, Queries, Values, checked_values, log_normaliser, scores

Query = Float[Tensor, "*query_batch query_channel"]
Demos = Bool[Tensor, "*demos"]


class Step(NamedTuple):
    """What the dual model of each query says to it: before the step, and what the step adds."""

    start: Float[Tensor, "*batch query value"]  # W_0 φ(q)
    step: Float[Tensor, "*batch query value"]  # ΔW φ(q)
    log_normaliser: Float[Tensor, "*batch query"]  # log D_q


def dual_step(
    queries: Queries,
    keys: Keys,
    values: Values,
    demos: Demos,
    allowed: Allowed | None = None,
) -> Step:
    """Start and step of all queries at once; their sum is softmax attention.

    Args:
        queries: (*batch, query, channel); for heads, let the batch be (batch, head).
        keys: (*batch, key, channel).
        values: (*batch, key, value).
        demos: which keys are demonstrations, (…, key), broadcast over the batch.
        allowed: which keys a query may look at, (…, query, key), such as a causal mask.

    Example:
        >>> found = contrastive.dual_step(queries, keys, values, demos)
        >>> torch.allclose(found.start + found.step, attention(queries, keys, values))
        True
    """
    exponent = scores(queries, keys, allowed)
    total = exponent.logsumexp(-1)
    weights = exponent.softmax(-1)  # exp(exponent - total), without the slow exp of -inf
    chosen = checked_demos(demos, keys)[..., None, :]
    checked_values(keys, values)
    step = (weights * chosen) @ values
    return Step((weights * ~chosen) @ values, step, total)


@dataclass(frozen=True)
class Dual:
    """A linear model of features, z ↦ W φ(z), for one query of each context.

    W = exp(log_scale) Σ_i c_i v_i φ(k_i)ᵀ, with exp(log_scale) = 1/D_q: call it with tokens z.
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
        return _finite((exponent.exp() * self.coefficients[..., None, :]) @ self.values)

    def stepped(self, demos: Demos, size: float = 1.0) -> Dual:
        """The model after a gradient step, ``size`` times as long as the one of attention."""
        chosen = checked_demos(demos, self.keys).to(self.coefficients)
        return replace(self, coefficients=self.coefficients + size * chosen)

    def loss(self, demos: Demos, rate: float = 1.0) -> Float[Tensor, "*batch"]:
        """L(W) = -(1 / (η D_q)) Σ_D v_i · W φ(k_i), for the rate η."""
        pulled = self._pull(demos) * self.coefficients
        return -_finite(pulled.sum(-1)) / rate

    def _pull(self, demos: Demos) -> Float[Tensor, "*batch key"]:
        """Σ_{i∈D} v_i·v_j φ(k_i)·φ(k_j) / D_q², for every key j."""
        near = scores(self.keys, self.keys) + 2 * self.log_scale[..., None, None]
        alike = self.values @ self.values.mT
        return (near.exp() * alike * checked_demos(demos, self.keys)[..., None]).sum(-2)


def start(query: Query, keys: Keys, values: Values, demos: Demos) -> Dual:
    """The model W_0 of one query (*batch, channel): all keys that are no demonstration.

    Example:
        >>> after = before.stepped(demos)(queries[:1])
        >>> torch.allclose(after, attention(queries[:1], keys, values))
        True
    """
    if query.shape[:-1] != keys.shape[:-2]:
        raise IclError(
            f"Need one query for each context, (*batch, channel); got {tuple(query.shape)} for "
            f"keys {tuple(keys.shape)}."
        )
    total = log_normaliser(query[..., None, :], keys)[..., 0]
    others = (~checked_demos(demos, keys)).to(keys.dtype)
    return Dual(keys, checked_values(keys, values), others, -total)


class Path(NamedTuple):
    """Entry n: after the gradients of the demonstrations among the first n keys."""

    predictions: Float[Tensor, "*batch time value"]
    losses: Float[Tensor, "*batch time"]


def path(query: Query, keys: Keys, values: Values, demos: Demos, rate: float = 1.0) -> Path:
    """The dual model as it learns demonstration by demonstration: (*batch, key + 1, …).

    The gradient of L is a sum over demonstrations and does not depend on W, so its parts can be
    added one by one, in any order. Entry 0 is W_0; the last is after the whole step, h'_q.

    Example:
        >>> walked = contrastive.path(queries[0], keys, values, demos)
        >>> torch.allclose(walked.predictions[-1], attention(queries, keys, values)[0])
        True
    """
    model = start(query, keys, values, demos)
    chosen = checked_demos(demos, keys)
    exponent = scores(query[..., None, :], keys)[..., 0, :] + model.log_scale[..., None]
    parts = (exponent.exp() * chosen)[..., None] * values
    first = model(query[..., None, :])
    predictions = torch.cat([first, first + parts.cumsum(-2)], -2)
    drops = _finite(model._pull(demos) * chosen) / rate
    loss = model.loss(demos, rate)[..., None]
    return Path(predictions, torch.cat([loss, loss - drops.cumsum(-1)], -1))


class Alignment(NamedTuple):
    """How near a model's answer W φ(k_i) is to the value v_i of the same token, for every key."""

    inner: Float[Tensor, "*batch key"]
    cosine: Float[Tensor, "*batch key"]  # 0 if the answer is 0


def alignment(model: Dual) -> Alignment:
    """The similarity of positive pairs, which a step on L raises in sum over demonstrations.

    It is a property of the model, not of attention's output: one vector added to all keys leaves
    attention as it is and changes φ(k_i)·φ(k_j), so compare similarities with care.

    Example:
        >>> was, now = (contrastive.alignment(m).inner for m in (before, before.stepped(demos)))
        >>> bool(now[demos].sum() > was[demos].sum())
        True
    """
    near = scores(model.keys, model.keys)
    top = near.amax(-1, keepdim=True)
    direction = ((near - top).exp() * model.coefficients[..., None, :]) @ model.values
    inner = (model(model.keys) * model.values).sum(-1)
    return Alignment(inner, functional.cosine_similarity(direction, model.values, -1, 1e-300))


def borrowed_normaliser(
    queries: Queries, keys: Keys, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query other"]:
    """|D_q / D_other - 1|: how wrong the answer to q is from the model of another query.

    Both models have the same pairs (with a causal mask, give queries that see the same keys);
    they differ by D alone, so the relative error is the same for every value.

    Example:
        >>> contrastive.borrowed_normaliser(queries, keys).diagonal().max() < 1e-12
        tensor(True)
    """
    total = log_normaliser(queries, keys, allowed)
    return (total[..., :, None] - total[..., None, :]).expm1().abs()


def info_nce_loss(
    model: Dual, demos: Demos, temperature: float = 1.0, rate: float = 1.0
) -> Float[Tensor, "*batch"]:
    """-(1/(η D_q)) Σ_D [v_i·u_i - τ log Σ_{j∈D} exp(v_j·u_i/τ)], with u_i = W φ(k_i).

    What L would be with negatives: every other demonstration's value is pushed from the answer.
    The bracket is τ times a log-probability, so this loss cannot fall below 0, while L has no
    bound.

    Example:
        >>> bool(contrastive.info_nce_loss(before, demos) > 0)
        True
    """
    chosen = checked_demos(demos, model.keys)
    likely = _similarities(model, chosen, temperature).diagonal(dim1=-2, dim2=-1)
    likely = torch.where(chosen, likely, 0.0).sum(-1)
    return -_finite(temperature * likely * model.log_scale.exp()) / rate


def info_nce_values(
    model: Dual, demos: Demos, temperature: float = 1.0
) -> Float[Tensor, "*batch key value"]:
    """v_i - Σ_{j∈D} p_ij v_j: the values with which attention takes a step on ``info_nce_loss``.

    p_ij is the softmax over j of v_j·W φ(k_i)/τ. For W = 0 it is uniform, and the step is the one
    of ``variants.negative_samples`` with β = 1 and all demonstrations, i too, as negatives. Values
    of other keys stay.
    """
    chosen = checked_demos(demos, model.keys)
    mean = _similarities(model, chosen, temperature).exp() @ model.values
    return torch.where(chosen[..., None], model.values - mean, model.values)


def _similarities(model: Dual, chosen: Tensor, temperature: float) -> Tensor:
    """log p_ij over demonstrations j: (*batch, key i, key j)."""
    if not temperature > 0:
        raise IclError(f"A temperature is positive; got {temperature}.")
    inner = model(model.keys) @ model.values.mT / temperature
    inner = inner.masked_fill(~chosen[..., None, :], -torch.inf)
    return inner - inner.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)


def checked_demos(demos: Demos, keys: Keys) -> Bool[Tensor, "*batch key"]:
    """The mask of demonstrations, of the shape of the keys."""
    try:
        return demos.expand(keys.shape[:-1])
    except RuntimeError as error:
        raise IclError(
            f"Need a mask of demonstrations (…, key) that fits keys {tuple(keys.shape)}; got "
            f"{tuple(demos.shape)}. For heads, give it an axis of length 1."
        ) from error


def _finite(found: Tensor) -> Tensor:
    if not bool(found.isfinite().all()):
        raise IclError(
            f"The dual model's answer to a key is beyond the numbers of {found.dtype}: use float64 "
            "or smaller keys. Its answer to the query itself (dual_step) never overflows."
        )
    return found
