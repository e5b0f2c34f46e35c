"""Smeared keys and cut paths, against a GPT-2 in loops; the curves that ship."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.special import softmax
from transformers import GPT2LMHeadModel

from iclutils import zoo
from iclutils.files import write_text
from training import induction, phase_change


def norm(x, module):
    gain, shift = (p.detach().numpy() for p in (module.weight, module.bias))
    return (x - x.mean()) / np.sqrt(x.var() + module.eps) * gain + shift


def linear(x, module):
    return x @ module.weight.detach().numpy() + module.bias.detach().numpy()


def mlp(x, block):
    up = linear(norm(x, block.ln_2), block.mlp.c_fc)
    up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return linear(up, block.mlp.c_proj)


def by_hand(network, tokens, cut=""):
    """Logits (pos, vocab), position by position and head by head; ``cut`` names the part."""
    model, width = network.transformer, network.config.n_embd // network.config.n_head
    wte, wpe = (m.weight.detach().numpy() for m in (model.wte, model.wpe))
    stream = [wte[token] + wpe[t] for t, token in enumerate(tokens)]
    unread = [x + mlp(x, model.h[0]) for x in stream]  # where layer 0 has no attention
    for number, block in enumerate(model.h):
        states = [np.split(linear(norm(x, block.ln_1), block.attn.c_attn), 3) for x in stream]
        if cut and number == 1:
            at = ("queries", "keys", "values").index(cut)
            for state, x in zip(states, unread, strict=True):
                state[at] = np.split(linear(norm(x, block.ln_1), block.attn.c_attn), 3)[at]
        wrote = []
        for t in range(len(tokens)):
            joined = []
            for h in range(network.config.n_head):
                own = slice(h * width, (h + 1) * width)
                keys = [state[1][own] for state in states]
                if hasattr(block.attn, "smear"):
                    share = 1 / (1 + np.exp(-block.attn.smear[h].item()))
                    pairs = zip(keys, keys[:1] + keys[:-1], strict=True)
                    keys = [share * key + (1 - share) * before for key, before in pairs]
                scores = [states[t][0][own] @ keys[s] / width**0.5 for s in range(t + 1)]
                values = [states[s][2][own] for s in range(t + 1)]
                joined.append(softmax(scores) @ np.stack(values))
            wrote.append(linear(np.concatenate(joined), block.attn.c_proj))
        stream = [x + y for x, y in zip(stream, wrote, strict=True)]
        stream = [x + mlp(x, block) for x in stream]
    return np.stack([norm(x, model.ln_f) for x in stream]) @ wte.T


@pytest.mark.parametrize("variant", phase_change.VARIANTS)
def test_a_changed_network_answers_as_loops_do(variant):
    network = phase_change.recipe(f"phase-{variant}-3").network().double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    tokens = [5, 9, 2, 5, 9, 2, 7]
    cut = variant.removeprefix("no-") if variant.startswith("no-") else ""
    for _ in range(2):  # nothing is left over from a pass
        found = network(torch.tensor([tokens])).logits[0]
        np.testing.assert_allclose(found.detach(), by_hand(network, tokens, cut), atol=1e-10)
    if cut:
        assert not np.allclose(found.detach(), by_hand(network, tokens), atol=1e-3)


def test_a_variant_differs_from_the_shipped_recipe_in_its_change_alone():
    plain, recipe = induction.recipe(3), phase_change.recipe("phase-two-layers-3")
    assert recipe.loss(recipe.network(), 5) == plain.loss(plain.network(), 5)
    network = recipe.network()
    assert recipe.held_out(network).items() >= plain.held_out(network).items()
    smeared = phase_change.recipe("phase-two-layers-smeared-3").network()
    assert {n for n, _ in smeared.named_parameters()} - {n for n, _ in network.named_parameters()}
    for name, weight in network.named_parameters():
        assert smeared.get_parameter(name).equal(weight)


def test_the_measures_see_the_heads_of_the_shipped_model():
    network = GPT2LMHeadModel.from_pretrained(zoo.folder("induction-3"))
    found, shipped = phase_change.measure(network), zoo.curves("induction-3")
    assert found == {k: pytest.approx(shipped[k][-1], abs=0.03) for k in ("prefix", "previous")} | {
        k: pytest.approx(v, abs=2e-3) for k, v in induction.measure(network).items()
    }


def test_the_step_of_the_change():
    curve = {"step": [50, 100, 150, 200], "accuracy": [0.0, 0.1, 0.9, 0.4]}
    assert phase_change.change_step(curve) == pytest.approx(125)
    assert phase_change.change_step(curve, 0.05) == pytest.approx(75)
    assert phase_change.change_step(curve, 0.95) == math.inf


def test_the_trainings_of_a_folder_are_what_ships(tmp_path, monkeypatch):
    monkeypatch.setattr(phase_change, "STORED", tmp_path / "curves.jsonl")
    for name in phase_change.names():
        rows = [dict.fromkeys(phase_change.MEASURES, 0.12345) | {"step": s} for s in (50, 100)]
        write_text(tmp_path / name / "training.jsonl", "\n".join(map(json.dumps, rows)))
        write_text(tmp_path / name / "SHA256SUMS", "")
    phase_change.collect(tmp_path)
    curve = {"step": [50, 100]} | {k: [0.123] * 2 for k in phase_change.MEASURES[1:]}
    seeds = dict.fromkeys(zoo.HELD_OUT, curve)
    assert phase_change.curves() == dict.fromkeys(phase_change.VARIANTS, seeds)
