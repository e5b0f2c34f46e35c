"""Pattern scores and labels: closed forms, brute force, hand-wired heads, chance kept in bounds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_gptj, save_neox, tiny_gpt2, tokens
from transformer_lens.config import TransformerBridgeConfig
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.circuits import labels, patterns
from iclutils.interp.head_scores import olsson_prefix_matching, uniform_pattern
from iclutils.models import TransformerBridge, cached, get_act_name, load, random_init
from iclutils.tasks.repeated import repeated_tokens

SIZE = 16
PLAIN = torch.arange(SIZE)[None]  # no token occurs twice


def one(pattern: torch.Tensor, ids: torch.Tensor = PLAIN) -> dict[str, float]:
    """Scores of one pattern."""
    scores = patterns.score(pattern[None, None].float(), ids)
    return {name: float(value) for name, value in scores.items()}


def random_pattern(seed: int, size: int = SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(size, size, generator=generator)
    return scores.masked_fill(~torch.ones(size, size).tril().bool(), -torch.inf).softmax(-1)


def shifted(steps: int, size: int = SIZE) -> torch.Tensor:
    """Every row looks so many steps back, the first rows at the first token."""
    return torch.eye(size)[(torch.arange(size) - steps).clamp_min(0)]


# Each catches a row that should be left out (row 0) or a diagonal off by one.
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (shifted(0), {"previous": 0, "current": 1, "local": 1, "first": 1 / SIZE, "even": 0}),
        (shifted(1), {"previous": 1, "current": 0, "local": 1, "first": 2 / SIZE, "even": 0}),
        (shifted(4), {"previous": 1 / (SIZE - 1), "local": 3 / (SIZE - 1), "hierarchical": 0}),
        (
            shifted(SIZE),
            {"first": 1, "local": 3 / (SIZE - 1), "current": 0, "even": 0, "hierarchical": 0},
        ),
        (
            uniform_pattern(SIZE),
            {
                "even": 1,
                "first": sum(1 / (t + 1) for t in range(SIZE)) / SIZE,
                "local": sum(min(t + 1, 4) / (t + 1) for t in range(1, SIZE)) / (SIZE - 1),
            },
        ),
    ],
)
def test_closed_forms(pattern: torch.Tensor, expected: dict[str, float]) -> None:
    assert {name: one(pattern)[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def bands(row: int) -> list[list[int]]:
    """Distances by dyadic band: {0}, {1}, {2, 3}, {4 .. 7}, .. as far as the row reaches."""
    found, start, stop = [[0]], 1, 2
    while start <= row:
        found.append(list(range(start, min(stop, row + 1))))
        start, stop = stop, 2 * stop
    return found


def test_equal_mass_at_all_scales_is_hierarchical() -> None:
    """Catches a band edge off by one, or the log of the wrong number of bands."""
    pattern = torch.zeros(SIZE, SIZE)
    for row in range(SIZE):
        for band in bands(row):
            for back in band:
                pattern[row, row - back] = 1 / len(bands(row)) / len(band)
    assert one(pattern)["hierarchical"] == pytest.approx(1, abs=1e-6)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.integers(3, 20), st.integers(2, 8))
def test_brute_force(seed: int, size: int, vocab: int) -> None:
    """Row by row; catches a mask shifted, BOS taken for a match, a mean over wrong rows."""
    ids = torch.randint(0, vocab, (1, size), generator=torch.Generator().manual_seed(seed))
    pattern = random_pattern(seed, size)
    got, a, x = one(pattern, ids), pattern.double().numpy(), ids[0].tolist()
    duplicate, induction, scale, even = [], [], [], []
    for t in range(1, size):
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
    assert got["even"] == pytest.approx(np.mean(even), abs=1e-5)
    assert got["hierarchical"] == pytest.approx(np.mean(scale), abs=1e-5)
    assert all(math.isnan(v) or -1e-6 <= v <= 1 + 1e-6 for v in got.values())


def test_induction_is_olssons_prefix_matching() -> None:
    pattern = torch.stack([random_pattern(seed, 21) for seed in range(6)]).reshape(2, 3, 21, 21)
    ids = tokens(2, 10).repeat(1, 2)
    ids = torch.cat([torch.full((2, 1), 59), ids], 1)
    got = patterns.score(pattern, ids)["induction"]
    torch.testing.assert_close(got, olsson_prefix_matching(pattern, ids))


def test_sequences_do_not_mix() -> None:
    """Catches a mean over the batch, or masks of another row."""
    pattern = torch.stack([random_pattern(seed) for seed in range(8)]).reshape(4, 2, SIZE, SIZE)
    ids, order = tokens(4, SIZE) % 5, torch.tensor([2, 0, 3, 1])
    straight, mixed = patterns.score(pattern, ids), patterns.score(pattern[order], ids[order])
    for name in patterns.SCORES:
        torch.testing.assert_close(straight[name][order], mixed[name], equal_nan=True)


def test_even_scores() -> None:
    ids = torch.stack([torch.arange(12), torch.arange(12) % 5])
    got = patterns.even_scores(ids)
    assert got["even"].tolist() == pytest.approx([1, 1])
    assert math.isnan(got["duplicate"][0])
    rows = range(6, 12)  # position 0 is BOS, so that token 0 first repeats at 10
    matches = [(t, len([s for s in range(1, t) if s % 5 == t % 5])) for t in rows]
    asked = [count / (t + 1) for t, count in matches if count]
    assert got["duplicate"][1].item() == pytest.approx(np.mean(asked))


def test_distance_leaves_the_first_token_out() -> None:
    """Catches a mean over all mass, which sinks would dominate."""
    sinking = 0.9 * shifted(SIZE) + 0.1 * shifted(2)
    assert float(patterns.distance(sinking)) == pytest.approx(2)
    assert float(patterns.distance(shifted(0))) == 0
    assert math.isnan(float(patterns.distance(shifted(SIZE))))


def test_the_notes_chain() -> None:
    """Catches another order of the branches, or a branch for induction, which the note lacks."""
    assert patterns.note_label(shifted(1)) == patterns.note_label(shifted(0)) == "diagonal"
    assert patterns.note_label(uniform_pattern(SIZE)) == "uniform"
    assert patterns.note_label(shifted(5)) == "other"
    far = torch.zeros(64, 64)
    for row in range(64):
        far[row, row - torch.tensor([b[-1] for b in bands(row)])] = 1 / len(bands(row))
    assert patterns.note_label(far) == "hierarchical"


def attention_only() -> TransformerBridge:
    config = TransformerBridgeConfig(
        n_layers=2, d_model=32, n_ctx=48, d_head=8, n_heads=4, d_vocab=60, attn_only=True
    )
    return TransformerBridge.boot_native(config).eval()


def models(folder: Path) -> list[TransformerBridge]:
    save_neox(folder / "neox")
    save_gptj(folder / "gptj")
    return [
        tiny_gpt2(folder / "gpt2"),
        tiny_gpt2(folder / "one", n_layer=1, n_head=1),
        load(folder / "neox"),
        load(folder / "gptj"),
        attention_only(),
    ]


def test_all_heads_at_once(tmp_path: Path) -> None:
    """Against each layer's cached patterns; catches layers or heads in another order."""
    ids = tokens(3, 12) % 7
    for model in models(tmp_path):
        got = patterns.every_score(model, ids)
        for layer in range(model.cfg.n_layers):
            _, cache = cached(model, ids, [get_act_name("pattern", layer)])
            expected = patterns.score(cache[get_act_name("pattern", layer)], ids)
            for name in patterns.SCORES:
                torch.testing.assert_close(got[name][:, layer], expected[name], equal_nan=True)
        note = patterns.note_labels(model, ids[:1])
        assert note[-1][-1] == patterns.note_label(cache[get_act_name("pattern", layer)][0, -1])


