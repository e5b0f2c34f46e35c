"""Saliency against the paper's formulas; ``test_architectures`` has it by transformers alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from random_prompts import prompts_strategy, random_prompts

from iclutils.chapters.label_anchors.saliency import edge_kinds, flow, flows, measure, saliency


@settings(max_examples=30)
@given(prompts=prompts_strategy())
def test_the_flows_are_the_papers_sums(prompts):
    size = prompts.tokens.shape[1]
    importance = torch.rand(len(prompts), 2, size, size, generator=torch.Generator().manual_seed(0))
    found = flow(importance, prompts)
    assert int(edge_kinds(prompts).sum(1).max()) == 1
    for row, q in enumerate(prompts.target.tolist()):
        places = prompts.label_pos[row].tolist()
        count = [sum(places), len(places), q * (q + 1) // 2 - sum(places) - len(places)]
        assert found.count[row].tolist() == count
        for layer in range(2):
            grid = importance[row, layer, : q + 1, : q + 1].double().tril(-1)
            into_label = sum(grid[p, :p].sum().item() for p in places)
            into_target = sum(grid[q, p].item() for p in places)
            total = [into_label, into_target, grid.sum().item() - into_label - into_target]
            assert found.total[row, layer].tolist() == pytest.approx(total, rel=1e-4, abs=1e-4)
            means = [t / n for t, n in zip(total, count, strict=True)]
            assert found.mean[row, layer].tolist() == pytest.approx(means, rel=1e-4, abs=1e-4)
            rest = (grid[q].sum().item() - into_target) / (q - len(places))
            assert found.others[row, layer].item() == pytest.approx(rest, rel=1e-4, abs=1e-4)
    even = flow(torch.ones_like(importance), prompts)
    assert even.at_target.tolist() == pytest.approx([0.5, 0.5])


@settings(max_examples=6)
@given(prompts=prompts_strategy())
def test_padding_and_order_do_not_matter(gpt2, prompts):
    whole = saliency(gpt2, prompts)
    assert all(parameter.grad is None for parameter in gpt2.parameters())
    other = replace(prompts, tokens=prompts.tokens.where(prompts.real, 7))
    assert torch.equal(saliency(gpt2, other), whole)
    order = torch.arange(len(prompts)).flip(0)
    torch.testing.assert_close(saliency(gpt2, prompts[order])[order], whole)
    for row in range(len(prompts)):
        alone = saliency(gpt2, prompts[row])[0]  # without padding
        width = alone.shape[-1]
        torch.testing.assert_close(whole[row, :, :width, :width], alone, atol=1e-5, rtol=1e-4)
        assert not whole[row, :, width:].any()
        assert not whole[row, :, :, width:].any()


def test_flows_are_those_of_the_saliency_label_words_or_other_tokens(gpt2):
    prompts = random_prompts(count=5, shots=2)
    places = {"": prompts.label_pos, "cue": prompts.cue_pos}
    found = flows(gpt2, prompts, places, batch_size=2)
    for name, at in places.items():
        moved = replace(prompts, label_pos=at)
        expected = flow(saliency(gpt2, moved), moved)
        torch.testing.assert_close(found[name].total, expected.total, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found[name].others, expected.others, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(measure(gpt2, prompts).total, found[""].total, atol=1e-5, rtol=1e-4)
    mean = found[""].mean.mean(0)
    share = mean / mean.sum(-1, keepdim=True)
    torch.testing.assert_close(found[""].relative, share)
    for kind, others in ((0, [1, 2]), (1, [0, 2]), (2, [0, 1])):
        lead = share[:, kind] - share[:, others].max(1)[0]
        torch.testing.assert_close(found[""].lead(kind), lead)
