"""Saliency: which token feeds which, and how much the answer's loss hangs on it.

The saliency of an edge is its attention times the gradient of the loss with respect to it,
``I_l[i, j] = |sum over heads of A[i, j] * dL/dA[i, j]|`` for destination i and source j, where L
is the cross-entropy of the softmax over the label words at the target against the gold class,
in nats. To first order it is the change of the loss if the edge were scaled (Michel et al. 2019
use the same product for whole heads). Summed over the edges of one kind and divided by their
number it gives the paper's three curves:

- ``S_wp``: from everything before a label word into the label word,
- ``S_pq``: from the label words into the target,
- ``S_ww``: all other edges.

Source: Wang et al. 2023, section 2.1, equations 1 to 4. The text averages over heads where
formula and code sum, a constant factor; its footnote takes absolute values inside the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ...errors import IclError, unknown
from ...interp.hooks import Hook, check_editable
from ...interp.readout import at_target, batches, check_prompts
from ...models import TransformerBridge, get_act_name
from ...tasks.prompts import Prompts, class_logits

KINDS = ("wp", "pq", "ww")
HEADS = ("sum", "sum_of_abs", "mean")


class Edge(NamedTuple):
    """One strong edge: at ``dest``, the layer reads from ``src``."""

    layer: int
    dest: int
    src: int
    weight: float


@dataclass(frozen=True)
class Flow:
    """Saliency by kind of edge, in the order of ``KINDS``.

    Attributes:
        total: saliency summed over the edges of a kind, in nats.
        count: number of those edges.
    """

    total: Float[Tensor, "batch layer kind"]
    count: Int[Tensor, "batch kind"]

    @property
    def mean(self) -> Float[Tensor, "batch layer kind"]:
        """S_wp, S_pq and S_ww: saliency per edge; NaN where a prompt has no edge of the kind."""
        return self.total / self.count[:, None]

    @property
    def relative(self) -> Float[Tensor, "layer kind"]:
        """S averaged over the prompts, as shares that sum to 1 in every layer (figure 3)."""
        return _shares(self.mean)

    @property
    def relative_total(self) -> Float[Tensor, "layer kind"]:
        """The same shares of the summed flow: how much flows, not how much per edge."""
        return _shares(self.total)


def saliency(
    model: TransformerBridge,
    prompts: Prompts,
    heads: str = "sum",
    batch_size: int | None = None,
) -> Float[Tensor, "batch layer dest src"]:
    """Saliency of every edge, in nats, from one forward and one backward pass.

    No gradient of a parameter is taken, and none below the attention of the first layer. The
    diagonal is left in; ``flow`` leaves it out. Padding has none.

    Args:
        model: the model.
        prompts: the prompts.
        heads: ``"sum"``, the absolute value of the sum over heads (formula and code);
            ``"sum_of_abs"``, the sum of absolute values (footnote); ``"mean"``, the first
            divided by the number of heads (text).
        batch_size: prompts per pass; all if omitted.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.label_words import saliency
        >>> from iclutils.tasks import topics
        >>> asked = topics.sample(4, torch.Generator().manual_seed(0), classes=2)
        >>> importance = saliency.saliency(models.load("anchors-0"), asked)
        >>> saliency.flow(importance, asked).mean.shape
        torch.Size([4, 4, 3])
    """
    size, parts = prompts.tokens.shape[1], []
    for rows in batches(prompts, batch_size, "saliency"):
        part = _one_pass(model, prompts[rows], heads)
        short = size - part.shape[-1]
        parts.append(functional.pad(part, (0, short, 0, short)))
    return torch.cat(parts)


def measure(
    model: TransformerBridge,
    prompts: Prompts,
    heads: str = "sum",
    batch_size: int | None = None,
) -> Flow:
    """``flow`` of the ``saliency`` of prompts, without keeping it: arguments as there."""
    parts = []
    for rows in batches(prompts, batch_size, "saliency"):
        part = prompts[rows]
        parts.append(flow(_one_pass(model, part, heads), part))
    return Flow(torch.cat([p.total for p in parts]), torch.cat([p.count for p in parts]))


def attention_and_gradient(
    model: TransformerBridge, prompts: Prompts
) -> tuple[Float[Tensor, "batch layer head dest src"], Float[Tensor, "batch layer head dest src"]]:
    """The two factors of saliency, A and dL/dA, head by head; for few prompts, they are large."""
    held: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}

    def take(layer: int, pattern: Tensor, gradient: Tensor) -> None:
        held[layer], gradients[layer] = pattern, gradient.detach()

    _backward(model, prompts, take)
    return _stacked(held, model), _stacked(gradients, model)


def edge_kinds(prompts: Prompts) -> Bool[Tensor, "batch kind dest src"]:
    """Which edges are of which kind, in the order of ``KINDS``.

    Together they are all edges from an earlier to a later position up to the target q, so their
    numbers are sum of p_k, K and the rest of q (q + 1) / 2. Sources of a label word are all
    earlier positions, other labels and formatting included, as in the paper's code.
    """
    place = torch.arange(prompts.tokens.shape[1], device=prompts.tokens.device)
    label = torch.zeros_like(prompts.tokens, dtype=torch.bool).scatter(1, prompts.label_pos, True)
    asked = place == prompts.target[:, None]
    before = place[:, None] > place
    inside = before & (place <= prompts.target[:, None])[:, :, None]
    into_label = inside & label[:, :, None]
    into_target = inside & asked[:, :, None] & label[:, None, :]
    return torch.stack([into_label, into_target, inside & ~into_label & ~into_target], 1)


def flow(importance: Float[Tensor, "batch layer dest src"], prompts: Prompts) -> Flow:
    """Sum the saliency of ``prompts`` over the edges of each kind."""
    kinds = edge_kinds(prompts)
    # One kind at a time and multiplied out, so that small shares keep their digits.
    total = [(importance * kinds[:, None, kind]).sum((-2, -1)) for kind in range(len(KINDS))]
    return Flow(torch.stack(total, -1), kinds.sum((-2, -1)))


def strongest_edges(importance: Float[Tensor, "layer dest src"], count: int) -> list[list[Edge]]:
    """The ``count`` strongest edges of every layer of one prompt, strongest first.

    The diagonal is left out, and so is what has no saliency at all: a layer may have fewer.
    """
    if count < 1:
        raise IclError(f"Ask for at least one edge a layer; got {count}.")
    size = importance.shape[-1]
    best = importance.tril(-1).flatten(1).topk(min(count, size * size))
    return [
        [
            Edge(layer, place // size, place % size, weight)
            for weight, place in zip(weights, places, strict=True)
            if weight > 0
        ]
        for layer, (weights, places) in enumerate(
            zip(best.values.tolist(), best.indices.tolist(), strict=True)
        )
    ]


def _shares(sizes: Float[Tensor, "batch layer kind"]) -> Float[Tensor, "layer kind"]:
    mean = sizes.mean(0)
    return mean / mean.sum(-1, keepdim=True)


def _one_pass(
    model: TransformerBridge, prompts: Prompts, heads: str
) -> Float[Tensor, "batch layer dest src"]:
    """Saliency of one batch; each layer's heads are joined while the gradient passes by."""
    if heads not in HEADS:
        raise unknown("way to join heads", heads, HEADS)
    done: dict[int, Tensor] = {}

    def join(layer: int, pattern: Tensor, gradient: Tensor) -> None:
        product = gradient.detach() * pattern
        joined = product.abs().sum(1) if heads == "sum_of_abs" else product.sum(1).abs()
        done[layer] = joined / product.shape[1] if heads == "mean" else joined

    _backward(model, prompts, join)
    return _stacked(done, model)


