"""A language model as a learner of regressions: numbers written in tokens, and read off them.

The prediction is the mean of the number that the next token stands for, over the tokens that
stand for one: of all answers the one that the squared error asks for.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.regression import distances, written
    >>> from iclutils.tasks import numbers
    >>> net, script = models.load("anchors-0"), numbers.of_ids(vocab=121, bos=121)
    >>> drawn = numbers.contexts(script, 2, 5, torch.Generator().manual_seed(0))
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...models import TransformerBridge, logits
from ...progress import bar
from ...tasks.numbers import Script
from .algorithms import Predictor


def answers(
    model: TransformerBridge,
    script: Script,
    xs: Float[Tensor, "batch n d"],
    ys: Float[Tensor, "batch n"],
    at_once: int = 16,
) -> tuple[Float[Tensor, "batch n"], Float[Tensor, "batch n"]]:
    """Each y as the model expects it after the pairs before, and the probability of any number.

    Args:
        model: the model.
        script: how numbers are written.
        xs, ys: contexts; entry n of the answers has not seen y_n.
        at_once: contexts in a pass.

    Example:
        >>> found, sure = written.answers(net, script, drawn.xs, drawn.ys)
        >>> bool(((sure > 0) & (sure < 1)).all())
        True
    """
    if xs.shape[-1] != 1:
        raise IclError(f"Numbers are written for x of one dimension; got {xs.shape[-1]}.")
    tokens, at = script.write(xs, ys)
    found, sure = [], []
    for part in bar(tokens.split(at_once), "contexts"):
        p = logits(model, part.to(model.cfg.device))[:, at].double().softmax(-1)
        p = p[..., script.values.to(p.device)]
        sure.append(p.sum(-1).cpu())
        found.append((p / p.sum(-1, keepdim=True) @ script.grid.to(p)).cpu())
    return torch.cat(found), torch.cat(sure)


def predictor(model: TransformerBridge, script: Script) -> Predictor:
    """The model as a function (xs, ys) -> predictions, for ``distances.ask``.

    Example:
        >>> distances.ask(written.predictor(net, script), drawn.xs, drawn.ys).shape
        torch.Size([2, 5])
    """
    return lambda xs, ys: answers(model, script, xs, ys)[0]
