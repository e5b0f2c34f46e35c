"""What the sources of chapter 04 got wrong, each alone and all else right: ``book/errata/04.md``.

Identities of the chapter that no network enters stand here, too."""

import pytest
import torch
from random_layers import TIGHT, some
from torch.testing import assert_close

from iclutils.chapters.gradient_step import descent
from iclutils.tasks.functions import Problem
from iclutils.tasks.regression import Task

PAIRS, DIM, RATE = 12, 5, 0.3
PUBLISHED = 0.20468888  # loss of one step, a constant in the released notebook


@pytest.fixture(scope="module")
def regression():
    """Contexts; W_0 is 0, so that the errors W_0 x - y are -y."""
    xs, weights = some(0, (64, PAIRS + 1, DIM), (64, DIM, 1))
    return xs, xs @ weights


def test_the_notes_error_signal_counts_rate_and_sign_twice(regression):
    xs, ys = regression
    pairs, query, errors = xs[:, :-1], xs[:, -1:], -ys[:, :-1]
    change = (-RATE / PAIRS * (query @ pairs.mT @ errors))[:, 0, 0]
    truth = descent.descend(xs, ys[..., 0], [RATE]).predictions[1]
    assert_close(change, truth, **TIGHT)
    as_written = -RATE / PAIRS * (query @ pairs.mT @ (-RATE / PAIRS * errors))[:, 0, 0]
    assert ((as_written - change).abs() / change.abs()).median() > 1


def test_layers_with_the_notes_signs_do_not_stack(regression):
    """P = -η/n: one layer is right, but adds +ΔW x_i to the labels, from which a second takes its
    step."""
    xs, ys = regression
    pairs, query = xs[:, :-1], xs[:, -1:]
    truth = descent.descend(xs, ys[..., 0], [RATE, RATE]).predictions
    by_layer = RATE / PAIRS * xs @ pairs.mT @ ys[:, :-1]  # what a layer adds to the y of each token
    assert_close(by_layer[:, -1, 0], truth[1], **TIGHT)
    labels = ys[:, :-1] + by_layer[:, :-1]
    second = by_layer[:, -1:] + RATE / PAIRS * query @ pairs.mT @ labels
    assert ((second[:, 0, 0] - truth[2]).abs() / truth[2].abs()).median() > 0.01


def test_the_released_loss_belongs_to_inputs_between_minus_and_plus_one_half():
    """Doc strings and labels say -1 to 1."""
    halves, ones = (descent.best_step(10, 10, w**2 / 3, w**4 / 5).rate_loss for w in (0.5, 1.0))
    assert halves == pytest.approx(PUBLISHED, rel=0.01)
    assert ones / PUBLISHED > 1.5


def test_the_best_rate_that_a_search_finds_has_the_loss_of_the_closed_form():
    """And GD++ needs fewer steps, since it evens out the spectrum of the inputs."""
    drawn = Problem(Task(10, inputs="uniform*1+-0.5")).sample(8000, 11, torch.Generator())
    gd, plus = (descent.tune(2, drawn.xs, drawn.ys, plus=plus) for plus in (False, True))
    assert gd[0].loss == pytest.approx(
        descent.best_step(10, 10, 1 / 12, 1 / 80).rate_loss, rel=0.05
    )
    assert plus[1].loss < 0.9 * gd[1].loss
    pairs = drawn.xs[:, :-1].double()
    mu = torch.linalg.eigvalsh(pairs.mT @ pairs)
    after = mu * (1 - plus[1].gammas[0] * mu) ** 2
    condition, evened = (x.amax(1) / x.amin(1) for x in (mu, after))
    assert (evened / condition).median() < 0.9
