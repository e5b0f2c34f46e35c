"""What a model predicts: logits at the target of every prompt alone, and log p of every token.

The unembedding is the widest product of a small model: a hook before it keeps the target's row of
the residual stream alone. Padding on the right comes after the target, which cannot see it.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..errors import IclError
from ..models import TransformerBridge, check_tokens, logits
from ..progress import bar
from ..tasks.prompts import Prompts
from .hooks import Hook, logits_at


def check_prompts(model: TransformerBridge, prompts: Prompts) -> None:
    """Refuse prompts that the model cannot read or answer."""
    if not len(prompts):
        raise IclError("There are no prompts: give at least one.")
    check_tokens(model, prompts.tokens)
    low, high = int(prompts.label_words.min()), int(prompts.label_words.max())
    if not 0 <= low <= high < model.cfg.d_vocab:
        raise IclError(
            f"Label words must lie in the model's vocabulary, 0..{model.cfg.d_vocab - 1}; got "
            f"{low}..{high}. Was another model's tokenizer used?"
        )


def in_batches(
    prompts: Prompts,
    batch_size: int | None,
    what: str,
    measure: Callable[[Prompts, Int[Tensor, "rows"]], Iterable[Tensor]],
) -> list[Tensor]:
    """Return the tensors (batch, ...) that ``measure`` gives of some prompts and their rows, for
    all prompts in their order, ``batch_size`` of like length in a pass; ``what`` names the bar."""
    size = batch_size or len(prompts)
    if size < len(prompts):
        order = prompts.target.argsort(stable=True)  # the shortest first, so that little is padded
    else:
        order = torch.arange(len(prompts), device=prompts.target.device)
    parts = [tuple(measure(prompts[rows], rows)) for rows in bar(order.split(size), what)]
    return [torch.cat(column)[order.argsort()] for column in zip(*parts, strict=True)]


def target_logits(
    model: TransformerBridge,
    prompts: Prompts,
    hooks: Sequence[Hook] = (),
    batch_size: int | None = None,
) -> Float[Tensor, "batch vocab"]:
    """Return next-token logits at the target, without gradients, under ``hooks`` of the whole batch
    or, only without hooks, ``batch_size`` prompts in a pass."""
    check_prompts(model, prompts)
    if hooks and batch_size is not None:
        raise IclError("Hooks are made for one batch: leave batch_size out, or run the batches.")

    def measure(part: Prompts, _: Tensor) -> list[Tensor]:
        return [logits_at(model, part.tokens, part.target[:, None], hooks)[:, 0]]

    return in_batches(prompts, batch_size, "logits", measure)[0]


def with_answers(
    prompts: Prompts, whole: Int[Tensor, "batch longest"]
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch longest"]]:
    """Write whole answers after their prompts, and tell where each token of these is predicted."""
    answer = whole.to(prompts.tokens.device)
    at = prompts.target[:, None] + torch.arange(answer.shape[1], device=answer.device)
    tokens = pad(prompts.tokens, (0, answer.shape[1])).scatter(1, at + 1, answer.clamp(min=0))
    return tokens, at


def is_answered(
    scores: Float[Tensor, "batch longest vocab"], whole: Int[Tensor, "batch longest"]
) -> Bool[Tensor, "batch"]:
    """Tell whether every token of the whole answers is the likeliest; see ``with_answers``."""
    answer = whole.to(scores.device)
    return ((scores.argmax(-1) == answer) | (answer < 0)).all(1)


def log_prob(
    scores: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch entry"]:
    """Return log p of each next token, in nats; entry i is about token i + 1."""
    chosen = tokens[:, 1:, None]
    return scores[:, :-1].gather(-1, chosen)[..., 0] - scores[:, :-1].logsumexp(-1)


def predictions(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> tuple[Float[Tensor, "batch entry"], Bool[Tensor, "batch entry"]]:
    """Return log p (nats) of every next token, and whether it is the most probable one."""
    scores = logits(model, tokens)
    return log_prob(scores, tokens), scores[:, :-1].argmax(-1) == tokens[:, 1:]
