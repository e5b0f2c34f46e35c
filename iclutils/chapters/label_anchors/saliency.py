"""Saliency: which token feeds which, and how much the answer's loss hangs on it.

The saliency of an edge from i to j is ``I_l[i, j] = |sum over heads of A[i, j] * dL/dA[i, j]|``,
with L the cross-entropy (nats) of the softmax over the label words at the target. Source: Wang et
al. 2023, section 2.1; its text averages over heads where formula and code sum, and its footnote
takes absolute values inside the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ...errors import unknown
from ...interp.hooks import Hook, check_editable
from ...interp.readout import at_target, check_prompts, in_batches
from ...models import TransformerBridge, get_act_name
from ...tasks.prompts import Prompts, class_logits

HEADS = ("sum", "sum_of_abs")  # how heads are joined: formula and code, or footnote


@dataclass(frozen=True)
class Flow:
    """Saliency summed over the edges of each kind (see ``edge_kinds``), and their number."""

    total: Float[Tensor, "batch layer kind"]
    count: Int[Tensor, "batch kind"]
    others: Float[Tensor, "batch layer"]  # per edge into the target from any other token

    def __getitem__(self, rows: Int[Tensor, "rows"]) -> Flow:
        """That of some of the prompts."""
        return Flow(self.total[rows], self.count[rows], self.others[rows])

    @property
    def mean(self) -> Float[Tensor, "batch layer kind"]:
        """S_wp, S_pq and S_ww: saliency per edge; NaN where a prompt has no edge of the kind."""
        return self.total / self.count[:, None]

    @property
    def relative(self) -> Float[Tensor, "layer kind"]:
        """S averaged over the prompts, as shares that sum to 1 in every layer (figure 3)."""
        return functional.normalize(self.mean.mean(0), p=1, dim=-1)

    @property
    def relative_total(self) -> Float[Tensor, "layer kind"]:
        """The same shares of the summed flow: how much flows, not how much per edge."""
        return functional.normalize(self.total.mean(0), p=1, dim=-1)

    @property
    def at_target(self) -> Float[Tensor, "layer"]:
        """S_pq over itself plus the same of all other tokens: 1/2 if the target favours none."""
        read, rest = self.mean[:, :, 1].mean(0), self.others.mean(0)
        return read / (read + rest)


def saliency(
    model: TransformerBridge, prompts: Prompts, heads: str = "sum"
) -> Float[Tensor, "batch layer dest src"]:
    """Saliency of every edge, in nats, from one forward and one backward pass. The diagonal is left
    in; padding has none.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.label_anchors import saliency
        >>> from iclutils.tasks import topics
        >>> asked = topics.sample(4, torch.Generator().manual_seed(0), classes=2)
        >>> importance = saliency.saliency(models.load("anchors-0"), asked)
        >>> saliency.flow(importance, asked).mean.shape
        torch.Size([4, 4, 3])
    """
    if heads not in HEADS:
        raise unknown("way to join heads", heads, HEADS)

    def join(pattern: Tensor, gradient: Tensor) -> Tensor:
        product = gradient * pattern
        return product.abs().sum(1) if heads == "sum_of_abs" else product.sum(1).abs()

    return _backward(model, prompts, join)


def measure(
    model: TransformerBridge, prompts: Prompts, heads: str = "sum", batch_size: int | None = None
) -> Flow:
    """``flow`` of the ``saliency`` of prompts, batch by batch."""
    return flows(model, prompts, {"": prompts.label_pos}, heads, batch_size)[""]


def flows(
    model: TransformerBridge,
    prompts: Prompts,
    places: Mapping[str, Int[Tensor, "batch demo"]],
    heads: str = "sum",
    batch_size: int | None = None,
) -> dict[str, Flow]:
    """``measure`` with the tokens at each of these places taken for the label words: beside those
    themselves ``isolation.wrong_positions``, as a null."""

    def of(batch: Prompts, rows: Tensor) -> Iterable[Tensor]:
        importance = saliency(model, batch, heads)
        for at in places.values():
            yield from vars(flow(importance, replace(batch, label_pos=at[rows]))).values()

    columns = iter(in_batches(prompts, batch_size, "saliency", of))
    return {name: Flow(next(columns), next(columns), next(columns)) for name in places}


def attention_and_gradient(
    model: TransformerBridge, prompts: Prompts
) -> tuple[Float[Tensor, "batch layer head dest src"], Float[Tensor, "batch layer head dest src"]]:
    """The two factors of saliency, A and dL/dA, head by head; for few prompts, they are large."""
    both = _backward(model, prompts, lambda *factors: torch.stack(factors, 1))
    return both[:, :, 0], both[:, :, 1]


def edge_kinds(prompts: Prompts) -> Bool[Tensor, "batch kind dest src"]:
    """Which edges are of which kind: into label words (wp), from them to the target (pq), others;
    together all from an earlier to a later position up to the target. Sources of a label word are
    all earlier positions, other labels and formatting included, as in the code."""
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
    total = [(importance * kind[:, None]).sum((-2, -1)) for kind in kinds.unbind(1)]
    count = kinds.sum((-2, -1))
    asked = importance[torch.arange(len(prompts)), :, prompts.target]  # (batch, layer, src)
    rest = kinds[torch.arange(len(prompts)), 2, prompts.target]  # no label word, not itself
    others = (asked * rest[:, None]).sum(-1) / rest.sum(-1, keepdim=True)
    return Flow(torch.stack(total, -1), count, others)


def _backward(
    model: TransformerBridge, prompts: Prompts, join: Callable[[Tensor, Tensor], Tensor]
) -> Float[Tensor, "batch layer *rest"]:
    """Results of ``join`` for every layer's pattern and its gradient while that passes by."""
    check_prompts(model, prompts)
    check_editable(model)
    start: list[Tensor] = []
    done: dict[int, Tensor] = {}

    def hook_for(layer: int) -> Hook:
        def watch(pattern: Tensor, hook: object) -> Tensor:
            if layer == 0:
                pattern = pattern.detach().requires_grad_()
                start.append(pattern)
            held = pattern.detach()
            pattern.register_hook(lambda slope: done.update({layer: join(held, slope.detach())}))
            return pattern

        return get_act_name("pattern", layer), watch

    layers = range(model.cfg.n_layers)
    hooks = [hook_for(layer) for layer in layers]
    with torch.enable_grad():
        logits = model.run_with_hooks(prompts.tokens, fwd_hooks=[*hooks, at_target(prompts)])
        scores = class_logits(prompts, logits[:, 0])
        # Summed over the prompts, so the gradient of each is its own.
        torch.autograd.grad(functional.cross_entropy(scores, prompts.gold, reduction="sum"), start)
    # Emptied, because the model holds on to its last patterns, and they to this dictionary.
    return torch.stack([done.pop(layer) for layer in layers], 1)
