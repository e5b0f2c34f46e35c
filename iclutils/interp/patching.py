"""The engine: a batch of changes, computed from where they matter.

A change to what one part of layer l reads leaves everything before it as it was. So one clean
pass is kept, the changed part alone is redone (of a head: one slice of one projection, one
attention), and all changes of a batch go through the later layers together. Positions after the
last scored one are left out; the last layer's queries, its MLP and the unembedding run at scored
positions only, and where few are scored its keys and values are never formed:
softmax((W_K q) . x) needs the inputs x alone.

The engine knows one attention: softmax(q k / sqrt(d_head)) v with positions added to the
embedding, one part after the other, as in GPT-2. ``Clean.plain`` says whether that is what the
model does; what is not plain goes by hooks (``wires``).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import clean_corrupt, patching
    >>> net = models.load("induction-0")
    >>> task = clean_corrupt.copying(net, 2, 5, torch.Generator().manual_seed(0))
    >>> clean = patching.CleanRun(net, task)
    >>> start = clean.resid_pre[0][None]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional

from ..errors import IclError, unknown
from ..models import TransformerBridge, cached, get_act_name
from ..progress import bar
from .clean_corrupt import CleanCorrupt, scored_logits
from .graph import (
    CHANNELS,
    Edge,
    Graph,
    Node,
    add_to_inputs,
    component_output,
    component_outputs,
    head,
    of,
    output_hook,
    split_qkv_input,
)
from .hooks import Head, How, ablate_heads, ablate_mlps, run_with_hooks

ROWS = 4096  # rows of d_model (patch x batch x pos) held at once; more leave the cache
FEW = 8  # scored entries up to which the last layer's keys and values are not formed
LOGITS = 2**25  # logits held at once: 128 MB
CLOSE = 1e-4  # how well the engine must reproduce the model


class CleanRun:
    """What one clean and one corrupt pass leave behind, up to the last scored position.

    Attributes:
        behaviour: without what follows the last scored position.
        graph: the model's.
        score: of the clean pass, in nats, (batch,).
        plain: whether the engine reproduces the model; if not, only ``change`` may be used.
        resid_pre, resid_mid, mlp_out: for each layer, (batch, pos, d_model).
        resid_post: of the last layer.
        q, k, v, z: for each layer, (batch, pos, head, d_head).
    """

    def __init__(self, model: TransformerBridge, behaviour: CleanCorrupt) -> None:
        reach = int(behaviour.at.max()) + 1
        clean, corrupt = behaviour.clean[:, :reach], behaviour.corrupt[:, :reach]
        self.behaviour = replace(behaviour, clean=clean, corrupt=corrupt)
        self.graph: Graph = of(model)
        self.model = model
        ends = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_mlp_out")
        heads = tuple(f"attn.hook_{part}" for part in ("q", "k", "v", "z"))
        wanted = {output_hook(w) for w in self.graph.writers}
        logits, self._clean = cached(model, clean, lambda name: name.endswith(ends + heads))
        _, self._corrupt = cached(model, corrupt, wanted)
        self._rows = torch.arange(len(clean), device=clean.device)[:, None]
        self.score = behaviour.score(logits[self._rows, behaviour.at])
        place = torch.arange(reach, device=clean.device)
        self.seen = place <= behaviour.at[..., None]  # (batch, entry, pos)
        self.causal = place <= place[:, None]
        if self._clean["blocks.0.attn.hook_k"].shape != self._clean["blocks.0.attn.hook_q"].shape:
            raise IclError(
                "Query heads of this model share keys and values, so they have no wires of their "
                "own: use a model with as many key heads as query heads."
            )
        self.plain = self._fits() and self._reproduces()

    @property
    def last(self) -> int:
        """The last layer."""
        return self.graph.layers - 1

    def pick(self, value: Float[Tensor, "*lead pos width"]) -> Float[Tensor, "*lead entry width"]:
        """The scored positions alone."""
        return value[..., self._rows, self.behaviour.at, :]

    def asked(
        self, layer: int, value: Float[Tensor, "*lead pos width"]
    ) -> Float[Tensor, "*lead asked width"]:
        """Those positions of a layer's output that are read: in the last layer the scored ones."""
        return self.pick(value) if layer == self.last else value

    def change(self, writer: Node) -> Float[Tensor, "batch pos d_model"]:
        """What a writer writes on the corrupt sequences minus what it writes on the clean ones."""
        corrupt = component_output(self.model, self._corrupt, writer)
        return corrupt - component_output(self.model, self._clean, writer)

    def _fits(self) -> bool:
        if self.graph.parallel or self.model.cfg.positional_embedding_type != "standard":
            return False
        layers = range(self.graph.layers)
        names = {"resid_pre": "", "resid_mid": "", "mlp_out": "", "q": "attn.", "k": "attn."}
        for part, where in (names | {"v": "attn.", "z": "attn."}).items():
            held = [f"blocks.{layer}.{where}hook_{part}" for layer in layers]
            if any(name not in self._clean for name in held):
                return False
            setattr(self, part, [self._clean[name] for name in held])
        self.resid_post = self._clean[f"blocks.{self.last}.hook_resid_post"]
        return True

    def _reproduces(self) -> bool:
        after = [*self.resid_pre[1:], self.resid_post]
        pairs = [(readout(self, self.pick(self.resid_post)[None])[0], self.score)]
        for layer in range(self.graph.layers):
            middle = self.asked(layer, self.resid_mid[layer])[None]
            start = self.asked(layer, self.resid_pre[layer])
            pairs.append((start + attention(self, layer, self.resid_pre[layer][None]), middle))
            pairs.append((middle + mlp(self, layer, middle), self.asked(layer, after[layer])[None]))
        return all(torch.allclose(ours, theirs, CLOSE, CLOSE) for ours, theirs in pairs)

    resid_pre: list[Tensor]
    resid_mid: list[Tensor]
    mlp_out: list[Tensor]
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    z: list[Tensor]


