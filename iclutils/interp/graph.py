"""The computational graph of a model: an edge from each writer to every later reader.

The order of a tensor (writer, reader) is fixed. Writers: the embedding (token and position), then
for each layer its heads and its MLP. Readers: for each layer the queries of its heads, their keys,
their values and the MLP's input, then the logits. An edge is of all positions at once.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import IclError, unknown
from ..models import ActivationCache, TransformerBridge, get_act_name
from .hooks import Hook, activations
from .invariants import END, blocks, check_channels

CHANNELS = ("q", "k", "v")


class Node(NamedTuple):
    """A writer (``embed``, ``head``, ``mlp``) or a reader (``q``, ``k``, ``v``, ``mlp_in``,
    ``logits``); layer and head are -1 where there is none."""

    kind: str
    layer: int = -1
    head: int = -1

    def __str__(self) -> str:
        if self.kind == "head":
            return f"{self.layer}.{self.head}"
        if self.kind in CHANNELS:
            return f"{self.kind} {self.layer}.{self.head}"
        return self.kind if self.layer < 0 else f"{self.kind} {self.layer}"


Edge = tuple[Node, Node]


def head(layer: int, index: int) -> Node:
    """Name the writer that head ``layer.index`` is."""
    return Node("head", layer, index)


@dataclass(frozen=True)
class Graph:
    """All nodes and edges of a model of this shape; ``parallel``: the MLP reads what the heads of
    its layer read (GPT-J, some GPT-NeoX), so that these heads do not write to it."""

    layers: int
    heads: int
    parallel: bool = False

    @cached_property
    def writers(self) -> tuple[Node, ...]:
        nodes = [Node("embed")]
        for layer in range(self.layers):
            nodes += [head(layer, h) for h in range(self.heads)] + [Node("mlp", layer)]
        return tuple(nodes)

    @cached_property
    def readers(self) -> tuple[Node, ...]:
        nodes = []
        for layer in range(self.layers):
            nodes += [Node(c, layer, h) for c in CHANNELS for h in range(self.heads)]
            nodes.append(Node("mlp_in", layer))
        return (*nodes, Node("logits"))

    @cached_property
    def reader_groups(self) -> list[list[Node]]:
        """List the readers in their order, those together that share a hook: the queries, the keys
        or the values of all heads of a layer."""
        return [list(group) for _, group in groupby(self.readers, lambda v: (v.kind, v.layer))]

    @cached_property
    def exists(self) -> Bool[Tensor, "writer reader"]:
        """Tell which edges there are."""
        return torch.tensor([[self._feeds(u, v) for v in self.readers] for u in self.writers])

    def _feeds(self, writer: Node, reader: Node) -> bool:
        if reader.kind == "logits" or writer.layer < reader.layer:
            return True
        same = writer.layer == reader.layer and writer.kind == "head"
        return same and reader.kind == "mlp_in" and not self.parallel

    def edges(self) -> list[Edge]:
        """List all edges, in the order of the tensor."""
        return [(self.writers[u], self.readers[v]) for u, v in self.exists.nonzero().tolist()]

    def index(self, edge: Edge) -> tuple[int, int]:
        """Return row and column of an edge; refuse one that the graph does not have."""
        writer, reader = edge
        for kind, node, nodes in zip(("writer", "reader"), edge, self._places, strict=True):
            if node not in nodes:
                raise unknown(kind, str(node), nodes)
        place = self._places[0][writer], self._places[1][reader]
        if not bool(self.exists[place]):
            raise IclError(f"No edge from {writer} to {reader}: a reader must come later.")
        return place

    @cached_property
    def _places(self) -> tuple[dict[Node, int], dict[Node, int]]:
        sides = ({n: i for i, n in enumerate(nodes)} for nodes in (self.writers, self.readers))
        return next(sides), next(sides)

    def mask(self, edges: Iterable[Edge]) -> Bool[Tensor, "writer reader"]:
        """Mark these edges."""
        out = torch.zeros_like(self.exists)
        for edge in edges:
            out[self.index(edge)] = True
        return out


def model_graph(model: TransformerBridge) -> Graph:
    """Return the graph of a model."""
    cfg = model.cfg
    return Graph(cfg.n_layers, cfg.n_heads, bool(getattr(cfg, "parallel_attn_mlp", False)))


def all_heads(model: TransformerBridge) -> list[Node]:
    """List every head, as a writer."""
    return [n for n in model_graph(model).writers if n.kind == "head"]


def output_hook(writer: Node) -> str:
    """Name the hook that holds what a writer writes; a head's is its ``z``, before ``W_O``."""
    if writer.kind == "embed":
        return get_act_name("resid_pre", 0)
    return get_act_name("z" if writer.kind == "head" else "mlp_out", writer.layer)


