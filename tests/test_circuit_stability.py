"""Stability of circuits: overlap by enumeration, permuted heads matched, planted phases."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom, spearmanr
from tiny import save_gpt2
from torch import Generator
from transformers import PreTrainedModel
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.circuits import history, matching, overlap
from iclutils.models import TransformerBridge, cached, edit_weights, get_act_name, load
from iclutils.tasks.repeated import repeated_tokens

# --- overlap -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "other", "of"), [(1, 1, 3), (2, 3, 6), (4, 4, 5), (3, 3, 8)])
def test_expected_overlap_is_the_mean_of_all_sets(size: int, other: int, of: int) -> None:
    """Catches the first-order value, and a distribution that starts or ends one item off."""
    sets = [frozenset(c) for c in itertools.combinations(range(of), other)]
    fixed = frozenset(range(size))
    mean = sum(len(fixed & s) / len(fixed | s) for s in sets) / len(sets)
    assert overlap.expected_jaccard(size, of, other) == pytest.approx(mean, abs=1e-12)
    for one in sets[:5]:
        p = sum(len(fixed & s) >= len(fixed & one) for s in sets) / len(sets)
        assert overlap.overlap_p(fixed, one, of) == pytest.approx(p, abs=1e-12)
    if size == other and size < of:
        assert overlap.expected_jaccard(size, of) > size / (2 * of - size), "not the first order"


@settings(deadline=None, max_examples=25)
@given(
    a=st.frozensets(st.integers(0, 15), min_size=1), b=st.frozensets(st.integers(0, 15), min_size=1)
)
def test_overlap_is_symmetric_and_that_of_scipy(a: frozenset[int], b: frozenset[int]) -> None:
    """Catches the two sizes exchanged where they differ."""
    assert overlap.jaccard(a, b) == overlap.jaccard(b, a)
    assert (overlap.jaccard(a, b) == 1) == (a == b)
    shared = len(a & b)
    expected = sum(hypergeom.pmf(x, 16, len(a), len(b)) for x in range(shared, 17))
    assert overlap.overlap_p(a, b, 16) == pytest.approx(expected, abs=1e-10)
    assert overlap.overlap_p(a, b, 16) == pytest.approx(overlap.overlap_p(b, a, 16), abs=1e-10)


def test_the_best_items_and_those_that_recur() -> None:
    values = torch.tensor([0.5, -3.0, float("nan"), 2.0, 0.5])
    assert overlap.top(values, 2) == {3, 0}, "of equal ones the first"
    assert overlap.top(values, 4) == {3, 0, 4, 1}
    stable, variable = overlap.recurring([{1, 2}, {2, 3}, {2, 1}], 2)
    assert (stable, variable) == ({1, 2}, {3})
    for bad in (0, 6):
        with pytest.raises(IclError, match="Cannot take"):
            overlap.top(values, bad)
    for sets in ((set(), {1}), ({1}, set())):
        with pytest.raises(IclError, match="size zero"):
            overlap.jaccard(*sets)
        with pytest.raises(IclError, match="size zero"):
            overlap.overlap_p(*sets, 4)
    with pytest.raises(IclError, match="do not fit into 4"):
        overlap.expected_jaccard(5, 4)
    with pytest.raises(IclError, match="in 3 of 2"):
        overlap.recurring([{1}, {2}], 3)


# --- matching ------------------------------------------------------------------------------------


def permuted(network: PreTrainedModel, order: list[list[int]]) -> None:
    """Head ``order[layer][i]`` becomes head i; the network computes the same."""
    width, heads = network.config.n_embd, network.config.n_head
    size = width // heads
    for block, heads_in in zip(network.transformer.h, order, strict=True):
        place = torch.cat([torch.arange(size) + h * size for h in heads_in])
        three = torch.cat([place + part * width for part in range(3)])
        attn = block.attn
        attn.c_attn.weight.copy_(attn.c_attn.weight[:, three].clone())
        attn.c_attn.bias.copy_(attn.c_attn.bias[three].clone())
        attn.c_proj.weight.copy_(attn.c_proj.weight[place].clone())


def written(model: TransformerBridge, tokens: torch.Tensor) -> torch.Tensor:
    """What each head writes, all positions below each other: (head, sample, d_model)."""
    _, cache = cached(model, tokens, lambda name: name.endswith("hook_z"))
    layers = range(model.cfg.n_layers)
    z = torch.cat(
        [cache[get_act_name("z", layer)].flatten(0, 1).transpose(0, 1) for layer in layers]
    )
    return z @ model.W_O.flatten(0, 1)


def test_permuted_heads_are_matched_back(tmp_path: Path) -> None:
    """Catches rows exchanged with columns, and features that belong to another head."""
    save_gpt2(tmp_path)
    order = [[2, 0, 3, 1], [1, 2, 3, 0], [3, 2, 1, 0]]
    plain, other = load(tmp_path), edit_weights(tmp_path, lambda network: permuted(network, order))
    tokens = repeated_tokens(plain, 8, 10, Generator().manual_seed(0)).tokens
    torch.testing.assert_close(plain(tokens), other(tokens), atol=1e-4, rtol=1e-4)
    expected = sorted(
        (4 * layer + old, 4 * layer + new)
        for layer, heads in enumerate(order)
        for new, old in enumerate(heads)
    )
    groups = matching.layer_of(3, 4), matching.layer_of(3, 4)
    seen = matching.similarity(*(matching.profiles(m, tokens) for m in (plain, other)))
    wrote = matching.cka_across(written(plain, tokens), written(other, tokens))
    for alike in (seen, wrote):
        assert matching.match(alike) == matching.match(alike, groups) == expected
        for a, b in expected:
            assert alike[a, b].item() == pytest.approx(1, abs=1e-5)
        assert alike.abs().max() < 1 + 1e-6
    by_attention = matching.match(seen, groups)
    above, spread = matching.excess(wrote, by_attention, Generator().manual_seed(0), groups)
    assert above > 3 * spread > 0


def test_profiles_say_what_the_wired_heads_look_at(tmp_path: Path) -> None:
    """Catches a relation or distance that is one token off, and the first position counted."""
    save_wired(tmp_path)
    model = load(tmp_path)
    tokens = repeated_tokens(model, 8, 11, Generator().manual_seed(0), distinct=True).tokens
    size, profile = tokens.shape[1], matching.profiles(model, tokens)
    assert profile.shape == (4, size + 4)
    even = [(1 / torch.arange(d + 1, size + 1)).sum().item() for d in range(size)]
    even[0] -= 1  # the first row
    back_one, back_ten = profile[0, 1].item(), profile[2, 10].item()
    assert back_one == pytest.approx(1 - even[1] / (size - 1), abs=0.02)
    assert back_ten == pytest.approx(11 / (size - 1) - even[10] / (size - 1), abs=0.05)
    same, after, first, itself = profile[2, size:].tolist()
    assert after > 0.3 > abs(same)
    assert itself == pytest.approx(profile[2, 0].item(), abs=1e-12)
    assert profile[1].abs().max() < 1e-6, "an idle head attends evenly"
    assert first < 0
    assert not matching.similarity(profile[1:2].round(decimals=5), profile).any()


def test_similarities_agree_with_numpy() -> None:
    """Catches features that are not centred, or a norm without its root."""
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(3, 20, 5)) + 1, generator.normal(size=(2, 20, 4))
    b[0] = a[1][:, :4] + 0.3 * b[0]
    got = matching.cka_across(torch.tensor(a), torch.tensor(b))
    middle = np.eye(20) - 1 / 20
    grams = [[middle @ x @ x.T @ middle for x in group] for group in (a, b)]
    for i, k in enumerate(grams[0]):
        for j, m in enumerate(grams[1]):
            expected = (k * m).sum() / math.sqrt((k * k).sum() * (m * m).sum())
            assert got[i, j].item() == pytest.approx(expected, abs=1e-10)
    cosine = matching.similarity(torch.tensor(a[0]), torch.tensor(a[1]))
    norms = np.linalg.norm(a[0], axis=1)[:, None] * np.linalg.norm(a[1], axis=1)
    np.testing.assert_allclose(cosine.numpy(), a[0] @ a[1].T / norms, atol=1e-10)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), rows=st.integers(1, 5), columns=st.integers(1, 5))
def test_the_best_matching_is_the_best_of_all(seed: int, rows: int, columns: int) -> None:
    """Catches a cost that is minimised, and heads that are matched twice."""
    alike = torch.rand(rows, columns, generator=Generator().manual_seed(seed))
    pairs = matching.match(alike)
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == min(rows, columns)
    flat = alike if rows <= columns else alike.T
    every = itertools.permutations(range(flat.shape[1]), flat.shape[0])
    best = max(sum(flat[i, j].item() for i, j in enumerate(p)) for p in every)
    assert sum(alike[a, b].item() for a, b in pairs) == pytest.approx(best, abs=1e-6)


def test_random_matchings_are_those_within_the_groups() -> None:
    """Catches random pairs across groups: mean and spread of all permutations are known."""
    alike = torch.rand(5, 5, generator=Generator().manual_seed(0))
    groups = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1])
    values = [
        (sum(alike[i, p[i]] for i in range(3)) + sum(alike[3 + i, 3 + q[i]] for i in range(2))) / 5
        for p in itertools.permutations(range(3))
        for q in itertools.permutations(range(2))
    ]
    chance = torch.stack(values)
    pairs = matching.match(alike, groups)
    assert all((a < 3) == (b < 3) for a, b in pairs)
    above, spread = matching.excess(alike, pairs, Generator().manual_seed(0), groups, 4000)
    assert above == pytest.approx((chance.max() - chance.mean()).item(), abs=0.01)
    assert spread == pytest.approx(chance.std(correction=0).item(), abs=0.01)


def test_excess_is_fair_only_on_another_measure() -> None:
    """Noise matched on itself looks like roles; on other noise it does not."""
    groups, generator = (matching.layer_of(4, 4),) * 2, Generator().manual_seed(0)
    itself, fresh = [], []
    for _ in range(30):
        noise, other = torch.rand(2, 16, 16, generator=generator)
        pairs = matching.match(noise, groups)
        for alike, found in ((noise, itself), (other, fresh)):
            above, spread = matching.excess(alike, pairs, generator, groups, 100)
            found.append(above / spread)
    assert torch.tensor(itself).mean() > 3
    assert abs(torch.tensor(fresh).mean()) < 0.6
    assert 0.6 < torch.tensor(fresh).std() < 1.5


def test_matchings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    alike = torch.rand(2, 3)
    with pytest.raises(IclError, match="not finite"):
        matching.match(alike / 0)
    with pytest.raises(IclError, match="no group in common"):
        matching.match(alike, (torch.tensor([0, 1]), torch.tensor([2, 3, 4])))
    with pytest.raises(IclError, match="a group for each of 2 and 3"):
        matching.match(alike, (torch.tensor([0, 1]), torch.tensor([0, 1])))
    with pytest.raises(IclError, match="Nothing is matched"):
        matching.excess(alike, [], Generator())
    with pytest.raises(IclError, match="one length"):
        matching.similarity(torch.rand(2, 3), torch.rand(2, 4))
    with pytest.raises(IclError, match="got 3 and 4"):
        matching.cka_across(torch.rand(2, 3, 5), torch.rand(2, 4, 5))
    save_gpt2(tmp_path)
    with pytest.raises(IclError, match="at least two tokens"):
        matching.profiles(load(tmp_path), torch.zeros(1, 1, dtype=torch.long))
    assert [matching.depth(layer, 2) for layer in range(2)] == [0.25, 0.75]


# --- history -------------------------------------------------------------------------------------


def series(noise: float, swap: int, checkpoints: int = 8) -> torch.Tensor:
    """(checkpoint, item, batch): 5 of 30 items matter; from ``swap`` on it is 5 others."""
    generator = Generator().manual_seed(0)
    values = noise * torch.randn(checkpoints, 30, 24, generator=generator)
    values[:swap, :5] += 1
    values[swap:, 10:15] -= 1  # of the other sign: the size of an effect counts
    return values


def told(values: torch.Tensor, present: list[bool], size: int = 5) -> list[history.Phase]:
    generator = Generator().manual_seed(1)
    pairs = itertools.pairwise(values)
    alike = torch.tensor([history.similarity(a, b, size).jaccard for a, b in pairs])
    floors = torch.tensor([history.floor(v, size, generator, 50) for v in values[1:]])
    return history.phases(alike, floors, torch.tensor(present))


def test_a_swap_of_items_is_found_where_it_was_planted() -> None:
    """Catches intervals shifted by one, signed means, and phases before there is a circuit."""
    values = series(0.5, swap=5)
    assert told(values, [True] * 8) == [
        ("stable", 0, 3),
        ("unstable", 4, 4),
        ("stable", 5, 6),
    ]
    assert told(values, [False, False, *[True] * 6]) == [
        ("absent", 0, 1),
        ("stable", 2, 3),
        ("unstable", 4, 4),
        ("stable", 5, 6),
    ]


def test_the_floor_falls_with_noise() -> None:
    """Catches halves that overlap, of which the floor would stay high."""
    floors = [history.floor(series(n, 8)[0], 5, Generator().manual_seed(0)) for n in (0.1, 1, 30)]
    assert floors[0] == 1
    assert floors[0] > floors[1] > floors[2]
    nothing = torch.randn(400, 24, generator=Generator().manual_seed(0))
    mean = history.floor(nothing, 80, Generator().manual_seed(0), alpha=0.5)
    assert mean == pytest.approx(overlap.expected_jaccard(80, 400), abs=0.03)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), size=st.integers(1, 12))
def test_likeness_does_not_depend_on_the_order_of_items(seed: int, size: int) -> None:
    """Catches items paired by rank instead of identity."""
    generator = Generator().manual_seed(seed)
    a, b = torch.randn(12, 6, generator=generator), torch.randn(12, 9, generator=generator)
    order = torch.randperm(12, generator=generator)
    first, again = history.similarity(a, b, size), history.similarity(a[order], b[order], size)
    assert first == pytest.approx(again, abs=1e-10)
    expected = spearmanr(a.double().mean(1), b.double().mean(1)).statistic
    assert first.rank == pytest.approx(expected, abs=1e-10)
    assert history.similarity(a, a, size) == pytest.approx((1, 1))
    floors = torch.tensor([history.floor(a, size, generator, 5)] * 3)
    assert history.phases(torch.ones(3), floors, torch.ones(4).bool()) == [("stable", 0, 2)]


def test_short_runs_are_no_stable_phase() -> None:
    similar = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    present = torch.tensor([True] * 6 + [False, True])
    kinds = history.kinds(similar, torch.full((7,), 0.5), present)
    assert kinds == ["unstable"] * 2 + ["stable"] * 2 + ["unstable", "absent", "absent"]
    assert history.kinds(similar, torch.full((7,), 0.5), present, 1)[0] == "stable"


def test_a_rise_is_where_the_value_crosses_both_bars() -> None:
    """Catches the interval that ends at a crossing counted as after it."""
    rise = history.rise([0.0, 0.01, 0.05, 0.5, 0.85, 0.9, 1.0])
    assert rise.within.tolist() == [False, False, True, True, False, False]
    assert rise.after.tolist() == [False, False, False, False, True, True]
    sudden = history.rise([0.0, 0.0, 1.0, 1.0])
    assert sudden.within.tolist() == [False, True, False]
    assert sudden.after.tolist() == [False, False, True]


def test_histories_that_cannot_be_are_refused() -> None:
    with pytest.raises(IclError, match="same items"):
        history.similarity(torch.rand(3, 4), torch.rand(2, 4), 1)
    with pytest.raises(IclError, match="two sequences"):
        history.floor(torch.rand(3, 1), 1, Generator())
    with pytest.raises(IclError, match="2 similarities, 2 floors and 2"):
        history.phases(torch.ones(2), torch.ones(2), torch.ones(2).bool())
    with pytest.raises(IclError, match="final value"):
        history.rise([0.5, 0.0])
    assert math.isnan(history.similarity(torch.ones(3, 4), torch.rand(3, 4), 1).rank)
