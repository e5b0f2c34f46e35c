"""Probes: planted signals are found where they are, and only there; closed forms agree."""

import numpy as np
import pytest
import torch
from random_layers import seeded
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from iclutils import IclError
from iclutils.chapters.ridge_ols import probes
from iclutils.models.regressors import InContextRegressors, Shape
from iclutils.tasks.regression import Contexts, Task, sample

HELD = 512
LAYER, PLACE = 1, 3  # where signals are planted


def noise(*size, seed=0):
    return torch.randn(size, generator=seeded(seed))


def planted():
    """States of a network with 3 layers and 5 positions of pure noise, and what one place holds."""
    states = noise(1, 3, 2048 + HELD, 5, 6)
    return states, states[0, LAYER, :, PLACE] @ noise(6, 2, seed=1)


def fitted(states, target, kind, steps):
    white = probes.whiten(states.clone(), HELD)
    return probes.fit(white, target, kind, seeded(), HELD, steps=steps)


def test_what_is_written_without_a_linear_trace_takes_an_mlp():
    states, _ = planted()
    held = states[0, LAYER, :, PLACE, :2].abs()  # even in the states: no linear correlation
    linear = fitted(states, held[None], "linear", 250)
    mlp = fitted(states, held[None], "mlp", 400)
    assert linear.error.min() > 0.95
    assert mlp.error[0, LAYER, 0] < 0.25
    assert mlp.attention[0, LAYER, 0, PLACE] > 0.7
    assert mlp.error[0, [0, 2], 0].min() > 0.95


def exact_error(features, target):
    """Held-out error, 1 - R², of scikit-learn's linear probe."""
    fit = LinearRegression().fit(features[:-HELD].numpy(), target[:-HELD].numpy())
    guess = fit.predict(features[-HELD:].numpy())
    return 1 - r2_score(target[-HELD:].numpy(), guess, multioutput="variance_weighted")


def test_training_comes_near_the_closed_form():
    """With one position there is nothing to attend to; with more, α is taken as it was learned."""
    states, held = planted()
    states = states + 0.5 * noise(*states.shape, seed=10)
    for part in (states[..., PLACE : PLACE + 1, :], states):
        learned = fitted(part, held[None], "linear", 200)
        mixed = torch.einsum("nlkp,nlbpw->nlbw", learned.attention, part)
        for layer in range(3):
            expected = exact_error(mixed[0, layer], held)
            assert float(learned.error[0, layer, 0]) == pytest.approx(expected, abs=0.01)


def test_states_and_targets():
    """Residual streams network by network; targets by NumPy."""
    shape = Shape(3, 6, "two", 2, 8, 2)
    nets = [InContextRegressors(shape, [0, 1]), InContextRegressors(shape, [2])]
    drawn = sample(Task(3, noise=0.3), 6, 6, seeded())
    drawn.xs[:, 1] = drawn.xs[:, 0]  # the first two pairs leave w open, and contradict each other
    for n in range(1, 6):
        cut = Contexts(drawn.xs[:, : n + 1], drawn.ys[:, : n + 1], drawn.weights)
        states, targets = probes.prepare(nets, cut)
        expected = torch.cat([torch.stack(net.resid(cut.xs, cut.ys), 1) for net in nets])
        torch.testing.assert_close(states, expected)
        for i in range(6):
            x, y = cut.xs[i, :n].double().numpy(), cut.ys[i, :n].double().numpy()
            np.testing.assert_allclose(targets[0, i], x.T @ y, 1e-4, 1e-5)
            least = np.linalg.lstsq(x, y, rcond=1e-10)[0]
            np.testing.assert_allclose(targets[1, i], least, 1e-4, 1e-5)
    in_parts = probes.hidden_states(nets, drawn.xs, drawn.ys, batch_size=4)
    torch.testing.assert_close(in_parts, probes.prepare(nets, drawn)[0])
    assert not in_parts.requires_grad


def test_too_few_contexts_are_refused():
    with pytest.raises(IclError, match="600 contexts leave no batch of 128"):
        probes.whiten(noise(1, 1, 600, 2, 3), HELD)
