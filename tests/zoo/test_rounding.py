"""Other roundings against the levels counted by hand."""

import pytest
import torch

from training.rounding import WAYS


@pytest.mark.parametrize(
    ("way", "levels", "most"), [("around zero", 16, 1.0), ("three bits", 8, 0.5)]
)
def test_a_block_has_so_many_levels_and_the_nearest_is_taken(way, levels, most):
    matrix = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    rounded = WAYS[way](matrix)
    for block, new in zip(matrix.reshape(-1, 32), rounded.reshape(-1, 32), strict=True):
        steps = new.unique().diff()
        step = steps.min()
        assert len(new.unique()) <= levels
        torch.testing.assert_close(steps / step, (steps / step).round(), atol=1e-3, rtol=0)
        assert (block - new).abs().max() <= most * step * (1 + 1e-3)
    assert ((matrix - rounded).norm() / matrix.norm()) < 4 / levels
