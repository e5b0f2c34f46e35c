"""Tests of the error diagnosis, against scikit-learn, SciPy and closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prompts import random_prompts, two_sets
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score

from iclutils.chapters.label_anchors import confusion
from iclutils.chapters.label_anchors.answers import answers
from iclutils.models import cached


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 999), directions=st.integers(1, 6))
@settings(max_examples=25)
def test_distances_are_those_along_scikit_learns_directions(seed, directions):
    queries, keys = noise(3, 30, 8, seed=seed), noise(3, 5, 8, seed=seed + 1)
    found = confusion.key_distances(queries, keys, directions)
    for layer in range(3):
        pca = PCA(directions).fit(queries[layer].numpy())
        projected = keys[layer].numpy() @ pca.components_.T
        projected *= pca.singular_values_ / math.sqrt(30)
        expected = torch.cdist(*[torch.tensor(projected)] * 2)
        torch.testing.assert_close(found[layer], expected, atol=1e-3, rtol=1e-3)
        relative = confusion.predicted_confusion(queries[layer], keys[layer], directions)
        expected = (expected / expected.max()).fill_diagonal_(1)
        torch.testing.assert_close(relative, expected, atol=1e-3, rtol=1e-3)
    # A shift of all queries or of all keys changes nothing.
    moved = confusion.key_distances(queries + 3, keys - 2, directions)
    torch.testing.assert_close(found, moved, atol=1e-3, rtol=1e-3)


@given(seed=st.integers(0, 999), classes=st.integers(2, 5))
@settings(max_examples=25)
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


def test_queries_and_keys_are_the_models(model):
    """Of several demonstrations of a class the keys are averaged; sets come back in their order."""
    prompts = two_sets(classes=2, shots=2)
    queries, keys, found = confusion.queries_and_keys(model, prompts, batch_size=3)
    expected = answers(model, prompts).class_logits
    torch.testing.assert_close(found.class_logits, expected, atol=1e-5, rtol=1e-5)
    names = [f"blocks.1.attn.hook_{name}" for name in "qk"]
    _, cache = cached(model, prompts.tokens, names)
    for row in range(len(prompts)):
        expected = cache[names[0]][row, prompts.target[row]].flatten()
        torch.testing.assert_close(queries[1, row], expected, atol=1e-5, rtol=1e-5)
        for c in range(2):
            places = prompts.label_pos[row][prompts.demo_class[row] == c]
            expected = cache[names[1]][row, places].flatten(1).mean(0)
            torch.testing.assert_close(keys[1, row, c], expected, atol=1e-5, rtol=1e-5)


def test_rotation_does_not_enter(gpt2, neox):
    """In the first layer of a rotary model a key is its token's, wherever the token stands."""
    prompts = random_prompts(1, count=12)
    gap = []
    for model in (neox, gpt2):
        _, keys, _ = confusion.queries_and_keys(model, prompts)
        words, flat = prompts.label_words.flatten(), keys[0].flatten(0, 1)
        gap.append(((flat[:, None] - flat).norm(dim=-1) * (words[:, None] == words)).max())
    assert gap[0] < 1e-4
    assert gap[1] > 0.1


def test_rho_is_the_mean_of_spearmans_over_sets():
    """Catches: pairs counted twice, another set's matrix, undefined pairs or sets that count."""
    one, other = noise(3, 4, 4), noise(3, 4, 4, seed=1)
    one, other = one + one.mT, other + other.mT
    other[1, 3, 0] = other[1, 0, 3] = torch.nan
    other[2] = 1.0  # nothing to rank
    i, j = torch.tril_indices(4, 4, -1)
    expected = []
    for a, b in zip(one[:2, i, j], other[:2, i, j], strict=True):
        known = ~b.isnan()
        ranks = [x[known].argsort().argsort().double() for x in (a, b)]
        expected.append(torch.corrcoef(torch.stack(ranks))[0, 1].item())
    assert confusion.rank_correlation(one, other) == pytest.approx(sum(expected) / 2)
    assert confusion.rank_correlation(one[0], other[0]) == pytest.approx(expected[0])
    assert math.isnan(confusion.rank_correlation(one[2], other[2]))
