"""One vector for a task: added at the target of a prompt without examples.

Sources: Hendel et al. 2023 (the state of a layer there); Todd et al. 2024 (what heads write)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ...interp.at_query import read
from ...interp.hooks import logits_under
from ...models import TransformerBridge, get_act_name
from .marks import written
from .question import Question


def task_vectors(
    model: TransformerBridge, question: Question
) -> tuple[Float[Tensor, "layer d_model"], Float[Tensor, "layer head d_model"]]:
    """Mean with examples less without, at the target: states after layers, writes of heads."""
    bare = question.without(range(question.examples))
    sides = ((question.task.clean, question.at), bare)
    (heads, states), (less, before) = (written(read(model, *side)) for side in sides)
    return states.mean(0) - before.mean(0), heads.mean(0) - less.mean(0)


def steered(
    model: TransformerBridge,
    question: Question,
    vectors: Iterable[tuple[int, Float[Tensor, "d_model"]]],
) -> tuple[Float[Tensor, "vector batch"], Float[Tensor, "vector batch"]]:
    """Prompts without examples, with a vector added at the target after a layer: margin (nats), and
    whether the right answer is the likeliest of all tokens; for each pair of layer and vector."""
    tokens, target = question.without(range(question.examples))
    rows = torch.arange(len(tokens), device=tokens.device)

    def added(value: Tensor, hook: object, vector: Tensor) -> Tensor:
        return value.index_put((rows, target), vector.to(value), accumulate=True)

    ways = [
        [(get_act_name("resid_post", layer), partial(added, vector=vector))]
        for layer, vector in vectors
    ]
    logits = [x[:, 0] for x in logits_under(model, tokens, ways, target[:, None])]
    right = [(x.argmax(1) == question.task.answer[:, 0]).to(x.dtype) for x in logits]
    return torch.stack([question.margin(x) for x in logits]), torch.stack(right)


def random_like(vector: Float[Tensor, "*lead d_model"], generator: torch.Generator) -> Tensor:
    """A vector of the same length in a random direction: the control."""
    drawn = torch.randn(vector.shape, generator=generator).to(vector)
    return drawn * vector.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)
