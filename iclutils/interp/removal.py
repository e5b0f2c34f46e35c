"""Take heads out of a model, and say in one sentence what was done.

An ablation has five parts: which heads, what their outputs become, what that is averaged over, how
the answer is measured, and against which other heads. ``without`` does it, ``caption`` says it.
Heads lose their output (``z``, before ``W_O``) at every position. What may stand there:

- ``zeros``: off the model's usual path, so it can hurt for that alone.
- ``mean_over`` prompts: keep these free of the task. A mean over prompts of the same function holds
  what they have in common, and that is the function (a task vector, chapter 05).
- ``outputs_on`` another prompt: not only takes evidence away, but adds that of the other prompt.

For one model and one set of heads inside a lesson, ``hooks.ablate_heads`` is shorter.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ..errors import IclError
from ..models import TransformerBridge, get_act_name
from .clean_corrupt import CleanCorrupt, margin
from .head_scores import same_layers
from .hooks import Head, Heads, activations, head_masks, logits_without

DRAWS = 20  # of other heads of the same layers, dealt over the prompts


@dataclass(frozen=True)
class Replacement:
    """What the outputs of removed heads become: by layer, what broadcasts to (batch, pos, head,
    d_head), and ``words`` for it, which complete the sentence "each head's output becomes ..."."""

    words: str
    by_layer: Mapping[int, Float[Tensor, "..."]]


class Outcome(NamedTuple):
    """What is left of the answer without each set of heads, or with all of them."""

    p: Float[Tensor, "*set batch"]  # probability of the answer among all words
    margin: Float[Tensor, "*set batch"]  # nats by which it leads the mean of the other choices
    right: Float[Tensor, "*set batch"]  # 1 where it is the likeliest of all words, else 0


def zeros(model: TransformerBridge) -> Replacement:
    """Return the replacement by nothing."""
    none = torch.zeros((), device=model.cfg.device)
    return Replacement("zero", dict.fromkeys(range(model.cfg.n_layers), none))


def head_means(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "layer head d_head"]:
    """Return the mean output of every head over all positions of some prompts of one length."""
    z = _outputs(model, tokens)
    if len(sizes := {each.shape[-1] for each in z.values()}) > 1:
        raise IclError(
            f"The heads of this model write {' or '.join(map(str, sorted(sizes)))} numbers, by "
            "layer, so that their means are no one table: replace them by zeros or outputs_on."
        )
    return torch.stack([z[layer].mean((0, 1)) for layer in sorted(z)])


def mean_over(means: Iterable[Float[Tensor, "layer head d_head"]], what: str) -> Replacement:
    """Return the replacement by one vector a head, the mean of ``head_means``; ``what`` names the
    prompts, as in "16 prompts of each of 11 other functions"."""
    mean = torch.stack([*means]).mean(0)  # (layer, head, d_head)
    return Replacement(f"its mean over all positions of {what}", dict(enumerate(mean)))


def outputs_on(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], what: str
) -> Replacement:
    """Return the replacement by what the heads write on another prompt for each row; ``what`` names
    it, as in "the same prompt with the rival's answers"."""
    return Replacement(f"what it writes on {what}", _outputs(model, tokens))


def without(
    model: TransformerBridge,
    task: CleanCorrupt,
    sets: Sequence[Heads],
    replacement: Replacement | Sequence[Replacement],
) -> Outcome:
    """Return what is left of the answer on the clean sequences without each set of heads.

    A set is a list of (layer, head), or one such list for each row of the task, as
    ``controls_by_row`` draws them. Every head of a set loses its output at every position, and
    ``replacement`` stands there, or the one of its set. The answer is that of the task's first
    scored entry; its rivals are the task's ``choices``, which it needs. For nats lost, MLP layers
    or several entries, see ``patching.ablate``."""
    new = [replacement] * len(sets) if isinstance(replacement, Replacement) else replacement
    ways = [
        (head_masks(model, heads, len(task)), each.by_layer)
        for heads, each in zip(sets, new, strict=True)
    ]
    order, parts = [], []
    for rows, logits in logits_without(model, task.clean, ways, task.at):
        order.append(rows)
        parts.append(torch.stack(outcome(task[rows % len(task)], logits[:, 0])))
    every = torch.cat(parts, -1)[:, torch.cat(order).argsort()]  # (measure, way x batch)
    return Outcome(*every.unflatten(-1, (len(sets), len(task))))


def outcome(task: CleanCorrupt, logits: Float[Tensor, "batch vocab"]) -> Outcome:
    """Return both metrics and the accuracy of the answer after these logits."""
    if task.choices is None:
        raise IclError("Name the answer and its rivals: the task needs choices.")
    right = logits.gather(-1, task.answer)[:, 0]
    ahead = margin(right, logits.gather(-1, task.choices))
    hit = logits.argmax(-1) == task.answer[:, 0]
    return Outcome((right - logits.logsumexp(-1)).exp(), ahead, hit.to(right))


def controls_by_row(
    heads: Iterable[Head],
    width: int,
    rows: int,
    generator: Generator,
    draws: int = DRAWS,
    outside: Iterable[Head] = (),
    layers: int = 0,
) -> list[Sequence[Head]]:
    """Return the control of a set for each row: of so many draws of ``head_scores.same_layers``
    (``width`` heads in a layer), which explains ``outside`` and ``layers``, row i has number i
    modulo ``draws``."""
    drawn = same_layers(heads, width, draws, generator, outside=outside, layers=layers)
    return [drawn[row % draws] for row in range(rows)]


def caption(
    heads: str,
    replacements: Iterable[Replacement],
    others: str = "as many other heads of the same layers",
) -> str:
    """Return the sentences that a figure of removals carries, with all five parts."""
    ways = "; or ".join(each.words for each in replacements)
    return (
        f"Removed: {heads}. At every position each head's output becomes {ways}. Measured: the "
        "answer's probability among all words, its lead over the rival's answer in nats, and how "
        f"often it is the likeliest word. Controls: {DRAWS} draws of {others}, dealt over the "
        "prompts."
    )


def _outputs(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> dict[int, Float[Tensor, "batch pos head d_head"]]:
    """Read the outputs of all heads, by layer."""
    names = [get_act_name("z", layer) for layer in range(model.cfg.n_layers)]
    seen = activations(model, tokens, names)
    return {layer: seen[name] for layer, name in enumerate(names)}