def attention(
    clean: CleanRun, layer: int, resid: Float[Tensor, "patch batch pos d_model"]
) -> Float[Tensor, "patch batch asked d_model"]:
    """What all heads of a layer write, biases included, where it is asked for.

    Example:
        >>> written = patching.attention(clean, 0, start)
        >>> torch.allclose(start + written, clean.resid_mid[0][None], atol=1e-3)
        True
    """
    attn, heads = clean.model.blocks[layer].attn, clean.graph.heads
    normal = _through(clean.model.blocks[layer].ln1, resid)

    def project(name: str, value: Tensor) -> Tensor:
        flat = _through(getattr(attn, name), value).flatten(0, 1)
        return flat.unflatten(-1, (heads, -1)).transpose(1, 2)  # rows, head, pos, d_head

    q = project("q", clean.asked(layer, normal))
    if layer < clean.last:
        k, v = project("k", normal), project("v", normal)
        z = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        seen = clean.seen.expand(len(resid), -1, -1, -1).flatten(0, 1)[:, None]
        if q.shape[2] > FEW:
            z = functional.scaled_dot_product_attention(
                q, project("k", normal), project("v", normal), seen
            )
        else:  # a key's bias moves all scores alike
            flat = normal.flatten(0, 1)[:, None]
            wanted = q @ attn.W_K.transpose(-1, -2) / q.shape[-1] ** 0.5  # rows, head, entry, d
            scores = (wanted.flatten(1, 2) @ flat[:, 0].transpose(-1, -2)).view(
                *q.shape[:3], flat.shape[2]
            )
            pattern = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            gathered = (pattern.flatten(1, 2) @ flat[:, 0]).view_as(wanted)
            z = gathered @ attn.W_V + attn.b_V[:, None]
    return attn.o(z.transpose(1, 2).flatten(2)).unflatten(0, resid.shape[:2])


