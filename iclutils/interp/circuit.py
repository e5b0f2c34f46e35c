"""A circuit: a few wires that are kept, and what the model still does with them alone.

Every wire outside a circuit carries what its writer writes on the corrupt sequence, every wire
inside what the run itself brings, all at once. With no wire at all the run is the corrupt one,
with all of them the clean one; where between the two a circuit lies is how *faithful* it is. It
is *complete* if without it nothing is left, and *minimal* if each of its wires is needed.

Sources: Wang et al. 2022, sections 3 and 4 (the three words, on nodes); Goldowsky-Dill et al.
2023 and Conmy et al. 2023 (on wires).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import circuit, clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task = clean_corrupt.copying(net, 6, 5, generator)
    >>> clean, corrupt = clean_corrupt.baselines(net, task)
    >>> wires = graph.of(net)
    >>> everything = wires.exists
    >>> ranking = circuit.rank_edges(everything.double(), wires)
"""

from __future__ import annotations

from collections.abc import Sequence

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
from .statistics import step_down_threshold

ROWS = 16_384  # rows of d_model held at once: (circuit, sequence, writer, position)
Wires = Bool[Tensor, "writer reader"]


def scores(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    kept: Bool[Tensor, "circuit from_writer to_reader"],
) -> Float[Tensor, "circuit batch"]:
    """Score of each circuit, in nats: all wires outside it carry the corrupt write at once.

    What the kept wires carry is computed anew, so a circuit has only what its own wires bring.
    Circuits and sequences share the batch of a pass.

    Example:
        >>> scores = circuit.scores(net, task, torch.stack([everything, ~everything & everything]))
        >>> torch.allclose(scores, torch.stack([clean, corrupt]), atol=1e-3)
        True
    """
    graph = of(model)
    _check(kept, graph.exists)
    cut = (graph.exists & ~kept.cpu()).to(behaviour.clean.device)
    together = max(1, ROWS // (len(graph.writers) * behaviour.clean.shape[1]))
    sequences = torch.arange(len(behaviour)).split(together)
    circuits = torch.arange(len(kept)).split(max(1, together // len(sequences[0])))
    out = torch.empty(len(kept), len(behaviour), device=behaviour.clean.device)
    count = len(sequences) * len(circuits)
    with split_qkv_input(model), bar(what="circuits", total=count) as shown:
        for rows in sequences:
            part = behaviour[rows]
            found = component_outputs(model, part.corrupt, graph.writers)
            corrupt = torch.stack([found[u] for u in graph.writers], 1)
            for some in circuits:
                out[some[:, None], rows] = _pass(model, part, graph, cut[some], corrupt)
                shown.update()
    return out


def _check(kept: Tensor, exists: Tensor) -> None:
    if kept.shape[1:] != exists.shape:
        raise IclError(
            f"A circuit of this model has the shape {tuple(exists.shape)}, writers by readers; "
            f"got {tuple(kept.shape[1:])}. Was it made for another model?"
        )
    if not len(kept):
        raise IclError("There is no circuit to run: give at least one.")
    if bool((kept.cpu() & ~exists).any()):
        raise IclError("A circuit holds a wire that does not exist: take wires of Graph.exists.")


def _pass(
    model: TransformerBridge,
    part: CleanCorrupt,
    graph: Graph,
    cut: Bool[Tensor, "circuit writer reader"],
    corrupt: Float[Tensor, "batch writer pos d_model"],
) -> Float[Tensor, "circuit batch"]:
    """All circuits on all sequences in one forward pass; run in ``forked``."""
    rows = torch.arange(len(part), device=cut.device).repeat(len(cut))
    moved = corrupt[rows]  # less what the run itself writes, as soon as it does
    mask = cut.repeat_interleave(len(part), 0).to(moved.dtype)
    w_o = model.W_O
    hooks: list[Hook] = []

    def watch(first: Node, start: int) -> Hook:
        def subtract(value: Tensor, hook: object) -> Tensor:
            if first.kind == "head":
                live = einsum(value, w_o[first.layer], "r p h k, h k d -> r h p d")
            else:
                live = value[:, None]
            moved[:, start : start + live.shape[1]] -= live
            return value

        return output_hook(first), subtract

    def replace(first: Node, columns: slice, before: int) -> Hook:
        def add(value: Tensor, hook: object) -> Tensor:
            weights, writes = mask[:, :before, columns], moved[:, :before]
            change = einsum(weights, writes, "r u v, r u p d -> r v p d")
            return value + (change.transpose(1, 2) if first.kind in CHANNELS else change[:, 0])

        return input_hook(model, first), add

    for start, writer in enumerate(graph.writers):
        if writer.kind != "head" or writer.head == 0:  # the heads of a layer share a hook
            hooks.append(watch(writer, start))
    for start, reader in enumerate(graph.readers):
        columns = slice(start, start + (graph.heads if reader.kind in CHANNELS else 1))
        if reader.head <= 0 and bool(cut[:, :, columns].any()):
            before = int(graph.exists[:, start].sum())  # who feeds it comes first in the order
            hooks.append(replace(reader, columns, before))
    return part.score(scored_logits(model, part[rows], hooks).unflatten(0, (len(cut), len(part))))


def faithfulness(
    scores: Float[Tensor, "*circuit batch"],
    clean: Float[Tensor, "batch"],
    corrupt: Float[Tensor, "batch"],
) -> Float[Tensor, "*circuit"]:
    """Share of the gap that a circuit keeps, mean over mean: 0 as the corrupt run, 1 as the clean.

    May leave [0, 1]. NaN or infinite if there is no gap (``clean_corrupt.baselines`` refuses that).

    Example:
        >>> circuit.faithfulness(torch.stack([corrupt, clean]), clean, corrupt)
        tensor([0., 1.])
    """
    return share(scores - corrupt, clean, corrupt)


def rank_edges(values: Float[Tensor, "writer reader"], graph: Graph) -> list[Edge]:
    """All wires by |value|, largest first; equal ones in the order of the graph.

    Example:
        >>> len(ranking) == int(everything.sum())
        True
    """
    places = graph.exists.nonzero()
    sizes = values.cpu()[graph.exists].abs()
    order = sizes.sort(descending=True, stable=True).indices
    return [(graph.writers[u], graph.readers[v]) for u, v in places[order].tolist()]


def curve(
    model: TransformerBridge, behaviour: CleanCorrupt, ranking: Sequence[Edge], sizes: Sequence[int]
) -> Float[Tensor, "size batch"]:
    """Score of the circuits of the best 0, 1, ... wires of a ranking, in nats.

    Example:
        >>> scores = circuit.curve(net, task, ranking, [0, len(ranking)])
        >>> torch.allclose(scores[0], corrupt, atol=1e-3)
        True
    """
    for size in sizes:
        if not 0 <= size <= len(ranking):
            raise IclError(f"The ranking has {len(ranking)} wires; a circuit of {size} cannot be.")
    graph = of(model)
    kept = torch.zeros(len(sizes), *graph.exists.shape, dtype=torch.bool)
    places = [graph.index(edge) for edge in ranking[: max(sizes, default=0)]]
    for row, size in zip(kept, sizes, strict=True):
        for place in places[:size]:
            row[place] = True
    return scores(model, behaviour, kept)


def smallest_size(
    sizes: Sequence[int], share: Float[Tensor, "size"], bar: float = 0.9
) -> int | None:
    """The first size from which on a curve stays at or above ``bar``; None if it never does.

    ``sizes`` increase. What comes up and sinks again does not count.

    Example:
        >>> circuit.smallest_size([1, 2, 4], torch.tensor([0.95, 0.5, 0.93]))
        4
    """
    if len(sizes) != len(share):
        raise IclError(f"Got {len(share)} shares for {len(sizes)} sizes.")
    found = None
    for size, value in zip(reversed(sizes), reversed(share.tolist()), strict=True):
        if not value >= bar:
            break
        found = size
    return found


def complement(kept: EdgeMask, exists: EdgeMask) -> EdgeMask:
    """All other wires."""
    return exists & ~kept


def completeness(
    model: TransformerBridge, behaviour: CleanCorrupt, kept: EdgeMask
) -> Float[Tensor, "batch"]:
    """Score of all wires but the circuit's, in nats: near the corrupt score if it is complete.

    Example:
        >>> without_all = circuit.completeness(net, task, everything)
        >>> torch.allclose(without_all, corrupt, atol=1e-3)
        True
    """
    _check(kept[None], of(model).exists)
    return scores(model, behaviour, complement(kept.cpu(), of(model).exists)[None])[0]


def minimality(
    model: TransformerBridge, behaviour: CleanCorrupt, kept: EdgeMask
) -> Float[Tensor, "edge batch"]:
    """Nats that a circuit loses with each of its wires, in the order of the graph.

    Positive: the wire is needed.

    Example:
        >>> first = wires.mask(ranking[:2])
        >>> len(circuit.minimality(net, task, first))
        2
    """
    places = kept.cpu().nonzero()
    if not len(places):
        raise IclError("A circuit of size zero has no wire that could be needed: give it one.")
    without = kept.cpu().expand(len(places) + 1, -1, -1).clone()
    without[torch.arange(len(places)), places[:, 0], places[:, 1]] = False
    found = scores(model, behaviour, without)
    return found[-1] - found[:-1]


def random_circuits(
    exists: EdgeMask, size: int, count: int, generator: Generator
) -> Bool[Tensor, "circuit writer reader"]:
    """``count`` circuits of ``size`` wires, each drawn without replacement: the control.

    Example:
        >>> circuit.random_circuits(everything, 3, 2, generator).sum((1, 2))
        tensor([3, 3])
    """
    places = exists.cpu().nonzero()
    if not 0 <= size <= len(places):
        raise IclError(f"The model has {len(places)} wires; cannot draw a circuit of {size}.")
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
        >>> pair = circuit.induction_edges(wires, [graph.head(0, 1)], [graph.head(1, 2)])
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
    out = [(v, logits) for v in induction]
    edges = [*into, *between, *out, (embed, logits)]
    for edge in edges:
        graph.index(edge)
    return edges


def threshold(
    effects: Float[Tensor, "writer reader batch"], exists: EdgeMask, generator: Generator
) -> float:
    """The largest |mean effect| of any wire that chance alone reaches once in twenty times.

    Step by step (``significance.stepwise``).

    Example:
        >>> effects = torch.randn(*everything.shape, 8, generator=generator)
        >>> circuit.threshold(effects, everything, generator) > 0
        True
    """
    return step_down_threshold(effects[exists.to(effects.device)], generator)


def above_threshold(
    effects: Float[Tensor, "writer reader batch"], exists: EdgeMask, threshold: float
) -> EdgeMask:
    """The wires whose mean effect, of either sign, is above a threshold.

    Example:
        >>> effects = torch.zeros(*everything.shape, 8)
        >>> bool(circuit.above_threshold(effects, everything, 0.5).any())
        False
    """
    return exists & (effects.mean(-1).abs() > threshold).to(exists.device)
