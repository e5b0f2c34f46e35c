"""Patching: what a model loses when a part of it carries what it does on other sequences.

``ablate`` replaces whole components, ``patch_edges`` what single edges carry, ``path_patching``
every edge alone (Wang et al. 2022, section 3; Goldowsky-Dill et al. 2023), the sweeps every MLP
output or head of one sequence.

All but the first two are computed from where a patch matters. A patch in layer l leaves
everything before it, and all earlier positions, as they were. So ``CleanRun`` keeps one clean
pass; of the patched layer only what changes is redone, and many patches go through the later
layers together. Positions after the last scored one are left out; the last layer's queries, its
MLP and the unembedding run at scored positions only, and where few are scored its keys and values
are never formed: softmax((W_K q) . x) needs the inputs x alone. This knows one attention,
softmax(q k / sqrt(d_head)) v with positions added to the embedding, one part after the other, as
in GPT-2. ``CleanRun.plain`` measures whether that is what the model does; all other models go by
one hooked forward pass for each patch.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import clean_corrupt, graph, patching
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task = clean_corrupt.copying(net, 2, 5, generator)
    >>> exists = graph.of(net).exists
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional

from ..errors import IclError
from ..models import ActivationCache, TransformerBridge, cached, get_act_name
from ..progress import bar
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
from .hooks import Head, Hook, How, ablate_heads, ablate_mlps, replacements, run_with_hooks

PARTS = ("resid_pre", "resid_mid", "resid_post", "mlp_out", "q", "k", "v", "z")
ROWS = 4096  # rows of d_model (patch x batch x pos) held at once; more leave the cache
TOGETHER = 16  # patches of neighbouring positions that share their first position
FEW = 8  # scored entries up to which the last layer's keys and values are not formed
LOGITS = 2**25  # logits held at once: 128 MB
CLOSE = 1e-4  # how well the model must be reproduced

LogProb = Float[Tensor, "patch batch entry"]


def ablate(
    model: TransformerBridge,
    task: CleanCorrupt,
    sets: Sequence[Iterable[Node]],
    how: How = "resample",
) -> Float[Tensor, "set batch"]:
    """Score without each set of heads and MLP layers, in nats.

    ``how``: ``"resample"`` gives them what they compute on the corrupt sequence, ``"mean"`` their
    mean over the batch and its positions, ``"zero"`` nothing.

    Example:
        >>> induction = [graph.head(1, h) for h in range(4)]
        >>> clean, _ = clean_corrupt.baselines(net, task)
        >>> bool(patching.ablate(net, task, [induction])[0].mean() < clean.mean() - 1)
        True
    """
    groups = [list(nodes) for nodes in sets]
    nodes = {node for group in groups for node in group}
    if not nodes <= {node for node in of(model).writers if node.kind != "embed"}:
        raise IclError("Only heads and MLP layers of the model can be removed.")
    names = {output_hook(node) for node in nodes}
    values = replacements(model, task.clean, names, how, task.corrupt)

    def fill(node: Node) -> Hook:
        def exchange(value: Tensor, hook: object) -> Tensor:
            value = value.clone()
            part = value if node.kind == "mlp" else value[:, :, node.head]
            new = values[output_hook(node)].expand_as(value)
            part[:] = new if node.kind == "mlp" else new[:, :, node.head]
            return value

        return output_hook(node), exchange

    scores = [
        task.score(scored_logits(model, task, list(map(fill, group))))
        for group in bar(groups, "sets")
    ]
    return torch.stack(scores)


def patch_edges(
    model: TransformerBridge, task: CleanCorrupt, edges: Sequence[Edge]
) -> Float[Tensor, "batch"]:
    """Score when these edges carry what their writers write on the corrupt sequence, in nats.

    The writers' values come from the clean and the corrupt run; every other edge carries what the
    run itself brings, so whatever lies after a patched reader is computed anew.
    """
    writers = {u for u, _ in edges}
    clean, corrupt = (component_outputs(model, t, writers) for t in (task.clean, task.corrupt))
    changes: dict[Node, Tensor] = {}
    for writer, reader in edges:
        changes[reader] = changes.get(reader, 0) + corrupt[writer] - clean[writer]
    with split_qkv_input(model):
        return task.score(scored_logits(model, task, add_to_inputs(model, changes)))


def patch_key_input(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    sources: Iterable[Head],
    target: Head,
    other: Int[Tensor, "batch pos"],
) -> Float[Tensor, "batch dest src"]:
    """Attention pattern of ``target`` when only its keys read what ``sources`` write on ``other``.

    Queries, values and every other reader keep the clean residual stream, so a change of the
    pattern is K-composition and nothing else.
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


