"""The computational graph of a model: an edge from each writer to every later reader.

The order of a tensor (writer, reader) is fixed. Writers: the embedding (token and position), then
for each layer its heads and its MLP. Readers: for each layer the queries of its heads, their keys,
their values and the MLP's input, then the logits. An edge is of all positions at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import IclError, unknown
from ..models import ActivationCache, TransformerBridge, cached, get_act_name
from .hooks import Hook

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


def of(model: TransformerBridge) -> Graph:
    """Return the graph of a model."""
    cfg = model.cfg
    return Graph(cfg.n_layers, cfg.n_heads, bool(getattr(cfg, "parallel_attn_mlp", False)))


def all_heads(model: TransformerBridge) -> list[Node]:
    """List every head, as a writer."""
    return [n for n in of(model).writers if n.kind == "head"]


def output_hook(writer: Node) -> str:
    """Name the hook that holds what a writer writes; a head's is its ``z``, before ``W_O``."""
    if writer.kind == "embed":
        return get_act_name("resid_pre", 0)
    return get_act_name("z" if writer.kind == "head" else "mlp_out", writer.layer)


def input_hook(model: TransformerBridge, reader: Node) -> str:
    """Name the hook that holds what a reader reads, before its LayerNorm (see
    ``split_qkv_input``)."""
    if reader.kind == "logits":
        return get_act_name("resid_post", model.cfg.n_layers - 1)
    if reader.kind == "mlp_in":
        return get_act_name("mlp_in", reader.layer)
    return get_act_name(f"{reader.kind}_input", reader.layer, "attn")


def component_output(
    model: TransformerBridge, cache: ActivationCache | Mapping[str, Tensor], writer: Node
) -> Float[Tensor, "batch pos d_model"]:
    """Return what a writer adds to the residual stream, from a cache; biases after W_O belong to
    none."""
    value = cache[output_hook(writer)]
    if writer.kind == "head":
        return value[:, :, writer.head] @ model.blocks[writer.layer].attn.W_O[writer.head]
    return value


def component_outputs(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], writers: Iterable[Node]
) -> dict[Node, Float[Tensor, "batch pos d_model"]]:
    """Return what each of ``writers`` adds to the residual stream on ``tokens``."""
    writers = list(writers)
    _, cache = cached(model, tokens, {output_hook(w) for w in writers})
    return {w: component_output(model, cache, w) for w in writers}


@contextmanager
def split_qkv_input(model: TransformerBridge) -> Iterator[None]:
    """Give every head a query, key and value input of its own, to be changed one by one."""
    before = model.cfg.use_split_qkv_input, model.cfg.use_hook_mlp_in
    try:
        model.set_use_split_qkv_input(True)
        model.set_use_hook_mlp_in(True)
    except (AttributeError, NotImplementedError) as error:
        raise IclError(
            "Path patching does not fit this model: it cannot fork the inputs of queries, keys and "
            "values. Use one like GPT-2, GPT-NeoX or Llama."
        ) from error
    try:
        yield
    finally:
        model.set_use_split_qkv_input(before[0])
        model.set_use_hook_mlp_in(before[1])


def add_to_inputs(
    model: TransformerBridge, changes: Mapping[Node, Float[Tensor, "batch pos d_model"]]
) -> list[Hook]:
    """Make hooks that add a change to what each reader reads, and to nothing else; run them inside
    ``split_qkv_input``."""

    def hook_for(reader: Node, change: Tensor) -> Hook:
        def add(value: Tensor, hook: object) -> Tensor:
            if reader.kind not in CHANNELS:
                return value + change
            value = value.clone()
            value[:, :, reader.head] += change
            return value

        return input_hook(model, reader), add

    return [hook_for(reader, change) for reader, change in changes.items()]
