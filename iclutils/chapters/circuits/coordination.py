"""Coordination: whether heads feed each other, stand in for each other, or push the same answer.

Three tests, each of which may hold or fail for a pair: *serial*, one feeds the other; *parallel*,
neither feeds the other and removing both costs what removing each costs; *aggregative*, both push
the answer's logit the same way and write to the same directions. Heads of one layer never feed
each other: they read the same and are summed.

Interaction, D(a, b) - D(a) - D(b) with D the nats lost without a head: below 0 for a pipeline
(either removal breaks it), about 0 for independent heads, above 0 for back-ups. It is the
interaction index of two players in a cooperative game; back-up heads: Wang et al. 2022, McGrath et
al. 2023. Which heads are alike is another question, for ``similarity``.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import coordination, subspaces
    >>> from iclutils.interp import clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task = clean_corrupt.copying(net, 4, 5, generator)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from ...errors import IclError
from ...interp.clean_corrupt import CleanCorrupt, scored_logits
from ...interp.graph import Node, component_output, head, of, output_hook
from ...interp.hooks import Hook, How, ablate_heads, ablate_mlps, run_with_hooks
from ...interp.statistics import step_down_threshold
from ...models import TransformerBridge, cached, get_act_name
from ...progress import bar
from .subspaces import Overlap


@dataclass(frozen=True)
class Interactions:
    """Nats lost without one group of nodes, and without two; the diagonal is one group's."""

    single: Float[Tensor, "group batch"]
    joint: Float[Tensor, "group group batch"]

    @property
    def syn(self) -> Float[Tensor, "group group batch"]:
        """D(a, b) - D(a) - D(b): symmetric; NaN on the diagonal."""
        out = self.joint - self.single[:, None] - self.single[None]
        itself = torch.eye(len(out), dtype=torch.bool, device=out.device)
        return out.masked_fill(itself[..., None], torch.nan)


def interactions(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    groups: Sequence[Sequence[Node]],
    how: How = "resample",
) -> Interactions:
    """Remove every group of heads and MLP layers, alone and with every other group.

    ``how`` as in ``patching.ablate``. Each pair is run once. Groups may share nodes.

    Example:
        >>> found = coordination.interactions(net, task, [[graph.head(0, 0)], [graph.head(1, 0)]])
        >>> torch.allclose(found.joint, found.joint.transpose(0, 1))
        True
    """
    if not groups or any(n.kind not in ("head", "mlp") for group in groups for n in group):
        raise IclError("Give at least one group, of heads and MLP layers alone.")
    hooks = [_removal(model, behaviour, group, how) for group in groups]
    clean = behaviour.score(scored_logits(model, behaviour))

    def lost(*chosen: int) -> Tensor:
        together = [hook for one in chosen for hook in hooks[one]]
        return clean - behaviour.score(scored_logits(model, behaviour, together))

    count = len(groups)
    single = torch.stack([lost(one) for one in range(count)])
    joint = torch.diag_embed(single.T).permute(1, 2, 0).clone()
    pairs = list(combinations(range(count), 2))
    for a, b in bar(pairs, "pairs"):
        joint[a, b] = joint[b, a] = lost(a, b)
    return Interactions(single, joint)


def same_layer(model: TransformerBridge, tokens: Int[Tensor, "batch pos"]) -> float:
    """Largest change of any head's output (``z``) when another head of its layer is removed.

    Its queries are set to zero beside its output, so that there is something to pass on if heads
    could. 0 but for rounding.

    Example:
        >>> coordination.same_layer(net, task.clean) < 1e-4
        True
    """
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    _, clean = cached(model, tokens, [get_act_name("z", layer) for layer in range(layers)])
    largest = 0.0
    nodes = [(layer, index) for layer in range(layers) for index in range(heads)]
    for layer, index in bar(nodes, "heads"):

        def silence(value: Tensor, hook: object, index: int = index) -> Tensor:
            value = value.clone()
            value[:, :, index] = 0
            return value

        name = get_act_name("z", layer)
        hooks: list[Hook] = [(f"blocks.{layer}.attn.hook_q", silence), (name, silence)]
        change = (
            (run_with_hooks(model, tokens, hooks, [name])[1][name] - clean[name])
            .abs()
            .amax((0, 1, 3))
        )
        change[index] = 0
        largest = max(largest, change.max().item())
    return largest


def direct_logits(
    model: TransformerBridge, behaviour: CleanCorrupt
) -> Float[Tensor, "writer batch"]:
    """What each writer adds to the right answer's logit directly, mean over scored entries.

    Relative to the mean over all tokens (over ``choices``, where given), in logits. The scale of
    the final LayerNorm is the run's, which makes it linear. The sum over writers is the logit but
    for biases (of attention layers, the final LayerNorm and the unembedding), which belong to
    nobody. (Direct logit attribution; Elhage et al. 2021, Wang et al. 2022.)

    Example:
        >>> coordination.direct_logits(net, task).shape == (len(graph.of(net).writers), 4)
        True
    """
    writers = of(model).writers
    wanted = {*map(output_hook, writers), "ln_final.hook_scale"}
    _, cache = cached(model, behaviour.clean, wanted)
    rows = torch.arange(len(behaviour), device=behaviour.clean.device)[:, None]
    unembed = model.W_U.T
    choices = behaviour.choices
    usual = unembed.mean(0) if choices is None else unembed[choices].mean(1, keepdim=True)
    reads = unembed[behaviour.answer] - usual  # (batch, entry, d_model)
    weight = getattr(model.ln_final, "weight", None)
    reads = reads if weight is None else reads * weight
    if not getattr(model.cfg, "uses_rms_norm", False):  # a LayerNorm takes the mean away
        reads = reads - reads.mean(-1, keepdim=True)
    reads = reads / cache["ln_final.hook_scale"][rows, behaviour.at]
    out = [
        (component_output(model, cache, u)[rows, behaviour.at] * reads).sum(-1).mean(-1)
        for u in writers
    ]
    return torch.stack(out)


