"""What seed note 004 gets wrong, each shown on the shipped guide of chapter 06 or by the note's own
rules (``book/errata/06.md``)."""

import pytest
import torch
from random_layers import seeded

from iclutils import models
from iclutils.chapters.attention_circuits import influence, interactions, pair, patterns
from iclutils.interp import clean_corrupt, graph, head_scores, patching
from iclutils.interp.hooks import run_with_hooks, set_activation

SEEDS = [f"anchors-{seed}" for seed in range(3, 8)]
TYPICAL = {  # heads, of no model in particular, that the note calls typical
    "previous": [(0, 0), (0, 1)],
    "even": [(1, 0)],
    "hierarchical": [(2, 3), (3, 5), (4, 7)],
    "induction": [(5, 7), (6, 3)],
}


@pytest.fixture(scope="module")
def guide():
    return models.load(SEEDS[0])


@pytest.fixture(scope="module")
def task(guide):
    return clean_corrupt.copying(guide, 8, 20, seeded())


def test_the_first_head_looks_one_back_and_nothing_looks_forward(guide, task):
    first = pair.find_induction_circuit(guide, task).previous
    scores = head_scores.score_heads(guide, task.clean, 20)
    looks = {name: scores[name].mean(0)[first.layer, first.head] for name in scores}
    assert looks["previous"] > looks["duplicate"] + 0.3
    for pattern in head_scores.attention_patterns(guide, task.clean):
        assert pattern.triu(1).max() == 0


def test_the_own_token_counts_and_a_norm_of_logits_is_no_influence(guide, task):
    """The twin raises all logits of a position alike, which changes no probability."""
    some = task[:4]
    at, answer = some.at[:, -6:], some.answer[:, -6:]
    kl = influence.influence(guide, some.clean, at, answer, seeded(), 4).kl
    own = kl.gather(-1, at[..., None])[..., 0]
    earlier = kl.scatter(-1, at[..., None], 0).amax(-1)
    assert (own / earlier).mean() > 0.5
    altered = some.clean.clone()
    altered[:, 10] = altered[:, 12]
    before, after = (models.logits(guide, x)[:, -2] for x in (some.clean, altered))
    raise_by = torch.randn(before.shape[-1], generator=seeded()) / before.shape[-1] ** 0.5
    twins = [x + (x @ raise_by)[:, None] for x in (before, after)]
    assert torch.allclose(twins[0].softmax(-1), before.softmax(-1), atol=1e-6)
    notes, of_twin = (after - before).norm(dim=-1), (twins[1] - twins[0]).norm(dim=-1)
    assert ((of_twin - notes).abs() / notes).max() > 0.1


def test_a_head_feeds_nothing_in_its_layer_or_before(guide, task):
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(3)]
    zero = [set_activation(f"blocks.1.attn.hook_{part}", torch.zeros(()), [0]) for part in "qz"]
    whole, cut = (run_with_hooks(guide, task.clean, hooks, names)[1] for hooks in ([], zero))
    change = [(whole[name] - cut[name]).abs().amax((0, 1, 3)) for name in names]  # by head
    assert change[0].max() == change[1][1:].max() == 0 < change[2].max()


def test_much_of_the_flow_skips_to_the_logits(guide, task):
    flow = patching.layer_flow(guide, task).mean(-1).abs()
    assert flow[:, -1].sum() > 0.1 * flow.sum()


def test_the_notes_rules_miss_induction_and_its_typical_heads():
    """Its chain of if and elif has no branch for induction; at most two of eight heads fit."""
    nets = [models.load(name) for name in SEEDS[:2]]
    ids = clean_corrupt.copying(nets[0], 32, 20, seeded()).clean
    blank = [models.random_init(SEEDS[0], seed=seed) for seed in range(2)]
    nulls = [patterns.null_scores(blank, ids), patterns.shuffled_scores(nets[0], ids, seeded(1))]
    limits = patterns.thresholds(nulls, patterns.uniform_scores(ids))
    column = {name: i for i, name in enumerate(patterns.SCORES)}
    for net in nets:
        labels = patterns.excess(patterns.scores(net, ids), limits) > 0
        shape = labels.shape
        there = [
            bool(labels[la, h, column[name]])
            for name, heads in TYPICAL.items()
            for la, h in heads
            if la < shape[0] and h < shape[1]
        ]
        assert sum(there) <= 2
        score = {name: value.mean(0) for name, value in patterns.scores(net, ids[:1]).items()}
        diagonal = score["previous"] + score["current"] > 0.7
        other = ~(diagonal | (score["hierarchical"] > 0.6))
        induction = labels[..., column["induction"]]
        assert induction.any()
        assert (other | (score["even"] > 0.5))[induction].float().mean() >= 0.5


def test_an_untrained_network_passes_the_trigger_for_pruning(task):
    shares = []
    for seed in range(2):
        blank = models.random_init(SEEDS[0], seed=seed)
        each = [[head] for head in graph.all_heads(blank)]
        lost = patching.ablate(blank, task, each, "mean")
        shares.append(interactions.is_redundant(lost).float().mean())
    assert min(shares) > 0.3
