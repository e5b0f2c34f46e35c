"""Pattern scores: brute force, and hand-wired heads above chance."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded

from iclutils.chapters.attention_circuits import patterns
from iclutils.models import random_init
from iclutils.tasks.repeated import repeated_tokens


def random_pattern(seed, size):
    scores = 3 * torch.randn(size, size, generator=seeded(seed))
    return scores.masked_fill(~torch.ones(size, size).tril().bool(), -torch.inf).softmax(-1)


def bands(row):
    """Distances by dyadic band: {0}, {1}, {2, 3}, {4 .. 7}, .. as far as the row reaches."""
    found, start, stop = [[0]], 1, 2
    while start <= row:
        found.append(list(range(start, min(stop, row + 1))))
        start, stop = stop, 2 * stop
    return found


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(3, 20), st.integers(2, 8))
def test_brute_force(seed, size, vocab):
    """Row by row; catches a mask shifted, BOS taken for a match, a mean over wrong rows or over the
    batch, and masks of another sequence."""
    ids = torch.randint(0, vocab, (2, size), generator=seeded(seed))
    both = torch.stack([random_pattern(seed + i, size) for i in range(4)]).view(2, 2, size, size)
    scores = patterns.pattern_scores(both, ids)
    got = {name: float(value[1, 1]) for name, value in scores.items()}
    a, x = both[1, 1].double().numpy(), ids[1].tolist()
    duplicate, induction, scale, even = [], [], [], []
    near = {"previous": [], "current": [], "local": []}
    for t in range(1, size):
        near["previous"].append(a[t, t - 1])
        near["current"].append(a[t, t])
        near["local"].append(a[t, max(0, t - 3) : t + 1].sum())
        earlier = [s for s in range(1, t) if x[s] == x[t]]
        if earlier:
            duplicate.append(sum(a[t, s] for s in earlier))
            induction.append(sum(a[t, s + 1] for s in earlier))
        even.append(-sum(p * math.log(p) for p in a[t] if p > 0) / math.log(t + 1))
        if len(bands(t)) >= 3:
            mass = [sum(a[t, t - back] for back in band) for band in bands(t)]
            scale.append(-sum(p * math.log(p) for p in mass if p > 0) / math.log(len(mass)))
    for name, rows in [("duplicate", duplicate), ("induction", induction)]:
        expected = np.mean(rows) if rows else math.nan
        assert got[name] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    for name, rows in near.items():
        assert got[name] == pytest.approx(np.mean(rows), abs=1e-5)
    assert got["first"] == pytest.approx(a[:, 0].mean(), abs=1e-5)
    assert got["even"] == pytest.approx(np.mean(even), abs=1e-5)
    assert got["hierarchical"] == pytest.approx(np.mean(scale), abs=1e-5)
    assert all(math.isnan(v) or -1e-6 <= v <= 1 + 1e-6 for v in got.values())


def test_wired_heads_are_above_chance_in_their_scores(wired):
    """The known answer; idle heads attend evenly and are above it in none."""
    ids = repeated_tokens(wired, 40, 11, seeded(), distinct=True).tokens
    blank = [random_init(wired.cfg.model_name, seed) for seed in range(2)]
    shuffled = patterns.shuffled_scores(wired, ids, seeded(1))
    nulls = [patterns.null_scores(blank, ids), shuffled]
    limits = patterns.thresholds(nulls, patterns.uniform_scores(ids))
    assert math.isnan(limits["even"])  # even attention is as even as can be
    scores = patterns.scores(wired, ids)
    excess = patterns.excess(scores, limits)
    named = [
        [k for k, value in zip(patterns.SCORES, row, strict=True) if value > 0.1]
        for row in excess.flatten(0, 1).tolist()
    ]
    assert named == [["previous", "local"], [], ["induction"], []]
    assert excess[1, 0, patterns.SCORES.index("induction")] > 0.5
    # Shuffled tokens scored by what repeats in *them* would hide a true induction head.
    assert shuffled["induction"].quantile(0.99) < 0.5 < scores["induction"][:, 1, 0].mean()
