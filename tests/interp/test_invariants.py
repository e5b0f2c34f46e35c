"""What holds of every task, however it scores, in all that removes, patches or estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import a_task

from iclutils.chapters.every_lens import question
from iclutils.interp import circuit, patching
from iclutils.interp.clean_corrupt import CleanCorrupt, baselines, scored_logits
from iclutils.interp.graph import head, of
from iclutils.models import TransformerBridge

assert question  # a task of its own
TASKS = [CleanCorrupt, *CleanCorrupt.__subclasses__()]


# Would catch a score that is compared with a baseline of another quantity.
@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("narrow", [False, True])
def test_the_score_is_the_tasks(
    gpt2: TransformerBridge, kind: type[CleanCorrupt], narrow: bool
) -> None:
    task = kind(**vars(a_task(gpt2, 2, 7, narrow=narrow)))
    clean, graph = baselines(gpt2, task)[0], of(gpt2)
    run = patching.CleanRun(gpt2, task)
    assert run.plain
    torch.testing.assert_close(run.score, clean, atol=1e-4, rtol=0)
    sets = [[head(layer, h)] for layer in range(3) for h in range(4)]
    few, many = (patching.ablate(gpt2, task, s) for s in ([[], sets[0]], [[], *sets]))
    torch.testing.assert_close(few[0], clean, atol=1e-4, rtol=0)
    torch.testing.assert_close(many[:2], few, atol=1e-4, rtol=0)
    same = replace(task, corrupt=task.clean)
    assert patching.path_patching(gpt2, same, graph.edges()[::9]).abs().max() < 1e-4
    assert patching.layer_flow(gpt2, same).abs().max() < 1e-4
    whole = circuit.scores(gpt2, task, graph.exists[None])[0]
    torch.testing.assert_close(whole, task.score(scored_logits(gpt2, task)), atol=1e-3, rtol=0)