def path_patching(
    model: TransformerBridge, task: CleanCorrupt, edges: Sequence[Edge] | None = None
) -> Float[Tensor, "writer reader batch"]:
    """Nats lost when each edge alone is patched; 0 where there is none, or none was asked for.

    The same as ``patch_edges`` edge by edge. ``edges``: the edges wanted; all if omitted.

    Example:
        >>> found = patching.path_patching(net, task).mean(-1)
        >>> bool((found[~exists] == 0).all())
        True
    """
    run = CleanRun(model, task)
    graph = run.graph
    asked = graph.exists if edges is None else graph.mask(edges)
    out = run.score.new_zeros(*asked.shape, len(task))
    columns = asked.any(0).nonzero()[:, 0].tolist()
    for column in bar(columns, "edges"):
        rows = asked[:, column].nonzero()[:, 0]
        groups = [[graph.writers[u]] for u in rows.tolist()]
        out[rows.to(out.device), column] = _lost(run, [graph.readers[column]], groups)
    return out


def layer_flow(
    model: TransformerBridge, task: CleanCorrupt
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
    run = CleanRun(model, task)
    graph, layers = run.graph, run.graph.layers
    sources = [[w for w in graph.writers if w.layer == at] for at in range(-1, layers)]
    out = run.score.new_zeros(layers + 1, layers + 1, len(task))
    for target in range(layers + 1):
        readers = [r for r in graph.readers if r.layer == (target if target < layers else -1)]
        out[: target + 1, target] = _lost(run, readers, sources[: target + 1])
    return out


def sampled_difference(
    model: TransformerBridge,
    task: CleanCorrupt,
    found: Float[Tensor, "writer reader batch"],
    count: int,
    generator: Generator,
) -> float:
    """Largest difference (nats) of ``path_patching`` to ``patch_edges``, on random edges.

    Example:
        >>> found = patching.path_patching(net, task)
        >>> patching.sampled_difference(net, task, found, 2, generator) < 1e-3
        True
    """
    graph = of(model)
    edges = graph.edges()
    clean = task.score(scored_logits(model, task))
    worst = 0.0
    for i in torch.randperm(len(edges), generator=generator)[:count].tolist():
        slow = clean - patch_edges(model, task, [edges[i]])
        worst = max(worst, float((found[graph.index(edges[i])] - slow).abs().max()))
    return worst


def backward_flow(model: TransformerBridge, task: CleanCorrupt) -> float:
    """Largest change of what an earlier layer writes when a layer writes as on the corrupt side.

    Measured on the model itself, with no use of the order that ``layer_flow`` builds on.

    Example:
        >>> patching.backward_flow(net, task) < 1e-4
        True
    """
    layers, tokens, other = range(model.cfg.n_layers), task.clean, task.corrupt
    names = [get_act_name(part, layer) for layer in layers for part in ("z", "mlp_out")]
    _, before = cached(model, tokens, names)
    worst = 0.0
    for layer in layers[1:]:
        heads = [(layer, h) for h in range(model.cfg.n_heads)]
        hooks = ablate_heads(model, tokens, heads, "resample", other)
        hooks += ablate_mlps(model, tokens, [layer], "resample", other)
        _, seen = run_with_hooks(model, tokens, hooks, names[: 2 * layer])
        worst = max(worst, *(float((seen[n] - before[n]).abs().max()) for n in seen))
    return worst


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
    L .. 2L-1 of repeated tokens and the sources L before them.

    Args:
        model: the model.
        tokens: one sequence.
        positions: where to patch.
        sources: where each patch is taken from, one per position.
        scored: prediction entries to read (entry i is about token i + 1), increasing.

    Example:
        >>> positions, entries = torch.arange(5, 10), torch.arange(6, 10)
        >>> same = patching.mlp_position_sweep(net, task.clean[:1], positions, positions, entries)
        >>> same.abs().max() < 1e-5
        tensor(True)
    """
    run = _one_sequence(model, tokens, scored)
    places = torch.cat([positions, sources])
    if len(positions) != len(sources) or not bool(
        ((places >= 0) & (places < len(tokens[0]))).all()
    ):
        raise IclError("Need one source per position, and both inside the sequence.")
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)  # a source may lie after the last scored entry
    out = run.log_prob[0].expand(len(names), len(positions), -1).clone()
    order = positions.argsort()
    order = order[positions[order] < run.reach]  # no later one is read
    if not len(order):
        return torch.zeros_like(out)
    for layer, name in enumerate(bar(names, "layers")):
        moved = cache[name][0, sources] - cache[name][0, positions]
        if not run.plain:
            hooks = [_add_at(name, int(positions[i]), moved[i]) for i in order]
            out[layer, order] = _by_hooks(run, [[hook] for hook in hooks])[:, 0]
            continue
        for some in order.split(TOGETHER):
            first = int(positions[some[0]])
            resid = run.clean("resid_post", layer)[:, first:].repeat(len(some), 1, 1)
            resid[torch.arange(len(some)), positions[some] - first] += moved[some]
            reached = run.task.at == positions[some, None]  # after the last layer, no other entry
            if layer < run.last:
                reached = run.task.at >= positions[some, None]
            resid = run.asked(layer, resid[:, None], first)
            out[layer, some] = _resume(run, layer + 1, resid, first, reached[:, None])[:, 0]
    return out - run.log_prob[0]


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
        mean: what the heads' ``z`` becomes; zero if omitted.

    Example:
        >>> patching.head_ablation_sweep(net, task.clean[:1], torch.arange(6, 10)).shape
        torch.Size([2, 4, 4])
    """
    run = _one_sequence(model, tokens, scored)
    shape = model.cfg.n_layers, model.cfg.n_heads
    fill = torch.zeros(*shape, 1, device=tokens.device) if mean is None else mean
    layers = []
    for layer in bar(range(shape[0]), "layers"):
        if not run.plain:
            hooks = [_fill_head(layer, h, fill[layer, h]) for h in range(shape[1])]
            layers.append(_by_hooks(run, [[hook] for hook in hooks]))
            continue
        change = (fill[layer] - run.clean("z", layer)).transpose(1, 2)  # batch, head, pos, d_head
        write = run.asked(layer, (change @ model.W_O[layer]).transpose(0, 1))
        layers.append(
            _from_middle(run, layer, run.asked(layer, run.clean("resid_mid", layer)) + write)
        )
    return torch.stack(layers)[:, :, 0] - run.log_prob[0]


class CleanRun:
    """What one clean and one corrupt pass leave behind, up to the last scored position.

    Attributes:
        task: without what follows the last scored position.
        log_prob: of the right answers in the clean run, in nats, (batch, entry); ``score`` is its
            mean over entries.
        plain: whether the fast way reproduces the model.
    """

    def __init__(self, model: TransformerBridge, task: CleanCorrupt) -> None:
        self.model, self.graph, self.reach = model, of(model), int(task.at.max()) + 1
        clean, corrupt = task.clean[:, : self.reach], task.corrupt[:, : self.reach]
        self.task = replace(task, clean=clean, corrupt=corrupt)
        self.last = self.graph.layers - 1
        names = {get_act_name(p, layer) for p in PARTS for layer in range(self.graph.layers)}
        logits, self._cache = cached(model, clean, names)
        self._rows = torch.arange(len(clean), device=clean.device)[:, None]
        self.log_prob = task.log_prob(logits[self._rows, task.at])
        self.score = self.log_prob.mean(-1)
        place = torch.arange(self.reach, device=clean.device)
        self.seen = place <= task.at[..., None]  # (batch, entry, pos)
        self.causal = place <= place[:, None]
        self.plain = self._is_plain(names)

    def clean(self, part: str, layer: int) -> Tensor:
        """An activation of the clean run, (batch, pos, ...)."""
        return self._cache[get_act_name(part, layer)]

    @cached_property
    def _corrupt(self) -> ActivationCache:
        names = {output_hook(w) for w in self.graph.writers}
        return cached(self.model, self.task.corrupt, names)[1]

    def change(self, writer: Node) -> Float[Tensor, "batch pos d_model"]:
        """What a writer writes on the corrupt sequences minus what it writes on the clean ones."""
        corrupt = component_output(self.model, self._corrupt, writer)
        return corrupt - component_output(self.model, self._cache, writer)

    def entries(self, first: int) -> Bool[Tensor, "entry"]:
        """Which scored entries a change at position ``first`` or later can reach."""
        return (self.task.at >= first).any(0)

    def asked(
        self, layer: int, value: Float[Tensor, "*lead pos width"], first: int = 0
    ) -> Float[Tensor, "*lead asked width"]:
        """Those positions of a layer's output that are read: in the last layer the scored ones.

        ``value`` holds the positions from ``first`` on.
        """
        if layer < self.last:
            return value
        return value[..., self._rows, self.task.at[:, self.entries(first)] - first, :]

    def _is_plain(self, names: Iterable[str]) -> bool:
        """Whether each part, computed from its clean input, gives its clean output."""
        standard = self.model.cfg.positional_embedding_type == "standard"
        if self.graph.parallel or not standard or any(n not in self._cache for n in names):
            return False
        if self.clean("k", 0).shape != self.clean("q", 0).shape:
            return False
        for layer in range(self.graph.layers):
            start, middle, end = (self.clean(f"resid_{p}", layer) for p in ("pre", "mid", "post"))
            middle, end = (self.asked(layer, value)[None] for value in (middle, end))
            ours = self.asked(layer, start) + _attention(self, layer, start[None])
            for one, other in ((ours, middle), (middle + _mlp(self, layer, middle), end)):
                if not torch.allclose(one, other, CLOSE, CLOSE):
                    return False
        return torch.allclose(_readout(self, end)[0], self.log_prob, CLOSE, CLOSE)


def _lost(
    run: CleanRun, readers: Sequence[Node], groups: Sequence[Sequence[Node]]
) -> Float[Tensor, "patch batch"]:
    """Nats lost when all ``readers`` read each group of writers from the corrupt run."""
    held = max(1, ROWS // run.task.clean.numel())
    scores = []
    with torch.no_grad():
        for start in range(0, len(groups), held):
            part = groups[start : start + held]
            shift = torch.stack([torch.stack([*map(run.change, g)]).sum(0) for g in part])
            if run.plain:
                scores.append(_patched(run, readers, shift).mean(-1))
                continue
            with split_qkv_input(run.model):
                hooks = [add_to_inputs(run.model, dict.fromkeys(readers, one)) for one in shift]
                scores.append(_by_hooks(run, hooks).mean(-1))
    return run.score - torch.cat(scores)


def _by_hooks(run: CleanRun, hooks: Sequence[Sequence[Hook]]) -> LogProb:
    """log p of the right answers under each list of hooks, one forward pass for each."""
    return torch.stack(
        [run.task.log_prob(scored_logits(run.model, run.task, one)) for one in hooks]
    )


def _patched(
    run: CleanRun, readers: Sequence[Node], shift: Float[Tensor, "patch batch pos d_model"]
) -> LogProb:
    """What ``readers`` read is shifted: the logits, one head, one MLP or a whole block."""
    kinds, layer = {r.kind for r in readers}, readers[0].layer
    if kinds == {"logits"}:
        return _readout(run, run.asked(run.last, run.clean("resid_post", run.last) + shift))
    start = run.clean("resid_pre", layer)
    middle = run.asked(layer, run.clean("resid_mid", layer))
    passing = run.asked(layer, shift)
    if kinds == {"mlp_in"}:
        return _resume(run, layer + 1, middle + _mlp(run, layer, middle + passing))
    if "mlp_in" not in kinds:
        return _from_middle(run, layer, middle + _head_change(run, readers, shift))
    middle = run.asked(layer, start) + _attention(run, layer, start + shift)
    return _resume(run, layer + 1, middle + _mlp(run, layer, middle + passing))


def _head_change(
    run: CleanRun, readers: Sequence[Node], shift: Float[Tensor, "patch batch pos d_model"]
) -> Float[Tensor, "patch batch asked d_model"]:
    """What one head writes minus what it wrote, when some of its three inputs are shifted."""
    _, layer, head = readers[0]
    attn, shifted = run.model.blocks[layer].attn, {r.kind for r in readers}
    normal = _through(run.model.blocks[layer].ln1, run.clean("resid_pre", layer) + shift)
    inputs = {}
    for channel in CHANNELS:
        if channel in shifted:
            weight, bias = (getattr(attn, f"{p}_{channel.upper()}")[head] for p in "Wb")
            value = normal @ weight + bias
        else:
            value = run.clean(channel, layer)[:, :, head].expand(len(shift), -1, -1, -1)
        inputs[channel] = run.asked(layer, value) if channel == "q" else value
    mask = run.seen if layer == run.last else run.causal
    z = functional.scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], mask)
    return (z - run.asked(layer, run.clean("z", layer)[:, :, head])) @ attn.W_O[head]


