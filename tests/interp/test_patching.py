"""Patches against hooked passes; against float64 in ``test_grouped``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patched import patch_edges
from refusals import must_refuse
from tiny import a_task, save_gpt2, save_grouped, save_neox, tiny_gpt2, tokens
from torch import Tensor

from iclutils import models
from iclutils.interp import patching
from iclutils.interp.clean_corrupt import CleanCorrupt, baselines
from iclutils.interp.graph import Graph, Node, head, of
from iclutils.interp.hooks import run_with_hooks
from iclutils.interp.readout import log_prob
from iclutils.models import TransformerBridge, cached, get_act_name


def close(got: Tensor, expected: Tensor, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)


def some(task: CleanCorrupt, *entries: int) -> CleanCorrupt:
    """Scored at a few entries alone, so that the last layer forms no keys and values."""
    at = list(entries)
    return replace(task, at=task.at[:, at], answer=task.answer[:, at], source=None)


def lost(model: TransformerBridge, task: CleanCorrupt, edges: list) -> Tensor:
    return baselines(model, task)[0] - patch_edges(model, task, edges)


def check_edges(model: TransformerBridge, task: CleanCorrupt, every: int = 1) -> None:
    """Every n-th edge, and some into the logits, against one hooked pass each."""
    graph, plain = of(model), patching.CleanRun(model, task).plain
    edges = {*graph.edges()[::every], *[(w, Node("logits")) for w in graph.writers[::3]]}
    got = patching.path_patching(model, task, None if plain else list(edges))
    assert got.shape == (*graph.exists.shape, len(task))
    assert not got[~graph.exists].any()
    clean = baselines(model, task)[0]
    for edge in edges:
        close(got[graph.index(edge)], clean - patch_edges(model, task, [edge]))
    assert got.abs().max() > 1e-2, "the edges have no effect to compare"


# Would catch a part of the reader that is not redone, or redone from the wrong stream; a last layer
# that mixes up what it attends to where no keys are formed, a bias of the keys that does not
# cancel, the positions of one sequence used for all, or an answer read from the choices.
def test_every_edge_of_a_gpt2_is_what_a_hooked_pass_says(gpt2: TransformerBridge) -> None:
    many, narrow = (a_task(gpt2, 2, 11, narrow=n) for n in (False, True))
    few = some(a_task(gpt2, 2, 7), 1, 4)
    uneven = replace(few, at=few.at - torch.tensor([[0], [3]]))
    free = replace(uneven, choices=torch.arange(4).expand(2, -1))
    assert many.at.shape[1] > patching.FEW
    for task, every in ((many, 17), (narrow, 17), (uneven, 13), (free, 23)):
        assert patching.CleanRun(gpt2, task).plain
        check_edges(gpt2, task, every)


# Would catch a shape that only fits three layers of four heads, results that depend on how many
# patches fit into memory, and edges that were not asked for.
def test_shapes_chunks_and_chosen_edges(
    gpt2: TransformerBridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, changes in enumerate(({"n_layer": 1}, {"n_head": 1, "n_layer": 2})):
        small = tiny_gpt2(tmp_path / str(i), **changes)
        check_edges(small, a_task(small, 2, 7), 2)
    task, graph = a_task(gpt2, 2, 7), of(gpt2)
    whole = patching.path_patching(gpt2, task)
    monkeypatch.setattr(patching, "ROWS", 3 * task.clean.numel())
    monkeypatch.setattr(patching, "LOGITS", 1)
    chosen = [(Node("embed"), Node("q", 1, 2)), (head(0, 1), Node("q", 1, 2))]
    for edges in (graph.edges()[::3], chosen, []):
        got, mask = patching.path_patching(gpt2, task, edges), graph.mask(edges)
        close(got[mask], whole[mask])
        assert not got[~mask].any()


# Would catch an engine that trusts the configuration (folded weights and rotary positions are plain
# attention, scores divided by the layer's number are not), and a fallback that patches another
# reader.
def test_what_is_plain_is_measured_and_the_rest_goes_by_hooks(
    neox: TransformerBridge, tmp_path: Path
) -> None:
    tiny_gpt2(tmp_path / "plain")
    folded = models.load(tmp_path / "plain", fold=True)
    for plain in (folded, neox):
        assert patching.CleanRun(plain, a_task(plain, 2, 7)).plain
        check_edges(plain, a_task(plain, 2, 7), 23)
    save_neox(tmp_path / "parallel", use_parallel_residual=True)
    parallel = models.load(tmp_path / "parallel")
    assert of(parallel).parallel
    scaled = tiny_gpt2(tmp_path / "scaled", scale_attn_by_inverse_layer_idx=True)
    for model, task in (
        (parallel, a_task(parallel, 2, 7)),
        (scaled, some(a_task(scaled, 2, 7), 2)),
    ):
        assert not patching.CleanRun(model, task).plain
        check_edges(model, task, 37)
        readers = [r for r in of(model).readers if r.layer == 1]
        flow = patching.layer_flow(model, task)
        close(flow[0, 1], lost(model, task, [(Node("embed"), r) for r in readers]))


# The residual stream is the sum of what is written: with every writer corrupt at the logits, the
# corrupt run is left. Would catch a writer that is missing or counted twice, a baseline that is
# not the clean run, sequences that mix, and a hook that reaches back.
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(length=st.integers(2, 12), seed=st.integers(0, 9))
def test_invariants(
    gpt2: TransformerBridge, neox: TransformerBridge, length: int, seed: int
) -> None:
    task = a_task(gpt2, 3, length, seed)
    every = [(writer, Node("logits")) for writer in of(gpt2).writers]
    close(patch_edges(gpt2, task, every), baselines(gpt2, task)[1], 2e-5, 1e-4)
    same = replace(task, corrupt=task.clean)
    assert patching.path_patching(gpt2, same, of(gpt2).edges()[::7]).abs().max() < 2e-5
    order = torch.tensor([2, 0, 1])
    flow, turned = (patching.layer_flow(gpt2, t) for t in (task, task[order]))
    assert not flow.permute(2, 1, 0).triu(1).any(), "a target comes after its source"
    close(turned, flow[..., order], 2e-5, 1e-4)
    for model in (gpt2, neox):
        assert patching.backward_flow(model, a_task(model, 1, length, seed)) == 0


# One hooked pass for each set is the truth; few sets are run so. Would catch a layer that is redone
# from the wrong stream, an MLP that still reads the removed head, positions that do not match.
@pytest.mark.parametrize("how", ["resample", "mean", "zero"])
@pytest.mark.parametrize("kind", ["gpt2", "neox", "llama"])
def test_single_nodes_are_removed_as_by_hooks(
    kind: str, how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"gpt2": save_gpt2, "neox": save_neox, "llama": save_grouped}
    saved[kind](tmp_path)
    model = models.load(tmp_path)
    task, last = a_task(model, 2, 7, narrow=True), model.cfg.n_layers - 1
    if kind == "neox":  # the way of a model that is not known
        monkeypatch.setattr(patching.CleanRun, "_is_plain", lambda run, names: False)
    nodes = [n for n in of(model).writers if n.kind != "embed"]
    sets = [[node] for node in nodes] + [[], [head(last, 0), Node("mlp", last)], nodes[2:7]]
    got = patching.ablate(model, task, sets, how)
    monkeypatch.setattr(patching, "FEW", len(sets))
    expected = patching.ablate(model, task, sets, how)
    close(got, expected, 2e-5, 1e-4)
    assert (expected - baselines(model, task)[0]).abs().max() > 1e-2, "nothing to compare"
    monkeypatch.setattr(patching, "FEW", 8)
    monkeypatch.setattr(patching, "ROWS", 1)
    close(patching.ablate(model, task, sets, how), expected, 2e-5, 1e-4)


@pytest.mark.parametrize(("sources", "target"), [([(0, 1)], (2, 3)), ([(0, 0), (1, 2)], (2, 0))])
def test_patched_keys_are_recomputed_by_hand(
    gpt2: TransformerBridge, sources: list, target: tuple[int, int]
) -> None:
    x, other, (layer, h) = tokens(2, 10), tokens(2, 10, seed=1), target
    (_, clean), (_, corrupt) = (gpt2.run_with_cache(each) for each in (x, other))
    change = sum(
        (corrupt["z", la] - clean["z", la])[:, :, i] @ gpt2.W_O[la, i] for la, i in sources
    )
    block = gpt2.blocks[layer]
    stream = block.ln1(clean["resid_pre", layer] + change)
    k = stream @ block.attn.W_K[h] + block.attn.b_K[h]
    scores = clean["q", layer][:, :, h] @ k.mT / k.shape[-1] ** 0.5
    later = torch.ones(10, 10, dtype=torch.bool).triu(1)
    got = patching.patch_key_input(gpt2, x, sources, target, other)
    close(got, scores.masked_fill(later, -torch.inf).softmax(-1), 1e-5, 1e-4)
    assert (got - clean["pattern", layer][:, h]).abs().max() > 1e-2, "nothing to compare"
    assert not gpt2.cfg.use_split_qkv_input


def loop(model: TransformerBridge, x: Tensor, scored: Tensor, edits: list) -> Tensor:
    """Change of log p by one hooked full pass for each (name, where, value)."""

    def log_p(*hooks: tuple[str, Callable]) -> Tensor:
        return log_prob(run_with_hooks(model, x, hooks)[0], x)[0, scored]

    def edit(name: str, where: tuple, value: Tensor) -> tuple[str, Callable]:
        def change(out: Tensor, hook: object) -> Tensor:
            out = out.clone()
            out[where] = value
            return out

        return name, change

    return torch.stack([log_p(edit(*each)) for each in edits]) - log_p()


# Would catch positions that lend patched instead of clean keys, patches of one chunk that mix,
# and entries before a patch that change.
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), length=st.integers(4, 30), together=st.integers(1, 5))
def test_the_position_sweep_equals_the_loop(
    gpt2: TransformerBridge,
    neox: TransformerBridge,
    data: st.DataObject,
    length: int,
    together: int,
) -> None:
    model = data.draw(st.sampled_from([gpt2, gpt2, neox]))
    place = st.integers(0, length - 1)
    positions, sources = (
        torch.tensor(data.draw(st.lists(place, min_size=3, max_size=7)))[:3] for _ in range(2)
    )
    scored = torch.tensor(sorted(data.draw(st.sets(st.integers(0, length - 2), min_size=1))))
    x = tokens(1, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patching, "TOGETHER", together)
        got = patching.mlp_position_sweep(model, x, positions, sources, scored)
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, x, names)
    pairs = list(zip(positions.tolist(), sources.tolist(), strict=True))
    edits = [(name, (0, to), cache[name][0, frm]) for name in names for to, frm in pairs]
    close(got, loop(model, x, scored, edits).view_as(got), 3e-5, 1e-4)
    if model is gpt2:
        assert not got[:, scored < positions[:, None]].any(), "no patch reaches back"
        assert not got[-1][scored != positions[:, None]].any(), "after the last layer, one entry"


def test_the_head_sweep_equals_the_loop(gpt2: TransformerBridge, neox: TransformerBridge) -> None:
    x, scored, zero = tokens(1, 24), torch.tensor([14, 15, 20]), torch.zeros(())
    for model in (gpt2, neox):
        got = patching.head_ablation_sweep(model, x, scored)
        edits = [
            (get_act_name("z", layer), (slice(None), slice(None), h), zero)
            for layer in range(model.cfg.n_layers)
            for h in range(4)
        ]
        close(got, loop(model, x, scored, edits).view_as(got), 2e-5, 1e-4)
        assert got.abs().max() > 1e-2


def test_mistakes_are_refused(gpt2: TransformerBridge) -> None:
    task, x, note = a_task(gpt2, 2, 7), tokens(1, 19), torch.arange(9, 18)
    sweep, far = patching.mlp_position_sweep, torch.tensor([19])
    must_refuse(
        (lambda: patching.path_patching(gpt2, task, [(head(1, 0), Node("q", 1, 1))]), "come later"),
        (lambda: Graph(2, 2).index((head(2, 0), Node("logits"))), "Unknown writer"),
        (lambda: patching.patch_key_input(gpt2, x, [(1, 0)], (1, 1), x), "come later"),
        (lambda: patching.ablate(gpt2, task, [[Node("embed")]]), "Only heads and MLP"),
        (lambda: sweep(gpt2, x, far, note[:1], note[:1]), "both inside the sequence"),
        (lambda: sweep(gpt2, x.repeat(2, 1), note, note - 9, note), "Need one sequence"),
        (lambda: patching.head_ablation_sweep(gpt2, x, torch.tensor([18])), "predict one of its"),
    )