def test_wired_heads_get_their_labels(tmp_path: Path) -> None:
    """The known answer; idle heads attend evenly and get nothing."""
    save_wired(tmp_path)
    model = load(tmp_path)
    ids = repeated_tokens(model, 40, 11, torch.Generator().manual_seed(0), distinct=True).tokens
    blank = [random_init(tmp_path, seed) for seed in range(2)]
    shuffled = labels.shuffled_scores(model, ids, torch.Generator().manual_seed(1))
    nulls = [labels.null_scores(blank, ids), shuffled]
    limits = labels.thresholds(nulls, patterns.even_scores(ids))
    assert math.isnan(limits["even"])  # even attention is as even as can be
    scores = patterns.every_score(model, ids)
    given = labels.labels(scores, limits)
    table = labels.rows(scores, limits, given, removal=torch.arange(4.0).reshape(2, 2))
    assert [row["labels"] for row in table] == ["previous, local", "", "induction", ""]
    assert [row["removal"] for row in table] == [0, 1, 2, 3]
    assert (table[2]["layer"], table[2]["head"]) == (1, 0)
    assert labels.excess(scores, limits)[1, 0, patterns.SCORES.index("induction")] > 0.5
    # Shuffled tokens scored by what repeats in *them* would hide a true induction head.
    assert shuffled["induction"].quantile(0.99) < 0.5 < scores["induction"][:, 1, 0].mean()