def _resume(
    run: CleanRun,
    layer: int,
    resid: Float[Tensor, "patch batch asked d_model"],
    first: int = 0,
    reached: Bool[Tensor, "patch batch entry"] | None = None,
) -> LogProb:
    """Go on from the input of ``layer``, positions from ``first`` on, to log p of the answers.

    ``reached``: entries that can differ from the clean run; the others are not read.
    """
    for block in range(layer, run.graph.layers):
        middle = run.asked(block, resid, first) + _attention(run, block, resid, first)
        resid = middle + _mlp(run, block, middle)
    return _readout(run, resid, first, reached)


def _from_middle(
    run: CleanRun, layer: int, middle: Float[Tensor, "patch batch asked d_model"]
) -> LogProb:
    """Go on from the residual stream between a layer's attention and its MLP."""
    return _resume(run, layer + 1, middle + _mlp(run, layer, middle))


def _attention(
    run: CleanRun, layer: int, resid: Float[Tensor, "patch batch pos d_model"], first: int = 0
) -> Float[Tensor, "patch batch asked d_model"]:
    """What all heads of a layer write, biases included, where it is asked for."""
    attn, attend = run.model.blocks[layer].attn, functional.scaled_dot_product_attention
    normal = _through(run.model.blocks[layer].ln1, resid)

    def project(name: str, value: Tensor) -> Tensor:
        flat = _through(getattr(attn, name), value).flatten(0, 1)
        return flat.unflatten(-1, (run.graph.heads, -1)).transpose(1, 2)  # rows, head, pos, d_head

    def everywhere(name: str) -> Tensor:
        """Keys or values; positions before ``first`` lend those of the clean run."""
        lent = run.clean(name, layer)[:, :first].repeat(len(resid), 1, 1, 1).transpose(1, 2)
        return torch.cat([lent, project(name, normal)], 2) if first else project(name, normal)

    q = project("q", run.asked(layer, normal, first))
    if layer < run.last:
        mask = run.causal[first:] if first else None
        z = attend(q, everywhere("k"), everywhere("v"), mask, is_causal=not first)
    else:
        seen = run.seen[:, run.entries(first)].repeat(len(resid), 1, 1)[:, None]
        if first or q.shape[2] > FEW:
            z = attend(q, everywhere("k"), everywhere("v"), seen)
        else:  # a key's bias moves all scores alike
            flat = normal.flatten(0, 1)
            wanted = q @ attn.W_K.transpose(-1, -2) / q.shape[-1] ** 0.5  # rows, head, entry, d
            scores = (wanted.flatten(1, 2) @ flat.mT).unflatten(1, wanted.shape[1:3])
            pattern = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            gathered = (pattern.flatten(1, 2) @ flat).view_as(wanted)
            z = gathered @ attn.W_V + attn.b_V[:, None]
    return attn.o(z.transpose(1, 2).flatten(2)).unflatten(0, resid.shape[:2])