def head_change(
    clean: CleanRun, layer: int, head: int, channels: str, shift: Float[Tensor, "patch batch pos d"]
) -> Float[Tensor, "patch batch asked d"]:
    """What one head writes minus what it wrote, when some of its three inputs are shifted.

    Args:
        clean: the clean pass.
        layer, head: which head.
        channels: which of ``q``, ``k`` and ``v`` read the shifted residual stream.
        shift: what is added to it, before the LayerNorm.
    """
    attn = clean.model.blocks[layer].attn
    normal = _through(clean.model.blocks[layer].ln1, clean.resid_pre[layer] + shift)
    inputs = {}
    for channel in CHANNELS:
        wanted = (lambda value: clean.asked(layer, value)) if channel == "q" else (lambda v: v)
        if channel in channels:
            weight = getattr(attn, f"W_{channel.upper()}")[head]
            bias = getattr(attn, f"b_{channel.upper()}")[head]
            inputs[channel] = wanted(normal) @ weight + bias
        else:
            held = wanted(getattr(clean, channel)[layer][:, :, head])
            inputs[channel] = held.expand(len(shift), -1, -1, -1)
    mask = clean.seen if layer == clean.last else clean.causal
    z = functional.scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], mask)
    return (z - clean.asked(layer, clean.z[layer][:, :, head])) @ attn.W_O[head]


def mlp(
    clean: CleanRun, layer: int, middle: Float[Tensor, "patch batch asked d_model"]
) -> Float[Tensor, "patch batch asked d_model"]:
    """What the MLP of a layer writes.

    Example:
        >>> written = patching.mlp(clean, 0, clean.resid_mid[0][None])
        >>> torch.allclose(written[0], clean.mlp_out[0], atol=1e-3)
        True
    """
    block = clean.model.blocks[layer]
    return _through(block.mlp, _through(block.ln2, middle))


def resume(
    clean: CleanRun, layer: int, resid: Float[Tensor, "patch batch asked d_model"]
) -> Float[Tensor, "patch batch"]:
    """Go on from the input of ``layer`` to the score, in nats.

    ``resid`` holds all positions; after the last layer, the scored ones.
    """
    for block in range(layer, clean.graph.layers):
        middle = clean.asked(block, resid) + attention(clean, block, resid)
        resid = middle + mlp(clean, block, middle)
    return readout(clean, resid)


