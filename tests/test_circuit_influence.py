"""Influence and its sources: brute force, a twin with the same probabilities, planted effects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, rel_entr
from tiny import BOS, VOCAB, save_gptj, tokens
from transformer_lens.config import TransformerBridgeConfig
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.circuits import influence as module
from iclutils.chapters.circuits.influence import (
    future_influence,
    influence,
    note_influence,
    raised,
    replacements,
)
from iclutils.chapters.circuits.sources import Sources, helpful, precision
from iclutils.interp.clean_corrupt import copying
from iclutils.models import TransformerBridge, load


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=["gpt2", "neox"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    return request.getfixturevalue(request.param)


AT = torch.tensor([[2, 5], [3, 7]])
ANSWER = torch.tensor([[4, 9], [11, 0]])


def one_by_one(
    model: TransformerBridge, rows: torch.Tensor, drawn: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """KL and change of log p of every draw: one whole sequence and one forward pass at a time."""
    size = *drawn.shape[:2], 2, rows.shape[1]
    kl, signed = np.zeros(size), np.zeros(size)

    def log_p(row: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            return log_softmax(model(row[None])[0].double().numpy(), axis=-1)

    for d, b, i in np.ndindex(*drawn.shape):
        row = rows[b].clone()
        row[i] = drawn[d, b, i]
        clean, after = log_p(rows[b]), log_p(row)
        for e in range(2):
            t, right = int(AT[b, e]), int(ANSWER[b, e])
            kl[d, b, e, i] = rel_entr(np.exp(clean[t]), np.exp(after[t])).sum()
            signed[d, b, e, i] = after[t, right] - clean[t, right]
    return kl, signed


def test_influence_is_what_one_row_at_a_time_gives(model: TransformerBridge) -> None:
    """Catches: prefixes of another row or position, KL the wrong way round, SE of another axis."""
    rows = tokens(2, 9)
    drawn = replacements(model, rows, seeded(1), 3)
    kl, signed = one_by_one(model, rows, drawn)
    got = influence(model, rows, AT, ANSWER, seeded(1), draws=3)
    pairs = [
        (got.kl, kl.mean(0)),
        (got.kl_se, kl.std(0, ddof=1) / 3**0.5),
        (got.signed, signed.mean(0)),
        (got.signed_se, signed.std(0, ddof=1) / 3**0.5),
    ]
    for ours, truth in pairs:
        np.testing.assert_allclose(ours.numpy(), truth, atol=2e-5, rtol=1e-4)
    assert got.kl.max() > 0.05
    future = torch.arange(9) > AT[..., None]
    assert not got.kl[future].any()
    assert kl.mean(0)[future.numpy()].max() < 1e-9  # brute force: nothing from the future


def test_the_memory_changes_nothing(
    model: TransformerBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a prefix that is not the row's own, or whole rows scored at shifted entries."""
    rows = tokens(2, 9)
    fast = influence(model, rows, AT, ANSWER, seeded(1), draws=3, together=2)

    def refuse(*_: object) -> None:
        raise IclError("no memory")

    monkeypatch.setattr(module, "keys_values", refuse)
    slow = influence(model, rows, AT, ANSWER, seeded(1), draws=3)
    for name in ("kl", "kl_se", "signed", "signed_se"):
        torch.testing.assert_close(getattr(fast, name), getattr(slow, name), atol=2e-5, rtol=1e-4)


def test_models_whose_attention_is_only_read_work_too(tmp_path: Path) -> None:
    save_gptj(tmp_path)
    got = influence(load(tmp_path), tokens(2, 9), AT, ANSWER, seeded(), draws=2)
    assert got.kl.isfinite().all()
    assert got.kl.max() > 1e-3


def test_an_attention_only_model_without_a_config_works(
    attention_only: TransformerBridge,
) -> None:
    got = influence(attention_only, tokens(2, 9), AT, ANSWER, seeded(), draws=2)
    assert got.kl.isfinite().all()
    assert got.kl.max() > 1e-5


@pytest.fixture(scope="module")
def attention_only() -> TransformerBridge:
    config = TransformerBridgeConfig(
        n_layers=2, d_model=32, n_ctx=48, d_head=8, n_heads=4, d_vocab=VOCAB, attn_only=True
    )
    return TransformerBridge.boot_native(config).eval()


def test_nothing_comes_from_the_future(model: TransformerBridge) -> None:
    assert (future_influence(model, tokens(2, 9), seeded()) < 1e-5).all()


