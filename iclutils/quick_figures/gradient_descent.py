"""Chapter 04: linear self-attention of our recipes beside a step of gradient descent, as inputs are
stretched. Chapter 05: what the updates of a language model's heads add to an answer it copies.
"""

from __future__ import annotations

import math

import torch

from ..chapters.contrastive_kernel import ablation, heads
from ..chapters.gradient_step import alignment, descent
from ..errors import IclError
from ..interp import at_query
from ..plots import figures
from ..progress import bar, say
from ..tasks.functions import Problem
from ..tasks.regression import Task
from ..tasks.repeated import repeated_tokens
from .quick_figure import QuickFigure, Request, announce

PROMPTS, BATCH = 16, 8
STRETCHED = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0]
CONTEXTS = 4000


def of_heads(request: Request) -> QuickFigure:
    """Repeated tokens up to the middle of the second copy; the first copy demonstrates."""
    model = request.load()
    cfg, source = model.cfg, request.session.generator("copying")
    length = min(request.session.tier.induction.length, (cfg.n_ctx - 1) // 2)
    batch = repeated_tokens(model, PROMPTS, length, source, distinct=True)
    end = length + length // 2 + 1
    tokens, shown, answer = batch.tokens[:, :end], heads.first_copy(batch), batch.tokens[:, end]
    others = torch.arange(cfg.d_vocab, device=tokens.device)[None]
    columns = (rows.split(BATCH) for rows in (tokens, shown[:, :end], answer))
    parts = list(zip(*columns, strict=True))
    unembedding = 8 * cfg.d_vocab * cfg.d_model  # in double precision
    held = {"streams": 4 * cfg.n_layers, "vocab": 1, "more": unembedding}
    announce(model, "updates of all heads", parts[0][0], 2 * len(parts), **held)
    splits, right = [], []
    for some, where, wanted in bar(parts, "prompts"):
        query = at_query.read(model, some)
        duals = heads.dual_heads(query, where)
        splits.append(heads.direct_logit_attribution(query, duals, wanted, others))
        ways = ablation.ablations(query, where, wanted, ways=["whole", "no update"])
        right.append(torch.stack([way.is_correct for way in ways.values()]))
    split = heads.LogitAttribution(*(torch.cat(part) for part in zip(*splits, strict=True)))
    whole, without = torch.cat(right, 1).float().mean(1).tolist()
    updates = split.demonstration_update.mean(0).cpu()
    query_terms = split.query_term.mean(0).cpu()
    best = "{}.{}".format(*divmod(int(updates.argmax()), cfg.n_heads))
    share = split.update_share.item() if whole > 0.5 else math.nan  # of what is not there, no share
    told = (
        "It does not copy, so there is no answer whose share could be told."
        if math.isnan(share)
        else f"The updates carry {share:.0%} of the answer's logit directly, head {best} most."
    )
    text = (
        f"Copying, the model answers {whole:.0%} right, and {without:.0%} with the updates ablated "
        f"in all heads. {told}"
    )
    numbers = {
        **{"updates": updates, "query terms": query_terms, "share of updates": share},
        **{"accuracy": whole, "accuracy without updates": without},
    }
    alt = (
        "Two maps by layer and head, zero in the middle of the scale: what each head's "
        f"demonstration update, and what its query term, adds to the logit of the answer. {text}"
    )
    layers, each = (list(map(str, range(count))) for count in updates.shape)
    maps = {"updates, nats": updates, "query terms, nats": query_terms}
    figure = figures.signed(maps, "head", "layer", 2, layers, each)
    return QuickFigure("05", figure, numbers, alt, text)


def of_lsa(request: Request) -> QuickFigure:
    net = request.session.lsa(request.name)
    known = net.tasks[-1] if net.tasks else {}
    if known.get("kind") != "Problem" or known.get("link") != "linear":
        raise IclError(
            f"{request.name!r} was not trained on linear functions; a step of gradient descent on "
            "a linear model is nothing to compare it with. Use networks such as 'lsa-1'."
        )
    problem = Problem(Task(**known["task"]), known["link"], tuple(known["scales"]))
    say(f"{request.name} against gradient descent: some seconds, less than 1 GB")
    tuned_on, drawn = (
        problem.sample(CONTEXTS, net.shape.pairs + 1, request.session.generator(purpose))
        for purpose in ("tuning", "asked")
    )
    (tuned,) = descent.tune(1, tuned_on.xs, tuned_on.ys)
    step = descent.predictor(tuned.rates, tuned.gammas)
    losses = alignment.under_shift(
        {"trained": net, "one step of GD": step}, drawn, STRETCHED, "inputs"
    )
    near = alignment.alignment(net, step, drawn.xs, drawn.ys)
    cosine, ratio = near.cosine.min(), (near.loss / near.reference_loss).max()
    text = (
        f"The trained network's answers depend on the query as those of one step of gradient "
        f"descent do with a cosine of {cosine:.2f}, and its loss is {ratio:.2f} of the step's "
        f"(the worst of {len(net.seeds)} trainings)."
    )
    lines = {name: (STRETCHED, rows.amax(0).tolist()) for name, rows in losses.items()}
    numbers = {"losses": losses, "cosine": near.cosine, "rate": tuned.rates[0]}
    numbers["loss ratio"] = ratio.item()
    alt = f"Loss of the trained network and of one step, over the scale of the inputs. {text}"
    figure = figures.curves({"loss": lines}, "inputs scaled by", log_y=True)
    return QuickFigure("04", figure, numbers, alt, text)
