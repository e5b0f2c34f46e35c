"""Patching: what a model loses when a part of it carries what it does on other sequences.

A patch leaves what comes before it as it was: ``CleanRun`` keeps one clean pass and takes many
patches through the later layers together, at the positions that matter. Models whose layers it
does not reproduce (``plain``) run one hooked forward pass for each patch. ``path_patching`` patches
one edge of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import TypeVar

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ..errors import IclError
from ..models import ActivationCache, TransformerBridge, cached, get_act_name
from ..progress import bar
from .at_query import angle_names, angles, rotate
from .clean_corrupt import CleanCorrupt, scored_logits
from .graph import (
    CHANNELS,
    Edge,
    Node,
    add_to_inputs,
    component_output,
    component_outputs,
    of,
    output_hook,
    split_qkv_input,
)
from .hooks import Head, Hook, How, replacements, run_with_hooks, set_activation

PARTS = ("resid_pre", "resid_mid", "resid_post", "mlp_out", "q", "k", "v", "z")
ROWS = 4096  # rows of d_model (patch x batch x pos) held at once; more leave the cache
TOGETHER = 16  # patches of neighbouring positions that share their first position
FEW = 8  # sets of nodes up to which hooked passes cost less than a ``CleanRun``
LOGITS = 2**25  # logits held at once: 128 MB
CLOSE = 1e-4  # how well the model must be reproduced

Stream = Float[Tensor, "patch batch _ d_model"]  # the residual stream, or what is added to it
Reached = Bool[Tensor, "patch batch entry"] | None  # what can differ from the clean run
Scores = Float[Tensor, "patch batch entry"]  # the task's, in nats
States = Float[Tensor, "patch batch _ head d_head"]  # of heads: queries, keys or values
Patch = TypeVar("Patch")


def ablate(
    model: TransformerBridge,
    task: CleanCorrupt,
    sets: Sequence[Iterable[Node]],
    how: How = "resample",
) -> Float[Tensor, "set batch"]:
    """Score the model without each set of heads and MLP layers, in nats.

    They become what they are on the corrupt sequence (``"resample"``), their mean over the batch
    and its positions (``"mean"``), or nothing (``"zero"``). For edges, see ``path_patching``.
    """
    groups = [list(nodes) for nodes in sets]
    run = CleanRun(model, task) if len(groups) > FEW else None
    nodes = {node for group in groups for node in group}
    if not nodes <= {node for node in of(model).writers if node.kind != "embed"}:
        raise IclError("Only heads and MLP layers of the model can be removed.")
    values = replacements(model, task.clean, {*map(output_hook, nodes)}, how, task.corrupt)

    def fill(node: Node) -> Hook:
        name = output_hook(node)
        return set_activation(name, values[name], [node.head] if node.kind == "head" else [])

    scores = []
    with bar(what="sets", total=len(groups)) as progress, torch.no_grad():
        for layers, some in groupby(groups, lambda group: {node.layer for node in group}):
            if run is not None and run.plain and len(layers) == 1:
                for part in run.batches(list(some)):
                    scores.append(_ablated(run, part, values).mean(-1))
                    progress.update(len(part))
                continue
            for group in some:
                scores.append(task.score(scored_logits(model, task, [*map(fill, group)]))[None])
                progress.update()
    return torch.cat(scores)


def _ablated(
    run: CleanRun, groups: Sequence[Sequence[Node]], values: Mapping[str, Tensor]
) -> Scores:
    """Score as ``ablate``, of sets in one layer: what lies before it is not run again."""
    layer, streams = groups[0][0].layer, []

    def new(part: str) -> Tensor:
        value = values[get_act_name(part, layer)]
        return value[:, : run.reach] if value.ndim else value

    for nodes in groups:
        middle = run.at_scored(layer, run.clean("resid_mid", layer))
        if heads := sorted({node.head for node in nodes} - {-1}):
            change, out = new("z") - run.clean("z", layer), run.model.blocks[layer].attn.W_O
            write = einsum(change[:, :, heads], out[heads], "b p h k, h k d -> b p d")
            middle = middle + run.at_scored(layer, write)
        if any(node.kind == "mlp" for node in nodes):
            mlp = run.at_scored(layer, new("mlp_out").expand_as(run.clean("mlp_out", layer)))
        else:
            mlp = _mlp(run, layer, middle[None])[0]
        streams.append(middle + mlp)
    return _resume(run, layer + 1, torch.stack(streams))


def patch_key_input(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    sources: Iterable[Head],
    target: Head,
    other: Int[Tensor, "batch pos"],
) -> Float[Tensor, "batch dest src"]:
    """Return the attention pattern of ``target`` when only its keys read what ``sources`` write on
    ``other``.

    Every other reader keeps the clean stream: a change is K-composition and nothing else.
    """
    writers, keys = [Node("head", *source) for source in sources], Node("k", *target)
    of(model).mask((writer, keys) for writer in writers)  # all of these edges exist
    before, after = (component_outputs(model, each, writers) for each in (tokens, other))
    change = sum((after[writer] - before[writer] for writer in writers), torch.tensor(0.0))
    hooks, name = add_to_inputs(model, {keys: change}), get_act_name("pattern", target[0])
    with split_qkv_input(model):
        return run_with_hooks(model, tokens, hooks, [name], target[0] + 1)[1][name][:, target[1]]


def key_patterns(
    run: CleanRun, groups: Sequence[Sequence[Node]], target: Node
) -> Float[Tensor, "set batch dest src"]:
    """Patch as ``patch_key_input``, for each group of earlier heads: one layer alone is run."""
    _, layer, head = target
    if not run.plain:
        clean, corrupt = run.task.clean, run.task.corrupt
        heads = ([node[1:] for node in group] for group in groups)
        each = (patch_key_input(run.model, clean, some, target[1:], corrupt) for some in heads)
        return torch.stack([*each])
    block, start = run.model.blocks[layer], run.clean("resid_pre", layer)

    def compared(channel: str, states: Tensor) -> Tensor:
        turns = angles(run.cache, layer)
        return rotate(run.model, layer, channel, states[..., None, :], turns)[..., 0, :]

    bias = 0 if block.attn.b_K is None else block.attn.b_K[head]
    q, patterns = compared("q", run.clean("q", layer)[:, :, head]), []
    with torch.no_grad():
        for part in run.batches(groups):
            shifted = torch.stack([sum(map(run.change, group), start) for group in part])
            k = _through(block.ln1, shifted) @ block.attn.W_K[head] + bias
            scores = q @ compared("k", k).mT / k.shape[-1] ** 0.5
            patterns.append(scores.masked_fill(~run.causal, -torch.inf).softmax(-1))
    return torch.cat(patterns)


def path_patching(
    model: TransformerBridge, task: CleanCorrupt, edges: Sequence[Edge] | None = None
) -> Float[Tensor, "writer reader batch"]:
    """Measure the nats lost when each edge alone is patched (Wang et al. 2022, section 3;
    Goldowsky-Dill et al. 2023); 0 where there is none, or it is not among ``edges``. Faster, and
    estimated: ``attribution.edge_attribution``.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.interp import clean_corrupt, graph, patching
        >>> net = models.load("induction-0")
        >>> task = clean_corrupt.copying(net, 2, 5, torch.Generator().manual_seed(0))
        >>> patching.path_patching(net, task).shape  # all edges
        torch.Size([11, 27, 2])
        >>> edge = graph.head(0, 2), graph.Node("k", 1, 0)  # what head 0.2 writes, keys of 1.0
        >>> lost = patching.path_patching(net, task, [edge])
        >>> lost[graph.of(net).index(edge)].shape  # nats, by sequence
        torch.Size([2])
    """
    run = CleanRun(model, task)
    graph = run.graph
    wanted = graph.exists if edges is None else graph.mask(edges)
    out = run.score.new_zeros(*wanted.shape, len(task))
    columns = wanted.any(0).nonzero()[:, 0].tolist()
    for column in bar(columns, "edges"):
        rows = wanted[:, column].nonzero()[:, 0]
        groups = [[graph.writers[u]] for u in rows.tolist()]
        out[rows.to(out.device), column] = _lost(run, [graph.readers[column]], groups)
    return out


def layer_flow(
    model: TransformerBridge, task: CleanCorrupt
) -> Float[Tensor, "source target batch"]:
    """Measure the nats lost when what one layer writes reaches one later block corrupt, and nothing
    else.

    Source 0 is the embedding, l + 1 all that layer l writes; target l is all that block l reads,
    the last one the logits. The residual stream that passes the block stays clean.
    """
    run = CleanRun(model, task)
    graph, layers = run.graph, run.graph.layers
    sources = [[w for w in graph.writers if w.layer == at] for at in range(-1, layers)]
    out = run.score.new_zeros(layers + 1, layers + 1, len(task))
    for target in range(layers + 1):
        readers = [r for r in graph.readers if r.layer == (target if target < layers else -1)]
        out[: target + 1, target] = _lost(run, readers, sources[: target + 1])
    return out


def mlp_position_sweep(
    model: TransformerBridge,
    tokens: Int[Tensor, "one pos"],
    positions: Int[Tensor, "position"],
    sources: Int[Tensor, "position"],
    scored: Int[Tensor, "entry"],
) -> Float[Tensor, "layer position entry"]:
    """Measure the change of log p (nats) when the MLP's output at one position becomes that at its
    source.

    For every layer and each position alone, in one sequence. ``scored``: increasing prediction
    entries (entry i is about token i + 1). The seed note patches L .. 2L-1 from L before them.
    """
    places = torch.cat([positions, sources, scored + 1])
    inside = bool(((places >= 0) & (places < tokens.shape[1])).all()) and int(scored.min()) >= 0
    if len(tokens) != 1 or len(positions) != len(sources) or not inside:
        raise IclError(
            "Need one sequence, one source per position, both inside it, and entries that predict "
            "one of its tokens."
        )
    run = CleanRun(model, CleanCorrupt(tokens, tokens, scored[None], tokens[:, scored + 1]))
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)  # a source may lie after the last scored entry
    out = run.by_entry[0].expand(len(names), len(positions), -1).clone()
    order = positions.argsort()
    order = order[positions[order] < run.reach]  # no later one is read
    for layer, name in enumerate(bar(names, "layers") if len(order) else ()):
        moved = cache[name][0, sources] - cache[name][0, positions]
        if not run.plain:
            swapped = cache[name][0, : run.reach].repeat(len(positions), 1, 1)
            swapped[order, positions[order]] += moved[order]
            hooks = [[set_activation(name, swapped[i])] for i in order.tolist()]
            out[layer, order] = _by_hooks(run, hooks)[:, 0]
            continue
        for some in order.split(TOGETHER):
            first = int(positions[some[0]])
            resid = run.clean("resid_post", layer)[:, first:].repeat(len(some), 1, 1)
            resid[torch.arange(len(some)), positions[some] - first] += moved[some]
            reached = run.task.at == positions[some, None]  # after the last layer, no other entry
            if layer < run.last:
                reached = run.task.at >= positions[some, None]
            resid = run.at_scored(layer, resid[:, None], first)
            out[layer, some] = _resume(run, layer + 1, resid, first, reached[:, None])[:, 0]
    return out - run.by_entry[0]


class CleanRun:
    """What one clean and one corrupt pass leave behind, up to the last scored position.

    ``by_entry``: score of every entry of the clean run, (batch, entry), ``score`` their mean, in
    nats; ``plain``: whether the fast way reproduces the model.
    """

    def __init__(self, model: TransformerBridge, task: CleanCorrupt) -> None:
        self.model, self.graph, self.reach = model, of(model), int(task.at.max()) + 1
        clean, corrupt = task.clean[:, : self.reach], task.corrupt[:, : self.reach]
        self.task = replace(task, clean=clean, corrupt=corrupt)
        self.last = self.graph.layers - 1
        differs = (clean != corrupt).any(0).nonzero().flatten().tolist()
        self.first = differs[0] if differs else self.reach - 1
        names = {get_act_name(p, layer) for p in PARTS for layer in range(self.graph.layers)}
        logits, self.cache = cached(model, clean, names | angle_names(self.graph.layers))
        self._rows = torch.arange(len(clean), device=clean.device)[:, None]
        self.by_entry = task.by_entry(logits[self._rows, task.at])
        self.score = self.by_entry.mean(-1)
        place = torch.arange(self.reach, device=clean.device)
        self.seen = place <= task.at[..., None]  # (batch, entry, pos)
        self.causal = place <= place[:, None]
        self.plain = self._is_plain(names)

    def clean(self, part: str, layer: int) -> Tensor:
        """Return an activation of the clean run, (batch, pos, ...)."""
        return self.cache[get_act_name(part, layer)]

    def batches(self, groups: Sequence[Patch], first: int = 0) -> Iterator[Sequence[Patch]]:
        """Yield as many patches at a time as ``ROWS`` allows, of positions from ``first`` on."""
        size = max(1, ROWS // self.task.clean[:, first:].numel())
        return (groups[start : start + size] for start in range(0, len(groups), size))

    @cached_property
    def _corrupt(self) -> ActivationCache:
        names = {output_hook(w) for w in self.graph.writers}
        return cached(self.model, self.task.corrupt, names)[1]

    def change(self, writer: Node) -> Float[Tensor, "batch pos d_model"]:
        """Return what a writer writes on the corrupt sequences minus that on the clean ones."""
        corrupt = component_output(self.model, self._corrupt, writer)
        return corrupt - component_output(self.model, self.cache, writer)

    def entries(self, first: int) -> Bool[Tensor, "entry"]:
        """Tell which scored entries a change at position ``first`` or later can reach."""
        return (self.task.at >= first).any(0)

    def at_scored(
        self, layer: int, value: Float[Tensor, "*lead pos width"], first: int = 0
    ) -> Float[Tensor, "*lead some_pos width"]:
        """Pick the positions, of those from ``first`` on, at which a layer's output is read: in
        the last layer the scored ones."""
        if layer < self.last:
            return value
        at = self.task.at[:, self.entries(first)] - first
        return value[..., self._rows, at.clamp(min=0), :]  # what a row has before is not read

    def _is_plain(self, names: Iterable[str]) -> bool:
        """Tell whether each part, computed from its clean input, gives its clean output."""
        whole = all(getattr(block.mlp, "name", "mlp") for block in self.model.blocks)  # not OPT's
        if self.graph.parallel or not whole or any(n not in self.cache for n in names):
            return False
        for layer in range(self.graph.layers):
            start, middle, end = (self.clean(f"resid_{p}", layer) for p in ("pre", "mid", "post"))
            middle, end = (self.at_scored(layer, value)[None] for value in (middle, end))
            ours = self.at_scored(layer, start) + _attention(self, layer, start[None])
            for one, other in ((ours, middle), (middle + _mlp(self, layer, middle), end)):
                if not torch.allclose(one, other, CLOSE, CLOSE):
                    return False
        return torch.allclose(_readout(self, end)[0], self.by_entry, CLOSE, CLOSE)


def _lost(
    run: CleanRun, readers: Sequence[Node], groups: Sequence[Sequence[Node]]
) -> Float[Tensor, "patch batch"]:
    """Measure the nats lost when all ``readers`` read each group of writers from the corrupt
    run."""
    scores = []
    with torch.no_grad():
        for part in run.batches(groups, run.first):
            shift = torch.stack([torch.stack([*map(run.change, g)]).sum(0) for g in part])
            if run.plain:
                scores.append(_patched(run, readers, shift).mean(-1))
                continue
            with split_qkv_input(run.model):
                hooks = [add_to_inputs(run.model, dict.fromkeys(readers, one)) for one in shift]
                scores.append(_by_hooks(run, hooks).mean(-1))
    return run.score - torch.cat(scores)


def _by_hooks(run: CleanRun, hooks: Sequence[Sequence[Hook]]) -> Scores:
    """Score every entry under each list of hooks, one forward pass for each."""
    logits = (scored_logits(run.model, run.task, one) for one in hooks)
    return torch.stack([*map(run.task.by_entry, logits)])


def _patched(run: CleanRun, readers: Sequence[Node], shift: Stream) -> Scores:
    """Shift what ``readers`` read: the logits, one head, one MLP or a whole block."""
    kinds, layer, first = {r.kind for r in readers}, readers[0].layer, run.first
    shift = shift[:, :, first:]
    if kinds == {"logits"}:
        end = run.clean("resid_post", run.last)[:, first:] + shift
        return _readout(run, run.at_scored(run.last, end, first), first)
    start, middle = (run.clean(f"resid_{part}", layer)[:, first:] for part in ("pre", "mid"))
    passing, middle = (run.at_scored(layer, stream, first) for stream in (shift, middle))
    if kinds == {*CHANNELS, "mlp_in"}:
        middle = run.at_scored(layer, start, first) + _attention(run, layer, start + shift, first)
    elif kinds != {"mlp_in"}:
        middle = middle + _head_change(run, readers, shift)
        return _resume(run, layer + 1, middle + _mlp(run, layer, middle), first)
    return _resume(run, layer + 1, middle + _mlp(run, layer, middle + passing), first)


def _head_change(run: CleanRun, readers: Sequence[Node], shift: Stream) -> Stream:
    """Return what one head writes minus what it wrote, when some of its three inputs are
    shifted."""
    _, layer, head = readers[0]
    block, shifted, first = run.model.blocks[layer], {r.kind for r in readers}, run.first
    normal = _through(block.ln1, run.clean("resid_pre", layer)[:, first:] + shift)

    def read(channel: str) -> Tensor:
        states = run.clean(channel, layer)[:, :, head].expand(len(shift), -1, -1, -1)
        if channel in shifted:
            weight, bias = (getattr(block.attn, f"{p}_{channel.upper()}") for p in "Wb")
            new = normal @ weight[head] + (0 if bias is None else bias[head])
            states = torch.cat([states[:, :, :first], new], 2)
        return states

    q = run.at_scored(layer, read("q")[:, :, first:], first)
    q, k, v = (states[..., None, :] for states in (q, read("k"), read("v")))
    before = run.at_scored(layer, run.clean("z", layer)[:, first:, head], first)
    return (_attended(run, layer, q, k, v, first)[..., 0, :] - before) @ block.attn.W_O[head]


def _resume(
    run: CleanRun, layer: int, resid: Stream, first: int = 0, reached: Reached = None
) -> Scores:
    """Go on from the input of ``layer``, positions from ``first`` on, to the scores."""
    for block in range(layer, run.graph.layers):
        middle = run.at_scored(block, resid, first) + _attention(run, block, resid, first)
        resid = middle + _mlp(run, block, middle)
    return _readout(run, resid, first, reached)


def _attention(run: CleanRun, layer: int, resid: Stream, first: int = 0) -> Stream:
    """Return what all heads of a layer write, biases included, where it is read."""
    attn, normal = run.model.blocks[layer].attn, _through(run.model.blocks[layer].ln1, resid)

    def project(name: str, value: Tensor) -> Tensor:
        return _through(getattr(attn, name), value).unflatten(-1, (run.graph.heads, -1))

    def everywhere(name: str) -> Tensor:
        """Return keys or values; positions before ``first`` lend those of the clean run."""
        lent = run.clean(name, layer)[:, :first].expand(len(resid), -1, -1, -1, -1)
        return torch.cat([lent, project(name, normal)], 2)

    q = project("q", run.at_scored(layer, normal, first))
    z = _attended(run, layer, q, everywhere("k"), everywhere("v"), first)
    return _through(attn.o, z.flatten(3))


def _attended(
    run: CleanRun, layer: int, q: States, k: States, v: States, first: int
) -> Float[Tensor, "patch batch some_pos head d_head"]:
    """Return the z of heads, from queries where they are read, from ``first`` on, and all keys and
    values, before norm and rotation."""
    of_q = of_k = angles(run.cache, layer)
    if of_k is not None:
        cos, sin = (part.expand(len(run.task), -1, -1) for part in of_k)
        of_k = cos, sin
        cos, sin = (run.at_scored(layer, part[:, first:], first) for part in of_k)
        of_q = cos, sin
    q, k = rotate(run.model, layer, "q", q, of_q), rotate(run.model, layer, "k", k, of_k)
    whole = layer < run.last and not first
    mask = None if whole else run.causal[first:]
    if layer == run.last:
        mask = run.seen[:, run.entries(first)].repeat(len(q), 1, 1)[:, None]
    queries, keys, values = (states.flatten(0, 1).transpose(1, 2) for states in (q, k, v))
    z = functional.scaled_dot_product_attention(queries, keys, values, mask, is_causal=whole)
    return z.transpose(1, 2).unflatten(0, q.shape[:2])


def _mlp(run: CleanRun, layer: int, middle: Stream) -> Stream:
    """Return what the MLP of a layer writes."""
    block = run.model.blocks[layer]
    return _through(block.mlp, _through(block.ln2, middle))


def _readout(run: CleanRun, resid: Stream, first: int = 0, reached: Reached = None) -> Scores:
    """Score every entry, from the last residual stream at scored positions."""
    task, model, entries = run.task, run.model, run.entries(first)
    normal, answer = _through(model.ln_final, resid), task.answer[:, entries]
    out = run.by_entry.repeat(len(resid), 1, 1)
    changed = (task.at >= first).expand_as(out) if reached is None else reached
    pick = changed[..., entries]
    if task.choices is not None:
        columns, bias = model.W_U.T, model.b_U
        right = (normal * columns[answer]).sum(-1) + bias[answer]
        rest = normal @ columns[task.choices].mT + bias[task.choices][:, None]
        out[changed] = task.compare(right, rest)[pick]
        return out
    scores, size = [], max(1, LOGITS // model.cfg.d_vocab)
    parts = normal[pick].split(size), answer.expand(pick.shape)[pick].split(size)
    for rows, target in zip(*parts, strict=True):
        logits = model.unembed(rows[None])[0]
        scores.append(task.compare(logits.gather(-1, target[:, None])[:, 0], logits))
    out[changed] = torch.cat(scores)
    return out


def _through(module: nn.Module, value: Float[Tensor, "patch batch any width"]) -> Tensor:
    """Run a module of the model, which takes one batch axis, on two."""
    return module(value.flatten(0, 1)).unflatten(0, value.shape[:2])
