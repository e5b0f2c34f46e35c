"""Planted faults by hand, signs against SciPy and scikit-learn, causes told from consequences."""

import numpy as np
import pytest
import scipy.stats
import torch
from random_layers import seeded
from sklearn.covariance import LedoitWolf
from tiny import a_task

from iclutils.chapters.attention_circuits import failures
from iclutils.chapters.attention_circuits.failures import KINDS, Fault
from iclutils.interp import graph
from iclutils.interp.attribution import direct_logits
from iclutils.interp.clean_corrupt import copying
from iclutils.interp.graph import Node, component_outputs, head
from iclutils.interp.hooks import activations
from iclutils.models import get_act_name

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


def test_signs_by_another_way(model):
    """Entropy by SciPy, effects by ``direct_logits``, distances by hand."""
    fitted, task = (copying(model, n, 6, seeded()) for n in (10, 4))
    covariances = failures.fit_covariances(model, fitted)
    seen = failures.symptoms(model, task, covariances=covariances)
    writers, direct = graph.model_graph(model).writers, direct_logits(model, task)
    assert [*seen] == [node for node in writers if node.kind != "embed"]
    names = [get_act_name("pattern", layer) for layer in range(model.cfg.n_layers)]
    cache = activations(model, task.clean, names)
    rows = torch.arange(len(task))[:, None]
    for node in (head(1, 2), Node("mlp", 1)):
        write = component_outputs(model, task.clean, [node])[node][rows, task.at].double()
        usual = component_outputs(model, fitted.clean, [node])[node]
        usual = usual[torch.arange(10)[:, None], fitted.at].mean(1).double().numpy()
        away = write.mean(1).numpy() - usual.mean(0)
        spread = np.linalg.inv(LedoitWolf().fit(usual).covariance_)
        expected = {
            "length": write.norm(dim=-1).mean(-1).numpy(),
            "direct_effect": direct[writers.index(node)].abs().numpy(),
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
            u: dict(zip(("length", "direct_effect"), x[:, 2 * i :].T, strict=False))
            for i, u in enumerate(nodes)
        }
        for x in (cases, healthy)
    ]
    odd = failures.anomalous_nodes(*sides)
    p = [scipy.stats.mannwhitneyu(cases[:, k], healthy[:, k]).pvalue for k in range(5)] + [1.0]
    flagged = (scipy.stats.false_discovery_control(p) <= 0.05).reshape(3, 2).any(1)
    assert odd == [node for node, yes in zip(nodes, flagged, strict=True) if yes]
    assert nodes[1] in odd


@pytest.fixture(scope="module")
def bench(wired):
    """Cases to break, and what is usual."""
    fitted, other, cases = (copying(wired, n, 11, seeded(i)) for i, n in enumerate((40, 40, 20)))
    covariances = failures.fit_covariances(wired, fitted)
    return cases, covariances, failures.symptoms(wired, other, covariances=covariances)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cause_is_told_from_its_consequences(wired, bench, kind):
    """A cut is the reader's problem; what reads from an overactive head is anomalous, too."""
    cases, *usual = bench
    hooks = failures.plant(wired, cases, FAULTS[kind])
    found = failures.diagnose(wired, cases, hooks, *usual)
    assert set(found.blamed) == FAULTS[kind].parts
    if kind == "overactive":
        assert SECOND in found.anomalous
