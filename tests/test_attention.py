"""Head scores against hand-made patterns, loops over positions, and closed forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_gpt2

from iclutils import IclError
from iclutils.interp import head_scores
from iclutils.models import cached
from iclutils.tasks.repeated import RepeatedTokens, repeated_tokens


def ideal(length: int, distance: int) -> torch.Tensor:
    """All attention ``distance`` back where that exists, else on the first token."""
    size = 2 * length + 1
    pattern = torch.zeros(size, size)
    for q in range(size):
        pattern[q, max(q - distance, 0)] = 1.0
    return pattern


def random_pattern(size: int, seed: int) -> torch.Tensor:
    scores = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed))
    hidden = torch.ones(size, size).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


@given(length=st.integers(2, 12))
def test_ideal_heads_score_one_on_their_own_score_only(length: int) -> None:
    induction, duplicate = ideal(length, length - 1), ideal(length, length)
    assert head_scores.prefix_matching(induction, length) == 1
    assert head_scores.duplicate_token(induction, length) == 0
    assert head_scores.duplicate_token(duplicate, length) == 1
    assert head_scores.prefix_matching(duplicate, length) == 0
    assert head_scores.previous_token(ideal(length, 1)) == 1
    assert head_scores.current_token(ideal(length, 0)) == 1
    assert head_scores.first_token(ideal(length, 2 * length + 1)) == 1


@given(length=st.integers(2, 9), seed=st.integers(0, 5))
def test_scores_equal_loops_over_positions(length: int, seed: int) -> None:
    a = random_pattern(2 * length + 1, seed)
    size = 2 * length + 1
    pairs = {
        head_scores.prefix_matching(a, length): [
            (q, q - length + 1) for q in range(length + 1, size)
        ],
        head_scores.duplicate_token(a, length): [(q, q - length) for q in range(length + 1, size)],
        head_scores.previous_token(a): [(q, q - 1) for q in range(1, size)],
        head_scores.current_token(a): [(q, q) for q in range(size)],
        head_scores.first_token(a): [(q, 0) for q in range(size)],
        head_scores.stripe(a, length): [(q, q - length + 1) for q in range(length - 1, size)],
    }
    for score, places in pairs.items():
        expected = sum(a[..., q, k] for q, k in places) / len(places)
        torch.testing.assert_close(score, expected)


@given(length=st.integers(2, 40), seed=st.integers(0, 20))
def test_the_stripe_is_within_its_bound_of_the_clean_score(length: int, seed: int) -> None:
    a = random_pattern(2 * length + 1, seed)
    gap = (head_scores.stripe(a, length) - head_scores.prefix_matching(a, length)).abs().max()
    assert gap <= 2 / (length + 2) + 1e-6


@given(length=st.integers(2, 30))
def test_a_distance_profile_never_exceeds_the_row_sums(length: int) -> None:
    profile = head_scores.distance_profile(random_pattern(2 * length + 1, 0), length)
    assert profile.shape[-1] == length + 2
    assert (profile.sum(-1) <= 1 + 1e-5).all()
    assert (profile >= 0).all()


def test_uniform_baselines_are_harmonic_sums() -> None:
    def mean_inverse(rows: range) -> float:
        return sum(1 / (q + 1) for q in rows) / len(rows)

    even = head_scores.uniform_baselines(50)
    expected = {
        "previous": mean_inverse(range(1, 101)),
        "current": mean_inverse(range(101)),
        "first": mean_inverse(range(101)),
        "duplicate": mean_inverse(range(51, 101)),
        "prefix": mean_inverse(range(51, 101)),
        "stripe": mean_inverse(range(49, 101)),
    }
    assert even == pytest.approx(expected, abs=1e-6)


def test_olssons_evaluator_sums_over_all_earlier_followers() -> None:
    tokens = RepeatedTokens.draw(1, 4, 30, 29, torch.Generator().manual_seed(1), times=3).tokens
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


def test_olssons_evaluator_reads_every_head(tmp_path: Path) -> None:
    model = tiny_gpt2(tmp_path)
    tokens = repeated_tokens(model, 2, 5, torch.Generator().manual_seed(0), times=4).tokens
    scores = head_scores.olsson_scores(model, tokens)
    _, cache = cached(model, tokens, ["blocks.1.attn.hook_pattern"])
    assert scores.shape == (2, 3, 4)
    followers = [(q, k + 1) for q in range(6, 21) for k in range(q - 5, 0, -5)]
    total = sum(cache["pattern", 1][0, 2, q, k] for q, k in followers) / 15
    assert len(set(tokens[0, 1:6].tolist())) == 5, "a chance repeat: followers is incomplete"
    torch.testing.assert_close(scores[0, 1, 2], total)


def test_olssons_evaluator_refuses_what_never_repeats() -> None:
    tokens = torch.arange(6)[None]
    with pytest.raises(IclError, match="nothing to match"):
        head_scores.olsson_prefix_matching(random_pattern(6, 0)[:1], tokens)


def test_the_detector_is_the_scaled_score_on_distinct_tokens(tmp_path: Path) -> None:
    model = tiny_gpt2(tmp_path)
    length = 12
    batch = repeated_tokens(model, 1, length, torch.Generator().manual_seed(0), distinct=True)
    theirs = head_scores.detector_scores(model, batch.tokens)
    ours = head_scores.head_scores(model, batch.tokens, length)
    size = 2 * length + 1
    for name, rows in {"previous": 2 * length, "prefix": length, "duplicate": length}.items():
        torch.testing.assert_close(theirs[name], ours[name][0] * rows / size)


def test_head_scores_read_the_models_own_patterns(tmp_path: Path) -> None:
    model = tiny_gpt2(tmp_path)
    batch = repeated_tokens(model, 3, 10, torch.Generator().manual_seed(0))
    scores = head_scores.head_scores(model, batch.tokens, 10)
    _, cache = cached(model, batch.tokens, ["blocks.2.attn.hook_pattern"])
    one = cache["pattern", 2][1, 3]
    assert scores["prefix"].shape == (3, 3, 4)
    places = [(q, q - 9) for q in range(11, 21)]
    expected = sum(one[q, k] for q, k in places) / 10
    torch.testing.assert_close(scores["prefix"][1, 2, 3], expected)


def test_patterns_of_another_length_are_refused() -> None:
    with pytest.raises(IclError, match="has 21 positions; this pattern has 20"):
        head_scores.prefix_matching(torch.zeros(20, 20), 10)
    with pytest.raises(IclError, match="distance must lie in"):
        head_scores.attention_at_offset(torch.zeros(21, 21), 10, 12)


def test_strongest_names_layer_and_head() -> None:
    scores = torch.zeros(3, 4)
    scores[2, 1] = 1
    assert head_scores.strongest(scores) == (2, 1)
