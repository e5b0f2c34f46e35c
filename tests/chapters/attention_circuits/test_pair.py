"""The induction pair: found wherever it is wired, paths against hooks, the rule by brute force."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from tiny import tiny_gpt2
from torch.nn.functional import one_hot
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.attention_circuits import pair
from iclutils.interp import clean_corrupt, patching
from iclutils.interp.graph import Node, all_heads, head
from iclutils.interp.head_scores import prefix_matching, score_heads
from iclutils.interp.patching import patch_key_input
from iclutils.models import TransformerBridge, load, random_init
from iclutils.tasks.repeated import RepeatedTokens

PLACES = [
    ((0, 0), (1, 1), 2, "fresh"),
    ((0, 1), (2, 0), 3, "shuffled"),
    ((1, 0), (2, 1), 3, "fresh"),
]
LENGTH = 11


def batches(
    model: TransformerBridge, count: int = 8, length: int = LENGTH, corruption: str = "fresh"
) -> tuple[clean_corrupt.CleanCorrupt, RepeatedTokens, RepeatedTokens]:
    made = clean_corrupt.copying(model, count, length, seeded(), corruption)
    return made, RepeatedTokens(made.clean, length), RepeatedTokens(made.corrupt, length)


@pytest.mark.parametrize(("previous", "induction", "layers", "corruption"), PLACES)
def test_wired_pair_is_found(
    tmp_path: Path,
    previous: tuple[int, int],
    induction: tuple[int, int],
    layers: int,
    corruption: str,
) -> None:
    """Catches heads in another order, a path into queries or values, and a wrong distance."""
    save_wired(tmp_path, (previous,), (induction,), layers)
    model = load(tmp_path)
    _, batch, other = batches(model, corruption=corruption)
    found = pair.find_induction_circuit(model, batch, other, seeded(), load(tmp_path, fold=True))
    assert (found.previous, found.induction) == (head(*previous), head(*induction))
    assert found.edges == ((head(*previous), Node("k", *induction)),)
    assert found.previous_score[0] > 0.9 > 0.1 > found.duplicate_score[0]
    assert found.prefix[0] > 0.8
    assert found.drop[0] > 0.9
    assert found.copying > 0.9
    assert found.k_composition > 2
    drops = pair.path_drops(model, batch, other, [found.induction]).mean(-1)[:, 0]
    idle = [i for i, node in enumerate(all_heads(model)) if node != found.previous]
    assert drops[idle].abs().max() < 1e-3


def test_back_ups_share_the_edges(tmp_path: Path) -> None:
    """Two heads per role: single paths are weak, and all of them are found."""
    save_wired(tmp_path, ((0, 0), (0, 1)), ((1, 0), (1, 2)), heads=3)
    model = load(tmp_path)
    _, batch, other = batches(model)
    found = pair.find_induction_circuit(model, batch, other, seeded())
    keys = {(u, v) for u in (head(0, 0), head(0, 1)) for v in (Node("k", 1, 0), Node("k", 1, 2))}
    assert set(found.edges) == keys
    assert found.drop[0] < 0.5
    assert math.isnan(found.copying)


def test_paths_against_hooks(model: TransformerBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hooked pass per pair; catches stale LayerNorm, a wrong mask, scale or key bias."""
    monkeypatch.setattr(patching, "ROWS", 100)  # a few changes at a time
    _, batch, other = batches(model, 3, 7)
    targets = [head(model.cfg.n_layers - 1, 2), head(0, 1)]
    got = pair.path_drops(model, batch, other, targets)
    prefix = score_heads(model, batch.tokens, 7)["prefix"]
    assert got.shape == (len(all_heads(model)), 2, 3)
    for u, node in enumerate(all_heads(model)):
        for v, target in enumerate(targets):
            if node.layer >= target.layer:
                assert got[u, v].abs().max() == 0
                continue
            place = (target.layer, target.head)
            before = prefix[:, target.layer, target.head]
            changed = patch_key_input(
                model, batch.tokens, [(node.layer, node.head)], place, other.tokens
            )
            lost = (before - prefix_matching(changed, 7)) / before.mean()
            torch.testing.assert_close(got[u, v], lost, atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 6))
def test_the_rule_by_brute_force(gpt2: TransformerBridge, seed: int, size: int, vocab: int) -> None:
    """Position by position; catches a shift, BOS as a match, what nothing came before counted."""
    ids, said = torch.randint(0, vocab, (2, 2, size), generator=seeded(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "logits", lambda *_: one_hot(said, vocab).float())
        got = pair.follows_rule(gpt2, ids)
    for x, best, share in zip(ids.tolist(), said.tolist(), got.tolist(), strict=True):
        after = [[x[s] for s in range(2, t + 1) if x[s - 1] == x[t]] for t in range(size)]
        follows = [best[t] in known for t, known in enumerate(after) if known]
        expected = sum(follows) / len(follows) if follows else math.nan
        assert share == pytest.approx(expected, nan_ok=True)


def test_a_wired_model_follows_the_rule(wired: TransformerBridge) -> None:
    """Catches: predictions that no occurrence came before counted, or a successor one late."""
    ids = torch.cat([torch.full((4, 1), 23), torch.randint(0, 8, (4, 30), generator=seeded())], 1)
    assert pair.follows_rule(wired, ids).min() > 0.9
    assert pair.follows_rule(random_init(wired.cfg.model_name, 0), ids).max() < 0.7
    assert pair.follows_rule(wired, torch.arange(12)[None]).isnan().all()


def test_a_model_without_a_circuit_is_refused(tmp_path: Path) -> None:
    model = tiny_gpt2(tmp_path / "one", n_layer=1)
    _, batch, other = batches(model, 3, 7)
    with pytest.raises(IclError, match="two attention layers"):
        pair.find_induction_circuit(model, batch, other, seeded())