def _mlp(
    run: CleanRun, layer: int, middle: Float[Tensor, "patch batch asked d_model"]
) -> Float[Tensor, "patch batch asked d_model"]:
    """What the MLP of a layer writes."""
    block = run.model.blocks[layer]
    return _through(block.mlp, _through(block.ln2, middle))


def _readout(
    run: CleanRun,
    resid: Float[Tensor, "patch batch asked d_model"],
    first: int = 0,
    reached: Bool[Tensor, "patch batch entry"] | None = None,
) -> LogProb:
    """log p of the right answers, in nats, from the last residual stream at scored positions.

    With ``choices``, only their columns of the unembedding are multiplied.
    """
    task, model, kept = run.task, run.model, run.entries(first)
    normal, answer = _through(model.ln_final, resid), task.answer[:, kept]
    out = run.log_prob.repeat(len(resid), 1, 1)
    changed = kept.expand_as(out) if reached is None else reached
    pick = changed[..., kept]
    if task.choices is not None:
        columns, bias = model.W_U.T, model.b_U
        right = (normal * columns[answer]).sum(-1) + bias[answer]
        rest = normal @ columns[task.choices].mT + bias[task.choices][:, None]
        out[changed] = (right - rest.logsumexp(-1))[pick]
        return out
    found = []
    held = max(1, LOGITS // model.cfg.d_vocab)
    parts = zip(normal[pick].split(held), answer.expand(pick.shape)[pick].split(held), strict=True)
    for rows, target in parts:
        logits = model.unembed(rows[None])[0]
        found.append(logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1))
    out[changed] = torch.cat(found)
    return out


def _through(module: nn.Module, value: Float[Tensor, "patch batch any width"]) -> Tensor:
    """A module of the model, which takes one batch axis, on two."""
    return module(value.flatten(0, 1)).unflatten(0, value.shape[:2])


def _one_sequence(model: TransformerBridge, tokens: Tensor, scored: Tensor) -> CleanRun:
    inside = bool(((scored >= 0) & (scored + 1 < tokens.shape[1])).all())
    if len(tokens) != 1 or not inside:
        raise IclError("Need one sequence, and entries that predict one of its tokens.")
    return CleanRun(model, CleanCorrupt(tokens, tokens, scored[None], tokens[:, scored + 1]))


def _add_at(name: str, position: int, change: Float[Tensor, "d_model"]) -> Hook:
    def add(value: Tensor, hook: object) -> Tensor:
        value = value.clone()
        value[:, position] += change
        return value

    return name, add


def _fill_head(layer: int, head: int, fill: Float[Tensor, "any"]) -> Hook:
    def replace_z(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, head] = fill
        return z

    return get_act_name("z", layer), replace_z
