"""Vital signs against sklearn and scipy; causes told from consequences; fixes on held-out cases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import LedoitWolf
from tiny import save_neox, tiny_gpt2
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.circuits.diagnosis import anomalies, confirm, explain
from iclutils.chapters.circuits.edits import healthy_inputs, score
from iclutils.chapters.circuits.faults import KINDS, Fault, one_earlier, plant
from iclutils.chapters.circuits.repair import (
    SUGGESTED,
    evaluate,
    one_later,
    repair,
    sharpened,
    without_first,
)
from iclutils.chapters.circuits.symptoms import Reference, symptoms
from iclutils.chapters.circuits.vitals import Cloud, components, items, usual, vitals
from iclutils.interp.clean_corrupt import CleanCorrupt, baselines, copying, share
from iclutils.interp.graph import Node, head
from iclutils.models import TransformerBridge, load

FIRST, SECOND = head(0, 0), head(1, 0)
FAULTS = {
    "even": Fault("even", (FIRST,), (), 0.95),
    "sink": Fault("sink", (FIRST,), (), 0.97),
    "cut": Fault("cut", (FIRST,), (Node("k", 1, 0),)),
    "misrouted": Fault("misrouted", (SECOND,)),
    "overactive": Fault("overactive", (FIRST,)),
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    folder: Path = tmp_path_factory.mktemp("neox")
    save_neox(folder)
    return load(folder)


@dataclass
class Bench:
    model: TransformerBridge
    clouds: dict[Node, Cloud]
    vitals: torch.Tensor
    reference: Reference
    cases: CleanCorrupt
    held_out: CleanCorrupt


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder: Path = tmp_path_factory.mktemp("wired")
    save_wired(folder)
    model = load(folder)
    generator = torch.Generator().manual_seed(1)
    fitted, healthy, cases, held_out = (copying(model, n, 11, generator) for n in (40, 40, 20, 20))
    clouds = usual(model, fitted)
    reference = Reference.from_healthy(symptoms(model, healthy, [FIRST, SECOND]))
    return Bench(model, clouds, vitals(model, healthy, clouds), reference, cases, held_out)


@pytest.mark.parametrize(("cases", "width"), [(12, 30), (60, 5)])
def test_the_cloud_is_that_of_sklearn(cases: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(cases, width, generator=generator) * torch.arange(1, width + 1)
    new = torch.randn(7, width, generator=generator) * 3
    wanted = np.sqrt(LedoitWolf().fit(x.double().numpy()).mahalanobis(new.double().numpy()))
    np.testing.assert_allclose(Cloud.fit(x).distance(new).numpy(), wanted, rtol=1e-8)


def test_a_component_that_always_writes_the_same_has_distance_zero() -> None:
    x = torch.ones(9, 4)
    assert Cloud.fit(x).distance(x).abs().max() == 0
    assert Cloud.fit(x).distance(x + 1).min() > 1e3
    with pytest.raises(IclError, match="eight"):
        Cloud.fit(x[:7])


@pytest.mark.parametrize("which", ["gpt2", "neox"])
def test_vitals_and_symptoms_see_the_same(which: str, request: pytest.FixtureRequest) -> None:
    """Two ways to the length, effect and entropy of a head; only columns in order agree."""
    model = request.getfixturevalue(which)
    b = copying(model, 10, 6, torch.Generator().manual_seed(0))
    columns, what = vitals(model, b, usual(model, b)), items(model)
    heads = [n for n in components(model) if n.kind == "head"]
    seen = symptoms(model, b, heads)
    for k, node in enumerate(heads):
        for measure, value in (
            ("length", seen.norm), ("direct", seen.direct.abs()), ("entropy", seen.entropy),
        ):  # fmt: skip
            own = columns[:, what.index((node, measure))].float()
            torch.testing.assert_close(own, value[:, k], atol=1e-5, rtol=1e-4)
    assert (Node("mlp", 0), "entropy") not in what
    assert columns.shape == (10, len(what))


def test_findings_are_those_of_scipy_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    cases, healthy = (torch.randn(n, 6, generator=generator).double() for n in (15, 20))
    cases[:, 2] += 3
    cases[:, 5] = healthy[:, 5] = 1  # never varies
    found = anomalies(cases, healthy)
    p = [scipy.stats.mannwhitneyu(cases[:, k], healthy[:, k]).pvalue for k in range(5)] + [1.0]
    np.testing.assert_allclose(found.p.numpy(), p, rtol=1e-10)
    wanted = scipy.stats.false_discovery_control(p) <= 0.05
    assert found.found.tolist() == wanted.tolist()
    assert wanted.tolist()[2]
    nodes = [(head(0, k // 2), str(k)) for k in range(6)]
    z, least, hit = found.by_component(nodes)[head(0, 1)]
    assert hit
    assert z > 2
    assert least == pytest.approx(min(p[2:4]))
    with pytest.raises(IclError, match="no case"):
        anomalies(cases[:0], healthy)
    with pytest.raises(IclError, match="eight"):
        anomalies(cases, healthy[:7])


def test_healthy_batches_keep_the_rate() -> None:
    """Of 200 healthy batches at most 20 have a finding: a chance of 1 in 1,000 at a rate of 5 %."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(200):
        cases, healthy = (torch.randn(16, 20, generator=generator) for _ in range(2))
        hits += bool(anomalies(cases, healthy).found.any())
    assert hits <= scipy.stats.binom.ppf(0.999, 200, 0.05)


