"""What holds of every task, however it scores, in all that removes, patches or estimates, on many
architectures; a new kind of task is among them without a change here."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny import a_task, save_gpt2, save_grouped, save_neox

from iclutils import models
from iclutils.chapters.every_lens import question
from iclutils.interp import attribution, circuit, patching
from iclutils.interp.clean_corrupt import CleanCorrupt, baselines
from iclutils.interp.graph import Node, add_to_inputs, change_of_writes, model_graph, output_hook
from iclutils.interp.hooks import activations, at_positions
from iclutils.interp.invariants import blocks
from tools import architectures

assert question  # it has a task of its own
TASKS = [CleanCorrupt, *CleanCorrupt.__subclasses__()]
pytestmark = pytest.mark.slow
CASES = ("Gemma-2", "Granite", "Phi", "BLOOM", "Falcon, ALiBi", "EXAONE-4", "StableLM, qk-norm")
SAVED = {  # beside transformers alone: ``tests/models/test_architectures.py``
    **{case: partial(architectures.save, case) for case in CASES},
    "folded": save_gpt2,
    "one layer": partial(save_gpt2, n_layer=1, n_head=1),
    "scaled": partial(save_gpt2, scale_attn_by_inverse_layer_idx=True),
    "parallel": partial(save_neox, use_parallel_residual=True),
    # Grouped heads, rotary positions, norms of queries; two layers of two heads, for every day.
    "qwen3": partial(
        save_grouped,
        kind="qwen3",
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=() if k == "qwen3" else pytest.mark.nightly) for k in SAVED],
)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    SAVED[request.param](folder)
    return models.load(folder, fold=request.param == "folded")


def close(got, expected):
    torch.testing.assert_close(got, expected.expand_as(got), atol=1e-4, rtol=1e-4)


@st.composite
def tasks(draw):
    """Of every kind: over all tokens or choices, at many places or few of each sequence's own."""
    length, seed, narrow = draw(st.integers(4, 12)), draw(st.integers(0, 9)), draw(st.booleans())
    few, first = not draw(st.booleans()), draw(st.integers(1, length))

    def made(model):
        task = a_task(model, 3, length, seed, narrow)
        corrupt = torch.cat([task.clean[:, :first], task.corrupt[:, first:]], 1)
        task = replace(task, corrupt=corrupt, source=None)
        if few:
            at = task.at[:, [1, -1]] - torch.tensor([[0], [1], [0]])
            task = replace(task, at=at, answer=task.clean.gather(1, at + 1))
        for kind in TASKS:
            yield kind(**vars(task))

    return made


def each(examples):
    """A property of so many tasks of every kind, on every model."""

    def decorated(check):
        def run(model, made, seed):
            for task in made(model):
                check(model, task, torch.Generator().manual_seed(seed))

        ways = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}
        drawn = given(made=tasks(), seed=st.integers(0, 99))(run)
        return settings(max_examples=examples, **ways)(drawn)

    return decorated


def picked(items, count, generator):
    return [items[i] for i in torch.randperm(len(items), generator=generator)[:count].tolist()]


def parts(graph, generator):
    """Sets of nodes, more than run one at a time, and edges, one of them into the logits."""
    nodes = picked(list(graph.writers[1:]), 9, generator)
    sets = [[node] for node in nodes] + [[], nodes[:3]]
    last = (picked(list(graph.writers), 1, generator)[0], Node("logits"))
    return sets, [last, *picked(graph.edges(), 4, generator)]


def without(graph, edges):
    return graph.exists & ~graph.mask(edges)


def found(model, task, seed=0):
    """Nats, (item, batch), of all that patches and of all that estimates."""
    graph = model_graph(model)
    sets, edges = parts(graph, torch.Generator().manual_seed(seed))
    index = tuple(zip(*map(graph.index, edges), strict=True))
    kept = torch.stack([graph.exists, *(without(graph, edges[:n]) for n in (1, 3, 5))])
    return {
        "resample": patching.ablate(model, task, sets),
        "zero": patching.ablate(model, task, sets, "zero"),
        "mean": patching.ablate(model, task, sets, "mean"),
        "edges": patching.path_patching(model, task, edges)[index],
        "flow": patching.layer_flow(model, task).flatten(0, 1),
        "circuit": circuit.scores(model, task, kept),
        "edge slopes": attribution.edge_attribution(model, task).flatten(0, 1),
        "averaged": attribution.edge_attribution(model, task, 2).flatten(0, 1),
        "node slopes": attribution.node_attribution(model, task, 2),
    }


# Would catch a score that is compared with a baseline of another quantity.
@each(2)
def test_the_clean_run_scores_the_baseline(model, task, generator):
    logits = models.logits(model, task.clean)[torch.arange(len(task))[:, None], task.at]
    clean = baselines(model, task)[0]
    close(clean, task.score(logits))
    close(patching.CleanRun(model, task).score, clean)


