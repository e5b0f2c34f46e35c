"""The induction circuit, on one whose answer is known because it is wired."""

from itertools import permutations

import pytest
import torch
from random_layers import seeded
from tiny import tiny_gpt2
from wired import save_wired

from iclutils import models
from iclutils.chapters import gpt2_induction
from iclutils.interp import head_scores, patching, readout, weights
from iclutils.interp.hooks import ablate_heads, replacements, set_activation
from iclutils.tasks.repeated import repeated_tokens

LENGTH = 12


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    save_wired(folder)
    model = models.load(folder, fold=True)
    batch, other = (repeated_tokens(model, 8, LENGTH, seeded(s), distinct=True) for s in (0, 1))
    return model, batch, other


def test_the_wired_heads_are_found(built):
    model, batch, _ = built
    circuit = gpt2_induction.find(model, batch)
    assert circuit == gpt2_induction.Circuit((0, 0), (1, 0), ((1, 0),), ((0, 0),))
    assert circuit.others(model) == [(0, 1), (1, 1)]
    assert circuit.pairs() == [((0, 0), (1, 0))]
    assert circuit.wires() == circuit.wires(every=False) == {(1, 0): [(0, 0)]}
    scores = {k: v.mean(0) for k, v in head_scores.score_heads(model, batch.tokens, LENGTH).items()}
    assert scores["prefix"][1, 0] > 0.99
    assert scores["previous"][0, 0] > 0.99
    assert scores["duplicate"][1, 0] < 0.01


def test_cutting_the_wire_is_what_stops_it(built):
    model, batch, other = built
    circuit = gpt2_induction.find(model, batch)
    for sets in (None, [[(0, 0)], [(0, 1)]]):  # by default head 0.1 alone, which is idle
        cut = gpt2_induction.effect_of_cuts(model, batch, circuit, other, sets)
        assert cut.before.min() > 0.99
        assert max(cut.without_path.max(), cut.without_previous.max()) < 0.2
        expected = torch.stack([cut.without_previous, cut.before][0 if sets else 1 :])
        torch.testing.assert_close(cut.without_others, expected)


def test_shapley_values_of_three_tokens_are_those_of_all_orders(tmp_path):
    model = tiny_gpt2(tmp_path)
    row, fill = torch.tensor([1, 7, 8, 9, 7]), torch.tensor([2, 3, 4])

    def value(kept):
        inner = [int(row[i + 1] if i in kept else fill[i]) for i in range(3)]
        logits = models.logits(model, torch.tensor([[1, *inner]]))
        return logits[0, -1].log_softmax(-1)[7].item()

    exact = torch.zeros(3)
    for order in permutations(range(3)):
        for place, i in enumerate(order):
            exact[i] += (value({*order[: place + 1]}) - value({*order[:place]})) / 6
    found = gpt2_induction.shapley_values(model, row, fill.expand(4000, 3), seeded(0))
    torch.testing.assert_close(found.sum(1), torch.full((4000,), value({0, 1, 2}) - value(set())))
    error = found.std(0) / 4000**0.5
    assert bool(((found.mean(0) - exact).abs() < 5 * error + 1e-6).all())


# What the note got wrong (book/errata/01.md), on a model that was trained to copy.
L = 30


@pytest.fixture(scope="module")
def trained():
    model = models.load("induction-3")
    batch, other = (repeated_tokens(model, 16, L, seeded(s)) for s in (0, 1))
    return model, batch, other, gpt2_induction.find(model, batch)


def without(model, batch, hooks):
    """Mean change of each measure of the clean second copy."""
    before, after = gpt2_induction.second_copy(model, batch, [[], hooks])
    return {name: (after[name] - before[name]).mean() for name in before}


def test_the_notes_second_half_begins_too_early(trained):
    """Nor does one prompt give a third decimal."""
    model, batch, *_ = trained
    log_p, _ = readout.predictions(model, batch.tokens)
    assert log_p[:, batch.second_half].mean() < log_p[:, batch.clean_half].mean()
    assert log_p[:, batch.second_half].mean(1).std() > 0.01


def test_queries_prefer_what_the_previous_token_head_wrote(trained):
    """In one model; where the two heads are of two models, the match breaks down."""
    *_, circuit = trained
    (l1, h1), (l2, h2) = circuit.previous, circuit.induction
    one, two = (models.load(name, fold=True) for name in ("induction-3", "induction-4"))
    match, _ = weights.qk_matching(one, circuit.previous, circuit.induction)
    words = one.W_E @ one.W_Q[l2, h2], one.W_E @ one.W_K[l2, h2]
    assert match > weights.top1(*words) + 0.1
    keys = two.W_E @ one.W_V[l1, h1] @ one.W_O[l1, h1] @ one.W_K[l2, h2]
    assert weights.top1(two.W_E @ two.W_Q[l2, h2], keys) < match - 0.1


def test_qk_matching_is_no_accuracy(trained):
    """It is read from weights, which an ablation leaves alone."""
    model, batch, other, circuit = trained
    hooks = ablate_heads(model, batch.tokens, circuit.all_induction, "mean", other.tokens)
    assert without(model, batch, hooks)["accuracy"] < -0.5


def test_a_whole_mlp_layer_is_needed(trained):
    """And a difference of loss is none of logits."""
    model, batch, other, _ = trained
    name = "blocks.0.hook_mlp_out"
    mean = replacements(model, batch.tokens, [name], "mean", other.tokens)[name]
    change = without(model, batch, [set_activation(name, mean)])
    assert change["loss"] > 1
    assert (change["loss"] + change["logit"]).abs() > 0.1 * change["loss"]


def test_the_first_position_is_patched_from_another_token(trained):
    model, batch, *_ = trained
    second = torch.arange(L, 2 * L)

    def changed(back):
        """Mean |change of log p| at each patched position, over layers and sequences."""
        sweep = patching.mlp_position_sweep
        rows = batch.tokens[:4, None]
        each = torch.stack([sweep(model, row, second, second - back, second) for row in rows])
        return each.diagonal(dim1=2, dim2=3).abs().mean((0, 1))

    same, another = changed(L), changed(L - 1)
    assert same[0] > 5 * same[1:].mean()
    assert another[1:].mean() > 0.5 * same[0]


def test_three_tokens_have_most_of_the_shapley_values(trained):
    model, batch, other, _ = trained
    rows, fill = batch.tokens[:4, : L + 5], other.tokens[:, 1 : L + 4]  # (draw, token)
    values = [gpt2_induction.shapley_values(model, row, fill, seeded(0)) for row in rows]
    worth = torch.stack(values).mean((0, 1))  # of the tokens at 1 to L + 3
    three = worth[torch.tensor([3, 4, L + 3]) - 1].sum()  # A and B before, A now
    assert three > worth.sum() - three + 1
