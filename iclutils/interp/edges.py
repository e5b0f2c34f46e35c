"""Wires, by hooks: what a writer writes, one reader's input changed, parts removed.

The plain way, one forward pass for each question, on every model whose inputs can be forked. The
fast ways of the other modules must agree with it.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import hooks
    >>> from iclutils.interp import clean_corrupt, graph, edges
    >>> net = models.load("induction-0")
    >>> task = clean_corrupt.repeating(net, 4, 6, torch.Generator().manual_seed(0))
    >>> clean, corrupt = clean_corrupt.ends(net, task)
    >>> writer, reader = graph.head(0, 0), graph.of(net).readers[-1]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import IclError
from ..models import ActivationCache, TransformerBridge, cached
from ..progress import bar
from .clean_corrupt import Behaviour, read
from .graph import CHANNELS, Edge, Node
from .hooks import Hook, How, head_ablation, mlp_ablation, mlp_name, z_name


def write_name(writer: Node) -> str:
    """Hook that holds what a writer writes; a head's is its ``z``, before ``W_O``."""
    if writer.kind == "embed":
        return "blocks.0.hook_resid_pre"
    return z_name(writer.layer) if writer.kind == "head" else mlp_name(writer.layer)


def read_name(model: TransformerBridge, reader: Node) -> str:
    """Hook that holds what a reader reads, before its LayerNorm (see ``forked``)."""
    if reader.kind == "logits":
        return f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    if reader.kind == "mlp_in":
        return f"blocks.{reader.layer}.hook_mlp_in"
    return f"blocks.{reader.layer}.attn.hook_{reader.kind}_input"


def written(
    model: TransformerBridge, cache: ActivationCache | Mapping[str, Tensor], writer: Node
) -> Float[Tensor, "batch pos d_model"]:
    """What a writer adds to the residual stream, from a cache; biases after W_O belong to none.

    Example:
        >>> _, cache = models.cached(net, task.clean, [edges.write_name(writer)])
        >>> found = edges.writes(net, task.clean, [writer])[writer]
        >>> torch.allclose(edges.written(net, cache, writer), found)
        True
    """
    value = cache[write_name(writer)]
    if writer.kind == "head":
        return value[:, :, writer.head] @ model.blocks[writer.layer].attn.W_O[writer.head]
    return value


def writes(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], writers: Iterable[Node]
) -> dict[Node, Float[Tensor, "batch pos d_model"]]:
    """What each of ``writers`` writes on ``tokens``.

    Example:
        >>> list(edges.writes(net, task.clean, [writer])) == [writer]
        True
    """
    writers = list(writers)
    _, cache = cached(model, tokens, {write_name(w) for w in writers})
    return {w: written(model, cache, w) for w in writers}


@contextmanager
def forked(model: TransformerBridge) -> Iterator[None]:
    """Give every head a query, key and value input of its own, to be changed one by one.

    Example:
        >>> with edges.forked(net):
        ...     inside = net.cfg.use_split_qkv_input
        ...
        >>> inside
        True
    """
    before = model.cfg.use_split_qkv_input, model.cfg.use_hook_mlp_in
    if getattr(model.cfg, "n_key_value_heads", None) not in (None, model.cfg.n_heads):
        raise IclError(
            "This model cannot fork the inputs of its heads: several share their keys and values. "
            "Use one like GPT-2, GPT-NeoX or a Llama with a key for every head."
        )
    try:
        model.set_use_split_qkv_input(True)
        model.set_use_hook_mlp_in(True)
    except (AttributeError, NotImplementedError) as error:
        raise IclError(
            "This model cannot fork the inputs of queries, keys and values: use one like GPT-2, "
            "GPT-NeoX or Llama."
        ) from error
    try:
        yield
    finally:
        model.set_use_split_qkv_input(before[0])
        model.set_use_hook_mlp_in(before[1])


def shifts(
    model: TransformerBridge, changes: Mapping[Node, Float[Tensor, "batch pos d_model"]]
) -> list[Hook]:
    """Hooks that add a change to what each reader reads, and to nothing else; run in ``forked``.

    Example:
        >>> nothing = torch.zeros(4, task.clean.shape[1], net.cfg.d_model)
        >>> with edges.forked(net):
        ...     logits, _ = hooks.run(net, task.clean, edges.shifts(net, {reader: nothing}))
        ...
        >>> torch.allclose(logits, models.logits(net, task.clean), atol=1e-3)
        True
    """

    def hook_for(reader: Node, change: Tensor) -> Hook:
        def add(value: Tensor, hook: object) -> Tensor:
            if reader.kind not in CHANNELS:
                return value + change
            value = value.clone()
            value[:, :, reader.head] += change
            return value

        return read_name(model, reader), add

    return [hook_for(reader, change) for reader, change in changes.items()]


def patched(
    model: TransformerBridge, behaviour: Behaviour, edges: Sequence[Edge]
) -> Float[Tensor, "batch"]:
    """Score when these wires carry what their writers write on the corrupt sequence, in nats.

    The writers' values come from the clean and the corrupt run; every other wire carries what the
    run itself brings, so whatever lies after a patched reader is computed anew.

    Example:
        >>> torch.allclose(edges.patched(net, task, []), clean, atol=1e-3)
        True
    """
    writers = {u for u, _ in edges}
    clean = writes(model, behaviour.clean, writers)
    corrupt = writes(model, behaviour.corrupt, writers)
    changes: dict[Node, Tensor] = {}
    for writer, reader in edges:
        change = corrupt[writer] - clean[writer]
        changes[reader] = changes[reader] + change if reader in changes else change
    with forked(model):
        return behaviour.score(read(model, behaviour, shifts(model, changes)))


def removed(
    model: TransformerBridge,
    behaviour: Behaviour,
    sets: Sequence[Iterable[Node]],
    how: How = "resample",
) -> Float[Tensor, "set batch"]:
    """Score without each set of heads and MLP layers, in nats.

    ``how``: ``"resample"`` gives them what they compute on the corrupt sequence, ``"mean"`` their
    mean over the batch and its positions, ``"zero"`` nothing.

    Example:
        >>> induction = [graph.head(1, h) for h in range(4)]
        >>> bool(edges.removed(net, task, [induction])[0].mean() < clean.mean() - 1)
        True
    """
    out = []
    for chosen in map(list, bar(sets, "sets")):
        if any(n.kind not in ("head", "mlp") for n in chosen):
            raise IclError("Only heads and MLP layers can be removed.")
        heads = [(n.layer, n.head) for n in chosen if n.kind == "head"]
        layers = [n.layer for n in chosen if n.kind == "mlp"]
        hooks = head_ablation(model, behaviour.clean, heads, how, behaviour.corrupt)
        hooks += mlp_ablation(model, behaviour.clean, layers, how, behaviour.corrupt)
        out.append(behaviour.score(read(model, behaviour, hooks)))
    return torch.stack(out)