def readout(
    clean: CleanRun, resid: Float[Tensor, "patch batch entry d_model"]
) -> Float[Tensor, "patch batch"]:
    """The score, in nats, from the last residual stream at scored positions.

    With ``choices``, only their columns of the unembedding are multiplied.

    Example:
        >>> last = clean.pick(clean.resid_post)[None]
        >>> torch.allclose(patching.readout(clean, last)[0], clean.score, atol=1e-3)
        True
    """
    behaviour, model = clean.behaviour, clean.model
    normal = _through(model.ln_final, resid)
    if behaviour.choices is not None:
        columns, bias = model.W_U.T, model.b_U
        right = (normal * columns[behaviour.answer]).sum(-1) + bias[behaviour.answer]
        rest = normal @ columns[behaviour.choices].transpose(-1, -2)
        rest = rest + bias[behaviour.choices][:, None]
        return (right - rest.logsumexp(-1)).mean(-1)
    held = max(1, LOGITS // (resid.shape[1] * resid.shape[2] * model.cfg.d_vocab))
    scores = [behaviour.score(_through(model.unembed, part)) for part in normal.split(held)]
    return torch.cat(scores)


def _through(module: nn.Module, value: Float[Tensor, "patch batch any width"]) -> Tensor:
    """A module of the model, which takes one batch axis, on two."""
    return module(value.flatten(0, 1)).unflatten(0, value.shape[:2])


def patch_edges(
    model: TransformerBridge, behaviour: CleanCorrupt, edges: Sequence[Edge]
) -> Float[Tensor, "batch"]:
    """Score when these wires carry what their writers write on the corrupt sequence, in nats.

    The writers' values come from the clean and the corrupt run; every other wire carries what the
    run itself brings, so whatever lies after a patched reader is computed anew.

    Example:
        >>> torch.allclose(patching.patch_edges(net, task, []), clean, atol=1e-3)
        True
    """
    writers = {u for u, _ in edges}
    clean = component_outputs(model, behaviour.clean, writers)
    corrupt = component_outputs(model, behaviour.corrupt, writers)
    changes: dict[Node, Tensor] = {}
    for writer, reader in edges:
        change = corrupt[writer] - clean[writer]
        changes[reader] = changes[reader] + change if reader in changes else change
    with split_qkv_input(model):
        return behaviour.score(scored_logits(model, behaviour, add_to_inputs(model, changes)))


def patch_key_input(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    sources: Iterable[Head],
    target: Head,
    other: Int[Tensor, "batch pos"],
) -> Float[Tensor, "batch dest src"]:
    """Attention pattern of ``target`` after patching only ``sources`` -> its key input.

    What the source heads write is replaced by what they write on ``other`` in the copy of the
    residual stream that the target head's keys read. Queries, values and every other reader keep
    the clean one, so a change of the pattern is K-composition and nothing else (path patching;
    Wang et al. 2022).
    """
    nodes, (layer, head) = [Node("head", *source) for source in sources], target
    for node in nodes:
        if node.layer >= layer:
            raise IclError(
                f"No path from {node} to {layer}.{head}: the target must be in a later layer."
            )
    clean, corrupt = (component_outputs(model, each, nodes) for each in (tokens, other))
    change = torch.stack([corrupt[node] - clean[node] for node in nodes]).sum(0)
    name = get_act_name("pattern", layer)
    with split_qkv_input(model):
        hooks = add_to_inputs(model, {Node("k", layer, head): change})
        return run_with_hooks(model, tokens, hooks, [name])[1][name][:, head]


def ablate(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    sets: Sequence[Iterable[Node]],
    how: How = "resample",
) -> Float[Tensor, "set batch"]:
    """Score without each set of heads and MLP layers, in nats.

    ``how``: ``"resample"`` gives them what they compute on the corrupt sequence, ``"mean"`` their
    mean over the batch and its positions, ``"zero"`` nothing.

    Example:
        >>> induction = [graph.head(1, h) for h in range(4)]
        >>> bool(patching.ablate(net, task, [induction])[0].mean() < clean.mean() - 1)
        True
    """
    out = []
    for chosen in map(list, bar(sets, "sets")):
        if any(n.kind not in ("head", "mlp") for n in chosen):
            raise IclError("Only heads and MLP layers can be removed.")
        heads = [(n.layer, n.head) for n in chosen if n.kind == "head"]
        layers = [n.layer for n in chosen if n.kind == "mlp"]
        hooks = ablate_heads(model, behaviour.clean, heads, how, behaviour.corrupt)
        hooks += ablate_mlps(model, behaviour.clean, layers, how, behaviour.corrupt)
        out.append(behaviour.score(scored_logits(model, behaviour, hooks)))
    return torch.stack(out)


def path_patching(
    model: TransformerBridge, behaviour: CleanCorrupt, edges: Sequence[Edge] | None = None
) -> Float[Tensor, "writer reader batch"]:
    """Nats lost when each wire alone is patched; 0 where there is no wire, or none was asked for.

    Args:
        model: the model.
        behaviour: what is asked, clean and corrupt.
        edges: the wires wanted; all if omitted.

    Example:
        >>> found = patching.path_patching(net, task).mean(-1)
        >>> bool((found[~exists] == 0).all())
        True
    """
    clean = CleanRun(model, behaviour)
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
    model: TransformerBridge, behaviour: CleanCorrupt, channels: str = "qkv"
) -> Float[Tensor, "layer head layer head batch"]:
    """Nats lost when one head's write into another is patched: ``[l1, h1, l2, h2]``.

    Args:
        model: the model.
        behaviour: what is asked, clean and corrupt.
        channels: the inputs of the reading head that are patched, together: ``"k"``, ``"qk"``, ...

    Returns:
        0 unless the writing head is in an earlier layer.

    Example:
        >>> patching.pairs(net, task, "k")[1].abs().max()
        tensor(0.)
    """
    if not channels or not set(channels) <= set(CHANNELS):
        raise unknown("channel", channels, CHANNELS)
    clean = CleanRun(model, behaviour)
    layers, heads = clean.graph.layers, clean.graph.heads
    out = clean.score.new_zeros(layers, heads, layers, heads, len(behaviour))
    targets = [(layer, h) for layer in range(1, layers) for h in range(heads)]
    for layer, h in bar(targets, "heads"):
        groups = [[head(below, other)] for below in range(layer) for other in range(heads)]
        lost = _lost(clean, [Node(channel, layer, h) for channel in channels], groups)
        out[:layer, :, layer, h] = lost.unflatten(0, (layer, heads))
    return out