def test_a_model_that_looks_ahead_is_caught(gpt2: TransformerBridge) -> None:
    """Catches: a brute force that compares the wrong positions and so finds nothing anywhere."""
    rows, whole = tokens(2, 9), gpt2.forward

    def ahead(some: torch.Tensor, **more: object) -> torch.Tensor:
        return whole(some, **more).roll(-1, 1)  # every position answers for the next one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2, "forward", ahead)
        assert (future_influence(gpt2, rows, seeded()) > 1e-2).all()


def test_positions_can_be_chosen_and_keep_their_draws(gpt2: TransformerBridge) -> None:
    rows = tokens(2, 9)
    whole = influence(gpt2, rows, AT, ANSWER, seeded(1), draws=3)
    some = influence(gpt2, rows, AT, ANSWER, seeded(1), draws=3, positions=[4, 1, 8])
    asked = torch.zeros(9, dtype=torch.bool)
    asked[[4, 1, 8]] = True
    torch.testing.assert_close(some.kl[..., asked], whole.kl[..., asked], atol=1e-5, rtol=1e-4)
    future = torch.arange(9) > AT[..., None]
    assert torch.equal(some.signed.isnan(), ~asked & ~future)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), flat=st.booleans())
def test_replacements_leave_out_the_token_and_bos(
    gpt2: TransformerBridge, seed: int, flat: bool
) -> None:
    rows = tokens(3, 5, seed)
    unigram = None if flat else torch.rand(VOCAB, generator=seeded(seed))
    drawn = replacements(gpt2, rows, seeded(seed), 4, unigram)
    assert drawn.shape == (4, 3, 5)
    assert not (drawn == rows).any()
    assert not (drawn == BOS).any()


def test_draws_follow_the_unigram(gpt2: TransformerBridge) -> None:
    """Catches: weights of another token, or a token that keeps its own share."""
    weight = torch.zeros(VOCAB)
    weight[[3, 7, 9, BOS]] = torch.tensor([1.0, 3.0, 6.0, 100.0])
    drawn = replacements(gpt2, torch.tensor([[9, 5]]), seeded(), 4000, weight)
    share = [
        (drawn[:, 0, i] == token).double().mean().item() for i in (0, 1) for token in (3, 7, 9)
    ]
    np.testing.assert_allclose(share, [0.25, 0.75, 0, 0.1, 0.3, 0.6], atol=0.03)


