"""Heads together: wired pipelines and back-ups, ablations, rotated bases."""

import numpy as np
import pytest
import torch
from random_layers import seeded
from tiny import save_gpt2, save_grouped, tokens
from wired import save_wired

from iclutils.chapters.attention_circuits import interactions, stability
from iclutils.interp.clean_corrupt import baselines, copying, share
from iclutils.interp.graph import all_heads, head
from iclutils.interp.hooks import ablate_heads, activations, run_with_hooks
from iclutils.models import edit_weights, get_act_name, load, logits


def test_wired_pipeline_and_back_ups(wired, tmp_path):
    """The sign key: a pipeline is below 0, back-ups above, idle heads at 0."""
    task = copying(wired, 8, 11, seeded())
    _, each = interactions.interactions(wired, task, [[n] for n in all_heads(wired)])
    each = share(each, *baselines(wired, task))
    assert -1.1 < each[0, 2] < -0.9
    assert each[[0, 0, 1, 1, 2], [1, 3, 2, 3, 3]].abs().max() < 1e-2

    save_wired(tmp_path, ((0, 0), (0, 1)), ((1, 0), (1, 2)), heads=3)
    model = load(tmp_path)
    task = copying(model, 8, 11, seeded())
    heads = [[head(0, 0)], [head(0, 1)], [head(1, 0)], [head(1, 2)]]
    each = share(interactions.interactions(model, task, heads)[1], *baselines(model, task))
    assert each[0, 1] > 0.8
    assert each[2, 3] > 0.8


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_rotating_a_basis_changes_the_notes_measure_alone(kind, tmp_path):
    """Logits and CKA stay, as the algebra says; the correlation does not."""
    folder = tmp_path
    save_gpt2(folder) if kind == "gpt2" else save_grouped(folder, kind)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=seeded())).Q
    rotated = edit_weights(folder, lambda net: interactions.rotate_head_basis(net, 1, 2, rotation))
    plain, ids = load(folder), tokens(4, 20)
    torch.testing.assert_close(logits(rotated, ids), logits(plain, ids), atol=1e-4, rtol=1e-4)
    before, after = (stability.head_outputs(m, ids).flatten(0, 1) for m in (plain, rotated))
    alike = stability.cka(before, before), stability.cka(after, after)
    torch.testing.assert_close(*alike, atol=1e-4, rtol=1e-4)
    before, after = (interactions.note_correlation(m, ids) for m in (plain, rotated))
    change = (after - before).abs()
    assert change[1, 2, [0, 1, 3]].max() > 0.05
    change[1, 2], change[1, :, 2] = 0, 0
    assert change.max() < 1e-4
    cache = activations(plain, ids, [get_act_name("z", 1)])
    z = cache[get_act_name("z", 1)].numpy()
    pearson = np.corrcoef(z[:, :, 0].ravel(), z[:, :, 3].ravel())[0, 1]
    assert float(before[1, 0, 3]) == pytest.approx(pearson)


def test_redundant_means_certainly_small():
    """Catches a bar that noise passes: the same mean, measured well or badly."""
    well = torch.tensor([0.004, 0.006]).repeat(8)
    badly = torch.tensor([-0.1, 0.11]).repeat(8)
    losses = torch.stack([well, badly, well + 1, well - 1])
    assert interactions.is_redundant(losses).tolist() == [True, False, False, True]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_pruning_is_zero_ablation(kind, tmp_path):
    """Catches rows taken for columns, another head's slice, a value bias that stays."""
    heads = [head(0, 1), head(0, 3), head(2, 0)]
    save_gpt2(tmp_path) if kind == "gpt2" else save_grouped(tmp_path, kind)
    whole, batch = load(tmp_path), tokens(3, 12)
    pruned = edit_weights(tmp_path, lambda net: interactions.prune(net, heads))
    hooks = ablate_heads(whole, batch, [node[1:] for node in heads], "zero", batch)
    expected, _ = run_with_hooks(whole, batch, hooks)
    torch.testing.assert_close(logits(pruned, batch), expected, atol=1e-5, rtol=1e-5)
    assert (logits(whole, batch) - expected).abs().max() > 0.1
