"""Ablations and cut attention against the Hugging Face weights and a softmax by hand."""

import pytest
import torch
from random_layers import seeded
from tiny import ARCHITECTURES, tokens

from iclutils import models
from iclutils.interp.hooks import ablate_sets, cut_attention, logits_under, run_with_hooks
from iclutils.models import get_act_name


def under(model, x, hooks):
    return run_with_hooks(model, x, hooks)[0]


@pytest.mark.parametrize("kind", ["gpt2", "gptj", "qwen3"])
def test_lists_of_hooks_that_share_lower_layers_give_what_each_gives_alone(kind, tmp_path):
    ARCHITECTURES[kind](tmp_path)
    model, x = models.load(tmp_path), tokens(3, 10)
    at, sets = torch.tensor([[2, 9]] * 3), [[(1, 2)], [], [[]], [(0, 0), (1, 1)], [(1, 1)]]
    hooks = ablate_sets(model, x, sets, "mean", x)
    for each, logits in zip(hooks, logits_under(model, x, hooks, at), strict=True):
        torch.testing.assert_close(logits, under(model, x, each)[:, [2, 9]], atol=0.0, rtol=0.0)
    assert not any("forward" in vars(block) for block in model.blocks)


@pytest.mark.parametrize("renormalise", [True, False])
def test_cut_edges_are_left_out_of_the_softmax_or_zeroed(gpt2, renormalise):
    x, names = tokens(2, 6), [get_act_name("attn_scores", 1), get_act_name("pattern", 1)]
    cut = torch.rand(2, 6, 6, generator=seeded(0)) < 0.4
    cut &= ~torch.eye(6, dtype=torch.bool)
    heads = torch.tensor([True, False, True, False])[:, None, None]
    _, plain = run_with_hooks(gpt2, x, [], names)
    for edges in (cut, cut[:, None] & heads):
        _, seen = run_with_hooks(gpt2, x, cut_attention(gpt2, {1: edges}, renormalise), names)
        mask = edges if edges.ndim == 4 else edges[:, None]
        if renormalise:
            expected = plain[names[0]].masked_fill(mask, -torch.inf).softmax(-1)
        else:
            expected = plain[names[1]].masked_fill(mask, 0)
        torch.testing.assert_close(seen[names[1]], expected)
