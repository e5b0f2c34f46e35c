"""Read the model where it answers: logits at the target of every prompt, and nowhere else.

The unembedding is the widest product of a small model, and a prompt needs one row of it. A hook
before it keeps only the target's row of the residual stream, so logits of the other positions
are never made. Padding on the right comes after the target, which cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...interventions import Hook
from ...models import TransformerBridge, check_tokens
from ...tasks.prompts import Prompts


def check(model: TransformerBridge, prompts: Prompts) -> None:
    """Refuse prompts that the model cannot read or answer.

    Raises:
        IclError: if a prompt is longer than the context, or a token or a label word is outside
            the vocabulary.
    """
    check_tokens(model, prompts.tokens)
    low, high = int(prompts.label_words.min()), int(prompts.label_words.max())
    if not 0 <= low <= high < model.cfg.d_vocab:
        raise IclError(
            f"Label words must lie in the model's vocabulary, 0..{model.cfg.d_vocab - 1}; got "
            f"{low}..{high}. Was another model's tokenizer used?"
        )


def at_target(prompts: Prompts) -> Hook:
    """Hook that hands the unembedding the target's row of every prompt: (batch, 1, d_model)."""
    rows = torch.arange(len(prompts), device=prompts.tokens.device)

    def narrow(resid: Tensor, hook: object) -> Tensor:
        return resid[rows, prompts.target][:, None]

    return "unembed.hook_in", narrow


def target_logits(
    model: TransformerBridge, prompts: Prompts, hooks: Sequence[Hook] = ()
) -> Float[Tensor, "batch vocab"]:
    """Next-token logits at the target, under ``hooks``, without gradients.

    Raises:
        IclError: if the model cannot read or answer the prompts (see ``check``).
    """
    check(model, prompts)
    with torch.no_grad():
        out = model.run_with_hooks(prompts.tokens, fwd_hooks=[*hooks, at_target(prompts)])
    return out[:, 0]
