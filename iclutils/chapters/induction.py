"""The induction circuit: find it, cut it, watch it grow.

An induction head attends from a token to what *followed* its earlier copy. It reads, through its
keys, which token came before each position, from a previous-token head in an earlier layer
(K-composition; Elhage et al. 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from ..errors import IclError
from ..interp.head_scores import prefix_matching, score_heads, strongest
from ..interp.hooks import Head, Hook, ablate_heads, run_with_hooks
from ..interp.patching import patch_key_input
from ..interp.readout import icl_score, log_prob, predictions
from ..models import TransformerBridge, get_act_name
from ..progress import bar
from ..tasks.repeated import RepeatedTokens, repeated_tokens

LABEL = 0.4  # threshold in use for calling a head by a role (ARENA 2023)


@dataclass(frozen=True)
class Circuit:
    """Heads by role, as (layer, head)."""

    previous: Head
    induction: Head
    all_induction: tuple[Head, ...]
    all_previous: tuple[Head, ...]

    def others(self, model: TransformerBridge) -> list[Head]:
        """Every head without a role here."""
        named = {self.previous, self.induction, *self.all_induction, *self.all_previous}
        return [head for head in _heads(model, model.cfg.n_layers) if head not in named]

    def pairs(self) -> list[tuple[Head, Head]]:
        """Every previous-token head with every induction head above it."""
        return [(a, b) for a in self.all_previous for b in self.all_induction if a[0] < b[0]]


@dataclass(frozen=True)
class Cause:
    """Prefix matching of the induction head, per sequence, before and after each cut."""

    before: Float[Tensor, "batch"]
    without_previous: Float[Tensor, "batch"]
    without_path: Float[Tensor, "batch"]
    without_all_previous: Float[Tensor, "batch"]
    without_all_paths: Float[Tensor, "batch"]
    without_other: dict[Head, Float[Tensor, "batch"]]


def find(model: TransformerBridge, batch: RepeatedTokens) -> Circuit:
    """The strongest induction head, and the strongest previous-token head in a layer below it.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters import induction
        >>> from iclutils.tasks.repeated import repeated_tokens
        >>> net = models.load("induction-0")
        >>> task = repeated_tokens(net, 8, 20, torch.Generator().manual_seed(0))
        >>> found = induction.find(net, task)
        >>> found.previous[0] < found.induction[0]
        True
    """
    scores = score_heads(model, batch.tokens, batch.length)
    return roles({name: values.mean(0) for name, values in scores.items()})


def roles(scores: Mapping[str, Float[Tensor, "layer head"]]) -> Circuit:
    """Heads by role from their mean scores (``score_heads``), as in ``find``."""
    if len(scores["prefix"]) < 2:
        raise IclError("An induction circuit needs two attention layers; this model has one.")
    prefix = scores["prefix"].clone()
    prefix[0] = 0  # nothing below layer 0 could feed a head there
    induction = strongest(prefix)
    below = scores["previous"][: induction[0]]
    previous = strongest(below)
    many = _labelled(prefix) or (induction,), _labelled(below) or (previous,)
    return Circuit(previous, induction, *many)


def _labelled(scores: Float[Tensor, "layer head"]) -> tuple[Head, ...]:
    return tuple((layer, head) for layer, head in torch.nonzero(scores > LABEL).tolist())


def _heads(model: TransformerBridge, layers: int) -> list[Head]:
    return [(layer, head) for layer in range(layers) for head in range(model.cfg.n_heads)]


def cause(
    model: TransformerBridge, batch: RepeatedTokens, circuit: Circuit, other: RepeatedTokens
) -> Cause:
    """What remains of the induction head's prefix matching when the circuit is cut.

    Mean-ablate the previous-token head, or patch only its write into the induction head's keys
    with that on ``other``; both for all previous-token heads at once; mean-ablate each other head
    below (the control).
    """
    layer, head = circuit.induction
    below = [h for h in _heads(model, layer) if h not in circuit.all_previous]
    watch = [get_act_name("pattern", layer)]

    def ablated(cut: Sequence[Head]) -> Tensor:
        hooks = ablate_heads(model, batch.tokens, cut, "mean", other.tokens)
        _, seen = run_with_hooks(model, batch.tokens, hooks, watch)
        return prefix_matching(seen[watch[0]][:, head], batch.length)

    def patched(cut: Sequence[Head]) -> Tensor:
        pattern = patch_key_input(model, batch.tokens, cut, circuit.induction, other.tokens)
        return prefix_matching(pattern, batch.length)

    return Cause(
        before=ablated([]),
        without_previous=ablated([circuit.previous]),
        without_path=patched([circuit.previous]),
        without_all_previous=ablated(circuit.all_previous),
        without_all_paths=patched(circuit.all_previous),
        without_other={h: ablated([h]) for h in bar(below, "other heads")},
    )


def clean_loss(
    model: TransformerBridge,
    batch: RepeatedTokens,
    hooks: Sequence[Hook],
) -> Float[Tensor, "batch"]:
    """Loss (nats) on the clean second copy of each sequence, under hooks."""
    scores, _ = run_with_hooks(model, batch.tokens, hooks)
    return -log_prob(scores, batch.tokens)[:, batch.clean_half].mean(1)


def random_sets(
    heads: Sequence[Head], size: int, count: int, generator: Generator
) -> list[list[Head]]:
    """``count`` random sets of ``size`` heads (all heads where fewer exist)."""
    draws = [torch.randperm(len(heads), generator=generator)[:size] for _ in range(count)]
    return [[heads[i] for i in draw.tolist()] for draw in draws]


def checkpoint_metrics(
    model: TransformerBridge, batch: RepeatedTokens, generator: Generator
) -> dict[str, float]:
    """What a model can do at one step of its training; what logged curves hold.

    Best head scores, loss (nats) and accuracy on the clean second copy, and the in-context-
    learning score of entries 10 and 50 of segments of 15 tokens repeated four times (Olsson et
    al. 2022 compare tokens 50 and 500 of texts).
    """
    scores = {k: v.mean(0) for k, v in score_heads(model, batch.tokens, batch.length).items()}
    log_probs, right = predictions(model, batch.tokens)
    long = repeated_tokens(model, len(batch.tokens), 15, generator, times=4)
    icl = icl_score(predictions(model, long.tokens)[0], early=10, late=50)
    return {
        "prefix": scores["prefix"].max().item(),
        "previous": scores["previous"].max().item(),
        "loss": -log_probs[:, batch.clean_half].mean().item(),
        "accuracy": right[:, batch.clean_half].float().mean().item(),
        "icl": icl.mean().item(),
    }


def width_of_rise(steps: Sequence[int], values: Sequence[float], low: float, high: float) -> float:
    """Share of training between the first reach of ``low`` and of ``high`` x the final value.

    Crossings are interpolated linearly between checkpoints.
    """

    def crossing(share: float) -> float:
        goal = share * values[-1]
        for i in range(1, len(values)):
            if values[i] >= goal > values[i - 1]:
                part = (goal - values[i - 1]) / (values[i] - values[i - 1])
                return steps[i - 1] + part * (steps[i] - steps[i - 1])
        return float(steps[0])

    return (crossing(high) - crossing(low)) / steps[-1]
