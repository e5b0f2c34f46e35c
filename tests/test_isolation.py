"""Isolation: rows of attention by hand, what cannot change, and the random control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_prompts import prompts_strategy, random_prompts
from tiny import save_gptj, save_neox, tiny_gpt2

from iclutils import IclError
from iclutils.chapters.label_words.isolation import (
    HOWS,
    cut_edges,
    first_layers,
    isolated_logits,
    isolation,
    label_loyalty,
    last_layers,
    layer_sweep,
    random_positions,
    word_loyalty,
)
from iclutils.interp.hooks import run_with_hooks
from iclutils.interp.readout import target_logits
from iclutils.models import TransformerBridge, get_act_name, load, logits
from iclutils.tasks.prompts import Prompts

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"), n_positions=128)


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    folder: Path = tmp_path_factory.mktemp("neox")
    save_neox(folder)
    return load(folder)


@pytest.fixture(params=["gpt2", "neox"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    return request.getfixturevalue(request.param)


def patterns(
    model: TransformerBridge, prompts: Prompts, layers: range, how: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of layer 0, clean and isolated."""
    name = get_act_name("pattern", 0)
    _, clean = run_with_hooks(model, prompts.tokens, [], [name])
    _, cut = run_with_hooks(
        model, prompts.tokens, isolation(model, prompts, layers, how=how), [name]
    )
    return clean[name], cut[name]


@pytest.mark.parametrize("how", HOWS)
def test_only_the_rows_of_label_words_change(model: TransformerBridge, how: str) -> None:
    prompts = random_prompts(seed=2, count=4, longest=3)
    clean, cut = patterns(model, prompts, range(1), how)
    for row, places in enumerate(prompts.label_pos.tolist()):
        for p in places:
            expected = torch.zeros_like(cut[row, :, p])
            expected[:, p] = 1.0 if how == "pre-softmax" else clean[row, :, p, p]
            assert torch.equal(cut[row, :, p], expected)
        others = [p for p in range(cut.shape[-1]) if p not in places]
        assert torch.equal(cut[row][:, others], clean[row][:, others])


def test_isolated_twice_is_isolated_once(gpt2: TransformerBridge) -> None:
    """With one-hot rows, zeroing what is already zero changes nothing."""
    prompts = random_prompts()
    hooks = isolation(gpt2, prompts, [0]) + isolation(gpt2, prompts, [0], how="zeroed")
    expected = isolated_logits(gpt2, prompts, [0])
    assert torch.equal(target_logits(gpt2, prompts, hooks), expected)


@pytest.mark.parametrize("how", HOWS)
def test_isolating_the_last_layer_changes_nothing(model: TransformerBridge, how: str) -> None:
    """No later layer reads what the label words write in the last one."""
    prompts = random_prompts(seed=4)
    clean = target_logits(model, prompts)
    assert torch.equal(isolated_logits(model, prompts, last_layers(model, 1), how=how), clean)
    early = isolated_logits(model, prompts, first_layers(model, 1), how=how)
    assert (early - clean).abs().max() > 0.1


def test_no_layer_changes_nothing(gpt2: TransformerBridge) -> None:
    prompts = random_prompts()
    none = isolated_logits(gpt2, prompts, first_layers(gpt2, 0))
    assert torch.equal(none, target_logits(gpt2, prompts))


def test_an_isolated_word_forgets_its_demonstration(gpt2: TransformerBridge) -> None:
    """Isolated in all layers, a label word writes the same whatever stands before it."""
    prompts = random_prompts(seed=6, count=1)
    p = int(prompts.label_pos[0, 0])
    swapped = prompts.tokens.clone()
    swapped[0, : p - 1] = (swapped[0, : p - 1] + 1) % 30
    name, layers = "blocks.2.hook_resid_post", range(3)
    seen = [
        run_with_hooks(gpt2, tokens, isolation(gpt2, prompts, layers), [name])[1][name][0, p]
        for tokens in (prompts.tokens, swapped)
    ]
    torch.testing.assert_close(seen[0], seen[1])
    free = [
        run_with_hooks(gpt2, tokens, [], [name])[1][name][0, p]
        for tokens in (prompts.tokens, swapped)
    ]
    assert (free[0] - free[1]).abs().max() > 0.1