def test_a_twin_with_the_same_probabilities(gpt2: TransformerBridge) -> None:
    """Catches: a measure of raw logits, of which the softmax ignores a part."""
    rows, hook = tokens(2, 9), raised(gpt2, seeded(3))
    with torch.no_grad():
        clean, twin = gpt2(rows), gpt2.run_with_hooks(rows, fwd_hooks=[hook])
    lift = twin - clean
    torch.testing.assert_close(lift, lift[..., :1].expand_as(lift), atol=1e-4, rtol=1e-4)
    assert lift[..., 0].std() > 0.1
    ours, theirs = (
        influence(gpt2, rows, AT, ANSWER, seeded(1), draws=3, hooks=h) for h in ([], [hook])
    )
    torch.testing.assert_close(theirs.kl, ours.kl, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(theirs.signed, ours.signed, atol=1e-4, rtol=1e-4)
    before, after = (note_influence(gpt2, rows, AT, seeded(1), 3, hooks=h) for h in ([], [hook]))
    assert (after.nansum() / before.nansum() - 1).abs() > 0.1


def test_the_note_s_score_by_its_own_loop(model: TransformerBridge) -> None:
    """Catches: a norm over the wrong axis, the own position counted, shared replacements."""
    rows = tokens(2, 9)
    got = note_influence(model, rows, AT, seeded(5), 2)
    drawn = torch.randint(0, VOCAB, (2, 2, 9), generator=seeded(5))
    for d, b, e in np.ndindex(2, 2, 2):
        t = int(AT[b, e])
        for i in range(t):
            row = rows[b].clone()
            row[i] = drawn[d, b, i]
            with torch.no_grad():
                truth = torch.norm(model(rows[b][None])[0, t] - model(row[None])[0, t])
            torch.testing.assert_close(got[d, b, e, i], truth, atol=1e-4, rtol=1e-4)
        assert got[d, b, e, t:].isnan().all()


def test_a_known_circuit_is_influenced_where_it_reads(tmp_path: Path) -> None:
    """Catches: positions off by one. The match, what follows it, the token itself; no other."""
    save_wired(tmp_path)
    wired = load(tmp_path)
    behaviour = copying(wired, 2, 11, seeded())
    at, answer = behaviour.at[:, 3:5], behaviour.answer[:, 3:5]
    assert behaviour.source is not None
    for row in range(2):  # replaced by tokens that occur nowhere, so that nothing new matches
        weight = torch.ones(24)
        weight[behaviour.clean[row]] = 0
        one = slice(row, row + 1)
        got = influence(
            wired, behaviour.clean[one], at[one], answer[one], seeded(1), 4, unigram=weight
        )
        for e in range(2):
            t, source = int(at[row, e]), int(behaviour.source[row, 3 + e])
            large = {i for i, v in enumerate(got.kl[0, e].tolist()) if v > 0.05}
            assert large == {source - 1, source, t}
            assert (got.signed[0, e, [source - 1, source, t]] < -1).all()


def test_what_cannot_be_measured_is_refused(gpt2: TransformerBridge) -> None:
    rows = tokens(2, 9)
    calls = [
        (lambda: influence(gpt2, rows, AT, ANSWER, seeded(), draws=1), "two draws"),
        (lambda: influence(gpt2, rows, AT, ANSWER[:, :1], seeded()), "one answer"),
        (lambda: influence(gpt2, rows, AT + 5, ANSWER, seeded()), "outside"),
        (lambda: influence(gpt2, rows, AT, ANSWER, seeded(), positions=[9]), "0..8"),
        (lambda: influence(gpt2, rows + VOCAB, AT, ANSWER, seeded()), "Token ids"),
        (lambda: influence(gpt2, rows[:0], AT[:0], ANSWER[:0], seeded()), "at least one"),
        (lambda: influence(gpt2, rows, AT, ANSWER, seeded(), together=0), "together"),
        (lambda: note_influence(gpt2, rows, AT, seeded(), 0), "at least one draw"),
        (lambda: future_influence(gpt2, rows[:, :1], seeded()), "two tokens"),
        (lambda: influence(gpt2, rows, AT, ANSWER, seeded(), unigram=torch.ones(3)), "60 numbers"),
    ]
    for call, message in calls:
        with pytest.raises(IclError, match=message):
            call()
    only = torch.zeros(VOCAB)
    only[int(rows[0, 0])] = 1
    with pytest.raises(IclError, match="Nothing can be drawn"):
        replacements(gpt2, rows, seeded(), 2, only)
    hook = ("blocks.0.hook_resid_pre", lambda value, hook: value)
    with pytest.raises(IclError, match="hooks on the logits"):
        influence(gpt2, rows, AT, ANSWER, seeded(), hooks=[hook])


def planted(
    rng: np.random.Generator, effects: dict[int, float], count: int = 14
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise at every position, and a loss of so many nats at offsets from the source."""
    source = torch.tensor([[9, 11]]).expand(count, -1)
    at = source + 5
    signed = rng.normal(0, 1, (count, 2, 30))
    for offset, nats in effects.items():
        for entry, place in enumerate((9, 11)):
            signed[:, entry, place + offset] -= nats
    return torch.from_numpy(signed), at, source


def test_the_rate_of_false_sources_is_kept() -> None:
    """Catches: no correction for many positions, or one for the wrong number of them."""
    rng, effects = np.random.default_rng(0), {-1: 4.0, 0: 8.0, 5: 4.0, 3: -8.0}
    false, power = [], []
    for seed in range(200):
        found = helpful(*planted(rng, effects), seeded(seed))
        offsets = set(found.offset[found.found].tolist())
        false.append(len(offsets - {-1, 0, 5}) / max(1, len(offsets)))
        power.append(len(offsets & {-1, 0, 5}) / 3)
    assert np.mean(false) <= 0.07
    assert np.mean(power) > 0.99


def test_sources_average_entries_and_leave_out_the_future() -> None:
    signed, at, source = planted(np.random.default_rng(1), {0: 3.0})
    got = helpful(signed, at, source, seeded())
    assert got.offset.tolist() == list(range(-11, 6))  # to each entry itself, and no further
    place = int((got.offset == 0).nonzero())
    truth = -(signed[:, 0, 9] + signed[:, 1, 11]).mean() / 2
    torch.testing.assert_close(got.mean[place], truth)
    signed[:9, :, 9] = torch.nan  # the first entry's source: one entry left in nine rows
    signed[:9, :, 11] = torch.nan
    few = helpful(signed, at, source, seeded())
    assert 0 not in few.offset.tolist()  # five sequences left


def test_precision_counts_structural_finds() -> None:
    offset = torch.tensor([-1, 0, 3, 19])
    found = torch.tensor([True, True, True, False])
    some = Sources(offset, torch.zeros(4), torch.zeros(4), found)
    assert precision(some, (-1, 0, 19)) == pytest.approx(2 / 3)
    assert np.isnan(precision(Sources(offset, some.mean, some.p, ~found & False), (-1,)))


def test_too_few_sequences_are_refused() -> None:
    signed, at, source = planted(np.random.default_rng(2), {}, count=5)
    with pytest.raises(IclError, match="at least 6 sequences"):
        helpful(signed, at, source, seeded())