def serial(
    path_effects: Float[Tensor, "layer head layer head batch"],
    composition: Float[Tensor, "l1 h1 l2 h2"],
    baseline: tuple[float, float],
    generator: Generator,
) -> Bool[Tensor, "layer head layer head"]:
    """Which heads feed which: ``[l1, h1, l2, h2]``, true only where l1 < l2.

    The mean effect of the patched path is larger than the largest that chance gives among all of
    them (sign flips over sequences, family-wise 5 %, step by step), *and* the composition of the
    weights is more than two standard deviations above random heads (``baseline``: their mean and
    deviation).

    Example:
        >>> effects, composition = torch.zeros(2, 1, 2, 1, 8), torch.zeros(2, 1, 2, 1)
        >>> effects[0, 0, 1, 0], composition[0, 0, 1, 0] = 1.0, 0.5
        >>> coordination.serial(effects, composition, (0.1, 0.05), generator).nonzero()
        tensor([[0, 0, 1, 0]])
    """
    if path_effects.shape[:-1] != composition.shape:
        raise IclError("Need path effects and composition scores of the same heads.")
    layers, heads = composition.shape[:2]
    layer = torch.arange(layers, device=path_effects.device)
    later = (layer[:, None] < layer)[:, None, :, None].expand(-1, heads, -1, heads)
    if not bool(later.any()):
        return later
    least = step_down_threshold(path_effects[later], generator)
    above = composition.to(path_effects.device) > baseline[0] + 2 * baseline[1]
    return later & above & (path_effects.mean(-1).abs() > least)


def kinds(
    feeds: Bool[Tensor, "layer head layer head"],
    syn: Float[Tensor, "node other batch"],
    gap: float,
    overlap: Overlap,
    direct: Float[Tensor, "direct_node direct_batch"],
) -> dict[tuple[Node, Node], frozenset[str]]:
    """The kinds of coordination that hold for each pair of heads; several may, or none.

    ``serial``: the first feeds the second. ``parallel``: it does not, |mean interaction| is within
    two standard errors or a hundredth of the gap, and the output spaces overlap as random ones do
    (within 2 SD). ``aggregative``: direct effects of one sign, each beyond two standard errors,
    and output spaces that overlap more than random ones (by 2 SD).

    Args:
        feeds: from ``serial``.
        syn: interactions of single heads, in the order of ``graph.all_heads``.
        gap: mean clean score minus mean corrupt score, in nats.
        overlap: of the same heads' output spaces.
        direct: their direct effects on the answer's logit.

    Returns:
        For each pair (a, b), a before b in that order.

    Example:
        >>> feeds, zero = torch.zeros(2, 4, 2, 4, dtype=torch.bool), torch.zeros(8, 8, 4)
        >>> feeds[0, 1, 1, 2] = True
        >>> spaces = subspaces.output_overlap(net)
        >>> named = coordination.kinds(feeds, zero, 1.0, spaces, torch.zeros(8, 4))
        >>> "serial" in named[graph.head(0, 1), graph.head(1, 2)]
        True
    """
    layers, heads = feeds.shape[:2]
    nodes = [head(layer, index) for layer in range(layers) for index in range(heads)]
    if not len(nodes) == len(syn) == len(overlap.kernel) == len(direct):
        raise IclError(f"Need all {len(nodes)} heads everywhere, in the order of the graph.")
    mean, bar = syn.mean(-1).abs(), (2 * _error(syn)).clamp_min(0.01 * abs(gap))
    excess = (overlap.kernel - overlap.expected) / overlap.sd
    sign = direct.mean(-1).sign() * (direct.mean(-1).abs() > 2 * _error(direct))
    feeding = feeds.reshape(len(nodes), len(nodes))
    out = {}
    for a, b in combinations(range(len(nodes)), 2):
        alike, fed = float(excess[a, b]), bool(feeding[a, b])
        holds = {
            "serial": fed,
            "parallel": not fed and bool(mean[a, b] <= bar[a, b]) and abs(alike) <= 2,
            "aggregative": alike > 2 and bool(sign[a] * sign[b] > 0),
        }
        out[nodes[a], nodes[b]] = frozenset(kind for kind, does in holds.items() if does)
    return out


def _error(values: Float[Tensor, "*item batch"]) -> Float[Tensor, "*item"]:
    """Standard error of the mean over sequences."""
    return values.std(-1) / values.shape[-1] ** 0.5


def _removal(
    model: TransformerBridge, behaviour: CleanCorrupt, group: Sequence[Node], how: How
) -> list[Hook]:
    """Hooks that remove a group; those of several groups can be run together."""
    heads = [(n.layer, n.head) for n in group if n.kind == "head"]
    layers = [n.layer for n in group if n.kind == "mlp"]
    hooks = ablate_heads(model, behaviour.clean, heads, how, behaviour.corrupt)
    if layers:
        hooks += ablate_mlps(model, behaviour.clean, layers, how, behaviour.corrupt)
    return hooks