@settings(max_examples=6, **QUIET)
@given(prompts=prompts_strategy(), how=st.sampled_from(HOWS))
def test_padding_order_and_batch_size_do_not_matter(
    gpt2: TransformerBridge, prompts: Prompts, how: str
) -> None:
    layers = first_layers(gpt2, 2)
    drawn = [prompts.label_pos, prompts.label_pos - 1]
    together = isolated_logits(gpt2, prompts, layers, drawn, how)
    apart = isolated_logits(gpt2, prompts, layers, drawn, how, batch_size=1)
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)
    order = torch.arange(len(prompts)).flip(0)
    flipped = [places[order] for places in drawn]
    again = isolated_logits(gpt2, prompts[order], layers, flipped, how)[order]
    torch.testing.assert_close(together, again, atol=1e-4, rtol=1e-4)


def test_the_logits_are_those_of_the_target(model: TransformerBridge) -> None:
    prompts = random_prompts(longest=6)
    expected = logits(model, prompts.tokens)[torch.arange(len(prompts)), prompts.target]
    torch.testing.assert_close(target_logits(model, prompts), expected)
    torch.testing.assert_close(target_logits(model, prompts, batch_size=2), expected)
    with pytest.raises(IclError, match="one batch"):
        target_logits(model, prompts, isolation(model, prompts, [0]), batch_size=2)


def test_the_sweep_isolates_each_layer_alone(gpt2: TransformerBridge) -> None:
    prompts = random_prompts()
    swept = list(layer_sweep(gpt2, prompts, batch_size=2))
    assert len(swept) == 3
    for layer, found in enumerate(swept):
        expected = isolated_logits(gpt2, prompts, [layer])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=40, **QUIET)
@given(prompts=prompts_strategy(), seed=st.integers(0, 100))
def test_the_control_draws_no_label_and_no_target(prompts: Prompts, seed: int) -> None:
    def draw() -> torch.Tensor:
        return random_positions(prompts, torch.Generator().manual_seed(seed))

    drawn = draw()
    assert drawn.shape == prompts.label_pos.shape
    assert torch.equal(drawn, draw())
    for row, places in enumerate(drawn.tolist()):
        assert len(set(places)) == len(places)
        assert not set(places) & set(prompts.label_pos[row].tolist())
        assert max(places) <= int(prompts.target[row]) - 2


def test_the_control_draws_evenly_and_anew() -> None:
    prompts = random_prompts(count=1, longest=3)
    generator = torch.Generator().manual_seed(0)
    draws = torch.cat([random_positions(prompts, generator, 1) for _ in range(3000)]).flatten()
    allowed = set(range(int(prompts.target) - 1)) - set(prompts.label_pos[0].tolist())
    assert set(draws.tolist()) == allowed
    expected = 3000 / len(allowed)
    counts = torch.tensor([int((draws == p).sum()) for p in allowed])
    assert bool(((counts - expected).abs() < 5 * expected**0.5).all())
    with pytest.raises(IclError, match=f"only {len(allowed)} to draw"):
        random_positions(prompts, generator, len(allowed) + 1)


def test_the_first_and_the_last_layers(gpt2: TransformerBridge) -> None:
    assert list(first_layers(gpt2, 2)) == [0, 1]
    assert list(last_layers(gpt2, 2)) == [1, 2]
    assert list(last_layers(gpt2, 0)) == []
    for spec in (first_layers, last_layers):
        with pytest.raises(IclError, match="3 layers"):
            spec(gpt2, 4)


