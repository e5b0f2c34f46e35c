"""Muon on stacks of matrices, against singular values and against torch's own."""

import torch

from iclutils.zoo.recipes.muon import QUINTIC, ROUNDS, Muon, orthogonal


def test_singular_vectors_stay_and_values_follow_the_quintic():
    source = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 5, 8, generator=source, dtype=torch.float64)
    for matrices in (stack, stack.mT):
        left, values, right = torch.linalg.svd(matrices, full_matrices=False)
        values = values / values.square().sum(-1, keepdim=True).sqrt()
        a, b, c = QUINTIC
        for _ in range(ROUNDS):
            values = a * values + b * values**3 + c * values**5
        expected = left @ torch.diag_embed(values) @ right
        torch.testing.assert_close(orthogonal(matrices), expected, atol=1e-6, rtol=1e-5)
        assert ((values > 0.6) & (values < 1.3)).all()


def test_each_matrix_of_a_stack_moves_as_under_the_muon_of_torch():
    """Torch holds weights (out, in) and turns them in bfloat16: directions agree to its grain."""
    source = torch.Generator().manual_seed(1)
    start = torch.randn(2, 6, 12, generator=source)
    aims = torch.randn(2, 6, 12, generator=source)
    stack, unused = torch.nn.Parameter(start.clone()), torch.nn.Parameter(torch.ones(1, 2, 2))
    single = [torch.nn.Parameter(part.mT.clone()) for part in start]
    ours = Muon([stack, unused], lr=0.05)
    theirs = torch.optim.Muon(single, lr=0.05, weight_decay=0.0, momentum=0.95)
    for _ in range(5):
        ours.zero_grad()
        (stack - aims).square().sum().backward()
        ours.step()
        theirs.zero_grad()
        sum((one.mT - aim).square().sum() for one, aim in zip(single, aims, strict=True)).backward()
        theirs.step()
    moved = stack.detach() - start
    expected = torch.stack([one.detach().mT for one in single]) - start
    assert expected.norm() > 1
    assert (moved - expected).norm() / expected.norm() < 0.02
    assert torch.equal(unused, torch.ones(1, 2, 2)), "it has no gradient"
