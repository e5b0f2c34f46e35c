"""Component statistics against scikit-learn and SciPy; causes told from consequences."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from random_layers import seeded
from sklearn.covariance import LedoitWolf
from wired import save_wired

from iclutils.chapters.attention_circuits import diagnosis
from iclutils.chapters.attention_circuits.failures import KINDS, Fault, measure_cases, plant
from iclutils.chapters.attention_circuits.interactions import direct_logits
from iclutils.interp.clean_corrupt import copying
from iclutils.interp.graph import Node, component_outputs, head, of
from iclutils.models import load

FIRST, SECOND = head(0, 0), head(1, 0)
FAULTS = {
    "even": Fault("even", (FIRST,), (), 0.95),
    "sink": Fault("sink", (FIRST,), (), 0.97),
    "cut": Fault("cut", (FIRST,), (Node("k", 1, 0),)),
    "misrouted": Fault("misrouted", (SECOND,)),
    "overactive": Fault("overactive", (FIRST,)),
}


@pytest.fixture(scope="module")
def bench(wired):
    return make_bench(wired, 40, 20)


def make_bench(model, healthy, cases):
    generator = seeded(1)
    fitted, other, broken = (copying(model, n, 11, generator) for n in (healthy, healthy, cases))
    spread = diagnosis.fit_covariances(model, fitted)
    healthy = diagnosis.component_statistics(model, other, spread)
    return SimpleNamespace(model=model, covariances=spread, healthy=healthy, cases=broken)


def test_statistics_by_another_way(model):
    """Length, effect and entropy as others see them, distance by hand; only columns in order
    agree."""
    generator = seeded()
    fitted, task = (copying(model, 10, 6, generator) for _ in range(2))
    covariances = diagnosis.fit_covariances(model, fitted)
    columns = diagnosis.component_statistics(model, task, covariances)
    heads = [node for node in columns if node.kind == "head"]
    assert [values.shape[1] for values in columns.values()] == [3 + (n in heads) for n in columns]
    seen, writers = measure_cases(model, task, heads), of(model).writers
    direct = direct_logits(model, task)
    for k, node in enumerate(heads):
        others = seen["norm"][:, k], direct[writers.index(node)].abs(), seen["entropy"][:, k]
        own = columns[node][:, [0, 1, 3]].float()
        torch.testing.assert_close(own, torch.stack(others, 1), atol=1e-5, rtol=1e-4)
    for node in (heads[2], Node("mlp", 1)):

        def mean_write(some, node=node):
            write = component_outputs(model, some.clean, [node])[node]
            return write[torch.arange(10)[:, None], some.at].mean(1).double().numpy()

        spread = LedoitWolf().fit(mean_write(fitted))
        moved = mean_write(task) - mean_write(fitted).mean(0)
        wanted = np.sqrt(np.einsum("ci,ij,cj->c", moved, np.linalg.inv(spread.covariance_), moved))
        np.testing.assert_allclose(columns[node][:, 2], wanted, rtol=1e-4)


def test_anomalies_are_those_of_scipy_one_by_one():
    generator = seeded()
    cases, healthy = (torch.randn(n, 6, generator=generator).double() for n in (15, 20))
    cases[:, 2] += 3
    cases[:, 5] = healthy[:, 5] = 1  # never varies
    nodes = head(0, 0), head(0, 1), Node("mlp", 0)
    odd = diagnosis.anomalous(
        *(dict(zip(nodes, x.split(2, 1), strict=True)) for x in (cases, healthy))
    )
    p = [scipy.stats.mannwhitneyu(cases[:, k], healthy[:, k]).pvalue for k in range(5)] + [1.0]
    flagged = (scipy.stats.false_discovery_control(p) <= 0.05).reshape(3, 2).any(1)
    assert odd == [node for node, one in zip(nodes, flagged, strict=True) if one]
    assert nodes[1] in odd


@pytest.mark.parametrize("kind", ["even", "overactive", "cut"])
def test_on_healthy_inputs_a_fault_shows_where_it_sits(model, kind):
    """Otherwise consequences would be called causes."""
    task = copying(model, 10, 6, seeded())
    covariances = diagnosis.fit_covariances(model, task)
    fault = Fault(kind, (head(0, 1),), (Node("k", 1, 2),) if kind == "cut" else ())
    hooks = plant(model, task, [fault])
    own = [*hooks, *diagnosis.healthy_inputs(model, task)]
    healthy, local, spread = (
        diagnosis.component_statistics(model, task, covariances, h) for h in ([], own, hooks)
    )
    moved, afar = (
        {node for node in healthy if (side[node] - healthy[node]).abs().max() > 1e-3}
        for side in (local, spread)
    )
    assert moved == fault.parts
    assert len(afar) > len(moved)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cause_is_told_from_its_consequences(bench, kind):
    """Planted in 0.0, the induction head is anomalous too; a cut is the reader's problem."""
    fault = FAULTS[kind]
    hooks = plant(bench.model, bench.cases, [fault])
    found = diagnosis.explain(bench.model, bench.cases, hooks, bench.covariances, bench.healthy)
    causes = {p.component: p for p in found if p.confirmed}
    assert set(causes) == fault.parts
    assert all(p.restored > 0.8 and p.local for p in causes.values())
    if fault.parts == {FIRST}:
        (rest,) = (p for p in found if p.component == SECOND)
        assert not rest.local
        assert np.isnan(rest.restored)
    depth = [of(bench.model).writers.index(p.component) for p in found]
    assert depth == sorted(depth)


def test_partners_are_both_named(tmp_path):
    """Two induction heads that stand in for each other: one alone brings nearly all back."""
    save_wired(tmp_path, induction=((1, 0), (1, 2)), heads=3)
    bench = make_bench(load(tmp_path), 24, 12)
    hooks = plant(bench.model, bench.cases, [Fault("sink", (head(1, 0), head(1, 2)))])
    found = diagnosis.explain(bench.model, bench.cases, hooks, bench.covariances, bench.healthy)
    assert {p.component for p in found if p.confirmed} == {head(1, 0), head(1, 2)}