def test_loyalty_by_hand() -> None:
    prompts = replace(random_prompts(count=2, classes=2), label_words=torch.tensor([[0, 1]] * 2))
    clean = torch.tensor([[5.0, 4, 3, 2, 1, 0], [5.0, 4, 3, 2, 1, 0]])
    changed = torch.tensor([[5.0, 4, 3, 2, 1, 0], [4.0, 5, 0, 1, 2, 3]])
    assert label_loyalty(prompts, changed, clean).tolist() == [True, False]
    assert word_loyalty(changed, clean, 2).tolist() == [1, 1]  # order does not count
    assert word_loyalty(changed, clean, 3).tolist() == [1, 0.5]  # {0,1,2} and {0,1,5}
    assert word_loyalty(clean.flip(1), clean, 3).tolist() == [0, 0]
    with pytest.raises(IclError, match="vocabulary"):
        word_loyalty(changed, clean, 7)


def test_wrong_input_is_refused(gpt2: TransformerBridge, neox: TransformerBridge) -> None:
    prompts = random_prompts()
    with pytest.raises(IclError, match="no layer 3"):
        isolation(gpt2, prompts, [3])
    with pytest.raises(IclError, match="way to isolate"):
        isolation(gpt2, prompts, [0], how="zero")
    with pytest.raises(IclError, match="1 layers, but 2"):
        isolation(gpt2, prompts, [0, 1], [prompts.label_pos])
    with pytest.raises(IclError, match="inside"):
        cut_edges(prompts, prompts.label_pos + 100)
    with pytest.raises(IclError, match="one row"):
        isolation(gpt2, prompts, [0], prompts.label_pos[:1])
    with pytest.raises(IclError, match="reads at most"):
        isolated_logits(neox, random_prompts(classes=5, shots=3, longest=5), [0])


@given(prompts_strategy())
def test_a_window_cuts_the_next_tokens_off_from_the_same_sources(prompts: Prompts) -> None:
    cut = cut_edges(prompts, prompts.label_pos, window=2)
    size = prompts.tokens.shape[1]
    for row, places in enumerate(prompts.label_pos.tolist()):
        expected = torch.zeros(size, size, dtype=torch.bool)
        for place in places:
            expected[place : place + 3, :place] = True
        assert torch.equal(cut[row], expected)


def test_without_a_window_only_the_label_words_are_cut_off(model: TransformerBridge) -> None:
    prompts = random_prompts(seed=3)
    plain = isolated_logits(model, prompts, [0])
    assert torch.equal(isolated_logits(model, prompts, [0], window=0), plain)
    assert (isolated_logits(model, prompts, [0], window=1) - plain).abs().max() > 0.01


@pytest.mark.parametrize("how", HOWS)
def test_a_window_reaches_the_attention(model: TransformerBridge, how: str) -> None:
    """Row p + 1 keeps p and itself, which stand inside the window, and loses all before p."""
    prompts = random_prompts(seed=2, count=1)
    name = get_act_name("pattern", 0)
    _, clean = run_with_hooks(model, prompts.tokens, [], [name])
    hooks = isolation(model, prompts, [0], how=how, window=1)
    _, cut = run_with_hooks(model, prompts.tokens, hooks, [name])
    for p in prompts.label_pos[0].tolist():
        row = cut[name][0, :, p + 1]
        assert not row[:, :p].any()
        kept = clean[name][0, :, p + 1, p : p + 2]
        share = kept / kept.sum(-1, keepdim=True) if how == "pre-softmax" else kept
        torch.testing.assert_close(row[:, p : p + 2], share, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("how", HOWS)
def test_attention_that_cannot_be_edited_is_refused(tmp_path: Path, how: str) -> None:
    """Without the refusal every prediction would be loyal, and nothing would show why."""
    save_gptj(tmp_path)
    model, prompts = load(tmp_path), random_prompts()
    with pytest.raises(IclError, match=r"after using it.*Use a model like GPT-2"):
        isolation(model, prompts, [0], how=how)
    with pytest.raises(IclError, match="after using it"):
        isolated_logits(model, prompts, [0], how=how)
    with pytest.raises(IclError, match="after using it"):
        next(layer_sweep(model, prompts, how=how))
    assert target_logits(model, prompts).shape[0] == len(prompts)
