"""Alignment: how near a trained network is to an algorithm, by what both answer and by weights.

A predictor is a ``LinearSelfAttention``, or any function of contexts (xs, ys) that returns the
answers for their queries, (batch,). Contexts may have an axis of networks in front: then each
network is measured on its own. The measures are those of {cite}`vonoswald2023`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from ...errors import IclError
from ...models.lsa import Layer, LinearSelfAttention
from ...progress import bar
from ...tasks.functions import Problem, Waves
from ...tasks.regression import Contexts, scaled_inputs, scaled_outputs

Predictor = Callable[[Tensor, Tensor], Tensor]
Inputs = Float[Tensor, "*network batch n d"]
Labels = Float[Tensor, "*network batch n"]
SHIFTS = {"inputs": scaled_inputs, "weights": scaled_outputs}


def own_contexts(
    problem: Problem | Waves, networks: int, contexts: int, pairs: int, generator: torch.Generator
) -> Contexts:
    """Contexts of its own for each network, (networks, contexts, ...). Networks that are measured
    on the same contexts share the error of the draw, which their spread then leaves out."""
    drawn = problem.sample(networks * contexts, pairs, generator)
    return Contexts(*(part.unflatten(0, (networks, contexts)) for part in drawn))


def repetitions(
    table: Float[Tensor, "networks sets"], worst: Callable[[Tensor, int], Tensor]
) -> Float[Tensor, "_"]:
    """What a finding is repeated over, of a measure of networks on ten sets of contexts: five
    networks, each on two sets of its own; of fewer, the ``worst`` (amin or amax), by set."""
    if len(table) < 5:
        return worst(table, 0)
    return table.unflatten(1, (5, 2)).mean(-1).diagonal()


def answers(predictor: Predictor, xs: Inputs, ys: Labels) -> Float[Tensor, "ensemble batch"]:
    """Answers of a predictor; networks get the contexts in the precision of their weights."""
    with torch.no_grad():
        return _answers(predictor, xs, ys)


class Responses(NamedTuple):
    """Answers of a predictor, and their sensitivity: the gradient with respect to the query's x."""

    answers: Float[Tensor, "ensemble batch"]
    sensitivity: Float[Tensor, "ensemble batch d"]


def responses(predictor: Predictor, xs: Inputs, ys: Labels) -> Responses:
    """Answers, each of its own context alone, and sensitivities: W, of a linear predictor."""
    query = xs[..., -1:, :].detach().clone()
    if isinstance(predictor, LinearSelfAttention) and xs.ndim == 3:  # a query for each network
        query = query.repeat(len(predictor.seeds), 1, 1, 1)
        xs, ys = (part.expand(len(predictor.seeds), *part.shape) for part in (xs, ys))
    with torch.enable_grad():
        query.requires_grad_()
        answered = _answers(predictor, torch.cat([xs[..., :-1, :], query], -2), ys)
        # 0 if the query is not read.
        (slope,) = torch.autograd.grad(answered.sum() + 0 * query.sum(), query)
    return Responses(answered.detach(), slope.reshape(*answered.shape, -1))


class Alignment(NamedTuple):
    """Of each network: how its answers and sensitivities g compare with those of a reference."""

    cosine: Float[Tensor, "ensemble"]  # mean cos(g, g'); 0 where one of them is 0
    difference: Float[Tensor, "ensemble"]  # mean |g - g'|
    predictions: Float[Tensor, "ensemble"]  # mean |answer - answer'|
    loss: Float[Tensor, "ensemble"]  # half the mean squared error
    reference_loss: Float[Tensor, "ensemble"]


def alignment(
    predictor: Predictor | Responses, reference: Predictor | Responses, xs: Inputs, ys: Labels
) -> Alignment:
    """Compare two predictors, or their ``responses``, on the same contexts, in float64.

    Example:
        >>> import torch
        >>> from iclutils.models import lsa
        >>> from iclutils.chapters.gradient_step import alignment, descent
        >>> xs, ys = torch.rand(100, 11, 10) - 0.5, torch.zeros(100, 11)
        >>> ys[:, :-1] = xs[:, :-1].sum(-1)
        >>> found = alignment.alignment(lsa.load("lsa-1"), descent.predictor([6.0]), xs, ys)
        >>> bool((found.cosine > 0.99).all())
        True
    """
    pair = [
        one if isinstance(one, Responses) else responses(one, xs, ys)
        for one in (predictor, reference)
    ]
    (answered, slope), (other, reference_slope) = ([part.double() for part in one] for one in pair)
    gap = answered - other
    return Alignment(
        cosine_similarity(slope, reference_slope, dim=-1, eps=1e-8).mean(-1),
        (slope - reference_slope).norm(dim=-1).mean(-1),
        gap.abs().mean(-1),
        half_mse(answered, ys).expand(len(gap)),
        half_mse(other, ys).expand(len(gap)),
    )


def half_mse(
    predicted: Float[Tensor, "ensemble batch"], ys: Float[Tensor, "*lead batch n"]
) -> Float[Tensor, "ensemble"]:
    """The loss: half the mean squared error of the answers, against the last y."""
    return 0.5 * (predicted - ys[..., -1]).square().mean(-1)


