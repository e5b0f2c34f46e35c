"""Estimated effects of edges: against TransformerLens, finite differences and integrals."""

from dataclasses import replace

import pytest
import torch
from tiny import a_task
from transformer_lens.tools.analysis import attribution_patching as theirs

from iclutils.interp import graph
from iclutils.interp.attribution import edge_attribution
from iclutils.interp.clean_corrupt import baselines
from iclutils.interp.graph import Node


def turned(task):
    """Clean for corrupt and the other way round."""
    return replace(task, clean=task.corrupt, corrupt=task.clean)


@pytest.mark.parametrize("kind", ["gpt2", "neox"])
def test_estimates_are_those_of_transformer_lens(kind, request):
    """Catches gradients that hold more than what goes through the reader, and swapped readers."""
    model = request.getfixturevalue(kind)
    task, nodes = a_task(model, 2, 2), graph.of(model)
    ours = edge_attribution(model, task)
    model.requires_grad_(True)  # theirs needs weights that are not frozen

    names = {"attn_head_out": "head", "mlp_out": "mlp", **{f"{c}_input": c for c in "qkv"}}

    def our(node):
        kind = names.get(node.kind, node.kind)
        layer = -1 if node.layer is None or kind == "logits" else node.layer
        return Node(kind, layer, -1 if node.head is None else node.head)

    for i in range(len(task)):
        row = task[i : i + 1]
        found = theirs.attribution_patch(
            model,
            row.corrupt,  # its gradient is taken on the second of the two
            row.clean,
            lambda logits, row=row: row.score(logits[:, row.at[0]]).sum(),
            theirs.EdgeAttributionConfig(granularity="edge"),
        )
        expected = torch.zeros(nodes.exists.shape)
        for (writer, reader), value in found.edge_scores.items():
            expected[nodes.index((our(writer), our(reader)))] -= value
        torch.testing.assert_close(ours[..., i], expected, atol=1e-5, rtol=1e-5)
        assert expected.abs().max() > 0.1, "nothing to compare"
    model.requires_grad_(False)
    assert not ours[~nodes.exists].any()


def test_averaged_gradients_of_the_embedding_sum_to_the_gap(gpt2):
    """Catches runs that do not lie between the two: the integral of a slope is the rise."""
    task = a_task(gpt2, 2)
    clean, corrupt = baselines(gpt2, task)
    both = [edge_attribution(gpt2, task, 32, at)[0].sum(0) for at in ("clean", "corrupt")]
    torch.testing.assert_close(sum(both) / 2, clean - corrupt, atol=0.02, rtol=0.02)
    once = edge_attribution(gpt2, task)[0].sum(0)
    assert (once - (clean - corrupt)).abs().max() > 0.1, "one step would do as well"


def test_the_ends_are_each_others_when_turned(gpt2):
    """Catches a gradient taken on the other run than asked for."""
    task = a_task(gpt2)
    ours, other = edge_attribution(gpt2, task, at="corrupt"), edge_attribution(gpt2, turned(task))
    torch.testing.assert_close(ours, -other, atol=1e-5, rtol=1e-4)
