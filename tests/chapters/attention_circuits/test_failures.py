"""Planted faults by hand, signs against SciPy and scikit-learn, causes told from consequences."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from random_layers import seeded
from sklearn.covariance import LedoitWolf
from tiny import a_task
from torch.testing import assert_close
from wired import save_wired

from iclutils.chapters.attention_circuits import failures
from iclutils.chapters.attention_circuits.failures import KINDS, Fault
from iclutils.chapters.attention_circuits.interactions import direct_logits
from iclutils.interp import graph
from iclutils.interp.clean_corrupt import copying, scored_logits
from iclutils.interp.graph import Node, component_outputs, head
from iclutils.interp.hooks import ablate_heads
from iclutils.models import cached, get_act_name, load

FIRST, SECOND = head(0, 0), head(1, 0)
EDGE = (FIRST, Node("k", 1, 0))
FAULTS = {kind: Fault(kind, (SECOND,)) for kind in ("even", "sink", "misrouted")}
FAULTS |= {"cut": Fault("cut", (FIRST,), (EDGE[1],)), "overactive": Fault("overactive", (FIRST,))}


@pytest.mark.parametrize("kind", ["even", "sink", "misrouted"])
def test_rows_of_attention_by_hand(model, kind):
    task, name = a_task(model, 4), get_act_name("pattern", 0)
    fault = Fault(kind, (head(0, 1), head(0, 3)))
    before, after = (
        failures.run_with_hooks(model, task.clean, hooks, [name])[1][name].numpy()
        for hooks in ([], failures.plant(model, task, fault))
    )
    for h in range(model.cfg.n_heads):
        expected = before[:, h].copy()
        for t in range(expected.shape[1]) if h in (1, 3) else ():
            expected[:, t] = 0
            for s in range(t + 1):
                if kind == "even":
                    expected[:, t, s] = 1 / (t + 1)
                else:
                    place = 0 if kind == "sink" else max(s - 1, 0)
                    expected[:, t, place] += before[:, h, t, s]
        np.testing.assert_allclose(after[:, h], expected, atol=1e-6)


def test_all_edges_cut_is_the_head_ablated(model):
    """Cuts see what is written in the run, so that an overactive writer agrees, too."""
    task, writer = a_task(model, 4), head(0, 2)
    readers = tuple(v for u, v in graph.of(model).edges() if u == writer)
    cut = failures.plant(model, task, Fault("cut", (writer,), readers))
    loud = failures.plant(model, task, Fault("overactive", (writer,)))
    ablated = scored_logits(
        model, task, ablate_heads(model, task.clean, [(0, 2)], "mean", task.clean)
    )
    for hooks in (cut, [*loud, *cut]):
        assert_close(failures.score(model, task, hooks), task.score(ablated), atol=1e-5, rtol=0)


def test_signs_by_another_way(model):
    """Entropy by SciPy, effects by ``direct_logits``, distances by hand."""
    fitted, task = (copying(model, n, 6, seeded()) for n in (10, 4))
    covariances = failures.fit_covariances(model, fitted)
    seen = failures.signs(model, task, covariances=covariances)
    writers, direct = graph.of(model).writers, direct_logits(model, task)
    assert [*seen] == [node for node in writers if node.kind != "embed"]
    names = [get_act_name("pattern", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, task.clean, names)
    rows = torch.arange(len(task))[:, None]
    for node in (head(1, 2), Node("mlp", 1)):
        write = component_outputs(model, task.clean, [node])[node][rows, task.at].double()
        usual = component_outputs(model, fitted.clean, [node])[node]
        usual = usual[torch.arange(10)[:, None], fitted.at].mean(1).double().numpy()
        away = write.mean(1).numpy() - usual.mean(0)
        spread = np.linalg.inv(LedoitWolf().fit(usual).covariance_)
        expected = {
            "length": write.norm(dim=-1).mean(-1).numpy(),
            "push": direct[writers.index(node)].abs().numpy(),
            "distance": np.sqrt(np.einsum("ci,ij,cj->c", away, spread, away)),
        }
        if node.kind == "head":
            pattern = cache[names[1]][rows, node.head, task.at].double().numpy()  # case, entry, src
            even = np.log(task.at.numpy() + 1)
            expected["entropy"] = (scipy.stats.entropy(pattern, axis=-1) / even).mean(-1)
            expected["first"] = pattern[..., 0].mean(-1)
            source = task.source.numpy()[..., None]
            expected["source"] = np.take_along_axis(pattern, source, -1).mean((1, 2))
        assert set(seen[node]) == set(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(seen[node][name], values, atol=1e-5, rtol=1e-4)


def test_anomalies_are_those_of_scipy_one_by_one():
    cases, healthy = (torch.randn(n, 6, generator=seeded(n)).double() for n in (15, 20))
    cases[:, 2] += 3
    cases[:, 5] = healthy[:, 5] = 1  # never varies
    nodes = head(0, 0), head(0, 1), Node("mlp", 0)
    sides = [
        {
            u: dict(zip(("length", "push"), x[:, 2 * i :].T, strict=False))
            for i, u in enumerate(nodes)
        }
        for x in (cases, healthy)
    ]
    odd = failures.anomalous(*sides)
    p = [scipy.stats.mannwhitneyu(cases[:, k], healthy[:, k]).pvalue for k in range(5)] + [1.0]
    flagged = (scipy.stats.false_discovery_control(p) <= 0.05).reshape(3, 2).any(1)
    assert odd == [node for node, yes in zip(nodes, flagged, strict=True) if yes]
    assert nodes[1] in odd


@pytest.mark.parametrize("kind", ["even", "overactive", "cut"])
def test_on_healthy_inputs_a_fault_shows_where_it_sits(model, kind):
    """Otherwise consequences would be called causes."""
    task = copying(model, 10, 6, seeded())
    fault = Fault(kind, (head(0, 1),), (Node("k", 1, 2),) if kind == "cut" else ())
    hooks = failures.plant(model, task, fault)
    own = [*hooks, *failures.healthy_inputs(model, task)]
    healthy, local, spread = (failures.signs(model, task, some) for some in ([], own, hooks))
    moved, afar = (
        {u for u in healthy for k in healthy[u] if (x[u][k] - healthy[u][k]).abs().max() > 1e-3}
        for x in (local, spread)
    )
    assert moved == fault.parts
    assert len(afar) > len(moved)


def make_bench(model, healthy, cases):
    generator = seeded(1)
    fitted, other, broken = (copying(model, n, 11, generator) for n in (healthy, healthy, cases))
    covariances = failures.fit_covariances(model, fitted)
    usual = failures.signs(model, other, covariances=covariances)
    return SimpleNamespace(model=model, covariances=covariances, usual=usual, cases=broken)


@pytest.fixture(scope="module")
def bench(wired):
    return make_bench(wired, 40, 20)


def diagnosis(bench, fault):
    hooks = failures.plant(bench.model, bench.cases, fault)
    return failures.diagnose(bench.model, bench.cases, hooks, bench.covariances, bench.usual)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cause_is_told_from_its_consequences(bench, kind):
    """A cut is the reader's problem; what reads from an overactive head is anomalous, too."""
    found = diagnosis(bench, FAULTS[kind])
    assert set(found.blamed) == FAULTS[kind].parts
    if kind == "overactive":
        assert SECOND in found.anomalous


def test_partners_are_both_named(tmp_path):
    """Two induction heads that stand in for each other: one alone brings nearly all back."""
    save_wired(tmp_path, induction=((1, 0), (1, 2)), heads=3)
    pair = head(1, 0), head(1, 2)
    assert set(diagnosis(make_bench(load(tmp_path), 24, 12), Fault("sink", pair)).blamed) == {*pair}
