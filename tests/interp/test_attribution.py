"""Estimated effects of edges: integrals, and both ends; float64 is in ``test_grouped``."""

from dataclasses import replace

import torch
from tiny import a_task

from iclutils.interp.attribution import edge_attribution
from iclutils.interp.clean_corrupt import baselines


def turned(task):
    """Clean for corrupt and the other way round."""
    return replace(task, clean=task.corrupt, corrupt=task.clean)


def test_averaged_gradients_of_the_embedding_sum_to_the_gap(gpt2):
    """Catches runs that do not lie between the two: the integral of a slope is the rise."""
    task = a_task(gpt2, 2)
    clean, corrupt = baselines(gpt2, task)
    both = [edge_attribution(gpt2, task, 32, at)[0].sum(0) for at in ("clean", "corrupt")]
    torch.testing.assert_close(sum(both) / 2, clean - corrupt, atol=0.02, rtol=0.02)
    once = edge_attribution(gpt2, task)[0].sum(0)
    assert (once - (clean - corrupt)).abs().max() > 0.1, "one step would do as well"


def test_the_ends_are_each_others_when_turned(gpt2):
    """Catches a gradient taken on the other run than asked for."""
    task = a_task(gpt2)
    ours, other = edge_attribution(gpt2, task, at="corrupt"), edge_attribution(gpt2, turned(task))
    torch.testing.assert_close(ours, -other, atol=1e-5, rtol=1e-4)