@pytest.mark.parametrize("which", ["gpt2", "neox"])
@pytest.mark.parametrize("kind", ["even", "overactive", "cut"])
def test_on_healthy_inputs_a_fault_shows_where_it_sits(
    which: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """Otherwise consequences would be called causes."""
    model = request.getfixturevalue(which)
    b = copying(model, 10, 6, torch.Generator().manual_seed(0))
    clouds, what = usual(model, b), items(model)
    fault = Fault(kind, (head(0, 1),), (Node("k", 1, 2),) if kind == "cut" else ())
    hooks = plant(model, b, [fault])
    healthy = vitals(model, b, clouds)
    own = vitals(model, b, clouds, [*hooks, *healthy_inputs(model, b)])
    moved = {what[k][0] for k in ((own - healthy).abs().amax(0) > 1e-3).nonzero()[:, 0].tolist()}
    assert moved == fault.parts
    spread = vitals(model, b, clouds, hooks)
    assert sum((spread - healthy).abs().amax(0) > 1e-3) > 4


def test_restoring_everything_restores_the_score(gpt2: TransformerBridge) -> None:
    b = copying(gpt2, 4, 6, torch.Generator().manual_seed(0))
    hooks = plant(gpt2, b, [Fault("sink", (head(0, 1), head(1, 2)))])
    back = confirm(gpt2, b, hooks, [components(gpt2), [], [head(0, 1), head(1, 2)]])
    lost = score(gpt2, b) - score(gpt2, b, hooks)
    torch.testing.assert_close(back[0], lost, atol=1e-5, rtol=0)
    torch.testing.assert_close(back[2], lost, atol=1e-5, rtol=0)
    assert back[1].abs().max() == 0
    with pytest.raises(IclError, match="Only the model's heads"):
        confirm(gpt2, b, hooks, [[Node("embed")]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_cause_is_told_from_its_consequences(bench: Bench, kind: str) -> None:
    """Planted in 0.0, the induction head is anomalous too; a cut is the reader's problem."""
    fault = FAULTS[kind]
    hooks = plant(bench.model, bench.cases, [fault])
    found = explain(
        bench.model,
        bench.cases,
        hooks,
        bench.clouds,
        bench.vitals,
        dict.fromkeys(fault.parts, kind),
    )
    problems = {p.component: p for p in found if p.confirmed}
    assert set(problems) == fault.parts
    for problem in problems.values():
        assert problem.restored > 0.8
        assert problem.local
        assert problem.suggestion == kind
    if fault.parts == {FIRST}:
        rest = [p for p in found if p.component == SECOND]
        assert rest
        assert not rest[0].local
        assert np.isnan(rest[0].restored)
        assert rest[0].suggestion is None
    depth = [components(bench.model).index(p.component) for p in found]
    assert depth == sorted(depth)


def test_partners_are_both_named(tmp_path: Path) -> None:
    """Two induction heads that stand in for each other: one alone brings nearly all back."""
    save_wired(tmp_path, induction=((1, 0), (1, 2)), heads=3)
    model = load(tmp_path)
    generator = torch.Generator().manual_seed(0)
    fitted, healthy, cases = (copying(model, n, 11, generator) for n in (24, 24, 12))
    clouds = usual(model, fitted)
    hooks = plant(model, cases, [Fault("sink", (head(1, 0), head(1, 2)))])
    found = explain(model, cases, hooks, clouds, vitals(model, healthy, clouds))
    assert {p.component for p in found if p.confirmed} == {head(1, 0), head(1, 2)}


def test_where_nothing_is_lost_nothing_is_explained(bench: Bench) -> None:
    with pytest.raises(IclError, match="lose nothing"):
        explain(bench.model, bench.cases, [], bench.clouds, bench.vitals)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fix_repairs_other_cases_and_harms_no_healthy_one(bench: Bench, kind: str) -> None:
    fault = FAULTS[kind]
    fix = repair(
        bench.model, kind, bench.cases, plant(bench.model, bench.cases, [fault]),
        fault.heads, fault.wires, bench.reference,
    )  # fmt: skip
    hooks = plant(bench.model, bench.held_out, [fault])
    outcome = evaluate(bench.model, bench.held_out, hooks, fix)
    assert outcome.restored >= 0.9
    clean, corrupt = baselines(bench.model, bench.held_out)
    torch.testing.assert_close(outcome.clean_before, clean)
    assert float(share(outcome.clean_before - outcome.clean_after, clean, corrupt)) < 0.01
    with pytest.raises(IclError, match="other sequences"):
        evaluate(bench.model, bench.cases, hooks, fix)


def test_what_is_gone_cannot_be_sharpened(bench: Bench) -> None:
    """An exactly even row has no scores left; a fix that restored it would know the fault."""
    fault = Fault("even", (FIRST,))
    fix = repair(
        bench.model, "even", bench.cases, plant(bench.model, bench.cases, [fault]), [FIRST]
    )
    hooks = plant(bench.model, bench.held_out, [fault])
    assert abs(evaluate(bench.model, bench.held_out, hooks, fix).restored) < 1e-3


@settings(deadline=None, max_examples=25)
@given(size=st.integers(2, 8), seed=st.integers(0, 99), temperature=st.floats(0.5, 8))
def test_fixes_of_rows_by_hand(size: int, seed: int, temperature: float) -> None:
    scores = torch.randn(2, size, size, generator=torch.Generator().manual_seed(seed))
    causal = scores.masked_fill(~torch.ones(size, size).tril().bool(), -torch.inf)
    rows = causal.softmax(-1)
    torch.testing.assert_close(sharpened(rows, temperature), (temperature * causal).softmax(-1))
    masked = causal.clone()
    masked[:, 1:, 0] = -torch.inf  # the first row sees nothing else
    torch.testing.assert_close(without_first(rows), masked.softmax(-1))
    later = one_later(rows)
    torch.testing.assert_close(later.sum(-1), torch.ones(2, size))
    assert torch.equal(later, later.tril())
    free = rows.clone()
    free[..., 0] = 0  # nothing at the first: then one step back and forth is no step
    torch.testing.assert_close(one_later(one_earlier(free)), free)


def test_fixes_that_lack_something_are_refused(bench: Bench) -> None:
    given = bench.model
    with pytest.raises(IclError, match="Unknown failure"):
        repair(given, "tired", bench.cases, [], [FIRST])
    with pytest.raises(IclError, match="say which wires"):
        repair(given, "cut", bench.cases, [], [FIRST])
    with pytest.raises(IclError, match="give the reference"):
        repair(given, "overactive", bench.cases, [], [FIRST])
    assert set(SUGGESTED) == set(KINDS)
