"""Circuits of edges: one that is known by design; see also ``test_invariants``."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from tiny import a_task
from wired import save_wired

from iclutils.interp import circuit, graph, patching, statistics
from iclutils.interp.clean_corrupt import baselines
from iclutils.interp.graph import Graph, Node, head
from iclutils.models import load


def test_the_textbook_pair_is_the_circuit_and_exact_effects_rank_it_first(tmp_path):
    """Catches an edge that the textbook's list forgets, and rankings from the wrong end."""
    save_wired(tmp_path)
    model = load(tmp_path)
    task, nodes = a_task(model, 8, 11), graph.of(model)
    clean, corrupt = baselines(model, task)
    kept = nodes.mask(circuit.induction_edges(nodes, [head(0, 0)], [head(1, 0)]))
    score = circuit.scores(model, task, kept[None])
    assert circuit.faithfulness(score, clean, corrupt).item() > 0.95
    left = circuit.scores(model, task, (nodes.exists & ~kept)[None])
    assert abs(circuit.faithfulness(left, clean, corrupt).item()) < 0.05
    places = [(nodes.writers[u], nodes.readers[v]) for u, v in kept.nonzero().tolist()]
    without = torch.stack([kept & ~nodes.mask([edge]) for edge in places])
    lost = (score - circuit.scores(model, task, without)).mean(1) / (clean - corrupt).mean()
    needed = {edge for edge, loss in zip(places, lost.tolist(), strict=True) if loss > 0.9}
    # Positions and the second copy are the same on both sequences, so what the queries, the keys
    # of 0.0 and the logits read of the embedding cannot be told apart.
    embed, k, logits = Node("embed"), Node("k", 1, 0), Node("logits")
    pair = {(head(0, 0), k), (head(1, 0), logits)}
    assert needed == pair | {(embed, Node("v", layer, 0)) for layer in (0, 1)}
    assert lost.abs()[[edge not in needed for edge in places]].max() < 1e-5
    effects = patching.path_patching(model, task)
    least = statistics.step_down_threshold(effects[nodes.exists], seeded())
    strong = nodes.exists & (effects.mean(-1).abs() > least)
    ranking = circuit.rank_edges(effects.mean(-1), nodes)
    assert 4 <= int(strong.sum()) <= 8
    assert torch.equal(strong, nodes.mask(ranking[: int(strong.sum())]))
    sizes = [0, 1, 2, 3, 4, 8, len(ranking)]
    curve = circuit.curve(model, task, ranking, sizes)
    torch.testing.assert_close(curve[[0, -1]], torch.stack([corrupt, clean]), atol=1e-5, rtol=0)
    assert circuit.smallest_size(sizes, circuit.faithfulness(curve, clean, corrupt)) == 4


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.0, 0.75, 0.25, 0.5, 1.0], 3),
        ([0.5, 0.5, 0.5, 0.5, 0.5], 0),
        ([1.0, 1.0, 1.0, 1.0, 0.4], None),
        ([0.0, 0.0, float("nan"), 1.0, 1.0], 3),
    ],
)
def test_the_smallest_size_is_where_a_curve_comes_to_stay(shares, expected):
    assert circuit.smallest_size(range(5), torch.tensor(shares), 0.5) == expected


@settings(max_examples=25)
@given(layers=st.integers(1, 3), heads=st.integers(1, 3), seed=st.integers(0, 99))
def test_rankings_and_random_circuits_hold_each_edge_once(layers, heads, seed):
    """Catches edges that do not exist, or twice the same, in a ranking or a draw."""
    nodes, generator = Graph(layers, heads), seeded(seed)
    values = torch.randn(nodes.exists.shape, generator=generator).round()  # with ties
    ranking = circuit.rank_edges(values, nodes)
    assert set(ranking) == set(nodes.edges())
    order = [(-values[nodes.index(e)].abs().item(), nodes.edges().index(e)) for e in ranking]
    assert order == sorted(order)
    kept = nodes.mask(ranking[: seed % (len(ranking) + 1)])

    def between(mask):
        pairs = (nodes.edges()[i] for i in mask[nodes.exists].nonzero()[:, 0].tolist())
        return Counter((u.layer, v.layer) for u, v in pairs)

    for control in circuit.random_circuits(nodes, kept, 3, generator):
        assert between(control) == between(kept)
        assert not (control & ~nodes.exists).any()
