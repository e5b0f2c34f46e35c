"""The algorithm lens: which head weighs the examples as the model does?

Every example votes for one choice, with the attention that a head gives to its answer. The votes
are compared with the model's logits of the choices, both less their mean (Han et al. 2023).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from ...interp.at_query import read
from ...models import TransformerBridge
from .marks import attention
from .question import Question


def read_examples(
    model: TransformerBridge, question: Question
) -> tuple[Float[Tensor, "batch choice"], Float[Tensor, "batch layer head demo"]]:
    """Return logits of the choices, and every head's attention to the answers."""
    query = read(model, question.task.clean, question.at)
    assert question.task.choices is not None
    logits = query.logits.gather(1, question.task.choices).double()
    return logits.cpu(), attention(query, question).cpu()


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
    """Return the correlation of votes with logits over prompts and choices; 0 if all are alike."""
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
