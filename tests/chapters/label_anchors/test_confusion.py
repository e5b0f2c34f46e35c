"""Tests of the error diagnosis, against scikit-learn, SciPy and closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score

from iclutils.chapters.label_anchors import confusion


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 999), directions=st.integers(1, 6))
@settings(max_examples=15)
def test_distances_are_those_along_scikit_learns_directions(seed, directions):
    queries, keys = noise(3, 30, 8, seed=seed), noise(3, 5, 8, seed=seed + 1)
    found = confusion.key_distances(queries, keys, directions)
    for layer in range(3):
        pca = PCA(directions).fit(queries[layer].numpy())
        projected = keys[layer].numpy() @ pca.components_.T
        projected *= pca.singular_values_ / math.sqrt(30)
        expected = torch.cdist(*[torch.tensor(projected)] * 2)
        torch.testing.assert_close(found[layer], expected, atol=1e-3, rtol=1e-3)
        relative = confusion.predicted_confusion(found[layer])
        expected = (expected / expected.max()).fill_diagonal_(1)
        torch.testing.assert_close(relative, expected, atol=1e-3, rtol=1e-3)
    # A shift of all queries or of all keys changes nothing.
    moved = confusion.key_distances(queries + 3, keys - 2, directions)
    torch.testing.assert_close(found, moved, atol=1e-3, rtol=1e-3)


@given(seed=st.integers(0, 999), classes=st.integers(2, 5))
@settings(max_examples=15)
def test_auc_is_scikit_learns(seed, classes):
    scores = (3 * noise(40, classes, seed=seed)).round().double()  # with exact ties
    gold = torch.arange(40) % classes
    auc = confusion.actual_confusion(scores, gold)
    assert auc.diagonal().tolist() == [1] * classes
    for i in range(classes):
        for j in range(i):
            rows = (gold == i) | (gold == j)
            p = scores.softmax(1)
            share = (p[:, i] / (p[:, i] + p[:, j])).round(decimals=9)[rows]
            expected = roc_auc_score(gold[rows] == i, share)
            assert auc[i, j].item() == pytest.approx(expected, abs=1e-9)
            assert auc[i, j] == auc[j, i]


def test_rho_is_spearmans_over_pairs():
    """Catches: pairs counted twice, undefined pairs that count."""
    one, other = noise(4, 4), noise(4, 4, seed=1)
    one, other = one + one.mT, other + other.mT
    other[3, 0] = other[0, 3] = torch.nan
    i, j = torch.tril_indices(4, 4, -1)
    known = ~other[i, j].isnan()
    ranks = [x[i, j][known].argsort().argsort().double() for x in (one, other)]
    expected = torch.corrcoef(torch.stack(ranks))[0, 1].item()
    assert confusion.rank_correlation(one, other) == pytest.approx(expected)
    assert math.isnan(confusion.rank_correlation(one, torch.ones(4, 4)))
