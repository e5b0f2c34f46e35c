"""Chapter 02: how much flows into label words, out of them, and past them, layer by layer."""

from __future__ import annotations

from ..chapters.label_anchors import saliency
from ..errors import IclError
from ..interp.readout import target_logits
from ..models import TransformerBridge, words
from ..plots import figures
from ..tasks import text, topics
from ..tasks.prompts import Prompts, predicted_class
from ..tasks.sources import open_source
from .quick_figure import QuickFigure, Request, announce

BATCH = 32  # prompts in a pass
CURVES = ("S_wp", "S_pq", "S_ww")
CUE, ANSWER = "Text:", "Label:"
SENTENCES, FEW = "sentiment", 10  # what a model with a tokenizer is asked, in how many prompts


def draw(request: Request) -> QuickFigure:
    """S_wp, S_pq and S_ww by layer, on the reader's own prompt, or on made-up topics or our
    sentences, which the model can read."""
    model = request.load()
    own = request.demonstrations or request.query
    prompts, about = _own(request, model) if own else _ours(request, model)
    tokens, layers = prompts.tokens[:BATCH], model.cfg.n_layers
    held = {"patterns": 4 * layers, "streams": 20 * layers, "vocab": 0}
    announce(model, "saliency", tokens, 3 * len(prompts) / len(tokens), **held)
    flow = saliency.measure(model, prompts, batch_size=BATCH)
    share, total = flow.relative.cpu(), flow.relative_total.cpu()
    panels = {
        title: {name: (range(len(x)), x[:, k].tolist()) for k, name in enumerate(CURVES)}
        for title, x in {"per edge": share, "summed over edges": total}.items()
    }
    seen = (
        f"the flow into label words (S_wp) is largest in layer {int(share[:, 0].argmax())}, "
        f"{share[:, 0].max():.0%} of that layer per edge; the flow from them to the end "
        f"(S_pq) in layer {int(share[:, 1].argmax())}, {share[:, 1].max():.0%}"
    )
    numbers = {"S": share, "S summed": total, "prompts": len(prompts)}
    alt = f"Two line plots by layer of three shares of saliency, S_wp, S_pq and S_ww: {seen}."
    return QuickFigure("02", figures.curves(panels, "layer"), numbers, alt, f"{about}{seen}.")


def _ours(request: Request, model: TransformerBridge) -> tuple[Prompts, str]:
    session = request.session
    if model.cfg.d_vocab != topics.VOCAB:
        words(model)  # it reads text
        source = open_source(SENTENCES, model, seed=session.seed)
        return source.varied(FEW), "On sentences that praise or blame "
    source = open_source("topics", model, session.generator, session.seed)
    return source.varied(session.tier.label_words.saliency_prompts), "On made-up topics "


def _own(request: Request, model: TransformerBridge) -> tuple[Prompts, str]:
    """The reader's own prompt; without a right answer, the model's takes its place."""
    query, right = request.query if isinstance(request.query, tuple) else (request.query, "")
    labels = list(dict.fromkeys(label.strip() for _, label in request.demonstrations))
    if len(labels) < 2 or not query:
        raise IclError(
            "Give demonstrations with at least two labels, [(text, label), ...], and a query; got "
            f"{len(labels)} labels and the query {query!r}."
        )
    if right and right.strip() not in labels:
        raise IclError(f"The query's label {right!r} is none of those shown: {', '.join(labels)}.")
    tokenizer = words(model)
    task = text.TextTask("your prompt", CUE, ANSWER, tuple(f" {label}" for label in labels))
    shown = [(demo, labels.index(label.strip())) for demo, label in request.demonstrations]
    gold = labels.index(right.strip()) if right else 0
    prompts = text.build(task, tokenizer, [shown], [(query, gold)], context=model.cfg.n_ctx)
    prompts = prompts.to(request.session.device)
    answer = int(predicted_class(prompts, target_logits(model, prompts)))
    if not right:
        prompts.gold[:] = answer
    long = [w for w in labels if len(tokenizer(f" {w}", add_special_tokens=False)["input_ids"]) > 1]
    read = f" (of {', '.join(long)} only the first token counts)" if long else ""
    what = repr(right.strip()) if right else "that answer"
    return prompts, f"The model answers {labels[answer]!r}{read}; for {what} "
