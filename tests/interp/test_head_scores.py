"""Head scores against hand-made patterns, loops over positions, and closed forms."""

from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layers import seeded

from iclutils.interp import head_scores
from iclutils.tasks.repeated import RepeatedTokens


def random_pattern(size, seed):
    scores = torch.randn(2, 3, size, size, generator=seeded(seed))
    hidden = torch.ones(size, size).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


@given(length=st.integers(2, 9), seed=st.integers(0, 5))
def test_scores_equal_loops_over_positions(length, seed):
    a = random_pattern(2 * length + 1, seed)
    size = 2 * length + 1
    pairs = {
        "prefix": [(q, q - length + 1) for q in range(length + 1, size)],
        "duplicate": [(q, q - length) for q in range(length + 1, size)],
        "previous": [(q, q - 1) for q in range(1, size)],
        "current": [(q, q) for q in range(size)],
        "first": [(q, 0) for q in range(size)],
        "stripe": [(q, q - length + 1) for q in range(length - 1, size)],
    }
    assert pairs.keys() == head_scores.SCORES.keys()
    for name, places in pairs.items():
        expected = sum(a[..., q, k] for q, k in places) / len(places)
        torch.testing.assert_close(head_scores.SCORES[name](a, length), expected)


def test_uniform_baselines_are_harmonic_sums():
    second, every = range(51, 101), range(101)
    rows = {"previous": range(1, 101), "current": every, "first": every}
    rows |= {"duplicate": second, "prefix": second, "stripe": range(49, 101)}
    expected = {name: fmean(1 / (q + 1) for q in some) for name, some in rows.items()}
    assert head_scores.uniform_baselines(50) == pytest.approx(expected, abs=1e-6)


def test_olssons_evaluator_sums_over_all_earlier_followers():
    tokens = RepeatedTokens.draw(1, 4, 30, 29, seeded(1), times=3).tokens
    pattern = random_pattern(13, 3)[:1]
    total, queries = torch.zeros(3), 0
    row = tokens[0].tolist()
    for q in range(1, 13):
        followers = [k + 1 for k in range(1, q) if row[k] == row[q]]
        if followers:
            queries += 1
            total += pattern[0, :, q, followers].sum(-1)
    got = head_scores.olsson_prefix_matching(pattern, tokens)[0]
    torch.testing.assert_close(got, total / queries)


SOME = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=9)


@given(heads=SOME, lists=SOME, seed=st.integers(0, 99))
def test_controls_hold_no_head_of_any_list_and_stand_as_near_as_they_can(heads, lists, seed):
    barred, layers = heads | lists, 5
    free = {(layer, head) for layer in range(layers) for head in range(4)} - barred
    for outside in (lists, barred):
        (drawn,) = head_scores.same_layers(
            heads, 4, 1, seeded(seed), outside=outside, layers=layers
        )
        assert not {*drawn} & barred
        assert len({*drawn}) == len(drawn) == min(len(heads), len(free))
        for layer in range(layers):
            asked = sum(la == layer for la, _ in heads)
            left = sum(la == layer for la, _ in free)
            assert sum(la == layer for la, _ in drawn) >= min(asked, left)
    (fewer,) = head_scores.same_layers(heads, 4, 1, seeded(seed), outside=lists)
    assert {la for la, _ in fewer} <= {la for la, _ in heads}
    assert drawn[: len(fewer)] == fewer


def test_what_a_layer_lacks_comes_from_the_nearest():
    heads, lists = [(2, 0), (2, 1), (2, 2)], [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1), (3, 2)]
    sets = head_scores.same_layers(heads, 3, 9, seeded(0), outside=lists, layers=6)
    assert len({tuple(drawn) for drawn in sets}) > 1
    for drawn in sets:
        assert sorted(layer for layer, _ in drawn) in ([0, 0, 0], [0, 0, 4], [0, 4, 4], [4, 4, 4])
        assert head_scores.from_other_layers(heads, [drawn, heads]) == 1.5


def test_a_whole_layer_is_compared_with_others_that_hold_no_head_of_another_list(gpt2):
    width, layers = gpt2.cfg.n_heads, gpt2.cfg.n_layers
    whole = [[(layer, head) for head in range(width)] for layer in range(layers)]
    assert head_scores.controls(gpt2, whole[0], 9, seeded(0)) == whole[1:]
    assert head_scores.controls(gpt2, whole[0], 9, seeded(0), [(1, 0)]) == whole[2:]
    for drawn in head_scores.controls(gpt2, [(0, 0)], 9, seeded(0), [(0, 1)]):
        assert drawn[0] not in {(0, 0), (0, 1)}
