"""Redundancy and pruning: known spreads, zero ablation."""

import pytest
import torch
from tiny import save_gpt2, save_grouped, tokens

from iclutils import models
from iclutils.chapters.attention_circuits import redundancy
from iclutils.interp.graph import head
from iclutils.interp.hooks import ablate_heads, run_with_hooks

HEADS = [head(0, 1), head(0, 3), head(2, 0)]


# Would catch a bar that noise passes: the same mean, known well or badly.
def test_redundant_means_known_to_be_small():
    known = torch.tensor([0.004, 0.006]).repeat(8)
    noisy = torch.tensor([-0.1, 0.11]).repeat(8)
    losses = torch.stack([known, noisy, known + 1, known - 1])
    assert redundancy.redundant(losses).tolist() == [True, False, False, True]
    by_numpy = losses.double().numpy()
    upper = by_numpy.mean(1) + 2 * by_numpy.std(1, ddof=1) / 4
    assert redundancy.redundant(losses / 6).tolist() == (upper < 0.06).tolist()


# Would catch rows taken for columns, another head's slice, a value bias that stays, and an edit of
# what was not named.
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_pruning_is_zero_ablation(kind, tmp_path):
    network = save_gpt2(tmp_path) if kind == "gpt2" else save_grouped(tmp_path, kind)
    whole = models.load(tmp_path)
    pruned = models.edit_weights(tmp_path, lambda net: redundancy.prune(net, HEADS))
    batch = tokens(3, 12)
    hooks = ablate_heads(whole, batch, [(n.layer, n.head) for n in HEADS], "zero", batch)
    expected, _ = run_with_hooks(whole, batch, hooks)
    torch.testing.assert_close(models.logits(pruned, batch), expected, atol=1e-5, rtol=1e-5)
    assert (models.logits(whole, batch) - expected).abs().max() > 0.1
    if kind != "gpt2":
        return
    before = {n: p.clone() for n, p in network.named_parameters()}
    redundancy.prune(network, HEADS)
    changed = {n for n, p in network.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {
        f"transformer.h.{la}.attn.{part}"
        for la in (0, 2)
        for part in ("c_attn.weight", "c_attn.bias", "c_proj.weight")
    }
