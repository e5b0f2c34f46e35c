"""A circuit: a few edges, and what the model still does with them alone.

*Faithful*: it scores as the clean run does, though all other edges carry corrupt output (Wang et
al. 2022, section 4; on edges Goldowsky-Dill 2023, Conmy 2023).
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from ..models import TransformerBridge
from ..progress import bar
from .clean_corrupt import CleanCorrupt, scored_logits, share
from .graph import CHANNELS, Edge, Graph, Node, model_graph, output_hook, shift_inputs
from .hooks import Hook, activations
from .invariants import blocks

ROWS = 16_384  # rows of d_model held at once: (circuit, sequence, writer, position)


def scores(
    model: TransformerBridge,
    task: CleanCorrupt,
    circuits: Bool[Tensor, "circuit from_writer to_reader"],
) -> Float[Tensor, "circuit batch"]:
    """Score each circuit, in nats: all edges outside it carry the corrupt output at once, and what
    the edges in it carry is computed anew."""
    graph = model_graph(model)
    cut = (graph.exists & ~circuits.cpu()).to(task.clean.device)
    together = max(1, ROWS // (len(graph.writers) * task.clean.shape[1]))
    sequences = torch.arange(len(task)).split(together)
    parts = torch.arange(len(circuits)).split(max(1, together // len(sequences[0])))
    out = torch.empty(len(circuits), len(task), device=task.clean.device)
    count = len(sequences) * len(parts)
    with bar(what="circuits", total=count) as progress:
        for rows in sequences:
            part = task[rows]
            cache = activations(model, part.corrupt, {*map(output_hook, graph.writers)})
            writes = [_writes(model, u, cache[output_hook(u)]) for u in _by_hook(graph)]
            corrupt = torch.cat(writes, 1)  # (batch, writer, pos, d_model)
            for some in parts:
                hooks = list(_hooks(model, graph, cut[some], corrupt))
                copies = part[torch.arange(len(part)).repeat(len(some))]
                score = copies.score(scored_logits(model, copies, hooks))
                out[some[:, None], rows] = score.view(len(some), len(part))
                progress.update()
    return out


def _by_hook(graph: Graph) -> list[Node]:
    """List the writers, of the heads of a layer the first: they share a hook."""
    return [u for u in graph.writers if u.kind != "head" or u.head == 0]


def _writes(
    model: TransformerBridge, first: Node, value: Tensor
) -> Float[Tensor, "batch some_writer pos d_model"]:
    """Return what the writers of one hook write; a factor is applied, a norm is not."""
    if first.kind != "head":
        return value[:, None]
    block = blocks(model)[first.layer]
    out = einsum(value, block.out, "r p h k, h k d -> r h p d")
    return out if block.normed else block.after(out)


def _hooks(
    model: TransformerBridge,
    graph: Graph,
    cut: Bool[Tensor, "circuit writer reader"],
    corrupt: Float[Tensor, "batch writer pos d_model"],
) -> Iterator[Hook]:
    """Make hooks that run all circuits on all sequences in one pass."""
    moved = corrupt.repeat(len(cut), 1, 1, 1)  # less what the run itself writes, once it does
    mask = cut.repeat_interleave(len(corrupt), 0).to(moved.dtype).mT.contiguous()
    whole: dict[int, Tensor] = {}  # what the three channels of a layer's heads are to read, at once
    normed = {la: block for la, block in enumerate(blocks(model)) if block.normed}
    handed: dict[int, Tensor] = {}  # z of the heads of a layer, before its norm

    def watch(first: Node, start: int) -> Hook:
        def subtract(value: Tensor, hook: object) -> Tensor:
            live = _writes(model, first, value)
            moved[:, start : start + live.shape[1]] -= live
            if first.kind == "head" and first.layer in normed:
                handed[first.layer] = value[:, None]
            return value

        return output_hook(first), subtract

    def change(start: int, count: int, before: int) -> Float[Tensor, "batch reader pos d_model"]:
        readers = slice(start, start + count)
        some = mask[:, readers, :before] @ moved[:, :before].flatten(2)  # (row, reader, pos * d)
        some = some.unflatten(2, moved.shape[2:])
        for layer, block in normed.items():
            first = graph.writers.index(Node("head", layer, 0))
            if first >= before:
                break
            of_heads = slice(first, first + graph.heads)
            part = mask[:, readers, of_heads] @ moved[:, of_heads].flatten(2)
            part = part.unflatten(2, moved.shape[2:])
            some = some - part + block.change(handed[layer], part)
        return some

    def replace(group: Sequence[Node], start: int, before: int) -> list[Hook]:
        first, count = group[0], len(group)
        channel = CHANNELS.index(first.kind) if first.kind in CHANNELS else None

        def shift() -> Tensor:
            if channel is None:
                return change(start, 1, before)[:, 0]
            if first.layer not in whole:
                whole.clear()
                begin = start - channel * count
                whole[first.layer] = change(begin, 3 * count, before).transpose(1, 2)
            return whole[first.layer].chunk(3, 2)[channel]

        return shift_inputs(model, first, range(count), shift)

    start = 0
    for first in _by_hook(graph):
        yield watch(first, start)
        start += graph.heads if first.kind == "head" else 1
    start = 0
    for group in graph.reader_groups:
        end = start + len(group)
        if bool(cut[:, :, start:end].any()):
            before = int(graph.exists[:, start].sum())  # who feeds it comes first in the order
            yield from replace(group, start, before)
        start = end


def faithfulness(
    scores: Float[Tensor, "*circuit batch"],
    clean: Float[Tensor, "batch"],
    corrupt: Float[Tensor, "batch"],
) -> Float[Tensor, "*circuit"]:
    """Return the share of the gap that a circuit keeps: 0 as corrupt, 1 as clean."""
    return share(scores - corrupt, clean, corrupt)


def rank_edges(values: Float[Tensor, "writer reader"], graph: Graph) -> list[Edge]:
    """Order all edges by |value|, largest first; equal ones in the order of the graph."""
    order = values.cpu()[graph.exists].abs().sort(descending=True, stable=True).indices
    edges = graph.edges()
    return [edges[i] for i in order.tolist()]


def curve(
    model: TransformerBridge, task: CleanCorrupt, ranking: Sequence[Edge], sizes: Sequence[int]
) -> Float[Tensor, "size batch"]:
    """Score the circuits of the best ``sizes`` edges of a ranking, in nats."""
    graph = model_graph(model)
    return scores(model, task, torch.stack([graph.mask(ranking[:size]) for size in sizes]))


def smallest_size(
    sizes: Sequence[int], share: Float[Tensor, "size"], bar: float = 0.9
) -> int | None:
    """Return the first size from which on a curve stays at or above ``bar``, if it does."""
    curve = zip(reversed(sizes), reversed(share.tolist()), strict=True)
    above = [size for size, _ in takewhile(lambda point: point[1] >= bar, curve)]
    return above[-1] if above else None


def random_circuits(
    graph: Graph, like: Bool[Tensor, "writer reader"], count: int, generator: Generator
) -> Bool[Tensor, "circuit writer reader"]:
    """Draw ``count`` circuits with as many edges between the same layers as ``like``: a control."""
    layer = [torch.tensor([node.layer for node in side]) for side in (graph.writers, graph.readers)]
    layer[1][-1] = graph.layers  # the logits
    block = (layer[0][:, None] + 1) * (graph.layers + 1) + layer[1]
    out = torch.zeros(count, *graph.exists.shape, dtype=torch.bool)
    for which in block[like.cpu()].unique():
        places = (graph.exists & (block == which)).nonzero()
        size = int(like.cpu()[block == which].sum())
        for row in out:
            drawn = places[torch.randperm(len(places), generator=generator)[:size]]
            row[drawn[:, 0], drawn[:, 1]] = True
    return out
