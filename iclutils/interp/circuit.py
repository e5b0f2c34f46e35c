"""A circuit: a few edges that are kept, and what the model still does with them alone.

Every edge outside a circuit carries what its writer writes on the corrupt sequence, every edge
inside what the run itself brings, all at once. With no edge at all the run is the corrupt one,
with all of them the clean one; where between the two a circuit lies is how *faithful* it is. It
is *complete* if without it nothing is left, and *minimal* if each of its edges is needed.

Sources: Wang et al. 2022, sections 3 and 4 (the three words, on nodes); Goldowsky-Dill et al.
2023 and Conmy et al. 2023 (on edges).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import circuit, clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task = clean_corrupt.copying(net, 6, 5, generator)
    >>> clean, corrupt = clean_corrupt.baselines(net, task)
    >>> edges = graph.of(net)
    >>> ranking = circuit.rank_edges(edges.exists.double(), edges)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from ..errors import IclError
from ..models import TransformerBridge
from ..progress import bar
from .clean_corrupt import CleanCorrupt, scored_logits, share
from .graph import (
    CHANNELS,
    Edge,
    Graph,
    Node,
    component_outputs,
    input_hook,
    of,
    output_hook,
    split_qkv_input,
)
from .hooks import Hook

ROWS = 16_384  # rows of d_model held at once: (circuit, sequence, writer, position)
EdgeMask = Bool[Tensor, "writer reader"]


def scores(
    model: TransformerBridge,
    task: CleanCorrupt,
    kept: Bool[Tensor, "circuit from_writer to_reader"],
) -> Float[Tensor, "circuit batch"]:
    """Score of each circuit, in nats: all edges outside it carry the corrupt output at once.

    What the kept edges carry is computed anew, so a circuit has only what its own edges bring.
    Circuits and sequences share the batch of a pass.

    Example:
        >>> both = torch.stack([edges.exists, torch.zeros_like(edges.exists)])
        >>> found = circuit.scores(net, task, both)
        >>> torch.allclose(found, torch.stack([clean, corrupt]), atol=1e-3)
        True
    """
    graph = of(model)
    if kept.shape[1:] != graph.exists.shape or bool((kept.cpu() & ~graph.exists).any()):
        raise IclError(
            "A circuit is a mask of the edges that exist, writers by readers, here "
            f"{tuple(graph.exists.shape)}; got {tuple(kept.shape[1:])}. Was it made for another "
            "model?"
        )
    cut = (graph.exists & ~kept.cpu()).to(task.clean.device)
    together = max(1, ROWS // (len(graph.writers) * task.clean.shape[1]))
    sequences = torch.arange(len(task)).split(together)
    circuits = torch.arange(len(kept)).split(max(1, together // len(sequences[0])))
    out = torch.empty(len(kept), len(task), device=task.clean.device)
    count = len(sequences) * len(circuits)
    with split_qkv_input(model), bar(what="circuits", total=count) as shown:
        for rows in sequences:
            part = task[rows]
            found = component_outputs(model, part.corrupt, graph.writers)
            corrupt = torch.stack([found[u] for u in graph.writers], 1)
            for some in circuits:
                hooks = list(_hooks(model, graph, cut[some], corrupt))
                copies = part[torch.arange(len(part)).repeat(len(some))]
                found_score = copies.score(scored_logits(model, copies, hooks))
                out[some[:, None], rows] = found_score.view(len(some), len(part))
                shown.update()
    return out


def _hooks(
    model: TransformerBridge,
    graph: Graph,
    cut: Bool[Tensor, "circuit writer reader"],
    corrupt: Float[Tensor, "batch writer pos d_model"],
) -> Iterator[Hook]:
    """Hooks that run all circuits on all sequences in one pass; inside ``split_qkv_input``."""
    moved = corrupt.repeat(len(cut), 1, 1, 1)  # less what the run itself writes, once it does
    mask = cut.repeat_interleave(len(corrupt), 0).to(moved.dtype)

    def watch(first: Node, start: int) -> Hook:
        def subtract(value: Tensor, hook: object) -> Tensor:
            if first.kind == "head":
                live = einsum(value, model.W_O[first.layer], "r p h k, h k d -> r h p d")
            else:
                live = value[:, None]
            moved[:, start : start + live.shape[1]] -= live
            return value

        return output_hook(first), subtract

    def replace(first: Node, columns: slice, before: int) -> Hook:
        def add(value: Tensor, hook: object) -> Tensor:
            change = einsum(
                mask[:, :before, columns], moved[:, :before], "r u v, r u p d -> r p v d"
            )
            return value + (change if first.kind in CHANNELS else change[:, :, 0])

        return input_hook(model, first), add

    for start, writer in enumerate(graph.writers):
        if writer.kind != "head" or writer.head == 0:  # the heads of a layer share a hook
            yield watch(writer, start)
    for start, reader in enumerate(graph.readers):
        columns = slice(start, start + (graph.heads if reader.kind in CHANNELS else 1))
        if reader.head <= 0 and bool(cut[:, :, columns].any()):
            before = int(graph.exists[:, start].sum())  # who feeds it comes first in the order
            yield replace(reader, columns, before)


def faithfulness(
    scores: Float[Tensor, "*circuit batch"],
    clean: Float[Tensor, "batch"],
    corrupt: Float[Tensor, "batch"],
) -> Float[Tensor, "*circuit"]:
    """Share of the gap that a circuit keeps, mean over mean: 0 as the corrupt run, 1 as the clean.

    May leave [0, 1].

    Example:
        >>> circuit.faithfulness(torch.stack([corrupt, clean]), clean, corrupt)
        tensor([0., 1.])
    """
    return share(scores - corrupt, clean, corrupt)


def rank_edges(values: Float[Tensor, "writer reader"], graph: Graph) -> list[Edge]:
    """All edges by |value|, largest first; equal ones in the order of the graph.

    Example:
        >>> len(ranking) == int(edges.exists.sum())
        True
    """
    order = values.cpu()[graph.exists].abs().sort(descending=True, stable=True).indices
    edges = graph.edges()
    return [edges[i] for i in order.tolist()]


def curve(
    model: TransformerBridge, task: CleanCorrupt, ranking: Sequence[Edge], sizes: Sequence[int]
) -> Float[Tensor, "size batch"]:
    """Score of the circuits of the best 0, 1, ... edges of a ranking, in nats.

    Example:
        >>> found = circuit.curve(net, task, ranking, [0, len(ranking)])
        >>> torch.allclose(found[0], corrupt, atol=1e-3)
        True
    """
    graph = of(model)
    return scores(model, task, torch.stack([graph.mask(ranking[:size]) for size in sizes]))


def smallest_size(
    sizes: Sequence[int], share: Float[Tensor, "size"], bar: float = 0.9
) -> int | None:
    """The first size from which on a curve stays at or above ``bar``; None if it never does.

    ``sizes`` increase. What comes up and sinks again does not count.

    Example:
        >>> circuit.smallest_size([1, 2, 4], torch.tensor([0.95, 0.5, 0.93]))
        4
    """
    found = None
    for size, value in zip(reversed(sizes), reversed(share.tolist()), strict=True):
        if not value >= bar:
            break
        found = size
    return found


def completeness(
    model: TransformerBridge, task: CleanCorrupt, kept: EdgeMask
) -> Float[Tensor, "batch"]:
    """Score of all edges but the circuit's, in nats: near the corrupt score if it is complete.

    Example:
        >>> without_all = circuit.completeness(net, task, edges.exists)
        >>> torch.allclose(without_all, corrupt, atol=1e-3)
        True
    """
    return scores(model, task, (of(model).exists & ~kept.cpu())[None])[0]


def minimality(
    model: TransformerBridge, task: CleanCorrupt, kept: EdgeMask
) -> Float[Tensor, "edge batch"]:
    """Nats that a circuit loses with each of its edges, in the order of the graph.

    Positive: the edge is needed.

    Example:
        >>> len(circuit.minimality(net, task, edges.mask(ranking[:2])))
        2
    """
    places = kept.cpu().nonzero()
    if not len(places):
        raise IclError("A circuit of size zero has no edge that could be needed: give it one.")
    without = kept.cpu().repeat(len(places) + 1, 1, 1)
    without[torch.arange(len(places)), places[:, 0], places[:, 1]] = False
    found = scores(model, task, without)
    return found[-1] - found[:-1]


def random_circuits(
    exists: EdgeMask, size: int, count: int, generator: Generator
) -> Bool[Tensor, "circuit writer reader"]:
    """``count`` circuits of ``size`` edges, each drawn without replacement: the control.

    Example:
        >>> circuit.random_circuits(edges.exists, 3, 2, generator).sum((1, 2))
        tensor([3, 3])
    """
    places = exists.cpu().nonzero()
    if not 0 <= size <= len(places):
        raise IclError(f"The model has {len(places)} edges; cannot draw a circuit of {size}.")
    out = torch.zeros(count, *exists.shape, dtype=torch.bool)
    for row in out:
        drawn = places[torch.randperm(len(places), generator=generator)[:size]]
        row[drawn[:, 0], drawn[:, 1]] = True
    return out


def induction_edges(
    graph: Graph, previous: Sequence[Node], induction: Sequence[Node]
) -> list[Edge]:
    """The textbook's circuit of previous-token and induction heads (Elhage et al. 2021).

    The embedding tells the first where they are and what they copy, they tell the keys of the
    second which token came before, these ask for the current token and copy what they find to
    the logits, where the embedding goes straight as well.

    Example:
        >>> pair = circuit.induction_edges(edges, [graph.head(0, 1)], [graph.head(1, 2)])
        >>> len(pair) > 3
        True
    """
    embed, logits = Node("embed"), Node("logits")
    between = [
        (u, Node("k", v.layer, v.head)) for u in previous for v in induction if u.layer < v.layer
    ]
    if not between:
        raise IclError("A pair needs a previous-token head in a layer before an induction head.")
    into = [(embed, Node(c, u.layer, u.head)) for u in previous for c in CHANNELS]
    into += [(embed, Node(c, v.layer, v.head)) for v in induction for c in "qv"]
    edges = [*into, *between, *((v, logits) for v in induction), (embed, logits)]
    graph.mask(edges)  # all of them exist
    return edges


def above_threshold(
    effects: Float[Tensor, "writer reader batch"], exists: EdgeMask, threshold: float
) -> EdgeMask:
    """The edges whose mean effect, of either sign, is above a threshold."""
    return exists & (effects.mean(-1).abs() > threshold).to(exists.device)
