"""The induction circuit, on one whose answer is known because it is wired."""

from itertools import permutations

import pytest
import torch
from random_layers import seeded
from tiny import tiny_gpt2
from wired import save_wired

from iclutils import models
from iclutils.chapters import gpt2_induction
from iclutils.interp import head_scores, readout
from iclutils.interp.hooks import ablate_sets
from iclutils.tasks.repeated import repeated_tokens

LENGTH = 12


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    save_wired(folder)
    model = models.load(folder)
    batch, other = (repeated_tokens(model, 8, LENGTH, seeded(s), distinct=True) for s in (0, 1))
    return model, batch, other


def test_the_wired_heads_are_found(built):
    model, batch, _ = built
    circuit = gpt2_induction.find(model, batch)
    assert circuit == gpt2_induction.Circuit((0, 0), (1, 0), ((1, 0),), ((0, 0),))
    assert circuit.others(model) == [(0, 1), (1, 1)]
    assert circuit.pairs() == [((0, 0), (1, 0))]
    scores = {k: v.mean(0) for k, v in head_scores.score_heads(model, batch.tokens, LENGTH).items()}
    assert scores["prefix"][1, 0] > 0.99
    assert scores["previous"][0, 0] > 0.99
    assert scores["duplicate"][1, 0] < 0.01


def test_cutting_the_wire_is_what_stops_it(built):
    model, batch, other = built
    circuit = gpt2_induction.find(model, batch)
    for sets in (None, [[(0, 0)], [(0, 1)]]):  # by default head 0.1 alone, which is idle
        cut = gpt2_induction.cause(model, batch, circuit, other, sets)
        assert cut.before.min() > 0.99
        assert max(cut.without_path.max(), cut.without_previous.max()) < 0.2
        torch.testing.assert_close(cut.without_all_previous, cut.without_previous)
        torch.testing.assert_close(cut.without_all_paths, cut.without_path)
        expected = [cut.without_previous, cut.before][0 if sets else 1 :]
        torch.testing.assert_close(cut.without_others, expected)


def test_the_loss_rises_without_the_head_and_not_without_an_idle_one(built):
    model, batch, other = built
    (found,) = gpt2_induction.second_copy(model, batch, [[]])
    before = found["loss"]
    log_p, right = readout.predictions(model, batch.tokens)
    torch.testing.assert_close(before, -log_p[:, batch.clean_half].mean(1))
    torch.testing.assert_close(found["accuracy"], right[:, batch.clean_half].float().mean(1))
    ways = ablate_sets(model, batch.tokens, [[(1, 0)], [(1, 1)]], "zero", other.tokens)
    cut, idle = (x["loss"] - before for x in gpt2_induction.second_copy(model, batch, ways))
    assert cut.mean() > 1
    assert idle.mean().item() == pytest.approx(0, abs=1e-6)


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
