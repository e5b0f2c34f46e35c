"""Paths: what every wire carries, by exact path patching, all writers of a reader at once.

The effect of a wire is what the score loses, in nats, when this wire alone carries what its writer
writes on the corrupt sequence and everything after its reader is computed anew (Wang et al. 2022,
section 3; Goldowsky-Dill et al. 2023). ``wires.patched`` is the same, one forward pass for each
wire; here the clean pass is shared, layers before the reader are skipped, and of the reader's
layer only what reads is redone (``engine``). Models that the engine does not know go by hooks.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import clean_corrupt, graph, path_patching
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task = clean_corrupt.repeating(net, 2, 5, generator)
    >>> exists = graph.of(net).exists
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from ..errors import IclError, unknown
from ..models import TransformerBridge, cached
from ..progress import bar
from .clean_corrupt import Behaviour, read
from .edges import forked, patched, shifts
from .graph import CHANNELS, Edge, Node, head
from .hooks import head_ablation, mlp_ablation, mlp_name, run, z_name
from .patching import ROWS, Clean, attention, head_change, mlp, resume


def effects(
    model: TransformerBridge, behaviour: Behaviour, edges: Sequence[Edge] | None = None
) -> Float[Tensor, "writer reader batch"]:
    """Nats lost when each wire alone is patched; 0 where there is no wire, or none was asked for.

    Args:
        model: the model.
        behaviour: what is asked, clean and corrupt.
        edges: the wires wanted; all if omitted.

    Example:
        >>> found = path_patching.effects(net, task).mean(-1)
        >>> bool((found[~exists] == 0).all())
        True
    """
    clean = Clean(model, behaviour)
    graph = clean.graph
    asked = graph.exists if edges is None else graph.mask(list(edges))
    out = clean.score.new_zeros(*asked.shape, len(behaviour))
    columns = asked.any(0).nonzero()[:, 0].tolist()
    for column in bar(columns, "wires"):
        rows = asked[:, column].nonzero()[:, 0]
        groups = [[graph.writers[u]] for u in rows.tolist()]
        out[rows.to(out.device), column] = _lost(clean, [graph.readers[column]], groups)
    return out


def pairs(
    model: TransformerBridge, behaviour: Behaviour, channels: str = "qkv"
) -> Float[Tensor, "layer head layer head batch"]:
    """Nats lost when one head's write into another is patched: ``[l1, h1, l2, h2]``.

    Args:
        model: the model.
        behaviour: what is asked, clean and corrupt.
        channels: the inputs of the reading head that are patched, together: ``"k"``, ``"qk"``, ...

    Returns:
        0 unless the writing head is in an earlier layer.

    Example:
        >>> path_patching.pairs(net, task, "k")[1].abs().max()
        tensor(0.)
    """
    if not channels or not set(channels) <= set(CHANNELS):
        raise unknown("channel", channels, CHANNELS)
    clean = Clean(model, behaviour)
    layers, heads = clean.graph.layers, clean.graph.heads
    out = clean.score.new_zeros(layers, heads, layers, heads, len(behaviour))
    targets = [(layer, h) for layer in range(1, layers) for h in range(heads)]
    for layer, h in bar(targets, "heads"):
        groups = [[head(below, other)] for below in range(layer) for other in range(heads)]
        lost = _lost(clean, [Node(channel, layer, h) for channel in channels], groups)
        out[:layer, :, layer, h] = lost.unflatten(0, (layer, heads))
    return out


def layer_flow(
    model: TransformerBridge, behaviour: Behaviour
) -> Float[Tensor, "source target batch"]:
    """Nats lost when what one layer writes reaches one later block corrupt, and nothing else.

    Source 0 is the embedding, source l + 1 all that layer l writes, heads and MLP at once. Target
    l is all that block l reads, the last target the logits; the residual stream that passes the
    block stays clean. 0 unless the target comes after the source. F(l1 -> l2) is the share
    (``clean_corrupt.share``) of entry ``[l1 + 1, l2]``; the last column is the skip to the logits.

    Example:
        >>> layers = net.cfg.n_layers
        >>> path_patching.layer_flow(net, task).shape == (layers + 1, layers + 1, 2)
        True
    """
    clean = Clean(model, behaviour)
    graph, layers = clean.graph, clean.graph.layers
    sources = [[w for w in graph.writers if w.layer == at] for at in range(-1, layers)]
    out = clean.score.new_zeros(layers + 1, layers + 1, len(behaviour))
    for target in range(layers + 1):
        wanted = target if target < layers else -1
        readers = [r for r in graph.readers if r.layer == wanted]
        out[: target + 1, target] = _lost(clean, readers, sources[: target + 1])
    return out


def sampled_difference(
    model: TransformerBridge,
    behaviour: Behaviour,
    found: Float[Tensor, "writer reader batch"],
    count: int,
    generator: Generator,
) -> float:
    """Largest difference (nats) of ``effects`` to one hooked pass per wire, on random wires.

    Example:
        >>> found = path_patching.effects(net, task)
        >>> path_patching.sampled_difference(net, task, found, 2, generator) < 1e-3
        True
    """
    if count < 1:
        raise IclError(f"Compare at least one wire; got {count}.")
    clean = Clean(model, behaviour)
    edges = clean.graph.edges()
    worst = 0.0
    for i in torch.randperm(len(edges), generator=generator)[:count].tolist():
        slow = clean.score - patched(model, behaviour, [edges[i]])
        worst = max(worst, float((found[clean.graph.index(edges[i])] - slow).abs().max()))
    return worst


def backward_flow(model: TransformerBridge, behaviour: Behaviour) -> float:
    """Largest change of what an earlier layer writes when a layer writes as on the corrupt side.

    Measured on the model itself, with no use of the order that ``layer_flow`` builds on.

    Example:
        >>> path_patching.backward_flow(net, task) < 1e-4
        True
    """
    layers, heads = range(model.cfg.n_layers), range(model.cfg.n_heads)
    tokens, other = behaviour.clean, behaviour.corrupt
    _, before = cached(model, tokens, {f(layer) for f in (z_name, mlp_name) for layer in layers})
    worst = 0.0
    for layer in layers[1:]:
        hooks = head_ablation(model, tokens, [(layer, h) for h in heads], "resample", other)
        hooks += mlp_ablation(model, tokens, [layer], "resample", other)
        names = [f(below) for f in (z_name, mlp_name) for below in range(layer)]
        _, seen = run(model, tokens, hooks, names)
        worst = max(worst, *(float((seen[n] - before[n]).abs().max()) for n in names))
    return worst


def _lost(
    clean: Clean, readers: Sequence[Node], groups: Sequence[Sequence[Node]]
) -> Float[Tensor, "patch batch"]:
    """Nats lost when all ``readers`` read each group of writers from the corrupt run."""
    held = max(1, ROWS // clean.behaviour.clean.numel())
    scores = []
    with torch.no_grad():
        for start in range(0, len(groups), held):
            part = groups[start : start + held]
            shift = torch.stack([torch.stack([*map(clean.change, g)]).sum(0) for g in part])
            way = _patched if clean.plain else _hooked
            scores.append(way(clean, readers, shift))
    return clean.score - torch.cat(scores)


def _patched(
    clean: Clean, readers: Sequence[Node], shift: Float[Tensor, "patch batch pos d_model"]
) -> Float[Tensor, "patch batch"]:
    """Score with what ``readers`` read shifted: the logits, one head, one MLP or a whole block."""
    kinds, layer = {r.kind for r in readers}, readers[0].layer
    if kinds == {"logits"}:
        return resume(clean, clean.graph.layers, clean.pick(clean.resid_post + shift))
    stream, passing = clean.asked(layer, clean.resid_mid[layer]), clean.asked(layer, shift)
    if kinds == {"mlp_in"}:
        return resume(clean, layer + 1, stream + mlp(clean, layer, stream + passing))
    if "mlp_in" not in kinds:  # one head
        channels = "".join(r.kind for r in readers)
        middle = stream + head_change(clean, layer, readers[0].head, channels, shift)
        return resume(clean, layer + 1, middle + mlp(clean, layer, middle))
    start = clean.resid_pre[layer] + shift
    middle = clean.asked(layer, start) + attention(clean, layer, start)
    return resume(clean, layer + 1, middle - passing + mlp(clean, layer, middle))


def _hooked(
    clean: Clean, readers: Sequence[Node], shift: Float[Tensor, "patch batch pos d_model"]
) -> Float[Tensor, "patch batch"]:
    """The same by one hooked forward pass for each patch."""
    model, behaviour = clean.model, clean.behaviour
    with forked(model):
        hooks = [shifts(model, dict.fromkeys(readers, one)) for one in shift]
        return torch.stack([behaviour.score(read(model, behaviour, one)) for one in hooks])
