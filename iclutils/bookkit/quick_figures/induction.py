"""Chapter 01: what every head looks at on random tokens that stand there twice.

With a text of the reader's own: the pattern of the induction head on that text, shown twice.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from ...chapters import induction
from ...errors import IclError
from ...interp import head_scores, weights
from ...models import TransformerBridge, bos, cached, check_tokens, words
from ...plots import figures
from ...progress import bar
from ...tasks.repeated import RepeatedTokens, repeated_tokens
from .glimpse import Asked, Glimpse, activations, announce

TOGETHER = 8  # sequences in a pass
SHOWN = {
    "previous token": "previous",
    "duplicate token": "duplicate",
    "prefix matching": "prefix",
}


def glimpse(asked: Asked) -> Glimpse:
    """Head scores on doubled random tokens, and copying read off the weights."""
    model = asked.load(fold=True)
    text = _twice(model, asked.prompt) if asked.prompt else None
    sizes = asked.session.tier.induction
    length = min(sizes.length, (model.cfg.n_ctx - 1) // 2)
    source = asked.session.generator("doubled")
    batch = repeated_tokens(model, sizes.sequences, length, source)
    parts = batch.tokens.split(TOGETHER)
    held = activations(model, parts[0], patterns=model.cfg.n_layers + 3)
    announce(model, "head scores on random tokens", parts[0], 1.2 * len(parts), held)
    found = [head_scores.head_scores(model, part, length) for part in bar(parts, "sequences")]
    scores = {key: torch.cat([part[key] for part in found]).mean(0).cpu() for key in found[0]}
    maps = {title: scores[key] for title, key in SHOWN.items()}
    maps["copying (weights)"] = weights.copying_scores(model)
    head = induction.roles(scores).induction
    best = maps["prefix matching"][head].item()
    even = head_scores.uniform_baselines(length)["prefix"]
    title = f"head {head[0]}.{head[1]}"
    seen = (
        f"{title} attends most to what followed the earlier copy: {best:.2f} of its attention,"
        f" where even attention would give {even:.2f}"
    )
    numbers = {**maps, "induction head": head, "even prefix matching": even}
    if text is None:
        alt = f"Heat maps by layer and head: {', '.join(maps)}. Of prefix matching, {seen}."
        return Glimpse("01", figures.head_maps(maps), numbers, alt, f"{seen}.")
    return _on_text(model, text, head, numbers, seen)


def _twice(model: TransformerBridge, prompt: str) -> RepeatedTokens:
    """BOS and the text two times over, as a doubled sequence."""
    ids = words(model)(prompt, add_special_tokens=False)["input_ids"]
    if len(ids) < 2:
        raise IclError(f"The prompt {prompt!r} has {len(ids)} tokens: give at least two.")
    tokens = torch.tensor([[bos(model), *ids, *ids]], device=model.cfg.device)
    check_tokens(model, tokens)
    return RepeatedTokens(tokens, len(ids))


def _on_text(
    model: TransformerBridge, text: RepeatedTokens, head: tuple[int, int], numbers: dict, seen: str
) -> Glimpse:
    _, cache = cached(model, text.tokens, [f"blocks.{head[0]}.attn.hook_pattern"])
    pattern = cache["pattern", head[0]][0, head[1]].cpu()
    here = head_scores.prefix_matching(pattern, text.length).item()
    found = f"On this text {here:.2f} of its attention goes there"
    alt = (
        f"Attention pattern of head {head[0]}.{head[1]}, the text shown twice across and down. "
        f"{found}, a diagonal one place right of the earlier copy."
    )
    figure = figures.attention(pattern, _written(model, text.tokens[0]))
    numbers |= {"pattern": pattern, "prefix matching on the text": here}
    return Glimpse("01", figure, numbers, alt, f"On random tokens {seen}. {found}.")


def _written(model: TransformerBridge, tokens: Int[Tensor, "pos"]) -> list[str]:
    return [str(words(model).decode([token])) for token in tokens.tolist()]