def _answers(predictor: Predictor, xs: Tensor, ys: Tensor) -> Tensor:
    if isinstance(predictor, LinearSelfAttention):
        weight = predictor.attention["query"]
        answered = predictor(xs.to(weight), ys.to(weight))
    else:
        answered = predictor(xs, ys)
        answered = answered if xs.ndim == 4 else answered[None]
    if answered.shape[1:] != xs.shape[-3:-2] or not bool(answered.isfinite().all()):
        given = f"{tuple(answered.shape[1:])}, or NaN or infinity"
        raise IclError(f"Need a finite answer for each of {xs.shape[-3]} contexts; got {given}.")
    return answered


def under_shift(
    predictors: Mapping[str, Predictor], contexts: Contexts, factors: Sequence[float], kind: str
) -> dict[str, Float[Tensor, "ensemble factor"]]:
    """Losses when the inputs or weights of linear tasks are scaled, over the square of the factor.
    Labels grow with it in both, so a predictor that answers 0 keeps the same number, as does any
    whose answers scale with the labels; GD's do under "weights", not under "inputs"."""
    rows: dict[str, list[Tensor]] = {name: [] for name in predictors}
    for factor in bar(factors, "factors"):
        shifted = SHIFTS[kind](contexts, factor)
        for name, predictor in predictors.items():
            answered = answers(predictor, shifted.xs, shifted.ys).double()
            rows[name].append(half_mse(answered, shifted.ys) / factor**2)
    return {name: torch.stack(losses, -1) for name, losses in rows.items()}


def with_noise(contexts: Contexts, count: int, generator: torch.Generator) -> Contexts:
    """The labels of ``count`` random pairs replaced by N(0, 1); the query's is kept."""
    pairs = contexts.ys.shape[-1] - 1
    place: dict[str, Any] = {"generator": generator, "device": generator.device}
    shape = (*contexts.ys.shape[:-1], pairs)
    chosen = torch.rand(shape, **place).argsort(-1).argsort(-1) < count
    chosen = pad(chosen, (0, 1)).to(contexts.ys.device)
    noise = torch.randn(contexts.ys.shape, **place).to(contexts.ys)
    return contexts._replace(ys=torch.where(chosen, noise, contexts.ys))


def products(network: LinearSelfAttention, layer: int = 0) -> tuple[Tensor, Tensor]:
    """KQ and PV of a layer, (ensemble, head, channel, channel) each: scores are e_j KQ e_iᵀ for the
    query's token j, and a key's token writes e_i PV."""
    weights = network.layer(layer)
    return weights.query @ weights.key.mT, weights.value @ weights.out


def off_pattern(
    network: LinearSelfAttention,
) -> tuple[Float[Tensor, "ensemble head"], Float[Tensor, "ensemble head"]]:
    """Of KQ and PV of layer 0, the shares of the squared norms that are not the construction's at
    its best scale: I on the x-block for KQ, and the entry from y to y for PV."""
    kq, pv = _of_joint_tokens(network)
    dim = network.shape.dim
    inside = kq.diagonal(dim1=-2, dim2=-1)[..., :dim].mean(-1).square() * dim
    whole_kq, whole_pv = (matrix.square().sum((-2, -1)) for matrix in (kq, pv))
    return (1 - inside / whole_kq).clamp(min=0), 1 - pv[..., dim, dim].square() / whole_pv


def step_matrix(network: LinearSelfAttention) -> Float[Tensor, "ensemble d d"]:
    """A of the step that a first layer of linear attention takes, -N Σ_heads PV_yy KQ_xx: it
    answers x_qᵀ A (1/N) Σ_i x_i y_i if PV writes nothing from x to y and KQ compares x alone. A
    step of GD has A = η I (see ``descent.best_step``)."""
    if network.shape.kinds[0] != "linear":
        raise IclError("Softmax attention has no matrix of its step; take linear attention.")
    kq, pv = _of_joint_tokens(network)
    dim = network.shape.dim
    return -network.shape.pairs * (pv[..., dim:, dim:] * kq[..., :dim, :dim]).sum(1)


def interpolate(
    network: LinearSelfAttention, reference: LinearSelfAttention, share: float
) -> LinearSelfAttention:
    """Networks with ``share`` of the KQ and PV of a reference, after the mean of KQ's x-diagonal
    goes over to PV: one solution up to scale if the loss stays as low half-way."""
    shape = network.shape
    extra = shape.norm or shape.hidden or shape.width or "softmax" in shape.attention
    if extra or shape.heads > 1 or shape.own > 1 or shape != reference.shape:
        raise IclError(
            "Weights are interpolated between networks of one shape, of a single linear head "
            f"alone; got {shape} and {reference.shape}."
        )
    own, other = _to_scale(network), _to_scale(reference)
    kq, pv = (a + share * (b.to(a) - a) for a, b in zip(own, other, strict=True))
    unit = torch.eye(kq.shape[-1]).to(kq).expand_as(kq)
    return LinearSelfAttention.from_layers(shape, [Layer(kq, unit, pv, unit)])


def _to_scale(network: LinearSelfAttention) -> tuple[Tensor, Tensor]:
    kq, pv = (part.detach() for part in products(network))
    diagonal = kq.diagonal(dim1=-2, dim2=-1)[..., : network.shape.dim]
    scale = diagonal.mean(-1)[..., None, None]
    return kq / scale, pv * scale


def _of_joint_tokens(network: LinearSelfAttention) -> tuple[Tensor, Tensor]:
    if network.shape.width or network.shape.separate:
        raise IclError("The construction is one of tokens (x, y); these networks have others.")
    with torch.no_grad():
        return products(network)
