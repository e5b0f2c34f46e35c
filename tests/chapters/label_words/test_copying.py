"""Growth: a model's state by plain Hugging Face passes, and on a circuit wired by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_prompts import BOS, CUE, LABELS, PAD, random_prompts
from tiny import save_gpt2
from transformers import GPT2LMHeadModel
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.label_words import copying
from iclutils.chapters.label_words.answers import answers
from iclutils.interp.hooks import ablate_heads, run_with_hooks
from iclutils.models import TransformerBridge, cached, get_act_name, load
from iclutils.tasks.prompts import Prompts
from iclutils.tasks.repeated import RepeatedTokens, repeated_tokens

LENGTH = 12
Built = tuple[TransformerBridge, GPT2LMHeadModel, Prompts, RepeatedTokens]


def few_tokens(prompts: Prompts) -> Prompts:
    """The same prompts for the wired model: 14 text words, 6 label words, the rest."""
    names = torch.arange(PAD + 1) % 14
    names[LABELS : LABELS + 6] = 14 + torch.arange(6)
    names[CUE], names[BOS], names[PAD] = 20, 21, 22
    return replace(prompts, tokens=names[prompts.tokens], label_words=names[prompts.label_words])


def ready(folder: Path, prompts: Prompts) -> Built:
    model = load(folder)
    network = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    return model, network, prompts, repeated_tokens(model, 8, LENGTH, generator, distinct=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Random weights: every prompt has an answer, and none is a tie."""
    folder = tmp_path_factory.mktemp("plain")
    save_gpt2(folder, n_positions=128)
    return ready(folder, random_prompts(seed=3, count=40, shots=2))


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A copying circuit: all classes tie, because it copies every label word alike."""
    folder = tmp_path_factory.mktemp("wired")
    save_wired(folder)
    return ready(folder, few_tokens(random_prompts(seed=3, count=40, shots=2, longest=3)))


def classes(network: GPT2LMHeadModel, prompts: Prompts) -> list[int]:
    """Class predicted for each prompt, one prompt at a time, without padding."""
    found = []
    for row, q in enumerate(prompts.target.tolist()):
        with torch.no_grad():
            last = network(prompts.tokens[row : row + 1, : q + 1]).logits[0, q]
        found.append(int(last[prompts.label_words[row]].argmax()))
    return found


def hit_rate(chosen: list[int], prompts: Prompts) -> float:
    return sum(c == g for c, g in zip(chosen, prompts.gold.tolist(), strict=True)) / len(chosen)


def isolated_classes(network: GPT2LMHeadModel, prompts: Prompts, layers: int) -> list[int]:
    """The same with label words that may not look back in the first layers, by attention mask."""
    found = []
    for row, q in enumerate(prompts.target.tolist()):
        hidden = torch.ones(q + 1, q + 1).triu(1).bool()
        for p in prompts.label_pos[row].tolist():
            hidden[p, :p] = True
        mask = torch.zeros(1, 1, q + 1, q + 1).masked_fill(hidden, -1e9)

        def cut(module: object, args: tuple, kwargs: dict, mask: torch.Tensor = mask) -> tuple:
            return args, kwargs | {"attention_mask": mask}

        blocks = network.transformer.h[:layers]
        handles = [b.attn.register_forward_pre_hook(cut, with_kwargs=True) for b in blocks]
        found += classes(network, prompts[row : row + 1])
        for handle in handles:
            handle.remove()
    return found


def prefix_scores(network: GPT2LMHeadModel, copied: RepeatedTokens) -> torch.Tensor:
    """Mean attention of the second copy's tokens to what followed the first: (layer, head)."""
    with torch.no_grad():
        patterns = torch.stack(network(copied.tokens, output_attentions=True).attentions, 1)
    places = range(LENGTH + 1, 2 * LENGTH + 1)
    return torch.stack([patterns[..., p, p - LENGTH + 1] for p in places]).mean((0, 1))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_state_is_what_plain_passes_say(plain: Built, layers: int) -> None:
    model, network, prompts, copied = plain
    found = copying.checkpoint_metrics(model, prompts, copied, layers)
    with torch.no_grad():
        best = network(copied.tokens).logits.argmax(-1)
    announced = range(LENGTH + 2, 2 * LENGTH + 1)
    right = [(best[:, p - 1] == copied.tokens[:, p]).float().mean().item() for p in announced]
    assert found["copying"] == pytest.approx(sum(right) / len(right))
    assert found["prefix"] == pytest.approx(prefix_scores(network, copied).max().item(), abs=1e-5)
    clean = classes(network, prompts)
    assert found["accuracy"] == pytest.approx(hit_rate(clean, prompts))
    cut = isolated_classes(network, prompts, layers)
    changed = sum(a != b for a, b in zip(clean, cut, strict=True)) / len(clean)
    assert found["aggregation"] == pytest.approx(changed)
    assert len(set(clean)) == 3


def test_the_wired_circuit_copies(wired: Built) -> None:
    model, _, prompts, copied = wired
    found = copying.checkpoint_metrics(model, prompts, copied, 1)
    assert found["copying"] == 1
    assert found["prefix"] > 0.99


def test_copying_heads_are_those_of_the_circuit(plain: Built, wired: Built) -> None:
    found = copying.prefix_scores(wired[0], wired[3])
    assert copying.copying_heads(found, 1) == [(1, 0)], "head 1.0 is wired to copy"
    scores = prefix_scores(plain[1], plain[3])
    heads = [(layer, head) for layer in range(3) for head in range(4)]
    ranked = sorted(heads, key=lambda head: -scores[head].item())
    assert copying.copying_heads(scores, 5) == ranked[:5]
    with pytest.raises(IclError, match="has 12 heads; got count=13"):
        copying.copying_heads(scores, 13)


def test_without_heads_means_take_their_place(plain: Built) -> None:
    model, _, prompts, _ = plain
    clean = answers(model, prompts)
    assert torch.equal(copying.without_heads(model, prompts, []), clean.correct)
    hooks = ablate_heads(model, prompts.tokens, [(0, 0), (2, 3)], "mean", prompts.tokens)
    found = copying.without_heads(model, prompts, [(0, 0), (2, 3)])
    assert torch.equal(found, answers(model, prompts, hooks).correct)
    assert not torch.equal(found, clean.correct)


def test_heads_are_removed_from_demonstrations_and_queries(model: TransformerBridge) -> None:
    """Against whole prompts, in which the heads write the same mean of other prompts."""
    prompts, others = random_prompts(3, count=4, shared=True), random_prompts(4, count=2)
    heads = [(0, 1), (1, 2)]
    got = copying.without_heads_by_set(model, prompts, heads, others)
    name = get_act_name("z", 1)
    _, seen = cached(model, others.tokens, [name])
    mean = seen[name][:, :, 2].mean((0, 1))
    hooks = ablate_heads(model, others.tokens, heads, "mean", others.tokens)
    _, watched = run_with_hooks(model, prompts.tokens, hooks, [name])
    torch.testing.assert_close(watched[name][:, :, 2], mean.expand_as(watched[name][:, :, 2]))
    whole = answers(model, prompts, hooks)
    torch.testing.assert_close(got.class_logits, whole.class_logits, atol=2e-4, rtol=1e-4)
