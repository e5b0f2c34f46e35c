"""Depth and width together: what ships without weights is what the networks give."""

import numpy as np
import pytest

from iclutils.models.regressors import load
from iclutils.tasks import generator
from iclutils.tasks.regression import Task, sample
from training import regression


def test_the_stored_distances_are_those_to_numpys_least_squares():
    xs, ys, _ = (part[:200] for part in sample(Task(8), 2000, 17, generator("map")))
    predicted = load("regression-w8")(xs, ys)[0].double().numpy()
    x, y = xs.double().numpy(), ys.double().numpy()
    squares = [
        (predicted[i, n] - x[i, n] @ np.linalg.lstsq(x[i, :n], y[i, :n], rcond=None)[0]) ** 2
        for i in range(len(x))
        for n in range(1, 17)
    ]
    stored = regression.depth_width()[4, 8]["OLS"][0]
    assert stored == pytest.approx(np.mean(squares) / 8, rel=3e-3)
