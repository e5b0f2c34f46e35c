"""Behaviours, graphs, wires and significance against a model with a known circuit, and by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny import load, save_gpt2, save_gptj, save_hand_built
from torch import Generator
from transformers import LlamaConfig, LlamaForCausalLM
from wired import save_wired

from iclutils import IclError, models
from iclutils.interp import clean_corrupt, graph, patching, statistics
from iclutils.tasks import topics


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> models.TransformerBridge:
    folder = tmp_path_factory.mktemp("wired")
    save_wired(folder)
    return models.load(folder)


def test_the_wired_model_is_the_hand_built_one(tmp_path: Path, wired: object) -> None:
    """Its defaults give the logits of the older builder, which other tests rest on."""
    save_hand_built(tmp_path)
    tokens = clean_corrupt.copying(models.load(tmp_path), 3, 11, seeded()).clean
    first, second = (models.logits(net, tokens) for net in (models.load(tmp_path), wired))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def test_repeating_differs_in_the_first_copy_alone(wired: models.TransformerBridge) -> None:
    for corruption in ("fresh", "shuffled"):
        asked = clean_corrupt.copying(wired, 4, 11, seeded(), corruption)
        differs = (asked.clean != asked.corrupt).any(0)
        assert differs[1:12].any()
        assert not differs[0]
        assert not differs[12:].any()
        rows = torch.arange(4)[:, None]
        assert torch.equal(asked.clean[rows, asked.at + 1], asked.answer)
        assert torch.equal(asked.clean[rows, asked.source], asked.answer)
    backwards = asked.corrupt[:, 1:12].flip(1)
    assert torch.equal(backwards, asked.clean[:, 1:12])
    with pytest.raises(IclError, match="Unknown corruption 'reversed'"):
        clean_corrupt.copying(wired, 4, 11, seeded(), "reversed")


def test_scores_are_log_probabilities(wired: models.TransformerBridge) -> None:
    """By numpy, over the vocabulary and over choices; fails if choices are ignored."""
    for narrow in (False, True):
        asked = clean_corrupt.copying(wired, 3, 11, seeded(), narrow=narrow)
        logits = clean_corrupt.scored_logits(wired, asked)
        whole = models.logits(wired, asked.clean)
        rows = torch.arange(3)[:, None]
        torch.testing.assert_close(logits, whole[rows, asked.at], atol=1e-5, rtol=0)
        for row in range(3):
            each = []
            for entry in range(asked.at.shape[1]):
                values = logits[row, entry].double().numpy()
                known = values if not narrow else values[asked.choices[row].numpy()]
                right = values[int(asked.answer[row, entry])]
                each.append(right - np.log(np.exp(known).sum()))
            assert asked.score(logits)[row].item() == pytest.approx(np.mean(each), abs=1e-5)


def test_known_shares(wired: models.TransformerBridge) -> None:
    asked = clean_corrupt.copying(wired, 8, 11, seeded())
    clean, corrupt = clean_corrupt.baselines(wired, asked)
    assert clean.mean() > -0.01
    assert corrupt.mean() < -5

    def share(*chosen: graph.Edge) -> float:
        lost = clean - patching.patch_edges(wired, asked, chosen)
        return clean_corrupt.share(lost, clean, corrupt).item()

    first = graph.head(0, 0)
    assert share((first, graph.Node("k", 1, 0))) == pytest.approx(1, abs=0.1)
    assert share((first, graph.Node("v", 1, 0))) == pytest.approx(0, abs=1e-3)
    assert share((graph.Node("embed"), graph.Node("v", 1, 0))) > 1
    gone = clean - patching.ablate(wired, asked, [[node] for node in graph.all_heads(wired)])
    expected = torch.tensor([1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(
        clean_corrupt.share(gone, clean, corrupt), expected, atol=0.05, rtol=0
    )
    every = [(writer, graph.Node("logits")) for writer in graph.of(wired).writers]
    torch.testing.assert_close(
        patching.patch_edges(wired, asked, every), corrupt, atol=1e-4, rtol=0
    )


def test_classification_swaps_labels_alone() -> None:
    prompts = topics.sample(6, seeded())
    asked = clean_corrupt.classification(prompts)
    differs = asked.clean != asked.corrupt
    assert torch.equal(differs.nonzero()[:, 1].view(6, -1), prompts.label_pos.sort(1).values)
    rows = torch.arange(6)[:, None]
    assert torch.equal(asked.clean[rows, asked.source], asked.answer)
    with pytest.raises(IclError, match="one demonstration per class"):
        clean_corrupt.classification(topics.sample(2, seeded(), shots=2))


@settings(deadline=None, max_examples=15)
@given(layers=st.integers(1, 4), heads=st.integers(1, 4), parallel=st.booleans())
def test_the_graph_has_every_later_reader(layers: int, heads: int, parallel: bool) -> None:
    shape = graph.Graph(layers, heads, parallel)
    assert len(shape.writers) == 1 + layers * (heads + 1)
    assert len(shape.readers) == layers * (3 * heads + 1) + 1
    per_layer = 3 * heads + 1
    count = sum(
        (1 + layer * (heads + 1)) * per_layer + (0 if parallel else heads)
        for layer in range(layers)
    )
    assert int(shape.exists.sum()) == count + len(shape.writers) == len(shape.edges())
    for edge in shape.edges()[::7]:
        place = torch.zeros_like(shape.exists)
        place[shape.index(edge)] = True
        assert torch.equal(shape.mask([edge]), place)


def test_wires_that_are_not_there_are_refused() -> None:
    shape = graph.Graph(2, 2)
    with pytest.raises(IclError, match="a reader must come later"):
        shape.index((graph.head(1, 0), graph.Node("k", 1, 1)))
    with pytest.raises(IclError, match="Unknown writer"):
        shape.index((graph.head(2, 0), graph.Node("logits")))


def test_models_whose_inputs_cannot_be_forked_say_so(tmp_path: Path) -> None:
    save_gptj(tmp_path / "j")
    few = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32}
    torch.manual_seed(0)
    grouped = LlamaForCausalLM(LlamaConfig(**few, **sizes, bos_token_id=0, eos_token_id=0))
    grouped.save_pretrained(tmp_path / "grouped")
    for name, net in (("j", load(tmp_path / "j")), ("g", models.load(tmp_path / "grouped"))):
        asked = clean_corrupt.copying(net, 2, 6, seeded())
        with pytest.raises(IclError, match="cannot fork"):
            patching.patch_edges(net, asked, [(graph.head(0, 1), graph.Node("k", 1, 1))])
        assert name


def test_empty_and_constant_behaviours_are_refused(tmp_path: Path) -> None:
    save_gpt2(tmp_path)
    net = load(tmp_path)
    asked = clean_corrupt.copying(net, 3, 6, seeded())
    with pytest.raises(IclError, match="nothing to score"):
        asked[slice(0, 0)]
    same = clean_corrupt.CleanCorrupt(asked.clean, asked.clean, asked.at, asked.answer)
    with pytest.raises(IclError, match="score the same"):
        clean_corrupt.baselines(net, same)
    with pytest.raises(IclError, match="same shape"):
        clean_corrupt.CleanCorrupt(asked.clean, asked.clean[:, :-1], asked.at, asked.answer)


def test_significance_by_enumeration() -> None:
    """All 2^8 flips of eight samples, and Benjamini-Hochberg by scipy."""
    values = torch.randn(5, 8, generator=seeded(), dtype=torch.float64)
    values[0] += 2
    flips = np.array(np.meshgrid(*[[-1, 1]] * 8)).reshape(8, -1)
    means = np.abs(values.numpy() @ flips) / 8
    exact = (means >= np.abs(values.numpy().mean(1))[:, None] - 1e-12).mean(1)
    found = statistics.sign_flip_p(values, seeded(1), draws=20_000)
    np.testing.assert_allclose(found, exact, atol=0.02)
    adjusted = stats.false_discovery_control(found.numpy())
    expected = torch.from_numpy(adjusted <= 0.05)
    assert torch.equal(statistics.benjamini_hochberg(found), expected)
    bar = statistics.single_step_threshold(values, seeded(2), draws=20_000)
    assert bar == pytest.approx(np.quantile(means.max(0), 0.95), abs=0.03)
    reference = torch.randn(400, 3, generator=seeded(), dtype=torch.float64) * 2 + 5
    z = statistics.robust_z(reference, reference)
    assert z.std().item() == pytest.approx(1, abs=0.15)


def test_a_strong_item_hides_others_in_one_step_and_not_in_several() -> None:
    """One item of 50 standard errors, one of 6, and 200 of noise; alarms stay below the rate."""
    values = torch.randn(202, 16, generator=seeded(), dtype=torch.float64)
    values[0] += 50
    values[1] += 3
    once = statistics.single_step_threshold(values, seeded(1))
    bar = statistics.step_down_threshold(values, seeded(1))
    means = values.mean(1).abs()
    assert means[1] < once
    assert (means > bar).nonzero().flatten().tolist() == [0, 1]
    alarms = 0
    for seed in range(40):
        noise = torch.randn(30, 16, generator=seeded(seed), dtype=torch.float64)
        alarms += bool(
            (noise.mean(1).abs() > statistics.step_down_threshold(noise, seeded(seed))).any()
        )
    assert alarms <= 6
