"""Alignment: how near a trained network is to an algorithm, by what both answer and by weights.

A predictor is a ``LinearSelfAttention``, or any function of contexts (xs, ys) that returns the
answers for their queries, (batch,). The measures are those of {cite}`vonoswald2023`, section 3 and
appendix: answers, the sensitivity of an answer to the query's x, interpolated weights, and losses
of contexts unlike those of training.

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
from torch.nn.functional import cosine_similarity, pad

from ...errors import IclError, unknown
from ...models.lsa import Layer, LinearSelfAttention
from ...progress import bar
from ...tasks.regression import Contexts, scaled_inputs, scaled_outputs

Predictor = Callable[[Tensor, Tensor], Tensor]
Labels = Float[Tensor, "label_batch label_n"]  # one for each x; a mismatch is refused with a cure
SHIFTS = {"inputs": scaled_inputs, "weights": scaled_outputs}


def answers(
    predictor: Predictor, xs: Float[Tensor, "batch n d"], ys: Labels
) -> Float[Tensor, "ensemble batch"]:
    """What a predictor answers; networks get the contexts in the precision of their weights.

    Example:
        >>> alignment.answers(net, xs, ys).shape
        torch.Size([5, 32])
    """
    with torch.no_grad():
        return _answers(predictor, *_inputs(predictor, xs, ys))


class Responses(NamedTuple):
    """What a predictor answers, and its sensitivity: the gradient with respect to the query's x."""

    answers: Float[Tensor, "ensemble batch"]
    sensitivity: Float[Tensor, "ensemble batch d"]


def responses(predictor: Predictor, xs: Float[Tensor, "batch n d"], ys: Labels) -> Responses:
    """Answers and sensitivities in one pass; the sensitivity of one that is linear is its W.

    Answers must depend on their own context alone. 0, if they do not depend on the query.

    Example:
        >>> alignment.responses(step, xs, ys).sensitivity.shape
        torch.Size([1, 32, 10])
    """
    xs, ys = _inputs(predictor, xs, ys)
    if isinstance(predictor, LinearSelfAttention):  # a query for each network
        xs, ys = (part.expand(len(predictor.seeds), *part.shape) for part in (xs, ys))
    with torch.enable_grad():
        query = xs[..., -1:, :].detach().clone().requires_grad_()
        found = _answers(predictor, torch.cat([xs[..., :-1, :].detach(), query], -2), ys)
        slope = None
        if found.requires_grad:
            (slope,) = torch.autograd.grad(found.sum(), query, allow_unused=True)
    slope = torch.zeros_like(query) if slope is None else slope
    return Responses(found.detach(), slope[..., 0, :].reshape(len(found), *slope.shape[-3::2]))


class Alignment(NamedTuple):
    """Of each network: how its answers and sensitivities g compare with those of a reference."""

    cosine: Float[Tensor, "ensemble"]  # mean cos(g, g'); 0 where one of them is 0
    difference: Float[Tensor, "ensemble"]  # mean |g - g'|
    predictions: Float[Tensor, "ensemble"]  # mean |answer - answer'|
    loss: Float[Tensor, "ensemble"]  # half the mean squared error
    reference_loss: Float[Tensor, "ensemble"]


def alignment(
    predictor: Predictor | Responses,
    reference: Predictor | Responses,
    xs: Float[Tensor, "batch n d"],
    ys: Labels,
) -> Alignment:
    """Compare two predictors, or their ``responses``, on the same contexts, in float64.

    Example:
        >>> alignment.alignment(step, step, xs, ys).cosine.round(decimals=4)
        tensor([1.], dtype=torch.float64)
    """
    both = [
        one if isinstance(one, Responses) else responses(one, xs, ys)
        for one in (predictor, reference)
    ]
    (found, slope), (other, reference_slope) = ([part.double() for part in one] for one in both)
    if len(found) != len(other) and 1 not in (len(found), len(other)):
        raise IclError(f"Cannot compare {len(found)} networks with {len(other)}.")
    gap = found - other
    return Alignment(
        cosine_similarity(slope, reference_slope, dim=-1, eps=1e-8).mean(-1),
        (slope - reference_slope).norm(dim=-1).mean(-1),
        gap.abs().mean(-1),
        half_mse(found, ys).expand(len(gap)),
        half_mse(other, ys).expand(len(gap)),
    )


