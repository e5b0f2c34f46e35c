"""Stability of circuits: overlap by enumeration, permuted heads matched, planted phases."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from scipy.stats import ortho_group
from tiny import save_gpt2

from iclutils.chapters.attention_circuits import stability
from iclutils.interp import graph
from iclutils.models import edit_weights, load
from iclutils.tasks.repeated import repeated_tokens
from tools.architectures import save


def test_overlap_by_enumeration():
    """Catches a chance that ignores layers: mean over all sets with as many items in each layer."""
    layer = torch.tensor([0, 0, 0, 1, 1])
    fixed = frozenset({0, 1, 3})
    for shown in ({0, 3}, {2, 4}, {0, 1, 2}, {3, 4}):
        inside = [sum(int(layer[i]) == la for i in shown) for la in (0, 1)]
        sets = [
            {*low, *high}
            for low in itertools.combinations((0, 1, 2), inside[0])
            for high in itertools.combinations((3, 4), inside[1])
        ]
        chance = sum(len(fixed & s) for s in sets) / len(sets)
        got = stability.overlap_excess(fixed, frozenset(shown), layer)
        assert got == pytest.approx(len(fixed & shown) - chance)


# Would catch z W_O where a norm stands between that and the stream: its scale is each position's.
@pytest.mark.parametrize("name", ["Gemma-2", "Granite"])
def test_what_heads_write_is_what_reaches_the_stream(name, tmp_path):
    save(name, tmp_path)
    model, ids = load(tmp_path), torch.randint(60, (2, 7), generator=seeded(0))
    nodes = graph.all_heads(model)
    expected = graph.component_outputs(model, ids, nodes)
    found = stability.head_outputs(model, ids).flatten(0, 1)
    for node, own in zip(nodes, found, strict=True):
        torch.testing.assert_close(own, expected[node][:, 1:].flatten(0, 1))


def permuted(network, order):
    """Head ``order[layer][i]`` becomes head i; the network computes the same."""
    width, heads = network.config.n_embd, network.config.n_head
    size = width // heads
    for block, heads_in in zip(network.transformer.h, order, strict=True):
        place = torch.cat([torch.arange(size) + h * size for h in heads_in])
        three = torch.cat([place + part * width for part in range(3)])
        attn = block.attn
        attn.c_attn.weight.copy_(attn.c_attn.weight[:, three].clone())
        attn.c_attn.bias.copy_(attn.c_attn.bias[three].clone())
        attn.c_proj.weight.copy_(attn.c_proj.weight[place].clone())


def test_permuted_heads_are_matched_back(tmp_path):
    """Catches rows exchanged with columns, and what belongs to another head."""
    save_gpt2(tmp_path)
    order = [[2, 0, 3, 1], [1, 2, 3, 0], [3, 2, 1, 0]]
    plain, other = load(tmp_path), edit_weights(tmp_path, lambda network: permuted(network, order))
    rows = repeated_tokens(plain, 8, 10, seeded(0)).tokens
    expected = sorted(
        (4 * layer + old, 4 * layer + new)
        for layer, heads in enumerate(order)
        for new, old in enumerate(heads)
    )
    layer = torch.arange(3).repeat_interleave(4)
    wrote = stability.cka(*(stability.head_outputs(m, rows).flatten(0, 1) for m in (plain, other)))
    for allowed in (None, layer[:, None] == layer):
        assert stability.match(wrote, allowed) == expected
    for a, b in expected:
        assert wrote[a, b].item() == pytest.approx(1, abs=1e-5)
    assert wrote.abs().max() < 1 + 1e-6


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(4, 12), st.integers(1, 5), st.integers(2, 5))
def test_cka(seed, count, left, right):
    """Gram matrices in numpy; catches a missing centring, and a basis or scale that matters."""
    noise = np.random.default_rng(seed)
    x, y = noise.normal(1, 1, (2, count, left)), noise.normal(1, 1, (3, count, right))
    middle = np.eye(count) - 1 / count
    grams = [[middle @ z @ z.T @ middle for z in group] for group in (x, y)]
    expected = [
        [(k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()) for m in grams[1]] for k in grams[0]
    ]
    np.testing.assert_allclose(stability.cka(torch.tensor(x), torch.tensor(y)), expected, atol=1e-8)
    turned = torch.tensor(3 * y @ ortho_group.rvs(right, random_state=noise) + 7)
    np.testing.assert_allclose(stability.cka(torch.tensor(x), turned), expected, atol=1e-8)


def series(noise, swap, checkpoints=8):
    """(checkpoint, item, batch): 5 of 30 items matter; from ``swap`` on it is 5 others."""
    generator = seeded(0)
    values = noise * torch.randn(checkpoints, 30, 24, generator=generator)
    values[:swap, :5] += 1
    values[swap:, 10:15] -= 1  # of the other sign: the size of an effect counts
    return values


@pytest.mark.parametrize("absent", [0, 2])
def test_a_swap_of_items_is_found_where_it_was_planted(absent):
    """Catches intervals shifted by one, signed means, and phases before there is a circuit."""
    values, generator = series(0.5, swap=5), seeded(1)
    alike = [stability.top_overlap(a, b, 5) for a, b in itertools.pairwise(values)]
    floors = [stability.reextraction_floor(v, 5, generator, 50) for v in values[1:]]
    present = torch.arange(8) >= absent
    found = stability.phases(torch.tensor(alike), torch.tensor(floors), present)
    expected = ["stable"] * 4 + ["unstable"] + ["stable"] * 2
    assert found == ["absent"] * absent + expected[absent:]
