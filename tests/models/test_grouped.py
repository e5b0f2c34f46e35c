"""Heads that share keys and values, written out: the same network, and one head apart."""

import pytest
import torch
from by_hand import ByHand
from tiny import BOS, GROUPED, VOCAB, a_task, save_grouped, tokens

from iclutils import models
from iclutils.interp import patching, weights
from iclutils.interp.attribution import edge_attribution
from iclutils.interp.clean_corrupt import CleanCorrupt
from iclutils.interp.graph import Node, of
from iclutils.models import TransformerBridge, cached, get_act_name

ALL = slice(None)
Both = tuple[TransformerBridge, ByHand]


@pytest.fixture(scope="module", params=GROUPED)
def both(request, tmp_path_factory):
    """A model as the package loads it, and the same by hand."""
    folder = tmp_path_factory.mktemp(request.param)
    network = save_grouped(folder, request.param)
    return models.load(folder), ByHand(network)


def close(got, expected, atol=2e-5):
    torch.testing.assert_close(got.double(), expected.double(), atol=atol, rtol=1e-4)


# Would catch keys of another group, a bias or norm left behind, and a model that is not the one
# on disk; an edit, or a twin with random weights, of the network after it was written out.
def test_the_network_is_the_same(both):
    model, truth = both
    x, names = tokens(2, 9), [get_act_name("pattern", layer) for layer in range(3)]
    logits, cache = cached(model, x, names)
    expected = truth.run(x)
    close(logits, expected.logits, 1e-4)
    with torch.no_grad():
        close(logits, truth.network(x).logits, 1e-4)
    for (layer, head), pattern in expected.patterns.items():
        close(cache[names[layer]][:, head], pattern)
    assert model.W_K.shape == model.W_Q.shape == (3, 4, 24, 8)
    for layer, head, name in ((0, 1, "k"), (1, 2, "v"), (2, 3, "q")):
        close(getattr(model, f"W_{name.upper()}")[layer, head], truth.matrix(layer, head, name)[0])


def test_edits_and_twins(tmp_path):
    save_grouped(tmp_path)
    seen = []

    def edit(network):
        seen.append(network.model.layers[0].self_attn.k_proj.weight.shape)
        network.model.layers[0].self_attn.k_proj.weight[8:] = 0

    edited = models.edit_weights(tmp_path, edit)
    assert seen == [(16, 24)], "an edit is of the published network"
    assert edited.W_K[0, :2].any()
    assert not edited.W_K[0, 2:].any()
    twin = models.random_init(tmp_path, 0)
    assert torch.equal(twin.W_V[:, 0], twin.W_V[:, 1])
    assert not torch.equal(twin.W_V[:, 1], twin.W_V[:, 2])


# Would catch rotation left out or in the wrong place, queries and keys without their norm, a norm
# that subtracts the mean, a gate that is lost, and a head that reads with another group's key; what
# precedes the first corrupt token redone from the wrong states.
@pytest.mark.parametrize(("first", "entries"), [(1, ALL), (1, slice(-1, None)), (7, ALL)])
def test_edges_and_layers_against_float64(both, first, entries):
    model, truth = both
    task, graph = a_task(model, 2, 5), of(model)
    corrupt = torch.cat([task.clean[:, :first], (task.clean[:, first:] + 7) % BOS], 1)
    task = CleanCorrupt(task.clean, corrupt, task.at[:, entries], task.answer[:, entries])
    edges = [*graph.edges()[::53], *[(u, Node("logits")) for u in graph.writers[::5]]]
    got = patching.path_patching(model, task, edges)
    for edge in edges:
        close(got[graph.index(edge)], truth.lost(task, edge))
    assert got.abs().max() > 0.01, "nothing to compare"
    flow = patching.layer_flow(model, task)
    clean, other = (truth.run(t).writes for t in (task.clean, task.corrupt))
    for source, target in ((0, 1), (1, 2), (2, 3)):
        readers = [r for r in graph.readers if r.layer == (target if target < 3 else -1)]
        change = sum(other[w] - clean[w] for w in graph.writers if w.layer == source - 1)
        shifted = truth.score(task, dict.fromkeys(readers, change))
        close(flow[source, target], truth.score(task) - shifted)


# Would catch gradients of a group where those of one head are meant: the heads of a group share a
# matrix, so that its own gradient is the sum over them.
def test_estimates_are_slopes_of_one_head_in_float64(both):
    model, truth = both
    task, graph = a_task(model, 1, 5), of(model)
    got = edge_attribution(model, task)
    clean, corrupt = (truth.run(x).writes for x in (task.clean, task.corrupt))
    for edge in graph.edges()[::41]:
        writer, reader = edge
        part = torch.zeros((), dtype=torch.float64, requires_grad=True)
        score = truth.score(task, {reader: part * (corrupt[writer] - clean[writer])})
        (slope,) = torch.autograd.grad(score.sum(), part)
        close(got[graph.index(edge)][0], -slope, 1e-4)
    assert got.abs().max() > 0.01, "nothing to compare"


# Would catch a turn in the wrong direction, of queries and keys alike, or before the norm.
@pytest.mark.parametrize("distance", [0, 1, 6])
def test_qk_matching_at_a_distance(both, distance):
    model, truth = both
    embed = truth.network.model.embed_tokens.weight.double()
    written = embed @ truth.matrix(0, 1, "v")[0] @ truth.out(0, 1)
    states = []
    for name, rows, place in (("q", embed, distance), ("k", written, 0)):
        own = getattr(truth.network.model.layers[2].self_attn, f"{name}_norm", None)
        value = rows @ truth.matrix(2, 3, name)[0]
        value = value if own is None else truth.norm(own, value)
        states.append(truth.turn(value, torch.full((len(rows),), float(place)).double()))
    matches, own = states[0] @ states[1].T, torch.arange(VOCAB)
    expected = [(matches.argmax(axis) == own).double().mean().item() for axis in (1, 0)]
    got = weights.qk_matching(model, (0, 1), (2, 3), distance)
    assert got == pytest.approx(tuple(expected), abs=1e-6)


# Would catch a fold that centres what RMSNorm does not, or leaves a scale behind.
def test_folded_weights_predict_the_same_and_hold_the_norm(both, tmp_path_factory):
    _, truth = both
    folder = tmp_path_factory.mktemp("folded")
    truth.network.save_pretrained(folder)
    folded, x = models.load(folder, fold=True), tokens(2, 9)
    expected = truth.run(x).logits.detach().log_softmax(-1)  # the unembedding is centred
    close(models.logits(folded, x).log_softmax(-1), expected, 1e-4)
    scale = truth.network.model.layers[1].input_layernorm.weight.double()
    close(folded.W_K[1, 3], scale[:, None] * truth.matrix(1, 3, "k")[0])
