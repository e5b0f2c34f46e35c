"""Influence, against one row and one forward pass at a time."""

import numpy as np
import torch
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
