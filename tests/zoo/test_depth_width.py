"""Depth and width together: what ships without weights is what the networks give."""

import json

import numpy as np
import pytest
import torch

from iclutils.models.regressors import load
from iclutils.tasks import generator
from iclutils.tasks.regression import Task, sample
from training import loop, regression


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


def test_what_was_trained_is_collected(tmp_path, monkeypatch):
    settings = regression.MAP["regression-map-L1-w8"] | {"steps": 2, "warmup": 1}
    for names, held in {
        "MAP": {"regression-map-L1-w8": settings},
        "SHIPPED": {},
        "PAPER": {},
    }.items():
        monkeypatch.setattr(regression, names, held)
    monkeypatch.setattr(regression, "STORED", tmp_path / "stored.jsonl")
    name = "regression-map-L1-w8"
    network = loop.train(regression.recipe(name), tmp_path / name, progress=False)
    regression.collect(tmp_path)
    (line,) = map(json.loads, regression.STORED.read_text().splitlines())
    assert (line["layers"], line["width"]) == (1, 8)
    assert load(network / "step-00002").shape.width == 8
    zero = torch.tensor(line["untrained"]["OLS"])
    assert zero.shape == (10,)
    assert not torch.equal(zero, torch.tensor(line["trained"]["OLS"]))
