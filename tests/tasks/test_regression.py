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
    tall = regression.scale_outputs(plain, factor)
    torch.testing.assert_close(tall.ys, factor * plain.ys)
    torch.testing.assert_close(truth(tall) + factor * noises, tall.ys, atol=1e-4, rtol=1e-4)


def test_skewed_inputs_have_the_spectrum_and_the_length():
    found = regression.skew_inputs(
        regression.sample(regression.Task(4), 1, 50_000, seeded()), seeded(1)
    )
    covariance = torch.cov(found.xs[0].double().mT)
    expected = 1 / (torch.arange(4).double() + 1) ** 2
    expected *= 4 / expected.sum()
    spectrum = torch.linalg.eigvalsh(covariance).flip(0)
    torch.testing.assert_close(spectrum, expected, rtol=0.04, atol=0)
    assert covariance[~torch.eye(4, dtype=torch.bool)].abs().max() > 0.1  # not along the axes
    torch.testing.assert_close(found.ys, truth(found), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dim", [2, 5, 8])
def test_half_subspace_has_half_the_rank_and_the_length(dim):
    found = regression.project_inputs(some(dim, 20, count=300), seeded(2))
    ranks = torch.linalg.matrix_rank(found.xs.double(), rtol=1e-5)
    assert ranks.unique().tolist() == [dim // 2]
    assert found.xs.square().sum(-1).mean() == pytest.approx(dim, rel=0.08)
    spans = [torch.linalg.pinv(x, rtol=1e-4) @ x for x in found.xs[:2].double()]
    assert (spans[0] - spans[1]).abs().max() > 0.05  # each context has its own


def test_queries_in_the_opposite_quadrant():
    plain = some(noise=0.2)
    found = regression.query_opposite(plain, seeded(3))
    signs = found.contexts.xs.sign()
    assert bool((signs == signs[:, :1]).all())
    assert torch.equal(found.contexts.xs.abs(), plain.xs.abs())
    assert len(signs[:, 0].unique(dim=0)) > 20
    assert bool((found.queries.sign() == -signs).all())
    noise = found.contexts.ys - truth(found.contexts)
    torch.testing.assert_close(noise, plain.ys - truth(plain), atol=1e-5, rtol=0)


def test_repeated_queries_are_earlier_inputs():
    plain = some(pairs=6, count=500)
    found = regression.repeat_inputs(plain, seeded(4))
    same = (found.queries[:, :, None] == plain.xs[:, None]).all(-1)  # (context, query, pair)
    assert bool(same.any(-1).all())
    assert torch.equal(found.queries[:, 0], plain.xs[:, 0])
    for n in range(2, 6):
        which = same[:, n].int().argmax(-1)
        assert which.unique().tolist() == list(range(n))
        assert stats.chisquare(which.bincount().numpy()).pvalue > 1e-3


def test_a_query_takes_the_place_of_its_pair():
    plain = some(noise=0.5)
    found = regression.QueriedContexts(plain, torch.randn(plain.xs.shape, generator=seeded(5)))
    for n in (0, 3, 8):
        at = found.at(n)
        assert torch.equal(at.xs[:, :n], plain.xs[:, :n])
        assert torch.equal(at.xs[:, n], found.queries[:, n])
        assert torch.equal(at.ys[:, :n], plain.ys[:, :n])
        noise = plain.ys[:, n] - truth(plain)[:, n]
        torch.testing.assert_close(at.ys[:, n], truth(at)[:, n] + noise, atol=1e-5, rtol=0)
