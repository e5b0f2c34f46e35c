"""Regressions: the draws that trainings rely on, the laws, what each shift promises."""

import pytest
import torch
from random_layers import seeded
from scipy import stats

from iclutils.tasks import regression


def some(dim=6, pairs=9, noise=0.0, count=40):
    return regression.sample(regression.Task(dim, noise), count, pairs, seeded())


def truth(contexts):
    return torch.einsum("bnd,bd->bn", contexts.xs, contexts.weights)


def test_normal_draws_are_inputs_weights_noise_in_this_order():
    """Trained networks saw this stream: it may not change."""
    task, twin = regression.Task(3, noise=0.5, prior=1.5), seeded(7)
    found = regression.sample(task, 4, 5, seeded(7))
    xs, weights = torch.randn(4, 5, 3, generator=twin), torch.randn(4, 3, generator=twin) * 1.5
    ys = (xs * weights[:, None]).sum(-1) + torch.randn(4, 5, generator=twin) * 0.5
    for ours, theirs in zip(found, (xs, ys, weights), strict=True):
        assert torch.equal(ours, theirs)
    assert task.ridge == pytest.approx(1 / 9)


LAWS = {
    "normal": stats.norm(),
    "uniform": stats.uniform(-(3**0.5), 2 * 3**0.5),
    "uniform*3+1": stats.uniform(1, 3),
}


@pytest.mark.parametrize("law", list(LAWS))
def test_laws_are_scipys(law):
    drawn = regression.draw(law, (100, 200), seeded()).flatten().double().numpy()
    assert stats.kstest(drawn, LAWS[law].cdf).pvalue > 1e-3


@pytest.mark.parametrize(("factor", "noise"), [(0.3, 0.0), (4.0, 0.5)])
def test_scales(factor, noise):
    plain = some(noise=noise)
    noises = plain.ys - truth(plain)
    wide = regression.scale_inputs(plain, factor)
    torch.testing.assert_close(wide.xs, plain.xs * factor)
    torch.testing.assert_close(wide.ys, factor * truth(plain) + noises, atol=1e-4, rtol=1e-4)