def layer_flow(
    model: TransformerBridge, behaviour: CleanCorrupt
) -> Float[Tensor, "source target batch"]:
    """Nats lost when what one layer writes reaches one later block corrupt, and nothing else.

    Source 0 is the embedding, source l + 1 all that layer l writes, heads and MLP at once. Target
    l is all that block l reads, the last target the logits; the residual stream that passes the
    block stays clean. 0 unless the target comes after the source. F(l1 -> l2) is the share
    (``clean_corrupt.share``) of entry ``[l1 + 1, l2]``; the last column is the skip to the logits.

    Example:
        >>> layers = net.cfg.n_layers
        >>> patching.layer_flow(net, task).shape == (layers + 1, layers + 1, 2)
        True
    """
    clean = CleanRun(model, behaviour)
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
    behaviour: CleanCorrupt,
    found: Float[Tensor, "writer reader batch"],
    count: int,
    generator: Generator,
) -> float:
    """Largest difference (nats) of ``effects`` to one hooked pass per wire, on random wires.

    Example:
        >>> found = patching.path_patching(net, task)
        >>> patching.sampled_difference(net, task, found, 2, generator) < 1e-3
        True
    """
    if count < 1:
        raise IclError(f"Compare at least one wire; got {count}.")
    clean = CleanRun(model, behaviour)
    edges = clean.graph.edges()
    worst = 0.0
    for i in torch.randperm(len(edges), generator=generator)[:count].tolist():
        slow = clean.score - patch_edges(model, behaviour, [edges[i]])
        worst = max(worst, float((found[clean.graph.index(edges[i])] - slow).abs().max()))
    return worst


def backward_flow(model: TransformerBridge, behaviour: CleanCorrupt) -> float:
    """Largest change of what an earlier layer writes when a layer writes as on the corrupt side.

    Measured on the model itself, with no use of the order that ``layer_flow`` builds on.

    Example:
        >>> patching.backward_flow(net, task) < 1e-4
        True
    """
    layers, heads = range(model.cfg.n_layers), range(model.cfg.n_heads)
    tokens, other = behaviour.clean, behaviour.corrupt
    _, before = cached(
        model, tokens, {get_act_name(part, layer) for part in ("z", "mlp_out") for layer in layers}
    )
    worst = 0.0
    for layer in layers[1:]:
        hooks = ablate_heads(model, tokens, [(layer, h) for h in heads], "resample", other)
        hooks += ablate_mlps(model, tokens, [layer], "resample", other)
        names = [get_act_name(part, below) for part in ("z", "mlp_out") for below in range(layer)]
        _, seen = run_with_hooks(model, tokens, hooks, names)
        worst = max(worst, *(float((seen[n] - before[n]).abs().max()) for n in names))
    return worst


def _lost(
    clean: CleanRun, readers: Sequence[Node], groups: Sequence[Sequence[Node]]
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
    clean: CleanRun, readers: Sequence[Node], shift: Float[Tensor, "patch batch pos d_model"]
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
    clean: CleanRun, readers: Sequence[Node], shift: Float[Tensor, "patch batch pos d_model"]
) -> Float[Tensor, "patch batch"]:
    """The same by one hooked forward pass for each patch."""
    model, behaviour = clean.model, clean.behaviour
    with split_qkv_input(model):
        hooks = [add_to_inputs(model, dict.fromkeys(readers, one)) for one in shift]
        return torch.stack([behaviour.score(scored_logits(model, behaviour, one)) for one in hooks])


READOUT_ROWS = 512  # rows of logits held at once: 512 x 50,257 floats are 100 MB


@dataclass(frozen=True)
class Rows:
    """The (patch, position) pairs that a layer of patches can change."""

    patch: Int[Tensor, "rows"]
    position: Int[Tensor, "rows"]
    count: int

    def keep(self, mask: Bool[Tensor, "rows"]) -> Rows:
        """Only the rows under ``mask``."""
        return Rows(self.patch[mask], self.position[mask], self.count)


