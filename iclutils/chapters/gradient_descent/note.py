"""The formulas for softmax attention of the note that this chapter starts from, as written.

Each function takes what ``contrastive.dual_step`` takes, for one slip alone, and all else right, so
that ``errors`` can tell what the slip costs (``as_written`` has three at once). Where a formula
has no size, it is read in the nearest way that has one, and the function says so. Here
v_i = W_V h_i is what attention mixes.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import contrastive, features, note
    >>> generator = torch.Generator().manual_seed(0)
    >>> queries, keys, values = torch.randn(3, 5, 3, generator=generator).double()
    >>> demos = torch.tensor([True, True, True, False, False])
    >>> halves = contrastive.dual_step(queries, keys, values, demos)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from .contrastive import Demos, checked_demos, dual_step
from .features import Keys, Queries, Values, attention, gaussian_attention, scores

Reading = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def minimised(
    queries: Queries, keys: Keys, values: Values, demos: Demos
) -> Float[Tensor, "*batch query value"]:
    """The similarity ⟨v_i, Wφ(k_i)⟩ is minimised: the step has the other sign, W_0 - ΔW.

    Example:
        >>> read = note.minimised(queries, keys, values, demos)
        >>> torch.allclose(read, halves.start - halves.step)
        True
    """
    first, step, _ = dual_step(queries, keys, values, demos)
    return first - step


def averaged(
    queries: Queries, keys: Keys, values: Values, demos: Demos
) -> Float[Tensor, "*batch query value"]:
    """The step carries 1/n, which softmax attention does not have: D_q is in its place.

    Example:
        >>> read = note.averaged(queries, keys, values, demos)
        >>> torch.allclose(read, halves.start + halves.step / 3)
        True
    """
    first, step, _ = dual_step(queries, keys, values, demos)
    return first + step / checked_demos(demos, keys).sum(-1).clamp(min=1)[..., None, None]


def normalised_twice(
    queries: Queries, keys: Keys, values: Values, demos: Demos
) -> Float[Tensor, "*batch query value"]:
    """P holds D⁻¹ and stands before a softmax, which has divided by D already: ΔW φ(q) / D_q."""
    first, step, total = dual_step(queries, keys, values, demos)
    return first + step * (-total[..., None]).exp()


def as_written(
    queries: Queries, keys: Keys, values: Values, demos: Demos
) -> Float[Tensor, "*batch query value"]:
    """W_0 φ(q) + P V M softmax(Kᵀq/√d) with P = -(1/n) D⁻¹: the three slips above at once."""
    first, step, total = dual_step(queries, keys, values, demos)
    count = checked_demos(demos, keys).sum(-1).clamp(min=1)[..., None, None]
    return first - step * (-total[..., None]).exp() / count


def wrong_side(
    queries: Queries, keys: Keys, values: Values, demos: Demos
) -> Float[Tensor, "*batch query value"]:
    """V D⁻¹ φ(K)ᵀ φ(Q): D, which has an entry for each query, divides by *key*.

    Entry i of D is then the normaliser of the query at the place of key i. D belongs on the right.
    """
    if queries.shape[-2] != keys.shape[-2]:
        raise IclError(
            f"V D⁻¹ φ(K)ᵀ has a size only if there are as many queries as keys; got "
            f"{queries.shape[-2]} queries and {keys.shape[-2]} keys."
        )
    exponent = scores(queries, keys)
    return (exponent - exponent.logsumexp(-1)[..., None, :]).exp() @ values


def gaussian(
    queries: Queries, keys: Keys, values: Values, demos: Demos
) -> Float[Tensor, "*batch query value"]:
    """The kernel of softmax is called Gaussian; it is the exponential of the inner product.

    Example:
        >>> read = note.gaussian(queries, keys, values, demos)
        >>> torch.allclose(read, features.gaussian_attention(queries, keys, values))
        True
    """
    return gaussian_attention(queries, keys, values)


def mapped_twice(
    queries: Queries, keys: Keys, values: Values, demos: Demos
) -> Float[Tensor, "*batch query value"]:
    """softmax(Kᵀq / √d) with q = φ(x): the feature map is applied, and then again by the softmax.

    K = (x_1, …) as written does not fit φ(x). With φ(x_i) in its place the scores are
    exp(k·q/√d) / √d, so attention takes an exponential of an exponential.
    """
    twice = scores(queries, keys).exp() / keys.shape[-1] ** 0.5
    if not bool(twice.isfinite().all()):
        raise IclError("Features mapped twice overflow here: take smaller queries or keys.")
    return twice.softmax(-1) @ values


def start_not_mapped(
    queries: Queries, keys: Keys, values: Values, demos: Demos
) -> Float[Tensor, "*batch query value"]:
    """W_0 x where W_0 φ(x) is needed. W_0 does not fit x; read as its part of degree 1,
    (1/D_q) Σ_T v_j k_j·q/√d.

    Example:
        >>> read = note.start_not_mapped(queries, keys, values, demos)
        >>> torch.allclose(read, features.attention(queries, keys, values))
        False
    """
    _, step, total = dual_step(queries, keys, values, demos)
    linear = scores(queries, keys) * (-total[..., None]).exp()
    return (linear * ~checked_demos(demos, keys)[..., None, :]) @ values + step


READINGS: dict[str, Reading] = {
    "minimised": minimised,
    "averaged": averaged,
    "normalised twice": normalised_twice,
    "as written": as_written,
    "wrong side": wrong_side,
    "gaussian": gaussian,
    "mapped twice": mapped_twice,
    "start not mapped": start_not_mapped,
}


def errors(
    queries: Queries, keys: Keys, values: Values, demos: Demos
) -> dict[str, Float[Tensor, "*batch query"]]:
    """|reading - softmax attention| / |softmax attention|, for each reading and query.

    Example:
        >>> sorted(note.errors(queries, keys, values, demos))[:2]
        ['as written', 'averaged']
    """
    exact = attention(queries, keys, values)
    size = exact.norm(dim=-1).clamp(min=torch.finfo(exact.dtype).tiny)
    return {
        name: (reading(queries, keys, values, demos) - exact).norm(dim=-1) / size
        for name, reading in READINGS.items()
    }
