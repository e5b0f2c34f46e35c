"""Read the model where it answers: logits at the target of every prompt, and nowhere else.

The unembedding is the widest product of a small model, and a prompt needs one row of it. A hook
before it keeps only the target's row of the residual stream, so logits of the other positions
are never made. Padding on the right comes after the target, which cannot see it.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import readout
    >>> from iclutils.tasks import topics
    >>> net = models.load("anchors-0")
    >>> asked = topics.sample(6, torch.Generator().manual_seed(0), classes=2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import IclError
from ..models import TransformerBridge, check_tokens, editable
from ..progress import bar
from ..tasks.prompts import Prompts
from .hooks import Hook


def check(model: TransformerBridge, prompts: Prompts) -> None:
    """Refuse prompts that the model cannot read or answer.

    Example:
        >>> readout.check(net, asked)
    """
    if not len(prompts):
        raise IclError("There are no prompts: give at least one.")
    check_tokens(model, prompts.tokens)
    low, high = int(prompts.label_words.min()), int(prompts.label_words.max())
    if not 0 <= low <= high < model.cfg.d_vocab:
        raise IclError(
            f"Label words must lie in the model's vocabulary, 0..{model.cfg.d_vocab - 1}; got "
            f"{low}..{high}. Was another model's tokenizer used?"
        )


def check_editable(model: TransformerBridge) -> None:
    """Refuse a model whose attention can be read but not edited (see ``models.editable``)."""
    if not editable(model):
        raise IclError(
            "This model shows its attention only after using it, so editing the attention, or a "
            "gradient through it, would silently come to nothing. Use a model like GPT-2, "
            "GPT-NeoX or Llama; compression and re-weighting work on this one, because they edit "
            "keys and values."
        )


def batches(prompts: Prompts, batch_size: int | None, what: str) -> Iterator[slice]:
    """Rows of ``prompts``, ``batch_size`` at a time; all at once if it is None.

    ``what`` names the work on the progress bar.

    Example:
        >>> list(readout.batches(asked, 4, "reading"))
        [slice(0, 4, None), slice(4, 8, None)]
    """
    size = len(prompts) if batch_size is None else batch_size
    if size < 1:
        raise IclError(f"batch_size must be at least 1; got {batch_size}.")
    starts = range(0, len(prompts), size)
    for start in bar(starts, what):
        yield slice(start, start + size)


def at_target(prompts: Prompts) -> Hook:
    """Hook that hands the unembedding the target's row of every prompt: (batch, 1, d_model)."""
    rows = torch.arange(len(prompts), device=prompts.tokens.device)

    def narrow(resid: Tensor, hook: object) -> Tensor:
        return resid[rows, prompts.target][:, None]

    return "unembed.hook_in", narrow


def target_logits(
    model: TransformerBridge,
    prompts: Prompts,
    hooks: Sequence[Hook] = (),
    batch_size: int | None = None,
) -> Float[Tensor, "batch vocab"]:
    """Next-token logits at the target, under ``hooks``, without gradients.

    Args:
        model: the model.
        prompts: the prompts.
        hooks: hooks of the whole batch.
        batch_size: prompts per forward pass, only without hooks; all if omitted.

    Example:
        >>> logits = readout.target_logits(net, asked)
        >>> full = models.logits(net, asked.tokens)[torch.arange(6), asked.target]
        >>> bool((logits - full).abs().max() < 1e-4)
        True
    """
    check(model, prompts)
    if hooks and batch_size is not None:
        raise IclError("Hooks are made for one batch: leave batch_size out, or run the batches.")
    parts = []
    with torch.no_grad():
        for rows in batches(prompts, batch_size, "logits"):
            part = prompts[rows]
            out = model.run_with_hooks(part.tokens, fwd_hooks=[*hooks, at_target(part)])
            parts.append(out[:, 0])
    return torch.cat(parts)
