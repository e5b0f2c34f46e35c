"""Saliency: which token feeds which, and how much the answer's loss hangs on it.

The saliency of an edge from i to j is ``I_l[i, j] = |sum over heads of A[i, j] * dL/dA[i, j]|``,
with L the cross-entropy (nats) of the softmax over the label words at the target. Source: Wang et
al. 2023, section 2.1, equations 1 to 4. It is an estimate to first order; ``isolation`` cuts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ...interp.hooks import Hook, at_positions
from ...interp.invariants import check_editable, check_window
from ...interp.readout import check_prompts, in_batches
from ...models import TransformerBridge, get_act_name
from ...tasks.prompts import Prompts, class_logits


@dataclass(frozen=True)
class Flow:
    """Saliency summed over the edges of each kind (see ``edge_kinds``), and their number."""

    total: Float[Tensor, "batch layer kind"]
    count: Int[Tensor, "batch kind"]
    others: Float[Tensor, "batch layer"]  # per edge into the target from any other token

    def __getitem__(self, rows: Int[Tensor, "rows"]) -> "Flow":
        """Return that of some of the prompts."""
        return Flow(self.total[rows], self.count[rows], self.others[rows])

    @property
    def mean(self) -> Float[Tensor, "batch layer kind"]:
        """Return S_wp, S_pq and S_ww: saliency per edge; NaN where there is none of the kind."""
        return self.total / self.count[:, None]

    @property
    def relative(self) -> Float[Tensor, "layer kind"]:
        """Return S averaged over the prompts, as shares that sum to 1 in every layer (figure 3)."""
        return functional.normalize(self.mean.mean(0), p=1, dim=-1)

    def lead(self, kind: int) -> Float[Tensor, "layer"]:
        """Return the share of a kind (0: S_wp, 1: S_pq, 2: S_ww) less the larger of the others."""
        others = [k for k in range(3) if k != kind]
        return self.relative[:, kind] - self.relative[:, others].amax(1)

    @property
    def at_target(self) -> Float[Tensor, "layer"]:
        """Return S_pq over itself plus the same of all other tokens; 1/2: no preference."""
        read, rest = self.mean[:, :, 1].mean(0), self.others.mean(0)
        return read / (read + rest)


def saliency(model: TransformerBridge, prompts: Prompts) -> Float[Tensor, "batch layer dest src"]:
    """Return the saliency of every edge, in nats, from one forward and one backward pass.

    The diagonal is left in; padding has none. Use ``flows`` for its means over kinds of edges.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.label_anchors import saliency
        >>> from iclutils.tasks import topics
        >>> prompts = topics.sample(4, torch.Generator().manual_seed(0), classes=2)
        >>> edges = saliency.saliency(models.load("anchors-0"), prompts)
        >>> saliency.flow(edges, prompts).mean.shape
        torch.Size([4, 4, 3])
    """
    check_prompts(model, prompts)
    check_editable(model)
    check_window(model, prompts.tokens.shape[1], "Saliency between label words and the target")
    start: list[Tensor] = []  # the lowest pattern, from which the gradient is taken
    done: dict[int, Tensor] = {}  # by layer: (batch, dest, src)

    def hook_for(layer: int) -> Hook:
        def watch(pattern: Tensor, hook: object) -> Tensor:  # (batch, head, dest, src)
            if layer == 0:
                pattern = pattern.detach().requires_grad_()
                start.append(pattern)
            weight = pattern.detach()

            def multiply(slope: Tensor) -> None:  # dL/dA passes by, and only the product stays
                done[layer] = (slope.detach() * weight).sum(1).abs()

            pattern.register_hook(multiply)
            return pattern

        return get_act_name("pattern", layer), watch

    layers = range(model.cfg.n_layers)
    hooks = [hook_for(layer) for layer in layers]
    last = at_positions(prompts.target[:, None])
    with torch.enable_grad():
        logits = model.run_with_hooks(prompts.tokens, fwd_hooks=[*hooks, last])
        scores = class_logits(prompts, logits[:, 0])  # (batch, cls)
        # Summed over the prompts, so the gradient of each is its own.
        torch.autograd.grad(functional.cross_entropy(scores, prompts.gold, reduction="sum"), start)
    # Emptied, because the model holds on to its last patterns, and they to this dictionary.
    return torch.stack([done.pop(layer) for layer in layers], 1)


def measure(model: TransformerBridge, prompts: Prompts, batch_size: int | None = None) -> Flow:
    """Return the ``flow`` of the ``saliency`` of prompts, ``batch_size`` in a pass."""
    return flows(model, prompts, {"": prompts.label_pos}, batch_size)[""]


def flows(
    model: TransformerBridge,
    prompts: Prompts,
    places: Mapping[str, Int[Tensor, "batch demo"]],
    batch_size: int | None = None,
) -> dict[str, Flow]:
    """Return ``measure`` by name, with the tokens at each of these places taken for label words:
    these themselves and, as a null, ``isolation.wrong_positions``."""

    def of(batch: Prompts, rows: Tensor) -> Iterable[Tensor]:
        importance = saliency(model, batch)
        for at in places.values():
            yield from vars(flow(importance, replace(batch, label_pos=at[rows]))).values()

    columns = iter(in_batches(prompts, batch_size, "saliency", of))
    return {name: Flow(next(columns), next(columns), next(columns)) for name in places}


def edge_kinds(prompts: Prompts) -> Bool[Tensor, "batch kind dest src"]:
    """Return which edges are of which kind: into label words from all earlier positions (wp), from
    them to the target (pq), all others (ww); together all from an earlier to a later position up to
    the target, as in the paper's formula and code."""
    place = torch.arange(prompts.tokens.shape[1], device=prompts.tokens.device)
    label = torch.zeros_like(prompts.tokens, dtype=torch.bool).scatter(1, prompts.label_pos, True)
    is_target = place == prompts.target[:, None]
    before = place[:, None] > place
    inside = before & (place <= prompts.target[:, None])[:, :, None]
    into_label = inside & label[:, :, None]
    into_target = inside & is_target[:, :, None] & label[:, None, :]
    return torch.stack([into_label, into_target, inside & ~into_label & ~into_target], 1)


def flow(importance: Float[Tensor, "batch layer dest src"], prompts: Prompts) -> Flow:
    """Sum the saliency of ``prompts`` over the edges of each kind."""
    kinds = edge_kinds(prompts)
    # One kind at a time and multiplied out, so that small shares keep their digits.
    total = [(importance * kind[:, None]).sum((-2, -1)) for kind in kinds.unbind(1)]
    count = kinds.sum((-2, -1))
    into_target = importance[torch.arange(len(prompts)), :, prompts.target]  # (batch, layer, src)
    rest = kinds[torch.arange(len(prompts)), 2, prompts.target]  # no label word, not itself
    others = (into_target * rest[:, None]).sum(-1) / rest.sum(-1, keepdim=True)
    return Flow(torch.stack(total, -1), count, others)