def mlp_position_sweep(
    model: TransformerBridge,
    tokens: Int[Tensor, "one pos"],
    positions: Int[Tensor, "position"],
    sources: Int[Tensor, "position"],
    scored: Int[Tensor, "entry"],
) -> Float[Tensor, "layer position entry"]:
    """Swap MLP outputs between positions, at every layer: change of log p, in nats.

    For every layer, and every position alone, the MLP's output there is replaced by its clean
    output at the source position of the same sequence. The seed note's patch has positions
    L .. 2L-1 of a doubled sequence and the sources L before them.

    Args:
        model: the model.
        tokens: one sequence.
        positions: where to patch.
        sources: where each patch is taken from, one per position.
        scored: prediction entries to read (entry i is about token i + 1), increasing.

    Returns:
        Change of log p for each layer, position and entry; negative where the patch hurts.

    Example:
        >>> positions = torch.arange(10, 20)
        >>> same = patching.mlp_position_sweep(net, task.tokens, positions, positions, entries)
        >>> same.abs().max() < 1e-5
        tensor(True)
    """
    _check(tokens, scored)
    if len(positions) != len(sources) or not bool(_inside(torch.cat([positions, sources]), tokens)):
        raise IclError("Need one source per position, and both inside the sequence.")
    clean = _Clean(model, tokens, scored)
    if not clean.plain:
        return _slow_mlp_sweep(model, tokens, positions, sources, scored)
    reach = torch.arange(int(scored[-1]) + 1, device=tokens.device)
    patch, position = torch.nonzero(reach[None] >= positions[:, None], as_tuple=True)
    rows = Rows(patch, position, len(positions))
    layers = []
    for layer in bar(range(model.cfg.n_layers), "layers"):
        moved = clean.mlp_out[layer][sources] - clean.mlp_out[layer][positions]
        resid = clean.resid_post[layer][position].clone()
        struck = position == positions[patch]
        resid[struck] += moved[patch[struck]]
        layers.append(_resume(model, clean, layer + 1, rows, resid, struck) - clean.log_prob)
    return torch.stack(layers)


def head_ablation_sweep(
    model: TransformerBridge,
    tokens: Int[Tensor, "one pos"],
    scored: Int[Tensor, "entry"],
    mean: Float[Tensor, "layer head d_head"] | None = None,
) -> Float[Tensor, "layer head entry"]:
    """Ablate every head of the model, one at a time: change of log p at ``scored``, in nats.

    Args:
        model: the model.
        tokens: one sequence.
        scored: prediction entries to read (entry i is about token i + 1), increasing.
        mean: what the heads write instead (before ``W_O``); zero if omitted.

    Example:
        >>> change = patching.head_ablation_sweep(net, task.tokens, entries)
        >>> change.shape
        torch.Size([2, 4, 9])
    """
    _check(tokens, scored)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    fill = torch.zeros(n_layers, n_heads, model.cfg.d_head, device=tokens.device)
    fill = fill if mean is None else mean
    clean = _Clean(model, tokens, scored)
    if not clean.plain:
        return _slow_head_sweep(model, tokens, scored, fill)
    width = int(scored[-1]) + 1
    patch = torch.arange(n_heads, device=tokens.device).repeat_interleave(width)
    position = torch.arange(width, device=tokens.device).repeat(n_heads)
    rows = Rows(patch, position, n_heads)
    layers = []
    for layer in bar(range(n_layers), "layers"):
        change = fill[layer][:, None] - clean.z[layer][:width].transpose(0, 1)
        write = einsum(change, model.W_O[layer], "head pos d, head d model -> head pos model")
        write = rearrange(write, "head pos model -> (head pos) model")
        here, middle = rows, clean.resid_mid[layer][position] + write
        if layer == n_layers - 1:
            mask = torch.isin(position, scored)
            here, middle = rows.keep(mask), middle[mask]
        resid = middle + _mlp(model, layer, middle)
        everywhere = torch.ones_like(here.patch, dtype=torch.bool)
        after = _resume(model, clean, layer + 1, here, resid, everywhere)
        layers.append(after - clean.log_prob)
    return torch.stack(layers)


def _inside(index: Tensor, tokens: Tensor) -> Tensor:
    return ((index >= 0) & (index < tokens.shape[1])).all()


