"""Weight scores against dense matrices in float64, which the package never forms."""

import pytest
import torch
from tiny import VOCAB, save_gpt2, save_grouped
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from iclutils import models
from iclutils.interp import weights


def dense(network, layer, head):
    """One head's matrices, straight from the Hugging Face weights, in float64."""
    block = network.transformer.h[layer].attn
    width, size = network.config.n_embd, network.config.n_embd // network.config.n_head
    w = block.c_attn.weight.detach().double()
    part = slice(head * size, (head + 1) * size)
    q, k, v = (w[:, i * width : (i + 1) * width][:, part] for i in range(3))
    return {"Q": q, "K": k, "V": v, "O": block.c_proj.weight.detach().double()[part]}


def test_copying_equals_the_eigenvalues_of_the_dense_matrix(tmp_path):
    network = save_gpt2(tmp_path)
    scores = weights.copying_scores(models.load(tmp_path))
    embedding = network.transformer.wte.weight.detach().double()
    for layer, head in [(0, 0), (1, 3), (2, 2)]:
        w = dense(network, layer, head)
        values = torch.linalg.eigvals(embedding @ w["V"] @ w["O"] @ embedding.T)
        expected = values.sum().real / values.abs().sum()
        assert scores[layer, head].item() == pytest.approx(expected.item(), abs=1e-3)


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_composition_equals_elhages_formula(tmp_path, kind):
    network = save_gpt2(tmp_path)
    scores = weights.composition_scores(models.load(tmp_path), kind)
    first, second = dense(network, 0, 1), dense(network, 2, 3)
    ov = first["V"] @ first["O"]
    reads = {
        "Q": second["Q"] @ second["K"].T,
        "K": second["K"] @ second["Q"].T,
        "V": second["V"] @ second["O"],
    }[kind]
    expected = (ov @ reads).norm() / (ov.norm() * reads.norm())
    assert scores[0, 1, 2, 3].item() == pytest.approx(expected.item(), rel=1e-4)
    assert not scores[2, :, 2].any()
    assert not scores[1, :, 0].any()


def test_the_random_baseline_equals_dense_products():
    got = weights.composition_baseline(24, 6, torch.Generator().manual_seed(3), draws=400)
    generator = torch.Generator().manual_seed(8)
    scores = []
    for _ in range(400):
        draw = [
            torch.rand(s, generator=generator, dtype=torch.float64) * 2 - 1
            for s in [(24, 6), (6, 24), (24, 6), (6, 24)]
        ]
        a, b = draw[0] @ draw[1], draw[2] @ draw[3]
        scores.append((a @ b).norm() / (a.norm() * b.norm()))
    expected = torch.stack(scores)
    # two independent samples of 400: their means differ by less than five standard errors
    error = (2 / 400) ** 0.5 * expected.std()
    assert got[0] == pytest.approx(expected.mean().item(), abs=5 * error.item())
    assert got[1] == pytest.approx(expected.std().item(), rel=0.3)


@pytest.mark.parametrize("among", [None, torch.tensor([3, 8, 11, 40, 41])])
def test_qk_matching_equals_the_dense_matrix(tmp_path, among):
    network = save_gpt2(tmp_path, vocab_size=700, bos_token_id=699, eos_token_id=699)
    words = network.transformer.wte.weight.detach().double()
    words = words if among is None else words[among]
    first, second = dense(network, 1, 2), dense(network, 2, 0)
    q = words @ second["Q"]
    k = words @ first["V"] @ first["O"] @ second["K"]
    own = torch.arange(len(words))
    expected = [((q @ k.T).argmax(axis) == own).double().mean().item() for axis in (1, 0)]
    found = weights.qk_matching(models.load(tmp_path), (1, 2), (2, 0), 0, among)
    assert found == pytest.approx(tuple(expected), abs=2 / 700)


# Would catch a turn in the wrong direction, of queries and keys alike, or before the norm.
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("distance", [1, 6])
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