def component_output(
    model: TransformerBridge, cache: ActivationCache | Mapping[str, Tensor], writer: Node
) -> Float[Tensor, "batch pos d_model"]:
    """Return what a writer adds to the stream, from a cache; biases after W_O belong to none. A
    factor (Granite) is applied; a norm (Gemma-2, OLMo-2) keeps the scale of the run, so that the
    heads of a layer add up. For what a *change* of one head changes, see ``change_of_writes``."""
    value = cache[output_hook(writer)]
    if writer.kind != "head":
        return value
    own = value[:, :, writer.head] @ model.blocks[writer.layer].attn.W_O[writer.head]
    return blocks(model)[writer.layer].share(value, own)


def component_outputs(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], writers: Collection[Node]
) -> dict[Node, Float[Tensor, "batch pos d_model"]]:
    """Return what each of ``writers`` adds to the residual stream on ``tokens``."""
    cache = activations(model, tokens, {output_hook(w) for w in writers})
    return {w: component_output(model, cache, w) for w in writers}


def change_of_writes(
    model: TransformerBridge,
    cache: ActivationCache | Mapping[str, Tensor],
    other: ActivationCache | Mapping[str, Tensor],
    writers: Iterable[Node],
) -> Float[Tensor, "batch pos d_model"]:
    """Return by how much the residual stream changes when these writers, and no others, write what
    they write in the ``other`` run, before a later part reacts; caches hold their ``output_hook``.
    A norm between the heads of a layer and the stream is applied anew to all that they write."""
    total: Tensor | None = None
    for (kind, layer), group in groupby(sorted(writers), lambda w: (w.kind, w.layer)):
        name, heads = output_hook(Node(kind, layer)), [node.head for node in group]
        change = other[name] - cache[name]
        if kind == "head":
            block = blocks(model)[layer]
            change = einsum(change[:, :, heads], block.out[heads], "b p h k, h k d -> b p d")
            change = block.change(cache[name], change)
        total = change if total is None else total + change
    if total is None:
        raise IclError("Name at least one writer whose output is to change.")
    return total


def add_to_inputs(
    model: TransformerBridge, changes: Mapping[Node, Tensor | Callable[[], Tensor]]
) -> list[Hook]:
    """Make hooks that add a change, (batch, pos, d_model), to what each reader reads of the
    residual stream, and to nothing else: a tensor, or a function that is called when the reader
    reads. Gradients pass through."""
    hooks: list[Hook] = []
    for reader, change in changes.items():

        def shift(reader: Node = reader, change: Any = change) -> Tensor:
            value = change if isinstance(change, Tensor) else change()
            return value[:, :, None] if reader.kind in CHANNELS else value

        hooks += shift_inputs(model, reader, [reader.head], shift)
    return hooks


def shift_inputs(
    model: TransformerBridge, first: Node, heads: Sequence[int], change: Callable[[], Tensor]
) -> list[Hook]:
    """Make hooks as ``add_to_inputs`` for readers that share a layer and a kind, those of ``heads``
    at once: the change of their queries, keys or values is (batch, pos, head, d_model). It passes
    the norm of the reader, if there is one."""
    if first.kind == "logits":
        return [(END, lambda value, hook: value + change())]
    block, layer = blocks(model)[first.layer], f"blocks.{first.layer}."
    norm = block.mlp_read if first.kind == "mlp_in" else block.heads_read
    stream: dict[str, Tensor] = {}

    def keep(name: str) -> Hook:
        def store(value: Tensor, hook: object) -> Tensor:
            stream[name] = value
            return value

        return layer + name, store

    def moved() -> Tensor:
        """Return the change behind the norm."""
        if norm is None:
            return change()
        now = sum(stream.values(), torch.zeros((), device=model.cfg.device))
        now = now if first.kind == "mlp_in" else now[:, :, None]
        return norm(now + change()) - norm(now)

    if first.kind == "mlp_in":
        parts = ["hook_in"] if block.parallel else ["hook_in", "hook_attn_out"]
        add: Hook = f"{layer}mlp.hook_in", lambda value, hook: value + moved()
        return [*map(keep, parts if norm else []), add]
    check_channels(model)
    channel = first.kind
    weight = getattr(model.blocks[first.layer].attn, f"W_{channel.upper()}")[heads]

    def project(value: Tensor, hook: object) -> Tensor:
        value = value.clone()
        value[:, :, heads] += einsum(moved(), weight, "b p h d, h d k -> b p h k")
        return value

    return [*map(keep, ["hook_in"] if norm else []), (f"{layer}attn.hook_{channel}", project)]
