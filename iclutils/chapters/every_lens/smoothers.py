"""Which algorithm weighs the examples as the model does?

Every example votes for one choice. A *smoother* weighs it by how near it is to the query; the votes
are compared with the model's logits of the choices, both less their mean. States are those of one
layer at the arrows, less their mean over all prompts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from ...interp.at_query import read
from ...interp.hooks import run_with_hooks
from ...models import TransformerBridge, get_act_name
from .marks import attention
from .question import Question

Weights = Float[Tensor, "batch demo"]
States = Float[Tensor, "batch arrow d_model"]  # those of the examples, then the query's
RIDGE = 0.1  # of the mean squared length of the states


def _kernel(states: States) -> tuple[Tensor, Tensor]:
    """Return inner products among the examples, and of each with the query."""
    of_examples, of_query = states[:, :-1], states[:, -1:]
    return of_examples @ of_examples.mT, (of_examples @ of_query.mT)[..., 0]


def _ridge(states: States) -> Weights:
    among, near = _kernel(states)
    penalty = RIDGE * among.diagonal(0, 1, 2).mean(1)[:, None, None]
    return torch.linalg.solve(among + penalty * torch.eye(near.shape[1]).to(near), near)


def _one(chosen: Int[Tensor, "batch"], states: States) -> Weights:
    return one_hot(chosen, states.shape[1] - 1).to(states)


SMOOTHERS: dict[str, Callable[[States], Weights]] = {
    "count": lambda states: torch.ones_like(states[:, :-1, 0]),
    "last example": lambda s: _one(torch.full((len(s),), s.shape[1] - 2), s),
    "nearest example": lambda s: _one(_kernel(normalize(s, dim=-1))[1].argmax(1), s),
    "ridge on states": _ridge,
    "one gradient step": lambda states: _kernel(states)[1],
}


def read_examples(
    model: TransformerBridge, question: Question, layer: int
) -> tuple[Float[Tensor, "batch choice"], States, Float[Tensor, "batch layer head demo"]]:
    """Return logits of the choices, states at the arrows, every head's attention to the answers."""
    name = get_act_name("resid_post", layer)
    tokens = question.task.clean
    _, seen = run_with_hooks(model, tokens, [], [name], layer + 1)
    arrows = torch.cat([question.cues, question.at[:, None]], 1)
    states = seen[name].take_along_dim(arrows[..., None], 1).double()
    query = read(model, tokens, question.at)
    assert question.task.choices is not None
    logits = query.logits.gather(1, question.task.choices).double()
    return logits.cpu(), (states - states.mean((0, 1))).cpu(), attention(query, question).cpu()


def votes(
    weights: Float[Tensor, "batch *head demo"], shows: Int[Tensor, "batch demo"], choices: int
) -> Float[Tensor, "batch *head choice"]:
    """Sum the weights of the examples of each choice; less the mean over the choices."""
    member = one_hot(shows.cpu(), choices).to(weights)
    summed = torch.einsum("b...n,bnc->b...c", weights, member)
    return summed - summed.mean(-1, keepdim=True)


def agreement(
    votes: Float[Tensor, "batch *head choice"], logits: Float[Tensor, "batch choice"]
) -> Float[Tensor, "*head"]:
    """Return the correlation of votes with the model's logits, over prompts and choices; 0 if all
    are alike. Use ``fit`` for one kernel's weights, ``beyond_counting`` for every head's."""
    target = logits - logits.mean(-1, keepdim=True)
    product = torch.einsum("b...c,bc->...", votes, target)
    size = (votes.square().sum((0, -1)) * target.square().sum()).sqrt()
    return torch.where(size > 0, product / size.clamp(min=1e-30), 0.0)


def beyond_counting(
    weights: Float[Tensor, "batch layer head demo"],
    shows: Int[Tensor, "batch demo"],
    logits: Float[Tensor, "batch choice"],
) -> Float[Tensor, "layer head"]:
    """Return the algorithm lens: ``agreement`` of every head's attention, as a kernel, with the
    logits, after the share of either that the count of examples explains is taken out."""
    choices = logits.shape[1]
    count = votes(torch.ones_like(weights[:, 0, 0]), shows, choices)
    norm = count.square().sum().clamp(min=1e-30)
    target = logits - logits.mean(-1, keepdim=True)
    target = target - (target * count).sum() / norm * count
    # Weights that sum to 1, so that only their distribution over the examples counts.
    voted = votes(weights / weights.sum(-1, keepdim=True).clamp(min=1e-30), shows, choices)
    slope = torch.einsum("blhc,bc->lh", voted, count) / norm
    voted = voted - torch.einsum("lh,bc->blhc", slope, count)
    return agreement(voted, target)


def fit(
    weights: Weights, shows: Int[Tensor, "batch demo"], logits: Float[Tensor, "batch choice"]
) -> float:
    """Return the ``agreement`` of the votes under these weights with the logits."""
    return agreement(votes(weights, shows, logits.shape[1]), logits).item()
