"""What the sources of chapter 03 got wrong, where no other test shows it (book/errata/03.md)."""

from functools import partial

import numpy as np
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from iclutils.chapters.ridge_ols import algorithms, distances, probes
from iclutils.models import regressors
from iclutils.tasks.regression import Task, sample

DIM = 8


def drawn(pairs=DIM + 1, count=100, noise=0.0, prior=1.0):
    task = Task(DIM, noise=noise, prior=prior)
    return sample(task, count, pairs, torch.Generator().manual_seed(0))


def test_the_released_fit_has_an_intercept_and_an_r2_of_the_labels():
    """Of answers that are not linear in the query, those of two neighbours."""
    xs, ys, true_weights = drawn(DIM // 2, count=1)
    queries = torch.randn(1, 48, DIM, generator=torch.Generator().manual_seed(1))
    predictor = partial(algorithms.knn, k=2)
    contexts = drawn(DIM // 2, count=1)
    fit = distances.implicit_weights(predictor, contexts, queries)
    every = [torch.cat([xs[0], q[None]]) for q in queries[0]]
    answers = [predictor(x, torch.cat([ys[0], torch.zeros(1)]))[-1].item() for x in every]
    line = LinearRegression().fit(queries[0].numpy(), answers)
    assert np.abs(line.coef_ - fit.weights[0].numpy()).max() > 0.01
    guess = (queries[0].double() @ fit.weights[0]).numpy()
    of_labels = r2_score((queries[0] @ true_weights[0]).numpy(), guess)
    assert abs(float(fit.r2) - of_labels) > 0.1


def test_with_noise_a_learner_is_not_nearest_to_least_squares():
    net = regressors.load("regression-noise")
    member = next(i for i, task in enumerate(net.tasks) if Task(**task).ridge == 0.25)
    task = Task(**net.tasks[member])
    xs, ys, _ = drawn(DIM, 200, task.noise, task.prior)
    answers = distances.predict(net.select(member), xs, ys)
    known = {"OLS": algorithms.ols(xs, ys), "Bayes": algorithms.ridge(xs, ys, task.ridge)}
    assert distances.nearest(answers, known | {"nothing": 0 * ys}, DIM).winners == ["Bayes"]


def test_two_layers_hold_the_moment_vector_as_clearly_as_eight():
    """By a linear probe of the tokens of y, best layer of each."""
    least = {}
    for layers in (2, 8):
        net = regressors.load(f"regression-two-L{layers}").select(0)
        contexts = sample(Task(4), 600, 9, torch.Generator().manual_seed(0))
        states, targets = probes.prepare([net], contexts)
        of_y = states[0, 1:, :, 1::2].mean(-2).numpy()  # (layer, context, width)
        moment, r2 = targets[0].numpy(), []
        for layer in of_y:
            probe = LinearRegression().fit(layer[:500], moment[:500])
            r2.append(r2_score(moment[500:], probe.predict(layer[500:])))
        least[layers] = 1 - max(r2)
    assert least[2] < least[8] + 0.1
