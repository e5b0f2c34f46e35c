"""Estimated effects of edges: integrals between both ends; see also ``test_invariants``."""

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
    to_clean, to_corrupt = (edge_attribution(gpt2, x, 32)[0].sum(0) for x in (task, turned(task)))
    torch.testing.assert_close((to_clean - to_corrupt) / 2, clean - corrupt, atol=0.02, rtol=0.02)
    once = edge_attribution(gpt2, task)[0].sum(0)
    assert (once - (clean - corrupt)).abs().max() > 0.1, "one step would do as well"
