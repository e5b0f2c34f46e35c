"""Heads that share keys and values: one head apart, as edits and weights see it.

That the network is the same, and the edges between its heads, is in ``test_architectures``.
"""

import pytest
import torch
from tiny import VOCAB, save_grouped
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from iclutils import models
from iclutils.interp import weights


def test_edits_and_twins(tmp_path):
    """Catches an edit, or a twin with random weights, of the network after it was written out."""
    save_grouped(tmp_path)
    seen = []

    def edit(network):
        seen.append(network.model.layers[0].self_attn.k_proj.weight.shape)
        network.model.layers[0].self_attn.k_proj.weight[8:] = 0

    edited = models.edit_weights(tmp_path, edit)
    assert seen == [(16, 24)], "an edit is of the published network"
    assert edited.W_K.shape == edited.W_Q.shape == (3, 4, 24, 8)
    assert edited.W_K[0, :2].any()
    assert not edited.W_K[0, 2:].any()
    twin = models.random_init(tmp_path, 0)
    assert torch.equal(twin.W_V[:, 0], twin.W_V[:, 1])
    assert not torch.equal(twin.W_V[:, 1], twin.W_V[:, 2])


# Would catch a turn in the wrong direction, of queries and keys alike, or before the norm.
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("distance", [0, 1, 6])
def test_qk_matching_at_a_distance(tmp_path, kind, distance):
    """Head 1 of layer 0 and head 3 of layer 2, each with its group's keys and values."""
    network = save_grouped(tmp_path, kind).double()
    first, _, last = (layer.self_attn for layer in network.model.layers)
    embed = network.model.embed_tokens.weight
    written = first.v_proj(embed)[:, :8] @ first.o_proj.weight[:, 8:16].T
    q, k = last.q_proj(embed)[:, 24:], last.k_proj(written)[:, 8:]
    if kind == "qwen3":
        q, k = last.q_norm(q), last.k_norm(k)
    turn = network.model.rotary_emb(embed, torch.tensor([[distance]]))
    q, _ = apply_rotary_pos_emb(q[None, None], k[None, None], *turn)
    matches, own = q[0, 0] @ k.T, torch.arange(VOCAB)
    expected = [(matches.argmax(axis) == own).double().mean().item() for axis in (1, 0)]
    found = weights.qk_matching(models.load(tmp_path), (0, 1), (2, 3), distance)
    assert found == pytest.approx(tuple(expected), abs=1e-6)
