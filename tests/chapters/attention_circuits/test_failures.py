"""Planted faults by hand, measures against numpy, faults found again."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from random_layers import seeded
from tiny import a_task
from torch.testing import assert_close

from iclutils.chapters.attention_circuits import failures
from iclutils.errors import IclError
from iclutils.interp import graph
from iclutils.interp.clean_corrupt import copying, scored_logits
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


def test_measures_by_hand(model):
    task, heads = a_task(model, 3), all_heads(model)
    assert task.source is not None
    seen = failures.measure_cases(model, task, heads)
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
            wanted = {
                "entropy": np.mean(entropies),
                "first": rows[:, 0].mean(),
                "sink": (rows.argmax(1) == 0).mean(),
                "routed": (rows[np.arange(len(at)), source] - others).mean(),
                "norm": np.linalg.norm(write[case, at], axis=1).mean(),
            }
            for name, value in wanted.items():
                assert float(seen[name][case, k]) == pytest.approx(value, abs=1e-5)
    assert_close(seen["score"][:, 0], task.score(scored_logits(model, task)))


def test_an_edge_that_is_cut_has_no_effect_left(wired):
    """Catches an effect that is counted from the healthy run, or that passes a cut."""
    task, cut = copying(wired, 6, 11, seeded()), failures.Fault("cut", (FIRST,), (EDGE[1],))
    look = lambda *faults: failures.measure_cases(wired, task, [SECOND], [EDGE], faults)["effect"]  # noqa: E731
    half = look(replace(cut, strength=0.5))
    assert look(cut).abs().max() < 1e-5
    assert (look() > 1).all()
    assert (half > 0).all()


@pytest.fixture(scope="module")
def bench(wired):
    healthy, cases = (copying(wired, n, 11, seeded(n)) for n in (300, 24))
    usual = failures.measure_cases(wired, healthy, [FIRST, SECOND], [EDGE])
    return SimpleNamespace(model=wired, usual=usual, cases=cases)


@pytest.mark.parametrize("kind", failures.KINDS)
def test_what_was_planted_is_flagged(bench, kind):
    fault = [PLANTED[kind]]
    seen = failures.measure_cases(bench.model, bench.cases, [FIRST, SECOND], [EDGE], fault)
    raised = failures.flags(seen, bench.usual, [[0], [1]])
    assert raised.kinds[:, failures.KINDS.index(kind)].all()


def test_healthy_cases_raise_few_flags(bench):
    """Compared with itself, one case in a hundred leaves each quantile."""
    for column in (0, 1):
        raised = failures.flags(bench.usual, bench.usual, [[column]])
        alarms = raised.kinds.float().mean(0)[: len(failures.KINDS) - 1]
        assert alarms.max() <= 0.015
        assert raised.wrong.float().mean() <= 0.015


def test_other_damage_stays_unknown(bench):
    """A broken MLP layer behind all heads that matter: cases go wrong without a flag."""

    def damage(network):
        for weight in network.transformer.h[1].mlp.parameters():
            weight += 3 * torch.randn(weight.shape, generator=seeded(0))

    broken = edit_weights(bench.model.cfg.model_name, damage)
    usual = failures.measure_cases(bench.model, copying(bench.model, 60, 11, seeded(2)), [SECOND])
    raised = failures.flags(failures.measure_cases(broken, bench.cases, [SECOND]), usual, [[0]])
    assert raised.wrong.all()
    assert (raised.wrong & ~raised.kinds.any(1)).float().mean() >= 0.8
    with pytest.raises(IclError, match="solved cases"):
        failures.flags(usual, {name: value[:20] for name, value in usual.items()}, [[0]])
