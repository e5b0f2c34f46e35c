"""Patched edges by hooks, one pass for each set: the truth that the fast ways are held against."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from iclutils.interp.clean_corrupt import CleanCorrupt, scored_logits
from iclutils.interp.graph import Edge, add_to_inputs, component_outputs, split_qkv_input
from iclutils.models import TransformerBridge


def patch_edges(model: TransformerBridge, task: CleanCorrupt, edges: Sequence[Edge]) -> Tensor:
    """Score when these edges carry what their writers write on the corrupt sequence, in nats."""
    writers, changes = {u for u, _ in edges}, {}
    clean, corrupt = (component_outputs(model, x, writers) for x in (task.clean, task.corrupt))
    for writer, reader in edges:
        changes[reader] = changes.get(reader, 0) + (corrupt[writer] - clean[writer])
    with split_qkv_input(model):
        return task.score(scored_logits(model, task, add_to_inputs(model, changes)))
