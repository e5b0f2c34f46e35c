"""Growth: a model's state by plain Hugging Face passes, and on a circuit wired by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from random_prompts import BOS, CUE, LABELS, PAD, random_prompts
from tiny import save_gpt2
from transformers import GPT2LMHeadModel
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.label_words import copying
from iclutils.models import TransformerBridge, load
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


def test_the_wired_circuit_copies_and_the_random_weights_do_not(plain: Built, wired: Built) -> None:
    found, other = (
        copying.checkpoint_metrics(m, prompts, copied, 1)
        for m, _, prompts, copied in (wired, plain)
    )
    assert found["copying"] == 1
    assert found["prefix"] > 0.99
    assert other["copying"] < 0.2
    assert other["prefix"] < 0.5


def test_copying_heads_are_those_of_the_circuit(plain: Built, wired: Built) -> None:
    found = copying.prefix_scores(wired[0], wired[3])
    assert copying.copying_heads(found, 1) == [(1, 0)], "head 1.0 is wired to copy"
    _, network, _, copied = plain
    scores = prefix_scores(network, copied)
    heads = [(layer, head) for layer in range(3) for head in range(4)]
    ranked = sorted(heads, key=lambda head: -scores[head].item())
    assert copying.copying_heads(scores, 5) == ranked[:5]
    assert sorted(copying.copying_heads(scores, 12)) == heads
    for count in (0, 13):
        with pytest.raises(IclError, match=f"has 12 heads; got count={count}"):
            copying.copying_heads(scores, count)


def without(network: GPT2LMHeadModel, prompts: Prompts, heads: list[tuple[int, int]]) -> list[bool]:
    """The same by hooks on the output projections; means are taken before anything is cut."""
    size = network.config.n_embd // network.config.n_head
    means: dict[int, torch.Tensor] = {}

    def note(layer: int, module: object, inputs: tuple) -> None:
        means[layer] = inputs[0].mean((0, 1))

    def put(layer: int, head: int, module: object, inputs: tuple) -> tuple:
        z, part = inputs[0].clone(), slice(head * size, (head + 1) * size)
        z[..., part] = means[layer][part]
        return (z,)

    def run(hooks: list[tuple[int, Callable]]) -> torch.Tensor:
        blocks = network.transformer.h
        handles = [blocks[la].attn.c_proj.register_forward_pre_hook(hook) for la, hook in hooks]
        with torch.no_grad():
            out = network(prompts.tokens).logits
        for handle in handles:
            handle.remove()
        return out

    run([(layer, partial(note, layer)) for layer in range(network.config.n_layer)])
    out = run([(layer, partial(put, layer, head)) for layer, head in heads])
    at = out[torch.arange(len(prompts)), prompts.target].gather(1, prompts.label_words)
    return (at.argmax(-1) == prompts.gold).tolist()


def test_without_heads_equals_hooks_by_hand(plain: Built) -> None:
    model, network, prompts, _ = plain
    for heads in ([(2, 0)], [(0, 0), (0, 1), (2, 3)], []):
        expected = without(network, prompts, heads)
        assert copying.without_heads(model, prompts, heads).tolist() == expected
        assert (expected != without(network, prompts, [])) == bool(heads)
