"""Isolation: label words that may not look back, and what the model loses by it.

In chosen layers a position is cut off from everything before it, in every head. If label words
collect what their demonstrations say, this must hurt in early layers and be harmless in late
ones, where the information has been collected; isolating as many random other positions is the
control. What is lost is measured against the unmodified model on the same prompts: *label
loyalty*, whether the class stays the same, and *word loyalty*, how far the likeliest words do.

Two operations go by the name. The paper's code sets the scores to -10,000 before the softmax, so
the row becomes one-hot on the position itself; its text sets A[p, i] to 0 for i < p, and the row
keeps only the mass A[p, p]. Isolating the last layer alone never changes the prediction: nothing
after it reads what the label words write there.

Source: Wang et al. 2023, section 2.2, figure 4 (released code: window 0, independent draws).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.label_words import isolation
    >>> from iclutils.interp.readout import target_logits
    >>> from iclutils.tasks import topics
    >>> net = models.load("anchors-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> asked = topics.sample(8, generator, classes=2)
    >>> whole = target_logits(net, asked)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import IclError, unknown
from ...interp.hooks import Hook, cut_attention
from ...interp.readout import batches, check_prompts, target_logits
from ...models import TransformerBridge
from ...tasks.prompts import Prompts, predicted_class

HOWS = ("pre-softmax", "zeroed")
Positions = Int[Tensor, "batch isolated"]


def first_layers(model: TransformerBridge, count: int) -> range:
    """The first ``count`` layers.

    Example:
        >>> isolation.first_layers(net, 2)
        range(0, 2)
    """
    return range(_count(model, count))


def last_layers(model: TransformerBridge, count: int) -> range:
    """The last ``count`` layers.

    Example:
        >>> list(isolation.last_layers(net, 1)) == [net.cfg.n_layers - 1]
        True
    """
    return range(model.cfg.n_layers - _count(model, count), model.cfg.n_layers)


def isolation(
    model: TransformerBridge,
    prompts: Prompts,
    layers: Iterable[int],
    positions: Positions | Sequence[Positions] | None = None,
    how: str = "pre-softmax",
    window: int = 0,
) -> list[Hook]:
    """Hooks that isolate positions in ``layers``.

    Args:
        model: the model.
        prompts: the prompts that will be run under the hooks.
        layers: where to isolate.
        positions: what to isolate in each prompt, one tensor for all layers or one per layer in
            the order of ``layers``; the label words if omitted.
        how: ``"pre-softmax"`` (code) or ``"zeroed"`` (text, no renormalisation).
        window: how many tokens after each position are cut off from the same sources as well;
            the released code has the parameter and always leaves it at 0.

    Example:
        >>> hooks = isolation.isolation(net, asked, layers=[0])
        >>> [name for name, _ in hooks]
        ['blocks.0.attn.hook_attn_scores']
    """
    layers = list(layers)
    if how not in HOWS:
        raise unknown("way to isolate", how, HOWS)
    chosen = prompts.label_pos if positions is None else positions
    each = [chosen] * len(layers) if isinstance(chosen, Tensor) else list(chosen)
    if len(each) != len(layers):
        raise IclError(f"Got positions for {len(each)} layers, but {len(layers)} layers.")

    cut = {
        layer: cut_edges(prompts, where, window) for layer, where in zip(layers, each, strict=True)
    }
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
    rows = (place >= first) & (place <= first + window)  # (batch, k, dest)
    return (rows[..., None] & (place < first)[:, :, None]).any(1)


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

    Example:
        >>> drawn = isolation.random_positions(asked, generator)
        >>> drawn.shape == asked.label_pos.shape
        True
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


def isolated_logits(
    model: TransformerBridge,
    prompts: Prompts,
    layers: Iterable[int],
    positions: Positions | Sequence[Positions] | None = None,
    how: str = "pre-softmax",
    window: int = 0,
    batch_size: int | None = None,
) -> Float[Tensor, "batch vocab"]:
    """Logits at the target under ``isolation``; arguments as there.

    For the control, ``positions=[random_positions(prompts, generator) for _ in layers]``.

    Example:
        >>> changed = isolation.isolated_logits(net, asked, layers=[])
        >>> bool((changed - whole).abs().max() < 1e-4)
        True
    """
    check_prompts(model, prompts)
    layers, chosen = list(layers), prompts.label_pos if positions is None else positions
    parts = []
    for rows in batches(prompts, batch_size, "isolation"):
        some = chosen[rows] if isinstance(chosen, Tensor) else [where[rows] for where in chosen]
        part = prompts[rows]
        hooks = isolation(model, part, layers, some, how, window)
        parts.append(target_logits(model, part, hooks))
    return torch.cat(parts)


def layer_sweep(
    model: TransformerBridge,
    prompts: Prompts,
    positions: Positions | None = None,
    how: str = "pre-softmax",
    batch_size: int | None = None,
) -> Iterator[Float[Tensor, "batch vocab"]]:
    """Logits at the target with one layer isolated, for each layer in turn.

    One layer's logits at a time, because all of them can be many.

    Example:
        >>> len(list(isolation.layer_sweep(net, asked))) == net.cfg.n_layers
        True
    """
    for layer in range(model.cfg.n_layers):
        yield isolated_logits(model, prompts, [layer], positions, how, batch_size=batch_size)


def label_loyalty(
    prompts: Prompts,
    changed: Float[Tensor, "batch vocab"],
    clean: Float[Tensor, "batch vocab"],
) -> Bool[Tensor, "batch"]:
    """Whether the changed model predicts the same class as the unmodified one.

    Example:
        >>> bool(isolation.label_loyalty(asked, whole, whole).all())
        True
    """
    return predicted_class(prompts, changed) == predicted_class(prompts, clean)


def word_loyalty(
    changed: Float[Tensor, "batch vocab"], clean: Float[Tensor, "batch vocab"], k: int = 5
) -> Float[Tensor, "batch"]:
    """Jaccard similarity of the k likeliest words of both models, 0 to 1.

    The paper says k = 5; the released notebook takes 10 for isolation and 5 for compression.

    Example:
        >>> isolation.word_loyalty(whole[:2], whole[:2], k=5)
        tensor([1., 1.])
    """
    if not 1 <= k <= clean.shape[-1]:
        raise IclError(f"k must lie in 1..{clean.shape[-1]}, the vocabulary; got {k}.")
    ours, theirs = (logits.topk(k).indices for logits in (changed, clean))
    shared = (ours[:, :, None] == theirs[:, None, :]).sum((1, 2)).to(clean.dtype)
    return shared / (2 * k - shared)


def _count(model: TransformerBridge, count: int) -> int:
    if not 0 <= count <= model.cfg.n_layers:
        raise IclError(f"The model has {model.cfg.n_layers} layers; got {count}.")
    return count
