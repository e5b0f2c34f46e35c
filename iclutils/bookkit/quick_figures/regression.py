"""Chapter 03: which textbook algorithm an in-context regressor is nearest to.

Networks made by our recipes read numbers. A language model gets numbers written in tokens, in
one dimension; beside the algorithms it is then compared with three that learn nothing: always
the middle, the mean of the labels so far, the last label again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...chapters.regression.algorithms import Predictor, baselines
from ...chapters.regression.distances import nearest, predict, spd
from ...chapters.regression.text import predict_numbers
from ...errors import IclError
from ...models import TransformerBridge, words
from ...plots import figures
from ...progress import say
from ...tasks import numbers, regression
from ...tasks.regression import Contexts, Task
from .quick_figure import QuickFigure, Request, announce

SHOWN = ("OLS", "ridge 1/10", "GD 0.02", "3-NN")  # lines of the figure
CONTEXTS, PAIRS, AT_ONCE = 64, 12, 16  # of a language model
FEWEST = 3  # pairs that tell algorithms apart


IDLE: dict[str, Predictor] = {  # they learn nothing
    "the middle": lambda xs, ys: torch.zeros_like(ys),
    "mean label": lambda xs, ys: (
        (ys.cumsum(-1) - ys) / torch.arange(ys.shape[-1]).to(ys).clamp(min=1)
    ),
    "last label": lambda xs, ys: torch.nn.functional.pad(ys[..., :-1], (1, 0)),
}


def draw(request: Request) -> QuickFigure:
    """Distances of a regressor, or of a language model, to the textbook algorithms."""
    if request.kind == "in-context regressors":
        return _of_regressor(request)
    return _of_model(request)


def _of_regressor(request: Request) -> QuickFigure:
    sizes = request.session.tier.regression
    net = request.session.regressors(request.name)
    dim = net.shape.dim
    task = Task(**net.tasks[-1]) if net.tasks else Task(dim)
    pairs = min(net.shape.pairs, 2 * dim + 1)
    say(f"distances of {request.name} on {sizes.contexts} contexts: some seconds, less than 1 GB")
    source = request.session.generator("contexts")
    drawn = regression.sample(task, sizes.contexts, pairs, source)
    found = predict(net, drawn.xs, drawn.ys)[-1].cpu()
    return _compared(request, found, drawn, baselines("wide", task.ridge), SHOWN, "")


def _of_model(request: Request) -> QuickFigure:
    model = request.load()
    form = _number_format(model)
    pairs = min(PAIRS, (model.cfg.n_ctx - len(form.start)) // form.pair)
    if pairs < FEWEST:
        raise IclError(
            f"Only {pairs} pairs of numbers fit the {model.cfg.n_ctx} tokens that this model "
            f"reads; at least {FEWEST} are needed."
        )
    drawn = numbers.contexts(form, CONTEXTS, pairs, request.session.generator("contexts"))
    tokens = form.write(drawn.xs, drawn.ys)[0][:AT_ONCE].to(model.cfg.device)
    announce(model, "pairs of numbers", tokens, CONTEXTS / AT_ONCE)
    found, sure = predict_numbers(model, form, drawn.xs, drawn.ys, AT_ONCE)
    share = sure[:, 1:].mean().item()
    remark = f" It gives {share:.0%} of its probability to numbers."
    shown = ("OLS", "3-NN", *IDLE)
    made = _compared(request, found, drawn, baselines() | IDLE, shown, remark)
    made.numbers["probability of a number"] = share
    return made


def _number_format(model: TransformerBridge) -> numbers.NumberFormat:
    """Numbers as the model's tokenizer writes them, or its token ids."""
    try:
        tokenizer = words(model)
    except IclError:
        first = getattr(model.cfg, "bos_token_id", None)
        return numbers.of_ids(model.cfg.d_vocab, None if first is None else int(first))
    return numbers.of_text(tokenizer)


def _compared(
    request: Request,
    found: Tensor,
    drawn: Contexts,
    known: Mapping[str, Predictor],
    shown: tuple[str, ...],
    remark: str,
) -> QuickFigure:
    """The figure: distance to some of the algorithms, and the squared error, by pairs seen."""
    dim, count = drawn.xs.shape[-1], drawn.ys.shape[-1]
    answers = {name: predict(f, drawn.xs, drawn.ys) for name, f in known.items()}
    region, draw = slice(1, count), request.session.generator("resamples")
    best = nearest(found, answers, dim, region)
    away = {name: spd(found, row, dim).mean for name, row in answers.items()}
    ys = drawn.ys.double()
    error = {"the model": found, "the middle": torch.zeros_like(ys)}
    missed = {name: spd(row, ys, dim).mean for name, row in error.items()}
    seen = list(range(1, count))
    panels = {
        "distance to an algorithm": {k: (seen, away[k][1:].tolist()) for k in shown},
        "squared error": {k: (seen, v[1:].tolist()) for k, v in missed.items()},
    }
    winner, least = best.winners[0], best.distances.min().item()
    share = best.share(draw, 200).max()
    scale = ys[:, 1:].square().mean().item() / dim
    missing = missed["the model"][1:].mean().item()
    text = (
        f"Of {len(known)} algorithms {winner} is nearest, at {least:.2g} (nearest in "
        f"{share:.0%} of resamples). Its own error is {missing:.2g}, where always "
        f"answering the middle would give {scale:.2g}.{remark}"
    )
    distances = dict(zip(best.names, best.distances.tolist(), strict=True))
    numbers_ = {
        **{"nearest": winner, "distances": distances},
        **{"by pairs": away, "squared error": missed, "scale": scale},
    }
    alt = f"Two line plots against the number of pairs, distances and squared errors. {text}"
    figure = figures.curves(panels, "labelled pairs n", log_y=True)
    return QuickFigure("03", figure, numbers_, alt, text)
