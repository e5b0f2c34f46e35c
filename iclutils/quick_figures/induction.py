"""Chapter 01: what every head looks at on repeated random tokens, or on a text shown twice."""

from __future__ import annotations

import torch

from ..chapters import gpt2_induction
from ..errors import IclError
from ..interp import head_scores, weights
from ..models import TransformerBridge, bos, cached, check_tokens, words
from ..plots import figures
from ..progress import bar
from ..tasks.repeated import RepeatedTokens, repeated_tokens
from .quick_figure import QuickFigure, Request, announce

BATCH = 8  # sequences in a pass
SHOWN = {"previous token": "previous", "duplicate token": "duplicate", "prefix matching": "prefix"}


def draw(request: Request) -> QuickFigure:
    """Head scores on repeated random tokens, and copying read off the weights; with a text, the
    pattern of the induction head on that text."""
    model = request.load(fold=True)
    text = _twice(model, request.prompt) if request.prompt else None
    sizes = request.session.tier.induction
    length = min(sizes.length, (model.cfg.n_ctx - 1) // 2)
    batch = repeated_tokens(model, sizes.sequences, length, request.session.generator("doubled"))
    parts = batch.tokens.split(BATCH)
    patterns = model.cfg.n_layers + 3
    announce(model, "head scores on random tokens", parts[0], 1.2 * len(parts), patterns=patterns)
    found = [head_scores.score_heads(model, part, length) for part in bar(parts, "sequences")]
    scores = {key: torch.cat([part[key] for part in found]).mean(0).cpu() for key in found[0]}
    maps = {title: scores[key] for title, key in SHOWN.items()}
    maps["copying (weights)"] = weights.copying_scores(model)
    layer, head = gpt2_induction.roles(scores).induction
    even = head_scores.uniform_baselines(length)["prefix"]
    seen = (
        f"head {layer}.{head} attends most to what followed the earlier copy: "
        f"{scores['prefix'][layer, head]:.2f} of its attention, where even attention would "
        f"give {even:.2f}"
    )
    numbers = {**maps, "induction head": (layer, head), "even prefix matching": even}
    if text is None:
        alt = f"Heat maps by layer and head: {', '.join(maps)}. Of prefix matching, {seen}."
        return QuickFigure("01", figures.head_maps(maps), numbers, alt, f"{seen}.")
    _, cache = cached(model, text.tokens, [f"blocks.{layer}.attn.hook_pattern"])
    pattern = cache["pattern", layer][0, head].cpu()
    here = head_scores.prefix_matching(pattern, text.length).item()
    alt = (
        f"Attention pattern of head {layer}.{head}, the text shown twice across and down. On this "
        f"text {here:.2f} of its attention goes one place right of the earlier copy, a diagonal."
    )
    told = f"On random tokens {seen}. On this text {here:.2f} of its attention goes there."
    pieces = [str(words(model).decode([token])) for token in text.tokens[0].tolist()]
    numbers |= {"pattern": pattern, "prefix matching on the text": here}
    return QuickFigure("01", figures.attention(pattern, pieces), numbers, alt, told)


def _twice(model: TransformerBridge, prompt: str) -> RepeatedTokens:
    """BOS and the text two times over."""
    ids = words(model)(prompt, add_special_tokens=False)["input_ids"]
    if len(ids) < 2:
        raise IclError(f"The prompt {prompt!r} has {len(ids)} tokens: give at least two.")
    tokens = torch.tensor([[bos(model), *ids, *ids]], device=model.cfg.device)
    check_tokens(model, tokens)
    return RepeatedTokens(tokens, len(ids))
