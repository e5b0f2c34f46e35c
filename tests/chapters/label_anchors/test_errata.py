"""What the study note and the paper's words say otherwise, on a small trained model."""

import pytest
import torch
from random_layers import seeded
from torch.nn.functional import cross_entropy

from iclutils import models
from iclutils.chapters.label_anchors import compression, extraction, isolation, saliency
from iclutils.chapters.label_anchors.answers import answers, word_loyalty
from iclutils.interp.hooks import cut_attention
from iclutils.interp.readout import target_logits
from iclutils.models import get_act_name
from iclutils.tasks import topics
from iclutils.tasks.prompts import Role, class_logits


@pytest.fixture(scope="module")
def trained():
    return models.load("anchors-3")


@pytest.fixture(scope="module")
def prompts():
    return topics.sample(60, seeded(0))


def ranks(values):
    return values.flatten().argsort().argsort().double()


def test_a_sum_orders_edges_otherwise(trained, prompts):
    few, seen = prompts[:4], []

    def keep(pattern, hook):
        seen.append(pattern.detach().requires_grad_())
        return seen[-1]

    with torch.enable_grad():
        hooks = [(get_act_name("pattern", 0), keep)]
        logits = trained.run_with_hooks(few.tokens, fwd_hooks=hooks)[torch.arange(4), few.target]
        cross_entropy(class_logits(few, logits), few.gold, reduction="sum").backward()
    weight, slope = seen[0].detach(), seen[0].grad
    product, added = ((x.sum(1).abs()) for x in (weight * slope, weight + slope))
    torch.testing.assert_close(product, saliency.saliency(trained, few)[:, 0])
    below = saliency.edge_kinds(few).any(1)
    assert torch.corrcoef(torch.stack([ranks(x[below]) for x in (product, added)]))[0, 1] < 0.9


def test_half_is_what_shuffled_predictions_give(trained, prompts):
    attention, predicted = extraction.label_attention(trained, prompts)
    draw, found = seeded(1), []
    for _ in range(40):
        mixed = predicted[torch.randperm(len(predicted), generator=draw)]
        found.append(extraction.auc_by_layer(attention, mixed).mean())
    assert 0.47 < torch.stack(found).mean() < 0.53


def test_attention_is_compared_with_the_prediction(trained):
    hard = topics.sample(200, seeded(3), texts=topics.HARD)
    attention, predicted = extraction.label_attention(trained, hard)
    assert not torch.equal(predicted, hard.gold)
    by_class = [extraction.auc_by_layer(attention, x).max() for x in (predicted, hard.gold)]
    assert by_class[0] > by_class[1]


def test_the_papers_rule_keeps_the_formatting(prompts):
    kept, labels = compression.hidden_anchor(prompts), compression.label_only(prompts)
    assert kept.sum() > 1.5 * labels.sum()
    assert {*prompts.roles[kept & ~labels].tolist()} == {Role.FORMAT}


def test_zeroed_weights_are_another_cut(trained, prompts):
    cut = {0: isolation.cut_edges(prompts)}
    before, after = (
        target_logits(trained, prompts, cut_attention(trained, cut, renormalise=first))
        for first in (True, False)
    )
    assert (before - after).abs().max() > 0.1


def test_five_words_and_ten_differ(trained, prompts):
    clean, drawn = answers(trained, prompts), isolation.random_positions(prompts, seeded(0))
    cut = isolation.isolate(trained, prompts, [0, 1], drawn)
    five, ten = (word_loyalty(cut, clean, k).mean() for k in (5, 10))
    assert abs(five - ten) > 0.05