def test_false_alarms_are_kept(tmp_path: Path) -> None:
    """On other untrained models; catches a quantile of means, or the wrong tail."""
    tiny_gpt2(tmp_path)
    ids = torch.cat([torch.full((30, 1), 59), tokens(30, 10).repeat(1, 2)], 1)
    made = [random_init(tmp_path, seed) for seed in range(10)]
    nulls = [labels.null_scores(made[:5], ids)]
    limits = labels.thresholds(nulls, patterns.even_scores(ids))
    held = [labels.labels(patterns.every_score(m, ids), limits) for m in made[5:]]
    assert labels.false_alarms(torch.stack(held).flatten(0, 1), limits) <= 0.02
    loose = labels.thresholds(nulls, patterns.even_scores(ids), alpha=0.5)
    held = [labels.labels(patterns.every_score(m, ids), loose) for m in made[5:]]
    assert labels.false_alarms(torch.stack(held).flatten(0, 1), loose) > 0.02


def test_thresholds_are_the_largest_quantile() -> None:
    nulls = [{n: torch.linspace(0, top, 101) for n in patterns.SCORES} for top in (0.2, 0.5)]
    even = {n: torch.full((3,), 0.3) for n in patterns.SCORES} | {"duplicate": torch.ones(3)}
    limits = labels.thresholds([*nulls, {"induction": torch.full((9,), 0.7)}], even, alpha=0.1)
    assert limits["previous"] == pytest.approx(0.45)
    assert limits["induction"] == pytest.approx(0.7)
    assert math.isnan(limits["duplicate"])  # 1 cannot be passed
    undefined = {n: torch.full((3,), torch.nan) for n in patterns.SCORES}
    assert all(math.isnan(v) for v in labels.thresholds([], undefined).values())


def made_scores(count: int, **values: torch.Tensor) -> dict[str, torch.Tensor]:
    blank = {n: torch.zeros(count, 1, 2) for n in patterns.SCORES}
    return blank | {k: v[:, None, None].expand(-1, 1, 2) for k, v in values.items()}


def test_labels_need_certainty_and_enough_sequences() -> None:
    """Catches a label by the mean alone, and undefined sequences counted as zeros."""
    wide = torch.tensor([0.0, 1.0]).repeat(20)  # mean .5, SE .08
    rare = torch.where(torch.arange(40) < 29, 1.0, torch.nan)
    scores = made_scores(40, previous=wide, duplicate=rare, induction=rare.roll(5).nan_to_num(1))
    limits = dict.fromkeys(patterns.SCORES, 0.4)
    given = dict(zip(patterns.SCORES, labels.labels(scores, limits)[0, 0].tolist(), strict=True))
    assert not given["previous"]
    assert labels.labels(scores, limits | {"previous": 0.3})[0, 0, 0]
    assert not given["duplicate"]
    assert given["induction"]


def test_likeness() -> None:
    first = torch.tensor([[[1, 1, 0], [0, 0, 0], [1, 0, 0]]]).bool()
    second = torch.tensor([[[1, 0, 0], [0, 0, 0], [0, 0, 1]]]).bool()
    assert labels.likeness(first, second) == pytest.approx((1 / 2 + 0) / 2)
    assert labels.likeness(first, first) == 1
    assert math.isnan(labels.likeness(first & False, second & False))


def test_bad_input(tmp_path: Path) -> None:
    model = tiny_gpt2(tmp_path)
    with pytest.raises(IclError, match="at least three tokens"):
        patterns.every_score(model, tokens(2, 2))
    with pytest.raises(IclError, match="one pattern per sequence"):
        patterns.score(random_pattern(0)[None, None], tokens(2, SIZE))
    with pytest.raises(IclError, match="one sequence"):
        patterns.note_labels(model, tokens(2, 9))
    with pytest.raises(IclError, match="at least one untrained"):
        labels.null_scores([], tokens(2, 9))
    with pytest.raises(IclError, match="alpha"):
        labels.thresholds([], patterns.even_scores(tokens(2, 9)), alpha=0.0)
    with pytest.raises(IclError, match="at least 30"):
        labels.labels(
            patterns.every_score(model, tokens(4, 9)), dict.fromkeys(patterns.SCORES, 0.0)
        )
