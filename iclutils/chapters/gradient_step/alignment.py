"""How near a trained network is to an algorithm, by answers and weights ({cite}`vonoswald2023`).

A predictor is a ``LinearSelfAttention``, or any function of contexts (xs, ys) that returns the
answers for their queries, (batch,). With an axis of networks in front each has its own."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ...errors import IclError
from ...models.lsa import LinearSelfAttention
from ...tasks.functions import Problem, Waves
from ...tasks.regression import Contexts

AT_ONCE = 5000  # contexts in a pass; the tokens of many more fill a gigabyte

Predictor = Callable[[Tensor, Tensor], Tensor]
Inputs = Float[Tensor, "*network batch n d"]
Labels = Float[Tensor, "*network batch n"]


def own_contexts(
    problem: Problem | Waves, networks: int, contexts: int, pairs: int, generator: torch.Generator
) -> Contexts:
    """Draw contexts of its own for each network, (networks, contexts, ...): on the same contexts
    their spread would leave out the error of the draw."""
    drawn = problem.sample(networks * contexts, pairs, generator)
    return Contexts(*(part.unflatten(0, (networks, contexts)) for part in drawn))


def repetitions(table: Float[Tensor, "networks sets"]) -> Float[Tensor, "_"]:
    """Return what a finding is repeated over, of a measure of networks on ten sets of contexts:
    five networks, each on two sets of its own; of fewer, the largest value, by set."""
    if len(table) < 5:
        return table.amax(0)
    return table.unflatten(1, (5, 2)).mean(-1).diagonal()


def answers(predictor: Predictor, xs: Inputs, ys: Labels) -> Float[Tensor, "ensemble batch"]:
    """Return the answers; networks get the contexts in the precision of their weights."""
    with torch.no_grad():
        parts = zip(xs.split(AT_ONCE, -3), ys.split(AT_ONCE, -2), strict=True)
        return torch.cat([_answers(predictor, *part) for part in parts], -1)


class Responses(NamedTuple):
    """Answers of a predictor, and their sensitivity: the gradient with respect to the query's x."""

    answers: Float[Tensor, "ensemble batch"]
    sensitivity: Float[Tensor, "ensemble batch d"]


def responses(predictor: Predictor, xs: Inputs, ys: Labels) -> Responses:
    """Return answers, each of its context alone, and sensitivities: W, of a linear predictor."""
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
    """Of each network: how its answers and sensitivities g compare with those of a reference. With
    several sets of contexts each field is (ensemble, set)."""

    cosine: Float[Tensor, "ensemble *set"]  # mean cos(g, g'); 0 where one of them is 0
    difference: Float[Tensor, "ensemble *set"]  # mean |g - g'|
    predictions: Float[Tensor, "ensemble *set"]  # mean |answer - answer'|
    loss: Float[Tensor, "ensemble *set"]  # half the mean squared error
    reference_loss: Float[Tensor, "ensemble *set"]

    @property
    def loss_ratio(self) -> Float[Tensor, "ensemble *set"]:
        """Return the loss over that of the reference."""
        return self.loss / self.reference_loss


def alignment(
    predictor: Predictor | Responses,
    reference: Predictor | Responses,
    xs: Inputs,
    ys: Labels,
    sets: int | None = None,
) -> Alignment:
    """Compare two predictors, or their ``responses``, on the same contexts, in float64: means over
    all contexts, or over each of so many equal ``sets`` of them. The last x of a context is the
    query, and the last y its right answer. For what answers alone lose, see ``half_mse``."""
    pair = [
        one if isinstance(one, Responses) else responses(one, xs, ys)
        for one in (predictor, reference)
    ]
    (answered, slope), (other, reference_slope) = ([part.double() for part in one] for one in pair)
    wanted = ys[..., -1].double()
    measures = (
        cosine_similarity(slope, reference_slope, dim=-1, eps=1e-8),
        (slope - reference_slope).norm(dim=-1),
        (answered - other).abs(),
        0.5 * (answered - wanted).square(),
        0.5 * (other - wanted).square(),
    )
    each = [m.expand_as(answered - other) for m in measures]  # (ensemble, batch)
    if sets is not None:
        each = [m.unflatten(-1, (sets, -1)) for m in each]  # (ensemble, set, batch / sets)
    return Alignment(*(m.mean(-1) for m in each))


def half_mse(
    predicted: Float[Tensor, "ensemble batch"], ys: Float[Tensor, "*lead batch n"]
) -> Float[Tensor, "ensemble"]:
    """Return the loss: half the mean squared error of the answers, against the last y."""
    return 0.5 * (predicted - ys[..., -1]).square().mean(-1)


def _answers(predictor: Predictor, xs: Tensor, ys: Tensor) -> Tensor:
    if isinstance(predictor, LinearSelfAttention):
        weight = predictor.attention["query"]
        answered = predictor(xs.to(weight), ys.to(weight))
    else:
        answered = predictor(xs, ys)
        answered = answered if xs.ndim == 4 else answered[None]
    if answered.shape[1:] != xs.shape[-3:-2] or not bool(answered.isfinite().all()):
        shape = f"{tuple(answered.shape[1:])}, or NaN or infinity"
        raise IclError(f"Need a finite answer for each of {xs.shape[-3]} contexts; got {shape}.")
    return answered


def products(network: LinearSelfAttention) -> tuple[Tensor, Tensor]:
    """Return KQ and PV of layer 0, (ensemble, head, channel, channel) each: scores are e_j KQ e_iᵀ
    for the query's token j, and a key's token writes e_i PV."""
    weights = network.layer()
    return weights.query @ weights.key.mT, weights.value @ weights.out


def off_pattern(
    network: LinearSelfAttention,
) -> tuple[Float[Tensor, "ensemble head"], Float[Tensor, "ensemble head"]]:
    """Return, of KQ and PV of layer 0, the shares of the squared norms that are not those of the
    construction at its best scale: I on the x-block for KQ, the entry from y to y for PV."""
    kq, pv = _of_joint_tokens(network)
    dim = network.shape.dim
    inside = kq.diagonal(dim1=-2, dim2=-1)[..., :dim].mean(-1).square() * dim
    whole_kq, whole_pv = (matrix.square().sum((-2, -1)) for matrix in (kq, pv))
    return (1 - inside / whole_kq).clamp(min=0), 1 - pv[..., dim, dim].square() / whole_pv


def step_matrix(network: LinearSelfAttention) -> Float[Tensor, "ensemble d d"]:
    """Return A of the step that a first layer of linear attention takes, -N Σ_heads PV_yy KQ_xx: it
    answers x_qᵀ A (1/N) Σ_i x_i y_i if PV writes nothing from x to y and KQ compares x alone. A
    step of GD has A = η I (see ``descent.best_step``)."""
    kq, pv = _of_joint_tokens(network)
    dim = network.shape.dim
    return -network.shape.pairs * (pv[..., dim:, dim:] * kq[..., :dim, :dim]).sum(1)


def _of_joint_tokens(network: LinearSelfAttention) -> tuple[Tensor, Tensor]:
    if network.shape.width or network.shape.separate:
        raise IclError("The construction is one of tokens (x, y); these networks have others.")
    with torch.no_grad():
        return products(network)