def _check(tokens: Tensor, scored: Tensor) -> None:
    if tokens.shape[0] != 1 or not bool(_inside(scored + 1, tokens)):
        raise IclError("Need one sequence, and entries that predict one of its tokens.")


class _Clean:
    """What one clean forward pass leaves behind, and whether the engine can reproduce it."""

    def __init__(
        self, model: TransformerBridge, tokens: Int[Tensor, "one pos"], scored: Int[Tensor, "entry"]
    ) -> None:
        parts = ("hook_resid_mid", "hook_resid_post", "hook_mlp_out", "hook_resid_pre")
        heads = ("attn.hook_z", "attn.hook_q", "attn.hook_k", "attn.hook_v")
        logits, cache = cached(model, tokens, lambda name: name.endswith(parts + heads))
        layers = range(model.cfg.n_layers)
        self.scored = scored
        self.target = tokens[0, scored + 1]
        self.log_prob = logits[0, scored].log_softmax(-1).gather(-1, self.target[:, None])[:, 0]
        self.resid_mid, self.resid_post, self.mlp_out, self.resid_pre = (
            [cache[f"blocks.{layer}.{name}"][0] for layer in layers] for name in parts
        )
        self.z, self.q, self.k, self.v = (
            [cache[f"blocks.{layer}.{name}"][0] for layer in layers] for name in heads
        )
        self.plain = self._reproduces(model, int(tokens.shape[1]))

    def _reproduces(self, model: TransformerBridge, size: int) -> bool:
        if self.k[0].shape != self.q[0].shape or model.cfg.parallel_attn_mlp:
            return False
        if model.cfg.positional_embedding_type != "standard":
            return False
        lower = torch.ones(size, size, dtype=torch.bool, device=self.scored.device).tril()
        for layer in range(model.cfg.n_layers):
            q, k, v = (t[layer].transpose(0, 1)[None] for t in (self.q, self.k, self.v))
            z = functional.scaled_dot_product_attention(q, k, v, lower)[0].transpose(0, 1)
            middle = self.resid_pre[layer] + _attention_out(model, layer, z)
            ours = middle + _mlp(model, layer, middle)
            if not torch.allclose(ours, self.resid_post[layer], rtol=1e-4, atol=1e-4):
                return False
        return True


def _resume(
    model: TransformerBridge,
    clean: _Clean,
    layer: int,
    rows: Rows,
    resid: Float[Tensor, "rows d_model"],
    dirty: Bool[Tensor, "rows"],
) -> Float[Tensor, "patch entry"]:
    """Go on from the input of ``layer`` and return log p at the scored entries.

    ``dirty`` marks the rows that already differ from the clean pass; with the first attention
    they spread to all rows. Rows that stay clean are not read out.
    """
    final = model.cfg.n_layers - 1
    for block in range(layer, model.cfg.n_layers):
        k, v = _patched_keys_values(model, clean, block, rows, resid, dirty)
        asked = rows
        if block == final:
            mask = torch.isin(rows.position, clean.scored)
            asked, resid, dirty = rows.keep(mask), resid[mask], dirty[mask]
        q = clean.q[block][asked.position].clone()
        q[dirty] = _project(model, block, "q", resid[dirty])
        middle = resid + _attention_out(model, block, _attend(asked, q, k, v))
        resid = middle + _mlp(model, block, middle)
        rows, dirty = asked, torch.ones_like(asked.patch, dtype=torch.bool)
    read = dirty & torch.isin(rows.position, clean.scored)
    rows, resid = rows.keep(read), resid[read]
    entry = torch.searchsorted(clean.scored, rows.position)
    out = clean.log_prob.expand(rows.count, -1).clone()
    for part in torch.arange(len(entry), device=resid.device).split(READOUT_ROWS):
        scores = model.unembed(model.ln_final(resid[part][None]))[0]
        hit = scores.gather(-1, clean.target[entry[part], None])[:, 0]
        out[rows.patch[part], entry[part]] = hit - scores.logsumexp(-1)
    return out


