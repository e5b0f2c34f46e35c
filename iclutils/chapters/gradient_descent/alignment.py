"""Alignment: how near a trained solver is to an algorithm, by what both answer and by weights.

A predictor is a ``Solvers``, or any function of contexts (xs, ys) that returns the answers for
their queries, (batch,) or (member, batch). The measures are those of {cite}`vonoswald2023`,
section 3 and appendix: answers, the sensitivity of an answer to the query's x, interpolated
weights, and losses of contexts unlike those of training.

Example:
    >>> import torch
    >>> from iclutils.models import lsa
    >>> from iclutils.chapters.gradient_descent import alignment, construction, descent
    >>> from iclutils.tasks import regression
    >>> generator = torch.Generator().manual_seed(0)
    >>> drawn = regression.sample(regression.Task(10, inputs="uniform"), 32, 11, generator)
    >>> xs, ys = drawn.xs, drawn.ys
    >>> net = lsa.load("lsa-1")
    >>> step = descent.predictor([1.0])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ...errors import IclError, unknown
from ...models.lsa import Solvers
from ...progress import bar
from ...tasks.regression import Contexts, scaled_inputs, scaled_outputs

Predictor = Callable[[Tensor, Tensor], Tensor]
Labels = Float[Tensor, "label_batch label_n"]  # one for each x; a mismatch is refused with a cure
SHIFTS = {"inputs": scaled_inputs, "weights": scaled_outputs}


def answers(
    predictor: Predictor, xs: Float[Tensor, "batch n d"], ys: Labels
) -> Float[Tensor, "member batch"]:
    """What a predictor answers; solvers get the contexts in the precision of their weights.

    Example:
        >>> alignment.answers(net, xs, ys).shape
        torch.Size([5, 32])
    """
    with torch.no_grad():
        return _asked(predictor, *_given(predictor, xs, ys))


def sensitivity(
    predictor: Predictor, xs: Float[Tensor, "batch n d"], ys: Labels
) -> Float[Tensor, "member batch d"]:
    """The gradient of every answer with respect to the query's x; W, for one that is linear.

    Answers must depend on their own context alone. 0, if they do not depend on the query.

    Example:
        >>> alignment.sensitivity(step, xs, ys).shape
        torch.Size([1, 32, 10])
    """
    xs, ys = _given(predictor, xs, ys)
    members = len(predictor.seeds) if isinstance(predictor, Solvers) else 1
    with torch.enable_grad():
        query = xs[:, -1:].detach().expand(members, -1, -1, -1).clone().requires_grad_()
        pairs = xs[:, :-1].detach().expand(members, -1, -1, -1)
        if isinstance(predictor, Solvers):  # a query for each member: one backward pass for all
            found = predictor(torch.cat([pairs, query], -2), ys.expand(members, -1, -1))
            return _gradient(found.sum(), query)[..., 0, :]
        found = _asked(predictor, torch.cat([pairs, query], -2)[0], ys)
        return torch.stack([_gradient(row.sum(), query)[0, :, 0] for row in found])


class Alignment(NamedTuple):
    """Of each member: how its answers and sensitivities g compare with those of a reference."""

    cosine: Float[Tensor, "member"]  # mean cos(g, g'); 0 where one of them is 0
    difference: Float[Tensor, "member"]  # mean |g - g'|
    predictions: Float[Tensor, "member"]  # mean |answer - answer'|
    loss: Float[Tensor, "member"]  # half the mean squared error
    reference_loss: Float[Tensor, "member"]


def alignment(
    predictor: Predictor, reference: Predictor, xs: Float[Tensor, "batch n d"], ys: Labels
) -> Alignment:
    """Compare two predictors on the same contexts, in float64 once they have answered.

    Example:
        >>> alignment.alignment(step, step, xs, ys).cosine.round(decimals=4)
        tensor([1.], dtype=torch.float64)
    """
    both = (predictor, reference)
    found, other = (answers(one, xs, ys).double() for one in both)
    slope, slant = (sensitivity(one, xs, ys).double() for one in both)
    if len(found) != len(other) and 1 not in (len(found), len(other)):
        raise IclError(f"Cannot compare {len(found)} members with {len(other)}.")
    gap, lean = found - other, slope - slant
    members = len(gap)
    return Alignment(
        cosine_similarity(slope, slant, dim=-1, eps=1e-8).mean(-1),
        lean.norm(dim=-1).mean(-1),
        gap.abs().mean(-1),
        half_squares(found, ys).expand(members),
        half_squares(other, ys).expand(members),
    )


def half_squares(found: Float[Tensor, "member batch"], ys: Labels) -> Float[Tensor, "member"]:
    """The loss: half the mean squared error of the answers, against the last y.

    Example:
        >>> alignment.half_squares(ys[None, :, -1] + 2, ys).round(decimals=3)
        tensor([2.])
    """
    return 0.5 * (found - ys[..., -1]).square().mean(-1)


# Contexts unlike those of training ---------------------------------------------------------------


def under_shift(
    predictors: Mapping[str, Predictor], contexts: Contexts, factors: Sequence[float], kind: str
) -> dict[str, Float[Tensor, "member factor"]]:
    """Losses when inputs or weights are scaled, over the square of the factor.

    Labels grow with the factor in both, so a predictor that answers 0 keeps the same number, as
    does any whose answers scale with the labels; GD's do under "weights", not under "inputs".

    Args:
        predictors: by name.
        contexts: of a linear task; w stays as it is under "inputs".
        factors: positive.
        kind: "inputs" or "weights".

    Example:
        >>> found = alignment.under_shift({"step": step}, drawn, [1.0, 2.0], "weights")["step"][0]
        >>> torch.allclose(found[0], found[1])
        True
    """
    if kind not in SHIFTS:
        raise unknown("shift", kind, SHIFTS)
    if not factors or not all(0 < factor < float("inf") for factor in factors):
        raise IclError(f"Need at least one factor, all finite and above 0; got {list(factors)}.")
    rows: dict[str, list[Tensor]] = {name: [] for name in predictors}
    for factor in bar(factors, "factors"):
        moved = SHIFTS[kind](contexts, factor)
        for name, predictor in predictors.items():
            found = answers(predictor, moved.xs, moved.ys).double()
            rows[name].append(half_squares(found, moved.ys) / factor**2)
    return {name: torch.stack(row, -1) for name, row in rows.items()}


def with_noise(contexts: Contexts, count: int, generator: torch.Generator) -> Contexts:
    """The labels of ``count`` random pairs replaced by N(0, 1); the query's is kept.

    Example:
        >>> noisy = alignment.with_noise(drawn, 3, generator)
        >>> int((noisy.ys != ys)[0].sum())
        3
    """
    pairs = contexts.ys.shape[-1] - 1
    if not 0 <= count <= pairs:
        raise IclError(f"Labels of 0 .. {pairs} pairs can be replaced; got {count}.")
    place: dict[str, Any] = {"generator": generator, "device": generator.device}
    shape = (*contexts.ys.shape[:-1], pairs)
    chosen = torch.rand(shape, **place).argsort(-1).argsort(-1) < count
    chosen = torch.nn.functional.pad(chosen, (0, 1)).to(contexts.ys.device)
    noise = torch.randn(contexts.ys.shape, **place).to(contexts.ys)
    return contexts._replace(ys=torch.where(chosen, noise, contexts.ys))


# Weights -----------------------------------------------------------------------------------------


class Products(NamedTuple):
    """What a head's weights do: scores are e_j KQ e_iᵀ, and a key's token writes e_i PV."""

    kq: Float[Tensor, "member head channel channel"]
    pv: Float[Tensor, "member head channel channel"]


def products(network: Solvers, layer: int = 0) -> Products:
    """KQ and PV of a layer: rows are channels of the query's token, and of the key's.

    Example:
        >>> alignment.products(net).kq.shape
        torch.Size([5, 1, 11, 11])
    """
    if not 0 <= layer < network.shape.layers:
        raise IclError(f"Layers are 0 .. {network.shape.layers - 1}; asked for {layer}.")
    weights = network.layer(layer)
    return Products(weights.query @ weights.key.mT, weights.value @ weights.out)


class OffPattern(NamedTuple):
    """Shares of the squared norm of KQ and of PV that the construction has no use for, 0 .. 1."""

    kq: Float[Tensor, "member head"]
    pv: Float[Tensor, "member head"]


def off_pattern(network: Solvers, layer: int = 0, pattern: str = "gradient") -> OffPattern:
    """How much of a layer's weights is not the construction, at its best scale.

    KQ is compared with I on the x-block, PV with the entry from y to y ("gradient"), and also with
    I on the x-block ("plus"). "diagonal" admits any diagonal x-block of KQ and no more of PV than
    "gradient": a step with a rate for each axis.

    Example:
        >>> made = construction.constructed(lsa.Shape(10, 10), [1.0])
        >>> alignment.off_pattern(made).kq
        tensor([[0.]])
    """
    if pattern not in ("gradient", "plus", "diagonal"):
        raise unknown("pattern", pattern, ["gradient", "plus", "diagonal"])
    kq, pv = _of_pairs(network, layer)
    dim = network.shape.dim
    scores, writes = (m.diagonal(dim1=-2, dim2=-1) for m in (kq, pv))
    even = [part[..., :dim].mean(-1).square() * dim for part in (scores, writes)]
    inside_kq = scores[..., :dim].square().sum(-1) if pattern == "diagonal" else even[0]
    inside_pv = writes[..., dim].square() + (even[1] if pattern == "plus" else 0)
    return OffPattern(_outside(inside_kq, kq), _outside(inside_pv, pv))


def step_matrix(network: Solvers, layer: int = 0) -> Float[Tensor, "member d d"]:
    """A of the step that a layer of linear attention takes: -N Σ_heads PV_yy KQ_xx.

    If PV writes nothing from x to y and KQ compares x alone, the first layer answers
    x_qᵀ A (1/N) Σ_i x_i y_i; a step of GD has A = η I (see ``one_step``).

    Example:
        >>> made = construction.constructed(lsa.Shape(3, 10), [0.5])
        >>> alignment.step_matrix(made)[0].diagonal().round(decimals=3)
        tensor([0.5000, 0.5000, 0.5000])
    """
    kq, pv = _of_pairs(network, layer)
    if network.shape.kinds[layer] != "linear":
        raise IclError("Softmax attention has no matrix of its step; take linear attention.")
    dim = network.shape.dim
    return -network.shape.pairs * (pv[..., dim:, dim:] * kq[..., :dim, :dim]).sum(1)


def interpolate(network: Solvers, reference: Solvers, share: float) -> Solvers:
    """Solvers with ``share`` of the weights of a reference, the rest of their own.

    Of both, KQ is divided by the mean of its diagonal's first d entries and PV multiplied by it;
    then both products are averaged. So a loss that stays as low half-way says that the two are
    the same solution up to scale.

    Args:
        network: one linear head, in one layer or in layers that share it.
        reference: the same; ``construction.constructed`` gives one. One member, or as many.
        share: of the reference, 0 .. 1.

    Example:
        >>> made = construction.constructed(lsa.Shape(10, 10), [1.0])
        >>> half = alignment.interpolate(made, made, 0.5)
        >>> torch.allclose(half(xs[None], ys[None]), made(xs[None], ys[None]), atol=1e-5)
        True
    """
    if not 0 <= share <= 1:
        raise IclError(f"A share is within 0 .. 1; got {share}.")
    for solvers in (network, reference):
        shape = solvers.shape
        extra = shape.norm or shape.hidden or shape.width or "softmax" in shape.attention
        if extra or shape.heads > 1 or not (shape.shared or shape.layers == 1):
            raise IclError(
                "Weights are interpolated for a single linear head, alone or shared by all layers, "
                f"without LayerNorm, MLP or read-in; got {shape}."
            )
    if network.shape != reference.shape or len(reference.seeds) not in (1, len(network.seeds)):
        raise IclError(
            f"The reference must have the same shape, and one member or {len(network.seeds)}; got "
            f"{reference.shape} with {len(reference.seeds)}, for {network.shape}."
        )
    own, other = _to_scale(network), _to_scale(reference)
    kq, pv = (a + share * (b.to(a) - a) for a, b in zip(own, other, strict=True))
    unit = torch.eye(kq.shape[-1]).to(kq).expand_as(kq)
    mixed = Solvers(network.shape, network.seeds).to(kq).requires_grad_(False)
    parts = {"query": kq, "key": unit, "value": pv, "out": unit}
    for name, part in parts.items():
        mixed.attention[name].copy_(part[:, None])
    return mixed.eval()


def _to_scale(network: Solvers) -> Products:
    with torch.no_grad():
        kq, pv = products(network)
        dim = network.shape.dim
        scale = kq.diagonal(dim1=-2, dim2=-1)[..., :dim].mean(-1)[..., None, None]
    if bool((scale == 0).any()):
        raise IclError("The x-diagonal of KQ has mean 0: there is no scale to take out of it.")
    return Products(kq / scale, pv * scale)


def _of_pairs(network: Solvers, layer: int) -> Products:
    if network.shape.width or network.shape.separate:
        raise IclError("The construction is one of tokens (x, y); these solvers have others.")
    with torch.no_grad():
        return products(network, layer)


def _outside(inside: Tensor, matrix: Tensor) -> Tensor:
    """1 minus the share of the squared norm that lies inside; 0 for a matrix of zeros."""
    whole = matrix.square().sum((-2, -1))
    return torch.where(whole > 0, 1 - inside / whole, torch.zeros_like(whole)).clamp(min=0)


def _given(predictor: Predictor, xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor]:
    if xs.ndim != 3 or xs.shape[:2] != ys.shape:
        raise IclError(
            f"Need xs of (batch, n, d) and ys of (batch, n); got {tuple(xs.shape)} and "
            f"{tuple(ys.shape)}."
        )
    if not isinstance(predictor, Solvers):
        return xs, ys
    weight = predictor.attention["query"]
    return xs.to(weight), ys.to(weight)


def _asked(predictor: Predictor, xs: Tensor, ys: Tensor) -> Tensor:
    found = predictor(xs[None], ys[None]) if isinstance(predictor, Solvers) else predictor(xs, ys)
    found = found if found.ndim == 2 else found[None]
    if found.ndim != 2 or found.shape[1] != len(xs):
        raise IclError(f"A predictor gives an answer for each of {len(xs)} contexts, nothing else.")
    if not bool(found.isfinite().all()):
        raise IclError("An answer is NaN or infinite; leave such contexts out.")
    return found


def _gradient(total: Tensor, place: Tensor) -> Tensor:
    if not total.requires_grad:
        return torch.zeros_like(place)
    found = torch.autograd.grad(total, place, retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(place) if found is None else found
