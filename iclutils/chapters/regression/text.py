"""A language model as an in-context regressor: numbers written in tokens, and read off them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...models import TransformerBridge, logits
from ...progress import bar
from ...tasks.numbers import NumberFormat


def predict_numbers(
    model: TransformerBridge,
    form: NumberFormat,
    xs: Float[Tensor, "batch n d"],
    ys: Float[Tensor, "batch n"],
    batch_size: int = 16,
) -> tuple[Float[Tensor, "batch n"], Float[Tensor, "batch n"]]:
    """Each y as the model expects it after the pairs before, and the probability of any number.

    The prediction is the mean number of the next token, over the tokens that stand for one.
    """
    if xs.shape[-1] != 1:
        raise IclError(f"Numbers are written for x of one dimension; got {xs.shape[-1]}.")
    tokens, at = form.write(xs, ys)
    found, sure = [], []
    for part in bar(tokens.split(batch_size), "contexts"):
        p = logits(model, part.to(model.cfg.device))[:, at].double().softmax(-1)
        p = p[..., form.values.to(p.device)]
        sure.append(p.sum(-1).cpu())
        found.append((p / p.sum(-1, keepdim=True) @ form.numbers.to(p)).cpu())
    return torch.cat(found), torch.cat(sure)