@each(2)
def test_removing_nothing_costs_nothing(model, task, generator):
    clean, nothing = baselines(model, task)[0], torch.zeros(len(task))
    assert not patching.ablate(model, task, [[]]).any()
    assert not patching.path_patching(model, task, []).any()
    got = found(model, replace(task, corrupt=task.clean))
    close(got["circuit"], clean)
    for name in ("resample", "edges", "flow", "edge slopes", "node slopes"):
        close(got[name], nothing)


# The tokens at the scored places are the same on both sides: what remains there is corrupt.
@each(2)
def test_removing_everything_leaves_the_corrupt_run(model, task, generator):
    (clean, corrupt), graph = baselines(model, task), model_graph(model)
    close(clean - patching.ablate(model, task, [graph.writers[1:]])[0], corrupt)
    kept = torch.stack([torch.zeros_like(graph.exists), graph.exists])
    kept[1, :, -1] = False
    close(circuit.scores(model, task, kept), corrupt)


# A circuit is cut with hooks of its own. Would catch a reader that is redone from the wrong stream,
# a writer left out or counted twice, an effect of one lens in another one's unit.
@each(2)
def test_removed_nodes_and_patched_edges_are_circuits_without_them(model, task, generator):
    graph, clean, layer = model_graph(model), baselines(model, task)[0], model.cfg.n_layers - 1
    sets, edges = parts(graph, generator)
    cut = [[(u, v) for u, v in graph.edges() if u in some] for some in sets]
    block = [(u, v) for u, v in graph.edges() if (u.layer, v.layer) == (layer - 1, layer)]
    kept = torch.stack([without(graph, x) for x in [*cut, *([edge] for edge in edges), block]])
    expected = circuit.scores(model, task, kept)
    close(clean - patching.ablate(model, task, sets), expected[: len(sets)])
    index = tuple(zip(*map(graph.index, edges), strict=True))
    lost, flow = patching.path_patching(model, task, edges), patching.layer_flow(model, task)
    close(clean - lost[index], expected[len(sets) : -1])
    close(clean - flow[layer, layer], expected[-1])
    assert not lost[~graph.mask(edges)].any()
    assert not flow.permute(2, 1, 0).triu(1).any(), "a target comes after its source"
    assert (expected - clean).abs().max() > 1e-2, "nothing to compare"


@each(1)
def test_sequences_do_not_mix_and_their_order_does_not_matter(model, task, generator):
    some = torch.randperm(len(task), generator=generator)
    some = some[: int(torch.randint(1, 4, (), generator=generator))]
    part = found(model, task[some])
    for name, values in found(model, task).items():
        if name != "mean":  # over the batch
            close(part[name], values[:, some])


# Would catch what depends on how much fits into memory.
@each(1)
def test_chunks_give_what_one_pass_gives(model, task, generator):
    seed = int(torch.randint(99, (), generator=generator))
    expected, rows = found(model, task, seed), 3 * task.clean.numel()
    with pytest.MonkeyPatch.context() as patch:
        for name, most in {"patching": rows, "circuit": 1, "attribution": 1}.items():
            patch.setattr(f"iclutils.interp.{name}.ROWS", most)
        for name, values in found(model, task, seed).items():
            close(values, expected[name])


# Would catch gradients of a group where those of one head are meant, and those of another reader.
@each(1)
def test_the_slope_of_an_edge_is_how_fast_the_score_is_lost(model, task, generator):
    graph = model_graph(model)
    _, edges = parts(graph, generator)
    index = tuple(zip(*map(graph.index, edges), strict=True))
    names = {*map(output_hook, graph.writers)}
    runs = [activations(model, tokens, names) for tokens in (task.clean, task.corrupt)]
    slopes = []
    for writer, reader in edges:
        share = torch.zeros(len(task), 1, 1, requires_grad=True)
        change = share * change_of_writes(model, *runs, [writer])
        hooks = [*add_to_inputs(model, {reader: change}), at_positions(task.at)]
        score = task.score(model.run_with_hooks(task.clean, fwd_hooks=hooks))
        slopes.append(-torch.autograd.grad(score.sum(), share)[0][:, 0, 0])
    close(attribution.edge_attribution(model, task)[index], torch.stack(slopes))


@each(2)
def test_the_slope_of_a_node_is_that_of_its_edges(model, task, generator):
    if any(block.normed for block in blocks(model)):
        return  # what the heads write changes less than their outputs, or more
    edges = attribution.edge_attribution(model, task, 2).sum(1)[1:]
    close(attribution.node_attribution(model, task, 2), edges)
