"""Chapter 03: which textbook algorithm an in-context regressor is nearest to.

A language model gets numbers written in tokens, in one dimension; it is compared with more
baselines, which learn nothing: the middle, the mean of the labels so far, the last label again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..chapters.ridge_ols.algorithms import Predictor, baselines
from ..chapters.ridge_ols.distances import nearest, predict, spd
from ..chapters.ridge_ols.text import IDLE, predict_numbers, text_baselines
from ..errors import IclError
from ..models import TransformerBridge, words
from ..plots import figures
from ..progress import say
from ..tasks import numbers, regression
from ..tasks.regression import Contexts, Task
from .quick_figure import QuickFigure, Request, announce

SHOWN = ("OLS", "ridge 1/10", "GD 0.02", "3-NN")  # lines of the figure
CONTEXTS, PAIRS, AT_ONCE = 64, 12, 16  # of a language model
FEWEST = 3  # pairs that tell algorithms apart


def draw(request: Request) -> QuickFigure:
    """Distances of a regressor, or of a language model, to the textbook algorithms."""
    source = request.session.generator("contexts")
    if request.kind != "in-context regressors":
        return _of_model(request, source)
    net, count = request.session.regressors(request.name), request.session.tier.regression.contexts
    task = Task(**net.tasks[-1]) if net.tasks else Task(net.shape.dim)
    say(f"distances of {request.name} on {count} contexts: some seconds, less than 1 GB")
    drawn = regression.sample(task, count, min(net.shape.pairs, 2 * net.shape.dim + 1), source)
    found = predict(net, drawn.xs, drawn.ys)[-1].cpu()
    return _compared(request, found, drawn, baselines("wide", task.ridge), SHOWN)


def _of_model(request: Request, source: torch.Generator) -> QuickFigure:
    model = request.load()
    form = _number_format(model)
    pairs = min(PAIRS, (model.cfg.n_ctx - len(form.start)) // form.pair)
    if pairs < FEWEST:
        raise IclError(
            f"Only {pairs} pairs of numbers fit the {model.cfg.n_ctx} tokens that this model "
            f"reads; at least {FEWEST} are needed."
        )
    drawn = numbers.contexts(form, CONTEXTS, pairs, source)
    tokens = form.write(drawn.xs, drawn.ys)[0][:AT_ONCE].to(model.cfg.device)
    announce(model, "pairs of numbers", tokens, CONTEXTS / AT_ONCE)
    found, sure = predict_numbers(model, form, drawn.xs, drawn.ys, AT_ONCE)
    share = sure[:, 1:].mean().item()
    remark = f" It gives {share:.0%} of its probability to numbers."
    made = _compared(request, found, drawn, text_baselines(), ("OLS", "3-NN", *IDLE), remark)
    made.numbers["probability of a number"] = share
    return made


def _number_format(model: TransformerBridge) -> numbers.NumberFormat:
    """Numbers as the model's tokenizer writes them, or its token ids."""
    try:
        return numbers.of_text(words(model))
    except IclError:
        first = getattr(model.cfg, "bos_token_id", None)
        return numbers.of_ids(model.cfg.d_vocab, None if first is None else int(first))


def _compared(
    request: Request,
    found: Tensor,
    drawn: Contexts,
    known: Mapping[str, Predictor],
    shown: tuple[str, ...],
    remark: str = "",
) -> QuickFigure:
    """The figure: distance to some of the algorithms, and the squared error, by pairs seen."""
    dim, ys = drawn.xs.shape[-1], drawn.ys.double()
    answers = {name: predict(f, drawn.xs, drawn.ys) for name, f in known.items()}
    best = nearest(found, answers, dim, slice(1, ys.shape[-1]))
    away = {name: spd(found, row, dim).mean for name, row in answers.items()}
    error = {"the model": found, "the middle": torch.zeros_like(ys)}
    missed = {name: spd(row, ys, dim).mean for name, row in error.items()}
    seen = list(range(1, ys.shape[-1]))
    panels = {
        "distance to an algorithm": {k: (seen, away[k][1:].tolist()) for k in shown},
        "squared error": {k: (seen, v[1:].tolist()) for k, v in missed.items()},
    }
    share = best.share(request.session.generator("resamples"), 200).max()
    scale = ys[:, 1:].square().mean().item() / dim
    text = (
        f"Of {len(known)} algorithms {best.winners[0]} is nearest, at {best.distances.min():.2g} "
        f"(nearest in {share:.0%} of resamples). Its own error is "
        f"{missed['the model'][1:].mean():.2g}, where always answering the middle would give "
        f"{scale:.2g}.{remark}"
    )
    distances = dict(zip(best.names, best.distances.tolist(), strict=True))
    results = {
        **{"nearest": best.winners[0], "distances": distances},
        **{"by pairs": away, "squared error": missed, "scale": scale},
    }
    alt = f"Two line plots against the number of pairs, distances and squared errors. {text}"
    figure = figures.curves(panels, "labelled pairs n", log_y=True)
    return QuickFigure("03", figure, results, alt, text)
