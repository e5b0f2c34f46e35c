"""A language model as an in-context regressor: numbers written in tokens, and read off it.

Its prediction is the mean number of what it expects next, exactly, over all numbers that can be
written. It is also compared with what ignores x, with lines that have an intercept, and with the
label of the nearest x."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...interp.hooks import at_positions, run_with_hooks
from ...interp.kv_cache import keys_values, read_with_cache
from ...models import TransformerBridge
from ...progress import bar
from ...tasks.numbers import NumberFormat
from ...tasks.regression import Contexts
from .algorithms import Predictor, baselines, knn, ridge

ROWS = 32  # continuations in one pass
IDLE: dict[str, Predictor] = {  # they learn nothing of x
    "the middle": lambda xs, ys: torch.zeros_like(ys),
    "mean label": lambda xs, ys: (
        (ys.cumsum(-1) - ys) / torch.arange(ys.shape[-1]).to(ys).clamp(min=1)
    ),
    "last label": lambda xs, ys: torch.nn.functional.pad(ys[..., :-1], (1, 0)),
}


def text_baselines() -> dict[str, Predictor]:
    """Return the algorithms, by name, that a language model which reads numbers is compared with:
    ``baselines``, and with a constant term a line and ridge regression of a line, the nearest
    neighbour, and rules that ignore x."""

    def line(xs: Tensor, ys: Tensor, penalty: float) -> Tensor:
        return ridge(torch.cat([xs, torch.ones_like(xs)], -1), ys, penalty)

    lines = {"line": partial(line, penalty=0.0), "line, ridge 1": partial(line, penalty=1.0)}
    return baselines() | lines | {"1-NN": partial(knn, k=1)} | IDLE


def predict_numbers(
    model: TransformerBridge,
    form: NumberFormat,
    xs: Float[Tensor, "batch n d"],
    ys: Float[Tensor, "batch n"],
    batch_size: int = 16,
) -> tuple[Float[Tensor, "batch n"], Float[Tensor, "batch n"]]:
    """Return each y as expected after the pairs before, and the probability of any number."""
    tokens, at = _write(form, xs, ys)
    answers = []
    for batch in bar(tokens.split(batch_size), "contexts"):
        hook = at_positions(at.expand(len(batch), -1))
        logits = run_with_hooks(model, batch.to(model.cfg.device), [hook])[0].double()
        log_p = logits.log_softmax(-1)[..., form.values[:, 0].to(logits.device)]
        answers.append(_mean(form, log_p.cpu()))
    means, sure = zip(*answers, strict=True)
    return torch.cat(means), torch.cat(sure)


def ask_every_number(
    model: TransformerBridge, form: NumberFormat, contexts: Contexts, after: Sequence[int]
) -> Float[Tensor, "batch entry query"]:
    """Return the model's answers to every x that can be written, after so many pairs. All x share
    the keys and values of the pairs; ``predict_numbers`` is for the contexts' own x."""
    device, count = model.cfg.device, len(form.values)
    tokens, at = _write(form, contexts.xs, contexts.ys)
    tokens, wanted = tokens.to(device), form.values[:, 0].to(device)
    gaps = torch.tensor(form.between, dtype=torch.long).expand(count, -1)
    queries = torch.cat([form.values, gaps], 1).to(device)  # (query, step)
    means = []
    for batch in bar(tokens.split(max(1, ROWS // count)), "contexts"):
        states, answers = keys_values(model, batch), []
        for pairs in after:
            cut = int(at[pairs]) - len(form.between) - 1  # the last token before an x
            last = batch[:, cut].repeat_interleave(count)[:, None]
            fed = torch.cat([last, queries.repeat(len(batch), 1)], 1)  # (batch query, step)
            keys, values = (
                tuple(s[:, :, :cut].repeat_interleave(count, 0) for s in part) for part in states
            )
            cached, own = (fed.new_ones(len(fed), n, dtype=torch.bool) for n in (cut, fed.shape[1]))
            step = torch.arange(fed.shape[1], device=device).expand_as(fed)
            with torch.no_grad():
                logits = read_with_cache(model, keys, values, cached, fed, own, cut + step, step)
            log_p = logits.double().log_softmax(-1)[:, -1, wanted].cpu()  # (batch query, value)
            answers.append(_mean(form, log_p)[0].unflatten(0, (-1, count)))
        means.append(torch.stack(answers, 1))
    return torch.cat(means)


def _write(form: NumberFormat, xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor]:
    if xs.shape[-1] != 1 or form.values.shape[1] != 1:
        raise IclError("x must have one dimension, and a number must be written in one token.")
    return form.write(xs, ys)


def _mean(form: NumberFormat, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean number under log p of every number, and the probability of any."""
    return log_p.softmax(-1) @ form.numbers, log_p.logsumexp(-1).exp()
