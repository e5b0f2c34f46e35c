"""Isolation: label words that may not look back, and what the model loses by it.

In chosen layers a position is cut off from everything before it, in every head. If label words
collect what their demonstrations say, this must hurt in early layers and be harmless in late
ones, where the information has been collected; isolating as many random other positions is the
control. What is lost is measured by the loyalty of the answers (``answers``).

Two operations go by the name. The paper's code sets the scores to -10,000 before the softmax, so
the row becomes one-hot on the position itself; its text sets A[p, i] to 0 for i < p, and the row
keeps only the mass A[p, p]. Isolating the last layer alone never changes the prediction: nothing
after it reads what the label words write there.

Source: Wang et al. 2023, section 2.2, figure 4 (released code: window 0, independent draws).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...errors import IclError, unknown
from ...interp.hooks import Hook, cut_attention
from ...interp.readout import batches
from ...models import TransformerBridge
from ...tasks.prompts import Prompts
from .answers import Answers, answers

HOWS = ("pre-softmax", "zeroed")
Positions = Int[Tensor, "batch isolated"]


def isolation(
    model: TransformerBridge,
    prompts: Prompts,
    layers: Iterable[int],
    positions: Positions | Sequence[Positions] | None = None,
    how: str = "pre-softmax",
    window: int = 0,
) -> list[Hook]:
    """Hooks that isolate positions in ``layers`` when ``prompts`` are run.

    Args:
        model: the model.
        prompts: the prompts.
        layers: where to isolate.
        positions: what to isolate in each prompt, one tensor for all layers or one per layer in
            the order of ``layers``; the label words if omitted.
        how: ``"pre-softmax"`` (code) or ``"zeroed"`` (text, no renormalisation).
        window: how many tokens after each position are cut off from the same sources as well;
            the released code has the parameter and always leaves it at 0.
    """
    if how not in HOWS:
        raise unknown("way to isolate", how, HOWS)
    layers, chosen = list(layers), prompts.label_pos if positions is None else positions
    each = [chosen] * len(layers) if isinstance(chosen, Tensor) else list(chosen)
    if len(each) != len(layers):
        raise IclError(f"Got positions for {len(each)} layers, but {len(layers)} layers.")
    cut = {la: cut_edges(prompts, at, window) for la, at in zip(layers, each, strict=True)}
    return cut_attention(model, cut, renormalise=how == "pre-softmax")


def cut_edges(
    prompts: Prompts, positions: Positions, window: int = 0
) -> Bool[Tensor, "batch dest src"]:
    """The edges that isolation cuts: from everything before a position into it.

    With a window, also from there into the ``window`` tokens after it.
    """
    size = prompts.tokens.shape[1]
    inside = bool(((positions >= 0) & (positions < size)).all())
    if len(positions) != len(prompts) or not inside:
        raise IclError("Need one row of positions per prompt, all of them inside the prompt.")
    place = torch.arange(size, device=positions.device)
    first = positions[..., None]
    rows = (place >= first) & (place <= first + window)  # (batch, isolated, dest)
    return (rows[..., None] & (place < first)[:, :, None]).any(1)


def isolated(
    model: TransformerBridge,
    prompts: Prompts,
    layers: Iterable[int],
    positions: Positions | Sequence[Positions] | None = None,
    how: str = "pre-softmax",
    window: int = 0,
    batch_size: int | None = None,
) -> Answers:
    """Answers under ``isolation``; arguments as there.

    For the control, ``positions=[random_positions(prompts, generator) for _ in layers]``.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.label_words.isolation import isolated
        >>> from iclutils.tasks import topics
        >>> asked = topics.sample(8, torch.Generator().manual_seed(0), classes=2)
        >>> isolated(models.load("anchors-0"), asked, layers=[0]).predicted.shape
        torch.Size([8])
    """
    layers, chosen = list(layers), prompts.label_pos if positions is None else positions
    parts = []
    for rows in batches(prompts, batch_size, "isolation"):
        some = chosen[rows] if isinstance(chosen, Tensor) else [where[rows] for where in chosen]
        part = prompts[rows]
        parts.append(answers(model, part, isolation(model, part, layers, some, how, window)))
    return Answers.join(parts)


def random_positions(
    prompts: Prompts, generator: torch.Generator, count: int | None = None
) -> Positions:
    """The control: as many random positions as there are label words, none of them one.

    Drawn without replacement, for each prompt alone, from 0 .. q-2 without the label positions,
    as in the paper's code; the target q and the token before it are never drawn. Position 0 may
    be, and has nothing before it to be cut off from. Draw again for every layer.

    Args:
        prompts: the prompts.
        generator: where the randomness comes from, on the CPU.
        count: how many; the number of demonstrations if omitted.
    """
    count = prompts.label_pos.shape[1] if count is None else count
    tokens, labels = prompts.tokens.cpu(), prompts.label_pos.cpu()
    free = torch.arange(tokens.shape[1]) <= prompts.target.cpu()[:, None] - 2
    free = free.scatter(1, labels, False)
    fewest = int(free.sum(-1).min())
    if not 1 <= count <= fewest:
        raise IclError(
            f"Cannot draw {count} random positions: some prompt has only {fewest} to draw from, "
            "up to two before its target. Use longer prompts or isolate fewer."
        )
    drawn = torch.multinomial(free.double(), count, replacement=False, generator=generator)
    return drawn.to(prompts.tokens.device)
