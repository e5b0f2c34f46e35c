"""Symptoms against numpy and TransformerLens, and faults found again where they were planted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_neox, tiny_gpt2
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.circuits.failures import (
    NOTE,
    Flags,
    confirm,
    first_match,
    flags,
    note_file,
    rates,
    suspect,
)
from iclutils.chapters.circuits.faults import KINDS, Fault, damage_mlp, plant
from iclutils.chapters.circuits.symptoms import OF_HEADS, Reference, Symptoms, symptoms
from iclutils.interp.clean_corrupt import CleanCorrupt, copying, scored_logits
from iclutils.interp.graph import Node, all_heads, head
from iclutils.interp.hooks import Hook, run_with_hooks
from iclutils.interp.patching import patch_edges
from iclutils.models import TransformerBridge, cached, edit_weights, get_act_name, load

FIRST, SECOND = head(0, 0), head(1, 0)
WIRE = (FIRST, Node("k", 1, 0))
PLANTED = {
    "even": Fault("even", (SECOND,)),
    "sink": Fault("sink", (SECOND,)),
    "cut": Fault("cut", (FIRST,), (WIRE[1],)),
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


@pytest.fixture(scope="module")
def wired_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("wired")
    save_wired(folder)
    return folder


@dataclass
class Bench:
    """The wired model, healthy cases to compare with and cases to break."""

    model: TransformerBridge
    reference: Reference
    cases: CleanCorrupt

    def see(self, hooks: list[Hook], model: TransformerBridge | None = None) -> Symptoms:
        b = self.cases
        back = {FIRST: one_back(b)}
        return symptoms(model or self.model, b, [FIRST, SECOND], [WIRE], hooks, back)

    def flag(self, *faults: Fault) -> Flags:
        seen = self.see(plant(self.model, self.cases, faults))
        return flags(seen, self.reference)


def one_back(b: CleanCorrupt) -> torch.Tensor:
    return (torch.arange(b.clean.shape[1]) - 1).clamp(min=0).expand_as(b.clean)


@pytest.fixture(scope="module")
def bench(wired_folder: Path) -> Bench:
    model = load(wired_folder)
    generator = torch.Generator().manual_seed(1)
    healthy = copying(model, 300, 11, generator)
    seen = symptoms(model, healthy, [FIRST, SECOND], [WIRE], (), {FIRST: one_back(healthy)})
    reference = Reference.from_healthy(seen)
    return Bench(model, reference, copying(model, 24, 11, generator))


@pytest.mark.parametrize("which", ["gpt2", "neox"])
def test_symptoms_by_hand(which: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(which)
    b = copying(model, 3, 6, torch.Generator().manual_seed(0))
    assert b.source is not None
    heads = all_heads(model)
    seen = symptoms(model, b, heads)
    _logits, cache = cached(
        model, b.clean, {get_act_name(p, n.layer) for n in heads for p in ("pattern", "z")}
    )
    for k, node in enumerate(heads):
        pattern = cache[get_act_name("pattern", node.layer)][:, node.head].double().numpy()
        z = cache[get_act_name("z", node.layer)][:, :, node.head]
        write = (z @ model.W_O[node.layer, node.head]).double().numpy()
        for case in range(3):
            at, source = b.at[case].numpy(), b.source[case].numpy()
            rows = pattern[case, at]
            entropies = [
                scipy.stats.entropy(r) / np.log(t + 1) for r, t in zip(rows, at, strict=True)
            ]
            others = [np.delete(r, s).max() for r, s in zip(rows, source, strict=True)]
            own = rows[np.arange(len(at)), source]
            spread = np.linalg.norm(write[case] - write[case].mean(0))
            wanted = {
                "entropy": np.mean(entropies),
                "first": rows[:, 0].mean(),
                "sunk": (rows.argmax(1) == 0).mean(),
                "token_uniformity": spread / np.linalg.norm(write[case]),
                "routed": (own - others).mean(),
                "norm": np.linalg.norm(write[case, at], axis=1).mean(),
            }
            for name, value in wanted.items():
                assert float(getattr(seen, name)[case, k]) == pytest.approx(value, abs=1e-5)
    torch.testing.assert_close(seen.score, b.score(scored_logits(model, b)))


def test_direct_effects_add_up_to_the_logit(gpt2: TransformerBridge) -> None:
    """Heads, MLPs, embedding and biases explain the answer's logit above the mean, exactly.

    A wrong scale, position or direction would leave a rest.
    """
    b = copying(gpt2, 3, 6, torch.Generator().manual_seed(0))
    seen = symptoms(gpt2, b, all_heads(gpt2))
    layers, heads = range(3), 4
    watch = [
        "blocks.0.hook_resid_pre",
        "ln_final.hook_scale",
        *(get_act_name("mlp_out", la) for la in layers),
    ]
    logits, cache = run_with_hooks(gpt2, b.clean, [], watch)
    rest = (
        cache[watch[0]] + sum(cache[get_act_name("mlp_out", la)] for la in layers) + gpt2.b_O.sum(0)
    )
    batch = torch.arange(3)[:, None]
    toward = gpt2.W_U.T[b.answer] - gpt2.W_U.mean(1)
    behind = (rest - rest.mean(-1, keepdim=True)) / cache["ln_final.hook_scale"]
    behind = behind * gpt2.ln_final.weight + gpt2.ln_final.bias
    others = (behind[batch, b.at] * toward).sum(-1).mean(-1)
    at = logits[batch, b.at]
    total = (at.gather(-1, b.answer[..., None])[..., 0] - at.mean(-1)).mean(-1)
    assert seen.direct.shape == (3, 3 * heads)
    torch.testing.assert_close(seen.direct.sum(1) + others, total, atol=1e-4, rtol=1e-4)


def test_effects_are_those_of_patched_wires(gpt2: TransformerBridge) -> None:
    b = copying(gpt2, 3, 6, torch.Generator().manual_seed(0))
    wires = [(head(0, 1), Node("v", 2, 0)), (head(1, 3), Node("mlp_in", 1))]
    seen = symptoms(gpt2, b, [head(0, 1)], wires)
    for k, wire in enumerate(wires):
        wanted = seen.score - patch_edges(gpt2, b, [wire])
        torch.testing.assert_close(seen.effect[:, k], wanted, atol=1e-5, rtol=0)
    cut = plant(gpt2, b, [Fault("cut", (head(0, 1),), (Node("v", 2, 0),))])
    broken = symptoms(gpt2, b, [head(0, 1)], wires, cut)
    assert broken.effect[:, 0].abs().max() < 1e-5  # nothing runs on it that could be exchanged


def test_only_the_right_source_arrives(bench: Bench) -> None:
    """The induction head moves the token it finds; the previous-token head names no answer."""
    assert float(bench.reference.median["arrives"][1]) == 1
    assert float(bench.reference.of.routed[:, 1].min()) > 0.5
    wrong = replace(bench.cases, source=bench.cases.source - 2)
    seen = symptoms(bench.model, wrong, [SECOND])
    assert float(seen.arrives.max()) == 0
    assert float(seen.routed.max()) < 0
    blind = symptoms(bench.model, replace(bench.cases, source=None), [SECOND])
    assert blind.routed.isnan().all()
    assert blind.arrives.isnan().all()
    assert len(seen.names) == seen.to_vector().shape[1] == len(OF_HEADS)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_planted_is_flagged(bench: Bench, kind: str) -> None:
    found = bench.flag(PLANTED[kind])
    assert found.kinds[:, KINDS.index(kind)].all()
    assert not found.unknown.any()
    assert not (found.healthy & found.wrong).any()


@pytest.mark.parametrize("kind", ["even", "sink", "overactive"])
def test_and_in_a_random_model(gpt2: TransformerBridge, kind: str) -> None:
    """Whatever the model answers is right. Its heads are too diffuse to look at the wrong place,
    and its wires too weak to be missed."""
    node = head(1, 2)

    def cases(count: int, seed: int) -> CleanCorrupt:
        b = copying(gpt2, count, 6, torch.Generator().manual_seed(seed))
        return replace(b, answer=scored_logits(gpt2, b).argmax(-1))

    reference = Reference.from_healthy(symptoms(gpt2, cases(60, 0), [node]))
    broken = cases(12, 1)
    hooks = plant(gpt2, broken, [Fault(kind, (node,))])
    found = flags(symptoms(gpt2, broken, [node], (), hooks), reference)
    assert found.kinds[:, KINDS.index(kind)].float().mean() >= 0.9


def test_two_at_once_are_both_flagged(bench: Bench) -> None:
    """A chain of questions would name one of them."""
    for a, b in [("even", "overactive"), ("misrouted", "overactive"), ("sink", "cut")]:
        found = bench.flag(PLANTED[a], PLANTED[b])
        both = [KINDS.index(a), KINDS.index(b)]
        assert found.kinds[:, both].all(), (a, b)
        named = first_match(found.kinds)
        assert all(len({NOTE[a], NOTE[b]} - {name}) >= 1 for name in named)


def test_healthy_cases_raise_few_alarms(bench: Bench) -> None:
    """Compared with itself, one case in a hundred leaves each quantile, on either side."""
    found = flags(bench.reference.of, bench.reference)
    tails = {"even": 2, "sink": 2, "misrouted": 1}
    for kind, count in tails.items():
        share = found.heads[:, :, KINDS.index(kind)].float().mean(0)
        assert share.max() <= 1.5 * 0.01 * count, kind
    assert found.wires.float().mean() <= 1.5 * 0.01
    assert found.wrong.float().mean() <= 1.5 * 0.01
    assert not found.unknown[~found.wrong].any()


def test_a_damaged_mlp_is_none_of_them(bench: Bench, wired_folder: Path) -> None:
    """It sits behind all heads that matter, so that attention looks as ever."""
    sick = edit_weights(wired_folder, damage_mlp(1, 3.0, torch.Generator().manual_seed(0)))
    healthy = copying(sick, 60, 11, torch.Generator().manual_seed(2))
    reference = Reference.from_healthy(symptoms(bench.model, healthy, [SECOND]))
    found = flags(symptoms(sick, bench.cases, [SECOND]), reference)
    assert found.wrong.all()
    assert found.unknown.float().mean() >= 0.8


def test_a_majority_of_a_role_is_needed(bench: Bench) -> None:
    fault, both = PLANTED["even"], [[FIRST, SECOND]]
    seen = bench.see(plant(bench.model, bench.cases, [fault]))
    kind = KINDS.index("even")
    assert flags(seen, bench.reference, both, 0.5).kinds[:, kind].all()
    few = flags(seen, bench.reference, both, 0.9).kinds[:, kind]
    assert few.float().mean() < 0.2
    with pytest.raises(IclError, match="majority"):
        flags(seen, bench.reference, [[]])


@pytest.mark.parametrize("kind", KINDS)
def test_undoing_a_failure_brings_the_score_back(bench: Bench, kind: str) -> None:
    """And undoing it in an idle head brings back nothing."""
    fault, b = PLANTED[kind], bench.cases
    hooks = plant(bench.model, b, [fault])
    back = {FIRST: one_back(b)}
    rest = bench.reference, back
    share = confirm(bench.model, b, hooks, kind, fault.heads, fault.wires, *rest)
    assert float(share.median()) == pytest.approx(1, abs=0.05)
    idle = confirm(bench.model, b, hooks, "even", [head(0, 1)])
    assert float(idle.median()) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_the_failure_of_a_head_is_named(bench: Bench, kind: str) -> None:
    """A cut looks like a collapse, a misroute like a cut; undoing each of them tells."""
    hooks = plant(bench.model, bench.cases, [PLANTED[kind]])
    back = {FIRST: one_back(bench.cases)}
    named = suspect(bench.model, bench.cases, hooks, bench.see(hooks), bench.reference, back)
    assert named == {FIRST if kind == "overactive" else SECOND: kind}


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), cases=st.integers(1, 12))
def test_rates_by_counting(seed: int, cases: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    flagged, planted = (torch.rand(cases, 5, generator=generator) < 0.4 for _ in range(2))
    found = rates(flagged, planted)
    for f in range(5):
        quiet = [bool(flagged[c, f]) for c in range(cases) if not planted[c].any()]
        wanted = np.mean(quiet) if quiet else np.nan
        np.testing.assert_allclose(float(found.alarms[f]), wanted)
        for p in range(5):
            hit = [bool(flagged[c, f]) for c in range(cases) if planted[c, p]]
            wanted = np.mean(hit) if hit else np.nan
            np.testing.assert_allclose(float(found.detection[p, f]), wanted)


def test_the_notes_chain_and_its_dictionary() -> None:
    flagged = torch.zeros(4, 5, dtype=torch.bool)
    flagged[0, [2, 4]] = True
    flagged[1, 1] = True
    flagged[2, [3, 4]] = True
    names = ["path_interruption", "attention_collapse", "incorrect_routing", "unknown"]
    assert first_match(flagged) == names
    assert note_file(names[:3])["path_interruption"] == [0]
    with pytest.raises(KeyError, match="unknown"):
        note_file(names)


def test_what_cannot_be_seen_is_refused(bench: Bench, gpt2: TransformerBridge) -> None:
    b = bench.cases
    with pytest.raises(IclError, match="30 correctly solved"):
        Reference.from_healthy(bench.see([]))
    with pytest.raises(IclError, match="at least one head"):
        symptoms(bench.model, b, [])
    with pytest.raises(IclError, match="own heads"):
        symptoms(bench.model, b, [head(5, 0)])
    with pytest.raises(IclError, match="every position"):
        symptoms(bench.model, b, [FIRST], sources={FIRST: b.at - 1})
    with pytest.raises(IclError, match="same places"):
        flags(symptoms(bench.model, b, [FIRST]), bench.reference)
    with pytest.raises(IclError, match="Unknown failure"):
        confirm(bench.model, b, [], "tired", [FIRST])
    with pytest.raises(IclError, match="say which wires"):
        confirm(bench.model, b, [], "cut", [FIRST])
    with pytest.raises(IclError, match="give the reference"):
        confirm(bench.model, b, [], "overactive", [FIRST])
    with pytest.raises(IclError, match="no source"):
        confirm(bench.model, replace(b, source=None), [], "misrouted", [FIRST])
    with pytest.raises(IclError, match="every case and kind"):
        rates(torch.zeros(2, 5, dtype=torch.bool), torch.zeros(3, 5, dtype=torch.bool))
    with pytest.raises(IclError, match="not among"):
        bench.reference.of.at(head(1, 1))
