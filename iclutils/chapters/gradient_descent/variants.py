"""Variants of attention, each from a change of the loss that attention takes a step on.

The loss of the dual model of a query is L(W) = -(1/(η D_q)) Σ_D v_i·W φ(k_i), and attention is its
model after one step at the rate η from W_0 (``contrastive``). Three changes ({cite}`ren2024`,
section 4; the derivations are ours), each a change of attention:

- *Regularised.* Add (α/(2η)) |W|². The gradient gains (α/η) W, so a step is W ← (1-α) W + ΔW. Only
  what the query's side says is scaled; without it (W_0 = 0) one step is as before. After t steps
  W_t = (1-α)^t W_0 + [1 + (1-α) + … + (1-α)^(t-1)] ΔW. Now there is a minimum, ΔW/α, and for
  0 < α < 2 the steps go to it.
- *Augmented.* The views of a token, linear so far, become non-linear: g_1(k_i) and g_2(v_i). The
  loss, hence attention, has them in the places of k_i and v_i, in D_q too.
- *Negative samples.* Subtract β times the mean similarity to negatives: -(1/(η D_q)) Σ_D (v_i -
  (β/|N_i|) Σ_{N_i} v_j)·W φ(k_i). It is linear in W again, so the bracket takes the place of v_i.

Shapes as in ``features``. ``explicit.learnt`` takes the steps with autograd instead.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import contrastive, features, variants
    >>> generator = torch.Generator().manual_seed(0)
    >>> queries, keys, values = torch.randn(3, 5, 3, generator=generator).double()
    >>> demos = torch.tensor([True, True, True, False, False])
    >>> plain = features.attention(queries, keys, values)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError
from .contrastive import Demos, checked_demos, dual_step
from .explicit import others
from .features import Allowed, Keys, Queries, Values, attention, checked_values

View = Callable[[Tensor], Tensor]


def regularised(
    queries: Queries,
    keys: Keys,
    values: Values,
    demos: Demos,
    alpha: float,
    steps: int = 1,
    allowed: Allowed | None = None,
) -> Float[Tensor, "*batch query value"]:
    """(1-α)^t W_0 φ(q) + [1 - (1-α)^t]/α ΔW φ(q): attention with other weights, normalised as ever.

    With α = 0 the factor of the step is t.

    Example:
        >>> torch.allclose(variants.regularised(queries, keys, values, demos, alpha=0.0), plain)
        True
    """
    if steps < 1 or not math.isfinite(alpha):
        raise IclError(f"Need at least one step and a finite α; got {steps} steps and {alpha}.")
    first, step, _ = dual_step(queries, keys, values, demos, allowed)
    kept = (1 - alpha) ** steps
    gained = sum((1 - alpha) ** s for s in range(steps))
    return kept * first + gained * step


def regularised_limit(
    queries: Queries,
    keys: Keys,
    values: Values,
    demos: Demos,
    alpha: float,
    allowed: Allowed | None = None,
) -> Float[Tensor, "*batch query value"]:
    """(ΔW/α) φ(q), the minimum of the regularised loss; it has forgotten W_0."""
    if not 0 < alpha < math.inf:
        raise IclError(f"The regularised loss has a minimum only for α > 0; got {alpha}.")
    return dual_step(queries, keys, values, demos, allowed).step / alpha


def augmented(
    queries: Queries,
    keys: Keys,
    values: Values,
    on_keys: View | None = None,
    on_values: View | None = None,
    allowed: Allowed | None = None,
) -> Float[Tensor, "*batch query value"]:
    """Softmax attention with g_1(keys) and g_2(values); one that is omitted changes nothing.

    Example:
        >>> double = variants.augmented(queries, keys, values, on_values=lambda v: 2 * v)
        >>> torch.allclose(double, 2 * plain)
        True
    """
    key = keys if on_keys is None else on_keys(keys)
    value = values if on_values is None else on_values(values)
    return attention(queries, key, value, allowed)


def contrasted(
    keys: Keys,
    values: Values,
    demos: Demos,
    beta: float,
    negatives: Bool[Tensor, "*negatives"] | None = None,
) -> Float[Tensor, "*batch key value"]:
    """v_i - (β/|N_i|) Σ_{N_i} v_j for demonstrations; the values of other keys stay.

    Args:
        keys: to check shapes with.
        values: before.
        demos: which keys are demonstrations.
        beta: β.
        negatives: (…, key, key), row i the set N_i; all other demonstrations if omitted, later
            ones too: under a causal mask, give the earlier ones. An empty set takes nothing away.
    """
    if not math.isfinite(beta):
        raise IclError(f"β must be finite; got {beta}.")
    chosen = checked_demos(demos, keys)
    checked_values(keys, values)
    if negatives is None:
        negatives = others(chosen)
    try:
        negatives = negatives.expand(*keys.shape[:-1], keys.shape[-2])
    except RuntimeError as error:
        raise IclError(
            f"Need negatives (…, key, key) that fit keys {tuple(keys.shape)}; got "
            f"{tuple(negatives.shape)}."
        ) from error
    mean = negatives.to(values.dtype) @ values / negatives.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(chosen[..., None], values - beta * mean, values)


def negative_samples(
    queries: Queries,
    keys: Keys,
    values: Values,
    demos: Demos,
    beta: float,
    negatives: Bool[Tensor, "*negatives"] | None = None,
    allowed: Allowed | None = None,
) -> Float[Tensor, "*batch query value"]:
    """Softmax attention with ``contrasted`` values.

    Example:
        >>> torch.allclose(variants.negative_samples(queries, keys, values, demos, beta=0.0), plain)
        True
    """
    return attention(queries, keys, contrasted(keys, values, demos, beta, negatives), allowed)
