"""Influence, sources and attention: brute force, planted effects, sums, edges that are cut."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from scipy.special import log_softmax, rel_entr
from tiny import tokens

from iclutils import IclError
from iclutils.chapters.attention_circuits import influence as module

AT = torch.tensor([[2, 5], [3, 7]])
ANSWER = torch.tensor([[4, 9], [11, 0]])


def one_by_one(model, rows, drawn):
    """KL and change of log p of every draw: one whole sequence and one forward pass at a time."""
    size = *drawn.shape[:2], 2, rows.shape[1]
    kl, signed = np.zeros(size), np.zeros(size)

    def log_p(row):
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


def test_influence_is_what_one_row_at_a_time_gives(model, monkeypatch):
    """With and without cached prefixes; catches those of another row or position, KL the wrong way
    round, entries of whole rows shifted."""
    rows = tokens(2, 9)
    drawn = module.replacements(model, rows, seeded(1), 3)
    kl, signed = one_by_one(model, rows, drawn)
    truth = kl.mean(0), signed.mean(0)
    assert truth[0][(torch.arange(9) > AT[..., None]).numpy()].max() < 1e-9  # nothing from later
    for size in (512, 2):
        monkeypatch.setattr(module, "BATCH", size)
        got = module.influence(model, rows, AT, ANSWER, seeded(1), draws=3)
        for ours, theirs in zip(got, truth, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-5, rtol=1e-4)
    assert got.kl.max() > 0.05

    def refuse(*_):
        raise IclError("no cache")

    monkeypatch.setattr(module, "keys_values", refuse)
    slow = module.influence(model, rows, AT, ANSWER, seeded(1), draws=3)
    for ours, theirs in zip(got, slow, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def planted(rng, effects, count=14):
    """Noise at every position, and a loss of so many nats at offsets from the source."""
    source = torch.tensor([[9, 11]]).expand(count, -1)
    at = source + 5
    signed = rng.normal(0, 1, (count, 2, 30))
    for offset, nats in effects.items():
        for entry, place in enumerate((9, 11)):
            signed[:, entry, place + offset] -= nats
    return torch.from_numpy(signed), at, source


def test_the_rate_of_false_sources_is_kept():
    """Catches: no correction for many positions, or one for the wrong number of them."""
    rng, effects = np.random.default_rng(0), {-1: 4.0, 0: 8.0, 5: 4.0, 3: -8.0}
    false, power = [], []
    for seed in range(100):
        offsets = set(module.sources(*planted(rng, effects), seeded(seed)).tolist())
        false.append(len(offsets - {-1, 0, 5}) / max(1, len(offsets)))
        power.append(len(offsets & {-1, 0, 5}) / 3)
    assert np.mean(false) <= 0.07
    assert np.mean(power) > 0.99


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 4), size=st.integers(1, 6))
def test_rollout_walks_down_the_layers(seed, layers, size):
    """Catches: layers in the wrong order. Against a sum over all walks, layer by layer."""
    raw = torch.rand(1, layers, size, size, generator=seeded(seed), dtype=torch.float64) + 1e-3
    patterns = raw.tril() / raw.tril().sum(-1, keepdim=True)
    walker = torch.eye(size, dtype=torch.float64)  # rows: where a walk began; from the top down
    for layer in reversed(range(layers)):
        walker = 0.5 * walker + 0.5 * torch.einsum("bi,ij->bj", walker, patterns[0, layer])
    torch.testing.assert_close(module.rollout(patterns)[0], walker)
