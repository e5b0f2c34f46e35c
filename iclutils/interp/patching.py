"""Patching: what a model loses when a part of it carries what it does on other sequences.

Every measure here returns nats *lost*: the score of the clean run less that of the patched one,
positive where the patch hurts. ``path_patching`` patches one edge of the graph, ``ablate`` whole
heads and MLP layers.

A patch leaves what comes before it as it was: ``CleanRun`` keeps one clean pass, from whose layers
many patched copies of it go on together, under hooks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import IclError
from ..models import TransformerBridge, check_tokens, get_act_name
from ..progress import bar
from .clean_corrupt import CleanCorrupt
from .graph import (
    Edge,
    Node,
    add_to_inputs,
    change_of_writes,
    model_graph,
    output_hook,
    shift_inputs,
)
from .hooks import (
    Head,
    Hook,
    How,
    activations,
    at_positions,
    replacements,
    run_from,
    run_with_hooks,
)

ROWS = 4096  # rows of d_model (patch x batch x pos) held at once; more leave the cache
LOGITS = 2**25  # logits held at once: 128 MB

Scores = Float[Tensor, "patch batch entry"]  # the task's, in nats
Copies = Float[Tensor, "row pos d_model"]  # rows: patch x batch
Patch = TypeVar("Patch")


def ablate(
    model: TransformerBridge,
    task: CleanCorrupt,
    sets: Sequence[Iterable[Node]],
    how: How = "resample",
    frozen: Collection[str] = (),
) -> Float[Tensor, "set batch"]:
    """Measure the nats lost without each set of heads and MLP layers: they become what they are on
    the corrupt sequence (``"resample"``), their mean over the batch and its positions (``"mean"``),
    or nothing (``"zero"``). For edges, see ``path_patching``.

    ``frozen``: hooks that keep their clean values. With the scales of all norms, no norm makes up
    for what is gone (Rushing and Nanda 2024)."""
    groups, run = [list(nodes) for nodes in sets], CleanRun(model, task)
    nodes = {node for group in groups for node in group}
    if not nodes <= {node for node in run.graph.writers if node.kind != "embed"}:
        raise IclError("Only heads and MLP layers of the model can be removed.")
    values = replacements(model, task.clean, {*map(output_hook, nodes)}, how, task.corrupt)
    values = {n: v[:, : run.reach] if v.ndim else v for n, v in values.items()}
    kept = run_with_hooks(model, run.task.clean, [], frozen)[1] if frozen else {}
    hold = [(n, partial(_copied, of=kept[n])) for n in frozen]
    lost = []
    with bar(what="sets", total=len(groups)) as progress:
        for first, some in groupby(groups, lambda group: min((n.layer for n in group), default=-1)):
            for part in run.batches(list(some)):
                hooks = _replaced(part, values, len(task), run.graph.heads) + hold
                lost.append(run.score - run.scores(max(first, 0), len(part), hooks).mean(-1))
                progress.update(len(part))
    return torch.cat(lost)


def _copied(value: Tensor, hook: object, of: Tensor) -> Tensor:
    """Return the value of the batch for each of its copies."""
    return of.repeat(len(value) // len(of), *[1] * (of.ndim - 1))


def _replaced(
    groups: Sequence[Sequence[Node]], values: Mapping[str, Tensor], batch: int, heads: int
) -> list[Hook]:
    """Make hooks that replace each group of nodes in its own copy of the batch."""
    masks: dict[str, Tensor] = {}
    for row, node in ((row, node) for row, group in enumerate(groups) for node in group):
        shape = (len(groups), 1, 1, heads, 1) if node.kind == "head" else (len(groups), 1, 1, 1)
        mask = masks.setdefault(output_hook(node), torch.zeros(shape, dtype=torch.bool))
        mask[(row, 0, 0, node.head) if node.kind == "head" else row] = True

    def replace_with(name: str, mask: Tensor) -> Hook:
        def put(value: Tensor, hook: object) -> Tensor:
            copies = value.unflatten(0, (-1, batch))  # (patch, batch, pos, ...)
            return torch.where(mask.to(value.device), values[name], copies).flatten(0, 1)

        return name, put

    return [replace_with(*item) for item in masks.items()]


def key_patterns(
    model: TransformerBridge,
    clean: Int[Tensor, "batch pos"],
    corrupt: Int[Tensor, "batch pos"],
    groups: Sequence[Sequence[Head]],
    target: Head,
) -> Float[Tensor, "group batch dest src"]:
    """Return the pattern of ``target`` on the clean sequences when its keys alone read what a group
    of earlier heads writes on the corrupt ones, for each group: K-composition and nothing else."""
    (layer, head), nodes = target, [[Node("head", *one) for one in group] for group in groups]
    every, keys = {node for group in nodes for node in group}, Node("k", *target)
    model_graph(model).mask((node, keys) for node in every)  # all of these edges exist
    start, name = get_act_name("resid_pre", layer), get_act_name("pattern", layer)
    names = [start, *map(output_hook, every)]
    own, other = (activations(model, side, names) for side in (clean, corrupt))
    none, patterns = torch.zeros_like(own[start]), []
    size = max(1, ROWS // clean.numel())
    for some in (nodes[i : i + size] for i in range(0, len(nodes), size)):
        shift = torch.cat([change_of_writes(model, own, other, x) if x else none for x in some])
        hooks = shift_inputs(model, Node("k", layer), [head], lambda: shift[:, :, None])  # noqa: B023
        tokens, stream = clean.repeat(len(some), 1), own[start].repeat(len(some), 1, 1)
        _, seen = run_from(model, layer, tokens, stream, hooks, [name], layer + 1)
        patterns.append(seen[name][:, head].unflatten(0, (len(some), -1)))
    return torch.cat(patterns)


def path_patching(
    model: TransformerBridge, task: CleanCorrupt, edges: Sequence[Edge] | None = None
) -> Float[Tensor, "writer reader batch"]:
    """Measure the nats lost when each edge alone is patched (Wang et al. 2022, section 3;
    Goldowsky-Dill et al. 2023); 0 where there is none, or it is not among ``edges``. Faster, and
    estimated: ``attribution.edge_attribution``.

    The edge from a head to a reader: the head's ``z`` is patched, and the change that this makes in
    what the heads of its layer write together (behind a norm, where the model has one there)
    reaches this reader alone.

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
        >>> lost[graph.model_graph(net).index(edge)].shape  # nats, by sequence
        torch.Size([2])
    """
    run = CleanRun(model, task)
    graph = run.graph
    wanted = graph.exists if edges is None else graph.mask(edges)
    out = run.score.new_zeros(*wanted.shape, len(task))
    columns = wanted.any(0).nonzero()[:, 0].tolist()
    for column in bar(columns, "edges"):
        rows = wanted[:, column].nonzero()[:, 0]
        reader = graph.readers[column]

        def hooks(shift: Copies, reader: Node = reader) -> list[Hook]:
            return add_to_inputs(model, {reader: shift})

        groups = [[graph.writers[u]] for u in rows.tolist()]
        layer = reader.layer if reader.layer >= 0 else graph.layers
        out[rows.to(out.device), column] = run.lost(layer, groups, hooks)
    return out


def layer_flow(
    model: TransformerBridge, task: CleanCorrupt
) -> Float[Tensor, "source target batch"]:
    """Measure the nats lost when what one layer writes reaches one later block alone corrupt.
    Source 0 is the embedding, l + 1 all that layer l writes; target l is all that block l reads,
    the last one the logits. The stream that passes the block stays clean."""
    run = CleanRun(model, task)
    graph, layers = run.graph, run.graph.layers
    sources = [[w for w in graph.writers if w.layer == at] for at in range(-1, layers)]
    out = run.score.new_zeros(layers + 1, layers + 1, len(task))
    for target in range(layers + 1):

        def hooks(shift: Copies, target: int = target) -> list[Hook]:
            if target == layers:
                return add_to_inputs(model, {Node("logits"): shift})
            start, end = (get_act_name(f"resid_{at}", target) for at in ("pre", "post"))
            return [
                (start, lambda value, hook: value + shift),
                (end, lambda value, hook: value - shift),
            ]

        below = sources[: target + 1]
        out[: target + 1, target] = run.lost(target, below, hooks)
    return out


def mlp_position_sweep(
    model: TransformerBridge,
    tokens: Int[Tensor, "one pos"],
    positions: Int[Tensor, "position"],
    sources: Int[Tensor, "position"],
    scored: Int[Tensor, "entry"],
) -> Float[Tensor, "layer position entry"]:
    """Measure the nats of log p lost when an MLP's output at a position becomes its source's, for
    every layer and each position alone, in one sequence. ``scored``: increasing entries (entry i
    predicts token i + 1). Xiang 2024 patches L .. 2L-1 from L before them."""
    places = torch.cat([positions, sources, scored + 1])
    inside = bool(((places >= 0) & (places < tokens.shape[1])).all()) and int(scored.min()) >= 0
    if len(tokens) != 1 or len(positions) != len(sources) or not inside:
        raise IclError(
            "Need one sequence, one source per position, both inside it, and entries that predict "
            "one of its tokens."
        )
    run = CleanRun(model, CleanCorrupt(tokens, tokens, scored[None], tokens[:, scored + 1]))
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    cache = activations(model, tokens, names)  # a source may lie after the last scored entry
    out = run.by_entry[0].expand(len(names), len(positions), -1).clone()
    reached = (positions < run.reach).nonzero()[:, 0].tolist()  # no later one is read
    for layer, name in enumerate(bar(names, "layers") if reached else ()):
        for part in run.batches(reached):
            swapped = cache[name][:, : run.reach].repeat(len(part), 1, 1)
            swapped[torch.arange(len(part)), positions[part]] = cache[name][0, sources[part]]
            put: Hook = name, lambda value, hook: swapped  # noqa: B023
            out[layer, part] = run.scores(layer, len(part), [put])[:, 0]
    return run.by_entry[0] - out


class CleanRun:
    """What one clean and one corrupt pass leave behind, up to the last scored position.
    ``by_entry``: score of every clean entry in nats, (batch, entry); ``score``: their mean."""

    def __init__(self, model: TransformerBridge, task: CleanCorrupt) -> None:
        check_tokens(model, task.clean)  # as a whole, before it is cut
        self.model, self.graph, self.reach = model, model_graph(model), int(task.at.max()) + 1
        clean, corrupt = task.clean[:, : self.reach], task.corrupt[:, : self.reach]
        self.task = replace(task, clean=clean, corrupt=corrupt)
        self._reads = [get_act_name("resid_pre", layer) for layer in range(self.graph.layers)]
        self._reads.append(get_act_name("resid_post", self.graph.layers - 1))
        names = {*self._reads} | {output_hook(w) for w in self.graph.writers}
        logits, self.cache = run_with_hooks(model, clean, [at_positions(task.at)], names)
        self.by_entry = task.by_entry(logits)
        self.score = self.by_entry.mean(-1)

    def batches(self, groups: Sequence[Patch]) -> Iterator[Sequence[Patch]]:
        """Yield as many patches at a time as ``ROWS`` and ``LOGITS`` allow."""
        logits = self.task.at.numel() * self.model.cfg.d_vocab
        size = max(1, min(ROWS // self.task.clean.numel(), LOGITS // logits))
        return (groups[start : start + size] for start in range(0, len(groups), size))

    @cached_property
    def _corrupt(self) -> Mapping[str, Tensor]:
        return activations(self.model, self.task.corrupt, {*map(output_hook, self.graph.writers)})

    def changes(self, groups: Sequence[Sequence[Node]]) -> Copies:
        """Return by how much the stream changes when each group of writers is corrupt."""
        none = torch.zeros_like(self.cache[get_act_name("resid_pre", 0)])
        each = (
            change_of_writes(self.model, self.cache, self._corrupt, group) if group else none
            for group in groups
        )
        return torch.cat([*each])

    def scores(self, layer: int, copies: int, hooks: Sequence[Hook]) -> Scores:
        """Score every entry in copies of the batch that go on, under hooks, from the clean input of
        a layer."""
        tokens, start = self.task.clean.repeat(copies, 1), self.cache[self._reads[layer]]
        at = at_positions(self.task.at.repeat(copies, 1))
        start = start.repeat(copies, 1, 1)
        logits, _ = run_from(self.model, layer, tokens, start, [*hooks, at])
        return self.task.by_entry(logits.unflatten(0, (copies, -1)))

    def lost(
        self, layer: int, groups: Sequence[Sequence[Node]], hooks: Callable[[Copies], list[Hook]]
    ) -> Float[Tensor, "patch batch"]:
        """Measure the nats lost when some reader of a layer reads each group of writers from the
        corrupt run; ``hooks`` makes it read a change."""
        scores = [
            self.scores(layer, len(part), hooks(self.changes(part))).mean(-1)
            for part in self.batches(groups)
        ]
        return self.score - torch.cat(scores)