def half_mse(found: Float[Tensor, "ensemble batch"], ys: Labels) -> Float[Tensor, "ensemble"]:
    """The loss: half the mean squared error of the answers, against the last y.

    Example:
        >>> alignment.half_mse(ys[None, :, -1] + 2, ys).round(decimals=3)
        tensor([2.])
    """
    return 0.5 * (found - ys[..., -1]).square().mean(-1)


# Contexts unlike those of training ---------------------------------------------------------------


def under_shift(
    predictors: Mapping[str, Predictor], contexts: Contexts, factors: Sequence[float], kind: str
) -> dict[str, Float[Tensor, "ensemble factor"]]:
    """Losses when inputs or weights are scaled, over the square of the factor.

    Labels grow with the factor in both, so a predictor that answers 0 keeps the same number, as
    does any whose answers scale with the labels; GD's do under "weights", not under "inputs".

    Args:
        contexts: of a linear task; w stays as it is under "inputs".

    Example:
        >>> found = alignment.under_shift({"step": step}, drawn, [1.0, 2.0], "weights")["step"][0]
        >>> torch.allclose(found[0], found[1])
        True
    """
    if kind not in SHIFTS:
        raise unknown("shift", kind, SHIFTS)
    rows: dict[str, list[Tensor]] = {name: [] for name in predictors}
    for factor in bar(factors, "factors"):
        shifted = SHIFTS[kind](contexts, factor)
        for name, predictor in predictors.items():
            found = answers(predictor, shifted.xs, shifted.ys).double()
            rows[name].append(half_mse(found, shifted.ys) / factor**2)
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
    chosen = pad(chosen, (0, 1)).to(contexts.ys.device)
    noise = torch.randn(contexts.ys.shape, **place).to(contexts.ys)
    return contexts._replace(ys=torch.where(chosen, noise, contexts.ys))


# Weights -----------------------------------------------------------------------------------------


def products(network: LinearSelfAttention, layer: int = 0) -> tuple[Tensor, Tensor]:
    """KQ and PV of a layer, (ensemble, head, channel, channel) each.

    Scores are e_j KQ e_iᵀ for the query's token j, and a key's token writes e_i PV.

    Example:
        >>> kq, pv = alignment.products(net)
        >>> kq.shape
        torch.Size([5, 1, 11, 11])
    """
    weights = network.layer(layer)
    return weights.query @ weights.key.mT, weights.value @ weights.out


def off_pattern(
    network: LinearSelfAttention, layer: int = 0, pattern: str = "gradient"
) -> tuple[Float[Tensor, "ensemble head"], Float[Tensor, "ensemble head"]]:
    """Of a layer's KQ and PV, the shares of the squared norms that are not the construction.

    At its best scale: KQ is compared with I on the x-block, PV with the entry from y to y
    ("gradient"), and also with I on the x-block ("plus").

    Example:
        >>> made = construction.constructed(lsa.Shape(10, 10), [1.0])
        >>> alignment.off_pattern(made)[0]
        tensor([[0.]])
    """
    if pattern not in ("gradient", "plus"):
        raise unknown("pattern", pattern, ["gradient", "plus"])
    kq, pv = _of_joint_tokens(network, layer)
    dim = network.shape.dim
    scores, writes = (m.diagonal(dim1=-2, dim2=-1) for m in (kq, pv))
    x_kq, x_pv = (part[..., :dim].mean(-1).square() * dim for part in (scores, writes))
    return _outside(x_kq, kq), _outside(writes[..., dim].square() + x_pv * (pattern == "plus"), pv)