def _stacked(layers: dict[int, Tensor], model: TransformerBridge) -> Tensor:
    """Stack and empty: the model holds on to its last patterns, and they to this dictionary."""
    return torch.stack([layers.pop(layer) for layer in range(model.cfg.n_layers)], 1)


def _backward(
    model: TransformerBridge, prompts: Prompts, take: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Run forward and backward, handing over each layer's pattern and its gradient."""
    check_prompts(model, prompts)
    check_editable(model)
    start: list[Tensor] = []

    def hook_for(layer: int) -> Hook:
        def watch(pattern: Tensor, hook: object) -> Tensor:
            if layer == 0:
                pattern = pattern.detach().requires_grad_()
                start.append(pattern)
            held = pattern.detach()
            pattern.register_hook(lambda gradient: take(layer, held, gradient))
            return pattern

        return get_act_name("pattern", layer), watch

    hooks = [hook_for(layer) for layer in range(model.cfg.n_layers)]
    with torch.enable_grad():
        scores = model.run_with_hooks(prompts.tokens, fwd_hooks=[*hooks, at_target(prompts)])[:, 0]
        # Summed over the prompts, so the gradient of each is its own.
        loss = functional.cross_entropy(
            class_logits(prompts, scores), prompts.gold, reduction="sum"
        )
        torch.autograd.grad(loss, start)
