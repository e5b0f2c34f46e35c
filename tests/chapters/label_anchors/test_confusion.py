"""Tests of the error diagnosis, against scikit-learn, SciPy and closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prompts import random_prompts, two_sets
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score

from iclutils import IclError
from iclutils.chapters.label_anchors import confusion
from iclutils.chapters.label_anchors.answers import answers
from iclutils.models import cached


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


def test_queries_and_keys_are_the_models(model):
    """Of several demonstrations of a class the keys are averaged; others are refused."""
    prompts = random_prompts(5, count=4, classes=2, shots=2, shared=True)
    queries, keys, found = confusion.queries_and_keys(model, prompts, batch_size=3)
    expected = answers(model, prompts).class_logits
    torch.testing.assert_close(found.class_logits, expected, atol=1e-5, rtol=1e-5)
    names = [f"blocks.1.attn.hook_{name}" for name in "qk"]
    _, cache = cached(model, prompts.tokens, names)
    for row in range(len(prompts)):
        expected = cache[names[0]][row, prompts.target[row]].flatten()
        torch.testing.assert_close(queries[1, row], expected, atol=1e-5, rtol=1e-5)
    for c in range(2):
        places = prompts.label_pos[0][prompts.demo_class[0] == c]
        expected = cache[names[1]][0, places].flatten(1).mean(0)
        torch.testing.assert_close(keys[1, c], expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(IclError, match="share demonstrations"):
        confusion.queries_and_keys(model, two_sets())


def test_rotation_does_not_enter(gpt2, neox):
    """In the first layer of a rotary model a key is its token's, wherever the token stands."""
    prompts, gap = random_prompts(1, count=12), []
    for model in (neox, gpt2):
        found = [confusion.queries_and_keys(model, prompts[row])[1][0] for row in range(12)]
        words, flat = prompts.label_words.flatten(), torch.cat(found)
        gap.append(((flat[:, None] - flat).norm(dim=-1) * (words[:, None] == words)).max())
    assert gap[0] < 1e-4
    assert gap[1] > 0.1


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