def step_matrix(network: LinearSelfAttention, layer: int = 0) -> Float[Tensor, "ensemble d d"]:
    """A of the step that a layer of linear attention takes: -N Σ_heads PV_yy KQ_xx.

    If PV writes nothing from x to y and KQ compares x alone, the first layer answers
    x_qᵀ A (1/N) Σ_i x_i y_i; a step of GD has A = η I (see ``descent.best_step``).

    Example:
        >>> made = construction.constructed(lsa.Shape(3, 10), [0.5])
        >>> alignment.step_matrix(made)[0].diagonal().round(decimals=3)
        tensor([0.5000, 0.5000, 0.5000])
    """
    if network.shape.kinds[layer] != "linear":
        raise IclError("Softmax attention has no matrix of its step; take linear attention.")
    kq, pv = _of_joint_tokens(network, layer)
    dim = network.shape.dim
    return -network.shape.pairs * (pv[..., dim:, dim:] * kq[..., :dim, :dim]).sum(1)


def interpolate(
    network: LinearSelfAttention, reference: LinearSelfAttention, share: float
) -> LinearSelfAttention:
    """Networks with ``share`` of the weights of a reference, the rest of their own.

    Of both, KQ is divided by the mean of its diagonal's first d entries and PV multiplied by it;
    then both products are averaged. So a loss that stays as low half-way says that the two are
    the same solution up to scale.

    Args:
        network: one linear head, in one layer or in layers that share it.
        reference: the same; ``construction.constructed`` gives one. One network, or as many.
        share: of the reference, 0 .. 1.

    Example:
        >>> made = construction.constructed(lsa.Shape(10, 10), [1.0])
        >>> half = alignment.interpolate(made, made, 0.5)
        >>> torch.allclose(half(xs, ys), made(xs, ys), atol=1e-5)
        True
    """
    shape = network.shape
    extra = shape.norm or shape.hidden or shape.width or "softmax" in shape.attention
    if extra or shape.heads > 1 or shape.own > 1 or shape != reference.shape:
        raise IclError(
            "Weights are interpolated for a single linear head, alone or shared by all layers, "
            f"without LayerNorm, MLP or read-in, and of one shape; got {shape} and "
            f"{reference.shape}."
        )
    own, other = _to_scale(network), _to_scale(reference)
    kq, pv = (a + share * (b.to(a) - a) for a, b in zip(own, other, strict=True))
    unit = torch.eye(kq.shape[-1]).to(kq).expand_as(kq)
    return LinearSelfAttention.from_layers(shape, [Layer(kq, unit, pv, unit)])


def _to_scale(network: LinearSelfAttention) -> tuple[Tensor, Tensor]:
    kq, pv = (part.detach() for part in products(network))
    diagonal = kq.diagonal(dim1=-2, dim2=-1)[..., : network.shape.dim]
    scale = diagonal.mean(-1)[..., None, None]
    if bool((scale == 0).any()):
        raise IclError("The x-diagonal of KQ has mean 0: there is no scale to take out of it.")
    return kq / scale, pv * scale


def _of_joint_tokens(network: LinearSelfAttention, layer: int) -> tuple[Tensor, Tensor]:
    if network.shape.width or network.shape.separate:
        raise IclError("The construction is one of tokens (x, y); these networks have others.")
    with torch.no_grad():
        return products(network, layer)


def _outside(inside: Tensor, matrix: Tensor) -> Tensor:
    """1 minus the share of the squared norm that lies inside; 0 for a matrix of zeros."""
    whole = matrix.square().sum((-2, -1))
    return torch.where(whole > 0, 1 - inside / whole, torch.zeros_like(whole)).clamp(min=0)


def _inputs(predictor: Predictor, xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(predictor, LinearSelfAttention):
        weight = predictor.attention["query"]
        return xs.to(weight), ys.to(weight)
    return xs, ys


def _answers(predictor: Predictor, xs: Tensor, ys: Tensor) -> Tensor:
    found = predictor(xs, ys)
    found = found if isinstance(predictor, LinearSelfAttention) else found[None]
    if found.shape[1:] != xs.shape[-3:-2] or not bool(found.isfinite().all()):
        raise IclError(
            f"A predictor gives a finite answer for each of {xs.shape[-3]} contexts; got "
            f"{tuple(found.shape[1:])}, or NaN or infinity. Leave such contexts out."
        )
    return found
