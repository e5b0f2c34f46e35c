"""Planted faults: rows of attention and cut wires by hand, and what must stay as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_gpt2, save_gptj

from iclutils import IclError
from iclutils.chapters.circuits.edits import carried, force, observe, score
from iclutils.chapters.circuits.faults import KINDS, Fault, damage_mlp, one_earlier, plant
from iclutils.interp.clean_corrupt import CleanCorrupt, copying, scored_logits
from iclutils.interp.graph import (
    Node,
    add_to_inputs,
    component_outputs,
    head,
    of,
    split_qkv_input,
)
from iclutils.interp.hooks import ablate_heads
from iclutils.models import TransformerBridge, edit_weights, get_act_name, load

FAST = {"deadline": None, "max_examples": 25}


@pytest.fixture(params=["gpt2", "neox"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    return request.getfixturevalue(request.param)


def task(model: TransformerBridge, count: int = 4, length: int = 6) -> CleanCorrupt:
    return copying(model, count, length, torch.Generator().manual_seed(0))


def a_fault(kind: str, strength: float = 1.0) -> Fault:
    readers = (Node("k", 1, 2), Node("mlp_in", 1)) if kind == "cut" else ()
    return Fault(kind, (head(0, 1), head(0, 3)), readers, strength)


@pytest.mark.parametrize("kind", KINDS)
def test_strength_zero_changes_no_bit(model: TransformerBridge, kind: str) -> None:
    b = task(model)
    logits, _ = observe(model, b, plant(model, b, [a_fault(kind, 0.0)]))
    assert torch.equal(logits, scored_logits(model, b))


@pytest.mark.parametrize("kind", KINDS)
def test_other_sequences_keep_every_bit(model: TransformerBridge, kind: str) -> None:
    """A fault that leaks over the batch would spoil the healthy cases of a detection rate."""
    b = task(model)
    rows = torch.tensor([True, False, True, False])
    logits, _ = observe(model, b, plant(model, b, [a_fault(kind)], rows))
    with split_qkv_input(model):  # the same order of sums
        clean = scored_logits(model, b) if kind == "cut" else None
    clean = scored_logits(model, b) if clean is None else clean
    assert torch.equal(logits[~rows], clean[~rows])
    assert (logits[rows] - clean[rows]).abs().amax((1, 2)).min() > 1e-3


@pytest.mark.parametrize("strength", [0.25, 1.0])
@pytest.mark.parametrize("kind", ["even", "sink", "misrouted"])
def test_rows_of_attention_by_hand(model: TransformerBridge, kind: str, strength: float) -> None:
    b = task(model)
    name = get_act_name("pattern", 0)
    _, clean = observe(model, b, (), [name])
    _, sick = observe(model, b, plant(model, b, [a_fault(kind, strength)]), [name])
    before, after = clean[name].numpy(), sick[name].numpy()
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


def test_an_overactive_head_puts_out_more(model: TransformerBridge) -> None:
    b = task(model)
    _, clean = observe(model, b, (), [get_act_name("z", 0)])
    _, sick = observe(
        model, b, plant(model, b, [a_fault("overactive", 0.5)]), [get_act_name("z", 0)]
    )
    ratio = torch.ones(model.cfg.n_heads)
    ratio[[1, 3]] = 2.5
    torch.testing.assert_close(
        sick[get_act_name("z", 0)], clean[get_act_name("z", 0)] * ratio[:, None]
    )


def test_a_cut_wire_carries_the_mean(model: TransformerBridge) -> None:
    """Against a shift made beforehand: catches a wrong reader, a wrong sign, a lost strength."""
    b = task(model)
    fault = Fault("cut", (head(0, 1),), (Node("v", 1, 0),), 0.5)
    own = component_outputs(model, b.clean, [head(0, 1)])[head(0, 1)]
    shift = add_to_inputs(model, {Node("v", 1, 0): 0.5 * (own.mean((0, 1)) - own)})
    with split_qkv_input(model):
        wanted = b.score(scored_logits(model, b, shift))
    hooks = plant(model, b, [fault])
    torch.testing.assert_close(score(model, b, hooks), wanted, atol=1e-5, rtol=0)
    kept = carried(model, b, hooks, fault.wires)[fault.wires[0]]
    torch.testing.assert_close(kept, 0.5 * (own + own.mean((0, 1))))


def test_all_wires_cut_is_the_head_removed(model: TransformerBridge) -> None:
    """Cuts see what is written in the run, so that later readers and earlier cuts agree."""
    b = task(model)
    graph = of(model)
    readers = tuple(v for u, v in graph.edges() if u == head(0, 2))
    hooks = plant(model, b, [Fault("cut", (head(0, 2),), readers)])
    removed = b.score(
        scored_logits(model, b, ablate_heads(model, b.clean, [(0, 2)], "mean", b.clean))
    )
    torch.testing.assert_close(score(model, b, hooks), removed, atol=1e-5, rtol=0)


def test_a_cut_sees_what_an_overactive_writer_writes(gpt2: TransformerBridge) -> None:
    b = task(gpt2)
    cut = Fault("cut", (head(0, 1),), (Node("k", 1, 0),))
    hooks = plant(gpt2, b, [cut, Fault("overactive", (head(0, 1),))])
    mean = component_outputs(gpt2, b.clean, [head(0, 1)])[head(0, 1)].mean((0, 1))
    kept = carried(gpt2, b, hooks, cut.wires)[cut.wires[0]]
    torch.testing.assert_close(kept, mean.expand_as(kept), atol=1e-5, rtol=0)


def test_forced_rows_are_one_hot_there_and_nowhere_else(gpt2: TransformerBridge) -> None:
    b = task(gpt2)
    assert b.source is not None
    name = get_act_name("pattern", 1)
    _, clean = observe(gpt2, b, (), [name])
    _, sick = observe(gpt2, b, [force(head(1, 0), b.at, b.source)], [name])
    for row in range(len(b)):
        for t in range(b.clean.shape[1]):
            wanted = clean[name][row, 0, t]
            if t in b.at[row].tolist():
                source = int(b.source[row, b.at[row].tolist().index(t)])
                wanted = torch.nn.functional.one_hot(torch.tensor(source), len(wanted)).float()
            assert torch.equal(sick[name][row, 0, t], wanted)


@settings(**FAST)
@given(size=st.integers(1, 9), seed=st.integers(0, 99))
def test_moved_rows_stay_causal_and_whole(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(2, size, size, generator=generator).tril()
    rows = rows / rows.sum(-1, keepdim=True)
    moved = one_earlier(rows)
    torch.testing.assert_close(moved.sum(-1), torch.ones(2, size))
    assert torch.equal(
        moved, moved.tril(-1) + moved * (torch.eye(size) * (torch.arange(size) == 0))
    )


def test_damage_is_in_one_layer_alone(tmp_path: Path) -> None:
    save_gpt2(tmp_path)

    def damaged() -> dict[str, torch.Tensor]:
        sick = edit_weights(tmp_path, damage_mlp(1, 0.5, torch.Generator().manual_seed(3)))
        return dict(sick.named_parameters())

    clean, first, again = dict(load(tmp_path).named_parameters()), damaged(), damaged()
    for name, weight in clean.items():
        change = first[name] - weight
        assert torch.equal(first[name], again[name])
        assert bool(change.any()) == (".h.1." in name and ".mlp." in name), name
    with pytest.raises(IclError, match="no MLP layer 7"):
        edit_weights(tmp_path, damage_mlp(7, 0.5, torch.Generator()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fault("asleep", (head(0, 0),)), "Unknown fault"),
        (lambda: Fault("even", ()), "at least one head"),
        (lambda: Fault("even", (Node("mlp", 0),)), "nothing but heads"),
        (lambda: Fault("cut", (head(0, 0),)), "Name readers"),
        (lambda: Fault("even", (head(0, 0),), (Node("logits"),)), "Name readers"),
        (lambda: Fault("even", (head(0, 0),), (), 1.5), "0..1"),
    ],
)
def test_impossible_faults_are_refused(make: object, message: str) -> None:
    with pytest.raises(IclError, match=message):
        make()  # type: ignore[operator]


def test_faults_that_do_not_fit_the_model_are_refused(
    gpt2: TransformerBridge, tmp_path: Path
) -> None:
    b = task(gpt2)
    cut = Fault("cut", (head(1, 0),), (Node("k", 2, 0),))
    with pytest.raises(IclError, match=r"head.*9\.0"):
        plant(gpt2, b, [Fault("even", (head(9, 0),))])
    with pytest.raises(IclError, match="must come later"):
        plant(gpt2, b, [Fault("cut", (head(1, 0),), (Node("k", 1, 0),))])
    with pytest.raises(IclError, match="only once"):
        plant(gpt2, b, [cut, cut])
    with pytest.raises(IclError, match="one row for each"):
        plant(gpt2, b, [cut], torch.ones(9, dtype=torch.bool))
    save_gptj(tmp_path)
    gptj = load(tmp_path)
    with pytest.raises(IclError, match="only after using it"):
        plant(gptj, task(gptj), [Fault("sink", (head(0, 0),))])
    b = task(gptj)
    with pytest.raises(IclError, match="cannot fork"):
        score(gptj, b, plant(gptj, b, [Fault("cut", (head(0, 0),), (Node("k", 1, 0),))]))


def test_parts_are_where_the_model_works_wrongly() -> None:
    assert a_fault("even").parts == {head(0, 1), head(0, 3)}
    assert a_fault("cut").parts == {head(1, 2), Node("mlp", 1)}
