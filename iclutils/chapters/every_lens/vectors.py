"""One vector for a task: added at the target of a prompt without examples.

Sources: Hendel et al. 2023 (the state of a layer there); Todd et al. 2024 (what heads write)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ...interp.hooks import logits_under
from ...models import TransformerBridge, get_act_name
from .question import Answered, Question


def steered(
    model: TransformerBridge,
    question: Question,
    vectors: Iterable[tuple[int, Float[Tensor, "d_model"]]],
) -> Answered:
    """The answers without examples when a vector is added at the target after a layer, (pair,
    batch): for each pair of layer and vector."""
    tokens, target = question.bare
    rows = torch.arange(len(tokens), device=tokens.device)

    def added(value: Tensor, hook: object, vector: Tensor) -> Tensor:
        return value.index_put((rows, target), vector.to(value), accumulate=True)

    ways = [
        [(get_act_name("resid_post", layer), partial(added, vector=vector))]
        for layer, vector in vectors
    ]
    logits = [x[:, 0] for x in logits_under(model, tokens, ways, target[:, None])]
    return question.said(torch.stack(logits))


def random_like(vector: Float[Tensor, "*lead d_model"], generator: torch.Generator) -> Tensor:
    """A vector of the same length in a random direction: the control."""
    drawn = torch.randn(vector.shape, generator=generator).to(vector)
    return drawn * vector.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)
