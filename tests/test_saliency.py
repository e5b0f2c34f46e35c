"""Saliency against retained gradients, finite differences and the paper's formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_prompts import prompts_strategy, random_prompts
from tiny import CONTEXT, VOCAB, save_gptj, save_neox, tiny_gpt2
from torch.nn import functional
from transformers import AutoModelForCausalLM

from iclutils import IclError
from iclutils.chapters.label_words.saliency import (
    HEADS,
    attention_and_gradient,
    edge_kinds,
    flow,
    measure,
    saliency,
    strongest_edges,
)
from iclutils.interp.readout import target_logits
from iclutils.models import TransformerBridge, get_act_name, load
from iclutils.tasks.prompts import Prompts, class_logits

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    gpt2, neox = (tmp_path_factory.mktemp(name) for name in ("gpt2", "neox"))
    tiny_gpt2(gpt2, n_positions=128)
    save_neox(neox)
    return {"gpt2": gpt2, "neox": neox}


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> TransformerBridge:
    return load(folders["gpt2"])


def loss(prompts: Prompts, at_target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        class_logits(prompts, at_target), prompts.gold, reduction="none"
    )


def by_retained_gradients(folder: Path, prompts: Prompts) -> torch.Tensor:
    """A * dL/dA from the Hugging Face model alone: (batch, layer, head, dest, src), float64."""
    network = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float64
    )
    out = network.eval()(prompts.tokens, output_attentions=True)
    for pattern in out.attentions:
        pattern.retain_grad()
    rows = torch.arange(len(prompts))
    loss(prompts, out.logits[rows, prompts.target]).sum().backward()
    return torch.stack([a.detach() * a.grad for a in out.attentions], 1)


@pytest.mark.parametrize("name", ["gpt2", "neox"])
@pytest.mark.parametrize("heads", HEADS)
def test_it_equals_retained_gradients(folders: dict[str, Path], name: str, heads: str) -> None:
    prompts = random_prompts(seed=3, count=4)
    product = by_retained_gradients(folders[name], prompts)
    expected = {
        "sum": product.sum(2).abs(),
        "sum_of_abs": product.abs().sum(2),
        "mean": product.mean(2).abs(),
    }[heads]
    got = saliency(load(folders[name]), prompts, heads)
    assert expected.max() > 0.1
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-5)
    if name == "gpt2":  # rotary models compute their rotations in float32 all the same
        exact = saliency(load(folders[name]).double(), prompts, heads)
        torch.testing.assert_close(exact, expected, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "neox"])
def test_attention_and_gradient_are_its_two_factors(folders: dict[str, Path], name: str) -> None:
    prompts = random_prompts(seed=3, count=4)
    model = load(folders[name])
    attention, gradient = attention_and_gradient(model, prompts)
    product = by_retained_gradients(folders[name], prompts)
    assert attention.shape == product.shape
    torch.testing.assert_close((attention * gradient).double(), product, atol=2e-6, rtol=2e-5)
    network = AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager")
    with torch.no_grad():
        patterns = torch.stack(network(prompts.tokens, output_attentions=True).attentions, 1)
    torch.testing.assert_close(attention, patterns, atol=1e-5, rtol=1e-4)
    joined = (attention * gradient).sum(2).abs()
    torch.testing.assert_close(joined, saliency(model, prompts), atol=1e-6, rtol=1e-5)
    assert not attention.requires_grad
    assert not gradient.requires_grad


def test_it_equals_finite_differences_of_the_loss(folders: dict[str, Path]) -> None:
    model = load(folders["gpt2"]).double()
    prompts = random_prompts(seed=1, count=1)
    importance = saliency(model, prompts)[0]
    step = 1e-5
    patterns: dict[int, torch.Tensor] = {}

    def changed(layer: int, head: int, dest: int, src: int, by: float) -> float:
        def nudge(pattern: torch.Tensor, hook: object) -> torch.Tensor:
            patterns[layer] = pattern
            pattern = pattern.clone()
            pattern[:, head, dest, src] += by
            return pattern

        return loss(
            prompts, target_logits(model, prompts, [(get_act_name("pattern", layer), nudge)])
        ).item()

    for layer, found in enumerate(strongest_edges(importance, 2)):
        for edge in found:
            total = 0.0
            for head in range(model.cfg.n_heads):
                where = (layer, head, edge.dest, edge.src)
                slope = (changed(*where, step) - changed(*where, -step)) / (2 * step)
                total += slope * patterns[layer][0, head, edge.dest, edge.src].item()
            assert abs(total) == pytest.approx(edge.weight, rel=1e-4, abs=1e-8)


@settings(max_examples=30, **QUIET)
@given(prompts=prompts_strategy())
def test_even_saliency_gives_one_everywhere(prompts: Prompts) -> None:
    size = prompts.tokens.shape[1]
    even = torch.ones(len(prompts), 2, size, size)  # diagonal, future and padding included
    found = flow(even, prompts)
    assert bool((found.mean == 1).all())
    torch.testing.assert_close(found.relative, torch.full((2, 3), 1 / 3))


@settings(max_examples=30, **QUIET)
@given(prompts=prompts_strategy())
def test_the_kinds_are_counted_as_in_the_paper(prompts: Prompts) -> None:
    kinds = edge_kinds(prompts)
    assert int(kinds.sum(1).max()) == 1
    count = flow(torch.ones(len(prompts), 1, *kinds.shape[-2:]), prompts).count
    sources, labels = prompts.label_pos.sum(-1), prompts.label_pos.shape[1]
    q = prompts.target
    expected = [sources, torch.full_like(q, labels), q * (q + 1) // 2 - sources - labels]
    assert torch.equal(count, torch.stack(expected, -1))


@settings(max_examples=30, **QUIET)
@given(prompts=prompts_strategy())
def test_the_flows_are_the_papers_sums(prompts: Prompts) -> None:
    size = prompts.tokens.shape[1]
    importance = torch.rand(len(prompts), 2, size, size, generator=torch.Generator().manual_seed(0))
    found = flow(importance, prompts)
    for row, q in enumerate(prompts.target.tolist()):
        places = prompts.label_pos[row].tolist()
        for layer in range(2):
            grid = importance[row, layer, : q + 1, : q + 1].double().tril(-1)
            into_label = sum(grid[p, :p].sum().item() for p in places)
            into_target = sum(grid[q, p].item() for p in places)
            rest = grid.sum().item() - into_label - into_target
            total = found.total[row, layer].tolist()
            assert total == pytest.approx([into_label, into_target, rest], rel=1e-4, abs=1e-4)
            numbers = [sum(places), len(places)]
            numbers.append(q * (q + 1) / 2 - sum(numbers))
            means = [into_label / numbers[0], into_target / numbers[1], rest / numbers[2]]
            assert found.mean[row, layer].tolist() == pytest.approx(means, rel=1e-4, abs=1e-4)


@settings(max_examples=6, **QUIET)
@given(prompts=prompts_strategy())
def test_padding_order_and_batch_size_do_not_matter(
    model: TransformerBridge, prompts: Prompts
) -> None:
    together = saliency(model, prompts)
    assert together.shape[-1] == prompts.tokens.shape[1]
    order = torch.arange(len(prompts)).flip(0)
    torch.testing.assert_close(saliency(model, prompts[order])[order], together)
    torch.testing.assert_close(saliency(model, prompts, batch_size=2), together)
    for row in range(len(prompts)):
        alone = saliency(model, prompts[row : row + 1])[0]  # without padding
        width = alone.shape[-1]
        torch.testing.assert_close(together[row, :, :width, :width], alone, atol=1e-5, rtol=1e-4)
        assert not together[row, :, width:].any()
        assert not together[row, :, :, width:].any()


def test_what_stands_in_the_padding_does_not_matter(model: TransformerBridge) -> None:
    prompts = random_prompts(seed=5, longest=6)
    other = replace(prompts, tokens=prompts.tokens.where(prompts.kept, 7))
    assert not torch.equal(prompts.tokens, other.tokens)
    assert torch.equal(saliency(model, prompts), saliency(model, other))


def test_in_the_last_layer_only_the_target_reads(model: TransformerBridge) -> None:
    prompts = random_prompts()
    last = saliency(model, prompts)[:, -1]
    rows = torch.arange(len(prompts))
    assert bool((last[rows, prompts.target].sum(-1) > 0).all())
    last[rows, prompts.target] = 0
    assert not last.any()
    assert not measure(model, prompts).mean[:, -1, 0].any()


def test_no_parameter_gets_a_gradient(folders: dict[str, Path]) -> None:
    model, prompts = load(folders["gpt2"]), random_prompts()
    frozen = saliency(model, prompts)
    model.requires_grad_(True)
    torch.testing.assert_close(saliency(model, prompts), frozen)
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(saliency(model, prompts), frozen)


def test_measuring_equals_the_flow_of_the_saliency(model: TransformerBridge) -> None:
    prompts = random_prompts(count=5, shots=2)
    found, expected = measure(model, prompts, batch_size=2), flow(saliency(model, prompts), prompts)
    torch.testing.assert_close(found.total, expected.total, atol=1e-5, rtol=1e-4)
    assert torch.equal(found.count, expected.count)
    torch.testing.assert_close(found.relative.sum(-1), torch.ones(model.cfg.n_layers))
    mean = expected.mean.mean(0)
    torch.testing.assert_close(found.relative, mean / mean.sum(-1, keepdim=True))
    share = expected.total.mean(0)
    torch.testing.assert_close(found.relative_total, share / share.sum(-1, keepdim=True))


def test_the_strongest_edges_in_order() -> None:
    importance = torch.zeros(2, 4, 4)
    importance[0, 3, 1], importance[0, 2, 0], importance[0, 1, 1] = 2.0, 3.0, 9.0
    first, second = strongest_edges(importance, 5)
    assert first == [(0, 2, 0, 3.0), (0, 3, 1, 2.0)]  # the diagonal is no edge
    assert second == []
    assert len(strongest_edges(importance, 1)[0]) == 1
    with pytest.raises(IclError, match="at least one"):
        strongest_edges(importance, 0)


def test_wrong_input_is_refused(folders: dict[str, Path], model: TransformerBridge) -> None:
    prompts = random_prompts()
    with pytest.raises(IclError, match="sum_of_abs"):
        measure(model, prompts, "sum_of_abz")
    with pytest.raises(IclError, match="vocabulary"):
        saliency(model, replace(prompts, label_words=prompts.label_words + VOCAB))
    with pytest.raises(IclError, match=f"at most {CONTEXT}"):
        saliency(load(folders["neox"]), random_prompts(classes=5, shots=3, longest=5))
    with pytest.raises(IclError, match="batch_size"):
        saliency(model, prompts, batch_size=0)
    with pytest.raises(IclError, match="does not belong"):
        flow(torch.ones(2, 1, 4, 4), prompts)
    empty = Prompts(**{name: value[:0] for name, value in vars(prompts).items()})
    with pytest.raises(IclError, match="no prompts"):
        saliency(model, empty)


def test_attention_that_passes_no_gradient_on_is_refused(tmp_path: Path) -> None:
    save_gptj(tmp_path)
    unfit, prompts = load(tmp_path), random_prompts()
    for ask in (saliency, measure, attention_and_gradient):
        with pytest.raises(IclError, match=r"after using it.*Use a model like GPT-2.*compression"):
            ask(unfit, prompts)
