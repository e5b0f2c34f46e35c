"""Circuits and estimates of edges, with a known answer; see also ``test_invariants``."""

from collections import Counter
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from tiny import a_task, tiny_gpt2
from wired import save_wired

from iclutils.interp import circuit, graph, patching, statistics
from iclutils.interp.attribution import edge_attribution
from iclutils.interp.clean_corrupt import baselines
from iclutils.interp.graph import Graph, Node, head
from iclutils.models import load


def test_the_textbook_pair_is_the_circuit_and_exact_effects_rank_it_first(tmp_path):
    """Catches an edge that the textbook's list forgets, and rankings from the wrong end."""
    save_wired(tmp_path)
    model = load(tmp_path)
    task, nodes = a_task(model, 8, 11), graph.model_graph(model)
    clean, corrupt = baselines(model, task)
    first, second, embed, logits = head(0, 0), head(1, 0), Node("embed"), Node("logits")
    read = [(embed, Node(part, 0, 0)) for part in "qkv"] + [(embed, Node(c, 1, 0)) for c in "qv"]
    textbook = [*read, (first, Node("k", 1, 0)), (second, logits), (embed, logits)]
    kept = nodes.mask(textbook)  # Elhage et al. 2021
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
    pair = {(first, Node("k", 1, 0)), (second, logits)}
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


def test_averaged_gradients_of_the_embedding_sum_to_the_gap(tmp_path):
    """Catches runs that do not lie between the two: the integral of a slope is the rise."""
    model = tiny_gpt2(tmp_path, n_layer=1, n_head=2)
    task = a_task(model, 2)
    turned = replace(task, clean=task.corrupt, corrupt=task.clean)
    clean, corrupt = baselines(model, task)
    to_clean, to_corrupt = (edge_attribution(model, x, 16)[0].sum(0) for x in (task, turned))
    torch.testing.assert_close((to_clean - to_corrupt) / 2, clean - corrupt, atol=0.02, rtol=0.02)
    once = edge_attribution(model, task)[0].sum(0)
    assert (once - (clean - corrupt)).abs().max() > 0.1, "one step would do as well"