def _patched_keys_values(
    model: TransformerBridge,
    clean: _Clean,
    layer: int,
    rows: Rows,
    resid: Float[Tensor, "rows d_model"],
    dirty: Bool[Tensor, "rows"],
) -> tuple[Tensor, Tensor]:
    """Keys and values of every patch: (patch, pos, head, d_head), clean where nothing changed."""
    width = int(rows.position.max()) + 1
    both = []
    for name, source in (("k", clean.k), ("v", clean.v)):
        full = source[layer][:width].expand(rows.count, -1, -1, -1).clone()
        full[rows.patch[dirty], rows.position[dirty]] = _project(model, layer, name, resid[dirty])
        both.append(full)
    return both[0], both[1]


def _attend(
    rows: Rows, q: Float[Tensor, "rows head d_head"], k: Tensor, v: Tensor
) -> Float[Tensor, "rows head d_head"]:
    """Causal attention of ragged query rows over their patch's keys and values."""
    first, last = int(rows.position.min()), int(rows.position.max())
    window = q.new_zeros(rows.count, last + 1 - first, *q.shape[1:])
    window[rows.patch, rows.position - first] = q
    query = torch.arange(first, last + 1, device=q.device)
    lower = torch.arange(k.shape[1], device=q.device)[None] <= query[:, None]
    z = functional.scaled_dot_product_attention(
        window.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), lower
    )
    return z.transpose(1, 2)[rows.patch, rows.position - first]


def _project(
    model: TransformerBridge, layer: int, name: str, resid: Float[Tensor, "rows d_model"]
) -> Float[Tensor, "rows head d_head"]:
    normal = model.blocks[layer].ln1(resid[None])
    flat = getattr(model.blocks[layer].attn, name)(normal)
    return rearrange(flat[0], "rows (head d) -> rows head d", head=model.cfg.n_heads)


def _attention_out(
    model: TransformerBridge, layer: int, z: Float[Tensor, "rows head d_head"]
) -> Float[Tensor, "rows d_model"]:
    return model.blocks[layer].attn.o(rearrange(z, "rows head d -> 1 rows (head d)"))[0]


def _mlp(
    model: TransformerBridge, layer: int, middle: Float[Tensor, "rows d_model"]
) -> Float[Tensor, "rows d_model"]:
    block = model.blocks[layer]
    return block.mlp(block.ln2(middle[None]))[0]


def _log_prob(model: TransformerBridge, tokens: Tensor, scored: Tensor, hooks: list) -> Tensor:
    out, _ = run_with_hooks(model, tokens, hooks)
    return out[0, scored].log_softmax(-1).gather(-1, tokens[0, scored + 1, None])[:, 0]


def _slow_mlp_sweep(
    model: TransformerBridge, tokens: Tensor, positions: Tensor, sources: Tensor, scored: Tensor
) -> Tensor:
    """The straightforward loop: one hooked forward pass per layer and position."""
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    clean = _log_prob(model, tokens, scored, [])
    out = torch.zeros(len(names), len(positions), len(scored), device=tokens.device)
    for layer, name in enumerate(bar(names, "layers")):
        for i, (p, source) in enumerate(zip(positions, sources, strict=True)):

            def patch(
                value: Tensor,
                hook: object,
                p: Tensor = p,
                source: Tensor = source,
                name: str = name,
            ) -> Tensor:
                value = value.clone()
                value[:, p] = cache[name][:, source]
                return value

            out[layer, i] = _log_prob(model, tokens, scored, [(name, patch)]) - clean
    return out


def _slow_head_sweep(
    model: TransformerBridge, tokens: Tensor, scored: Tensor, fill: Tensor
) -> Tensor:
    """The straightforward loop: one hooked forward pass per head."""
    clean = _log_prob(model, tokens, scored, [])
    out = torch.zeros(*fill.shape[:2], len(scored), device=tokens.device)
    for layer in bar(range(model.cfg.n_layers), "layers"):
        for h in range(model.cfg.n_heads):

            def drop(z: Tensor, hook: object, layer: int = layer, head: int = h) -> Tensor:
                z = z.clone()
                z[:, :, head] = fill[layer, head]
                return z

            after = _log_prob(model, tokens, scored, [(get_act_name("z", layer), drop)])
            out[layer, h] = after - clean
    return out
