"""Planted faults by hand, features against numpy, faults found again, fixes on held-out cases."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from tiny import a_task
from torch.testing import assert_close

from iclutils.chapters.attention_circuits import failures
from iclutils.chapters.attention_circuits.interactions import direct_logits
from iclutils.interp import graph
from iclutils.interp.clean_corrupt import baselines, copying, scored_logits
from iclutils.interp.graph import Node, all_heads, head
from iclutils.interp.hooks import ablate_heads
from iclutils.models import cached, edit_weights, get_act_name

FIRST, SECOND = head(0, 0), head(1, 0)
EDGE = (FIRST, Node("k", 1, 0))
PLANTED = {
    "even": failures.Fault("even", (SECOND,)),
    "sink": failures.Fault("sink", (SECOND,)),
    "cut": failures.Fault("cut", (FIRST,), (EDGE[1],)),
    "misrouted": failures.Fault("misrouted", (SECOND,)),
    "overactive": failures.Fault("overactive", (FIRST,)),
}


def a_fault(kind, strength=1.0):
    readers = (Node("k", 1, 2), Node("mlp_in", 1)) if kind == "cut" else ()
    return failures.Fault(kind, (head(0, 1), head(0, 3)), readers, strength)


@pytest.mark.parametrize("strength", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("kind", ["even", "sink", "misrouted"])
def test_rows_of_attention_by_hand(model, kind, strength):
    task, name = a_task(model, 4), get_act_name("pattern", 0)
    before, after = (
        failures.observe(model, task, hooks, [name])[1][name].numpy()
        for hooks in ([], failures.plant(model, task, [a_fault(kind, strength)]))
    )
    for h in range(model.cfg.n_heads):
        wanted = before[:, h].copy()
        for t in range(wanted.shape[1]) if h in (1, 3) else ():
            target = np.zeros_like(wanted[:, t])
            for s in range(t + 1):
                if kind == "even":
                    target[:, s] += 1 / (t + 1)
                else:
                    target[:, 0 if kind == "sink" else max(s - 1, 0)] += before[:, h, t, s]
            wanted[:, t] = (1 - strength) * before[:, h, t] + strength * target
        np.testing.assert_allclose(after[:, h], wanted, atol=1e-6)


def test_all_edges_cut_is_the_head_ablated(model):
    """Cuts see what is written in the run, so that later readers, earlier cuts and an overactive
    writer agree."""
    task, writer = a_task(model, 4), head(0, 2)
    readers = tuple(v for u, v in graph.of(model).edges() if u == writer)
    cut = failures.Fault("cut", (writer,), readers)
    ablated = scored_logits(
        model, task, ablate_heads(model, task.clean, [(0, 2)], "mean", task.clean)
    )
    for faults in ([cut], [cut, failures.Fault("overactive", (writer,))]):
        hooks = failures.plant(model, task, faults)
        assert_close(failures.score(model, task, hooks), task.score(ablated), atol=1e-5, rtol=0)


def test_features_by_hand(model):
    task = a_task(model, 3)
    assert task.source is not None
    heads = all_heads(model)
    seen = failures.features(model, task, heads)
    names = [get_act_name(part, n.layer) for n in heads for part in ("pattern", "z")]
    _, cache = cached(model, task.clean, names)
    for k, node in enumerate(heads):
        pattern = cache[get_act_name("pattern", node.layer)][:, node.head].double().numpy()
        z = cache[get_act_name("z", node.layer)][:, :, node.head]
        write = (z @ model.W_O[node.layer, node.head]).double().numpy()
        for case in range(3):
            at, source = task.at[case].numpy(), task.source[case].numpy()
            rows = pattern[case, at]
            entropies = [
                scipy.stats.entropy(r) / np.log(t + 1) for r, t in zip(rows, at, strict=True)
            ]
            others = [np.delete(r, s).max() for r, s in zip(rows, source, strict=True)]
            spread = np.linalg.norm(write[case] - write[case].mean(0))
            wanted = {
                "entropy": np.mean(entropies),
                "first": rows[:, 0].mean(),
                "sink": (rows.argmax(1) == 0).mean(),
                "uniformity": spread / np.linalg.norm(write[case]),
                "routed": (rows[np.arange(len(at)), source] - others).mean(),
                "norm": np.linalg.norm(write[case, at], axis=1).mean(),
            }
            for name, value in wanted.items():
                assert float(seen.values[name][case, k]) == pytest.approx(value, abs=1e-5)
    assert_close(seen.score, task.score(scored_logits(model, task)))
    direct = direct_logits(model, task)[[graph.of(model).writers.index(n) for n in heads]]
    assert_close(seen.values["direct"].T, direct)


@pytest.fixture(scope="module")
def bench(wired):
    generator = seeded(1)
    healthy, cases, held_out = (copying(wired, n, 11, generator) for n in (300, 24, 20))
    seen = failures.features(wired, healthy, [FIRST, SECOND], [EDGE])
    reference = failures.Reference(seen)
    return SimpleNamespace(model=wired, reference=reference, cases=cases, held_out=held_out)


def test_false_alarms_of_healthy_halves(bench):
    """A case is judged once in each draw, by the others alone: the loudest one always."""
    healthy = bench.reference.of
    other = failures.features(bench.model, bench.held_out, [FIRST, SECOND], [EDGE])
    both = healthy + other
    both.values["norm"][7] *= 50
    alarms = failures.false_alarms(both, [[FIRST], [SECOND]], seeded(2), draws=10)
    assert len(alarms) == len(healthy.score) + len(other.score)
    assert alarms[7] == 1
    assert 0 < alarms.mean() < 0.5
    assert_close(both.of_cases(torch.tensor([300])).score, other.score[:1])


@pytest.mark.parametrize("kind", failures.KINDS)
def test_what_was_planted_is_flagged(bench, kind):
    hooks = failures.plant(bench.model, bench.cases, [PLANTED[kind]])
    seen = failures.features(bench.model, bench.cases, [FIRST, SECOND], [EDGE], hooks)
    found = failures.flags(seen, bench.reference, [[FIRST], [SECOND]])
    assert found.kinds[:, failures.KINDS.index(kind)].all()
    assert not found.unknown.any()


def test_healthy_cases_raise_few_alarms(bench):
    """Compared with itself, one case in a hundred leaves each quantile, on either side."""
    for node in (FIRST, SECOND):
        found = failures.flags(bench.reference.of, bench.reference, [[node]])
        for kind, tails in {"even": 2, "sink": 2, "misrouted": 1, "cut": 1}.items():
            alarms = found.kinds[:, failures.KINDS.index(kind)].float().mean()
            assert alarms <= 1.5 * 0.01 * tails, kind
        assert found.wrong.float().mean() <= 1.5 * 0.01


def test_a_damaged_mlp_is_none_of_them(bench):
    """It sits behind all heads that matter, so that attention looks as ever."""
    broken = edit_weights(bench.model.cfg.model_name, failures.damage_mlp(1, 3.0, seeded(0)))
    reference = failures.Reference(
        failures.features(bench.model, copying(bench.model, 60, 11, seeded(2)), [SECOND])
    )
    found = failures.flags(failures.features(broken, bench.cases, [SECOND]), reference, [[SECOND]])
    assert found.wrong.all()
    assert found.unknown.float().mean() >= 0.8


@pytest.mark.parametrize("kind", failures.KINDS)
def test_a_fix_repairs_other_cases_and_harms_no_healthy_one(bench, kind):
    strength = {"even": 0.95, "sink": 0.97}.get(kind, 1.0)
    heads = (SECOND,) if kind == "misrouted" else (FIRST,)
    fault = replace(PLANTED[kind], heads=heads, strength=strength)
    net, held = bench.model, bench.held_out
    hooks = failures.plant(net, bench.cases, [fault])
    fix = failures.repair(net, kind, bench.cases, hooks, heads, fault.edges, bench.reference)(held)
    broken = failures.plant(net, held, [fault])
    scores = (failures.score(net, held, h) for h in ([], fix, broken, [*broken, *fix]))
    whole, harmed, before, after = (values.mean() for values in scores)
    clean, corrupt = baselines(net, held)
    assert (after - before) / (whole - before) >= 0.9
    assert abs(float(whole - harmed) / float((clean - corrupt).mean())) < 0.01


@settings(max_examples=25)
@given(size=st.integers(2, 8), seed=st.integers(0, 99), temperature=st.floats(0.5, 8))
def test_fixes_of_rows_by_hand(size, seed, temperature):
    scores = torch.randn(2, size, size, generator=seeded(seed))
    causal = scores.masked_fill(~torch.ones(size, size).tril().bool(), -torch.inf)
    rows = causal.softmax(-1)
    assert_close(failures.sharpened(rows, temperature), (temperature * causal).softmax(-1))
    masked = causal.clone()
    masked[:, 1:, 0] = -torch.inf  # the first row sees nothing else
    assert_close(failures.without_first(rows), masked.softmax(-1))
