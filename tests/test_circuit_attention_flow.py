"""Attention as a stand-in: closed forms, sums that must come out, edges that are really cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from tiny import BOS, VOCAB, save_gptj, tiny_gpt2, tokens
from transformers import LlamaConfig, LlamaForCausalLM
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.circuits import attention_flow as flow
from iclutils.interp.clean_corrupt import (
    CleanCorrupt,
    baselines,
    copying,
    scored_logits,
    share,
)
from iclutils.interp.head_scores import uniform_pattern
from iclutils.interp.hooks import run_with_hooks
from iclutils.models import TransformerBridge, cached, get_act_name, load


@pytest.fixture(params=["gpt2", "neox"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    return request.getfixturevalue(request.param)


def behaviour_of(rows: torch.Tensor, at: list[int]) -> CleanCorrupt:
    where = torch.tensor(at).expand(len(rows), -1)
    return CleanCorrupt(rows, rows.flip(0), where, torch.zeros_like(where))


def test_rollout_of_even_attention_in_one_layer() -> None:
    even = uniform_pattern(5)
    got = flow.rollout(even.expand(2, 1, 5, 5))
    torch.testing.assert_close(got, (0.5 * even + 0.5 * torch.eye(5)).expand(2, 5, 5))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 4), size=st.integers(1, 6))
def test_rollout_walks_down_the_layers(seed: int, layers: int, size: int) -> None:
    """Catches: layers in the wrong order. Against a sum over all walks, layer by layer."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(1, layers, size, size, generator=generator, dtype=torch.float64).tril() + 1e-3
    patterns = raw.tril() / raw.tril().sum(-1, keepdim=True)
    got = flow.rollout(patterns)[0]
    torch.testing.assert_close(got.sum(-1), torch.ones(size, dtype=torch.float64))
    walker = torch.eye(size, dtype=torch.float64)  # rows: where a walk began; from the top down
    for layer in reversed(range(layers)):
        walker = 0.5 * walker + 0.5 * torch.einsum("bi,ij->bj", walker, patterns[0, layer])
    torch.testing.assert_close(got, walker)
    assert not got.triu(1).any()


def test_mean_patterns_average_heads(model: TransformerBridge) -> None:
    rows = tokens(2, 7)
    got = flow.mean_patterns(model, rows)
    _, cache = cached(model, rows, [get_act_name("pattern", 1)])
    torch.testing.assert_close(got[:, 1], sum(cache[get_act_name("pattern", 1)].unbind(1)) / 4)


def test_what_edges_carry_sums_to_what_attention_writes(model: TransformerBridge) -> None:
    """Catches: values of other heads, destinations and sources exchanged, W_O of another head."""
    rows, name = tokens(3, 7), "blocks.1.hook_attn_out"
    _, cache = cached(model, rows, [name])
    total = torch.cat([part.sum((1, 3)) for part in flow.carried(model, rows, 1)])
    truth = cache[name] - model.blocks[1].attn.o.bias
    torch.testing.assert_close(total, truth, atol=1e-5, rtol=1e-4)


def test_norms_of_what_edges_carry(
    model: TransformerBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tokens(3, 7)
    parts = list(flow.carried(model, rows, 1))
    together, each = flow.norm_weighted(model, rows), flow.head_norms(model, rows)
    whole = torch.cat(parts)
    torch.testing.assert_close(together[:, 1], whole.sum(1).pow(2).sum(-1).sqrt())
    torch.testing.assert_close(each[:, 1], whole.pow(2).sum(-1).sqrt())
    assert each.shape == (3, model.cfg.n_layers, 4, 7, 7)
    monkeypatch.setattr(flow, "ROWS", 1)  # one sequence at a time
    torch.testing.assert_close(flow.norm_weighted(model, rows), together)


def test_a_model_with_one_head_carries_what_it_writes(tmp_path: Path) -> None:
    one = tiny_gpt2(tmp_path, n_head=1, n_layer=1)
    rows = tokens(2, 6)
    torch.testing.assert_close(flow.norm_weighted(one, rows), flow.head_norms(one, rows)[:, :, 0])


def test_fewer_key_heads_than_query_heads(tmp_path: Path) -> None:
    """Catches: values given to the wrong queries (repeated in turn instead of in blocks)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        bos_token_id=BOS,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    llama, rows, name = load(tmp_path), tokens(2, 7), "blocks.1.hook_attn_out"
    _, cache = cached(llama, rows, [name])
    total = torch.cat([part.sum((1, 3)) for part in flow.carried(llama, rows, 1)])
    torch.testing.assert_close(total, cache[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layers", [None, [1]])
def test_cut_edges_get_no_attention_and_the_rest_shares_it(
    model: TransformerBridge, layers: list[int] | None
) -> None:
    """Catches: edges of other rows or layers cut, or rows that no longer sum to 1."""
    rows = tokens(2, 7)
    dest, src = torch.tensor([[4, 6], [3, 6]]), torch.tensor([[2, 6], [0, 1]])
    hooks = flow.knockout(model, behaviour_of(rows, [5]), dest, src, layers)
    cut = torch.zeros(2, 7, 7, dtype=torch.bool)
    for b, d, s in ((0, 4, 2), (0, 6, 6), (1, 3, 0), (1, 6, 1)):
        cut[b, d, s] = True
    names = [get_act_name("pattern", layer) for layer in range(2)]
    _, seen = run_with_hooks(model, rows, hooks, names)
    _, clean = run_with_hooks(model, rows, [], names)
    for layer, name in enumerate(names):
        if layers is not None and layer not in layers:
            assert torch.equal(seen[name], clean[name])
            continue
        assert not seen[name].transpose(0, 1)[:, cut].any()
        torch.testing.assert_close(seen[name].sum(-1), torch.ones(2, 4, 7))
    first = 0 if layers is None else 1  # nothing before it differs: the rest is rescaled
    rest = clean[names[first]].masked_fill(cut[:, None], 0)
    torch.testing.assert_close(seen[names[first]], rest / rest.sum(-1, keepdim=True))


def test_only_positions_that_see_the_cut_change(model: TransformerBridge) -> None:
    rows = tokens(2, 7)
    edge = torch.tensor([[3], [3]]), torch.tensor([[1], [1]])
    hooks = flow.knockout(model, behaviour_of(rows, [5]), *edge)
    after, _ = run_with_hooks(model, rows, hooks)
    before, _ = run_with_hooks(model, rows, [])
    torch.testing.assert_close(after[:, :3], before[:, :3], atol=1e-5, rtol=1e-5)
    assert ((after - before)[:, 3:].abs().amax(-1) > 1e-3).all()


def test_a_known_circuit_needs_the_edge_to_its_source(tmp_path: Path) -> None:
    """Catches: dest and src exchanged. Without the edge the copy is lost, without others not."""
    save_wired(tmp_path)
    wired = load(tmp_path)
    behaviour = copying(wired, 8, 11, torch.Generator().manual_seed(0))
    clean, corrupt = baselines(wired, behaviour)
    assert behaviour.source is not None

    def lost(src: torch.Tensor, layers: list[int]) -> float:
        hooks = flow.knockout(wired, behaviour, behaviour.at, src, layers)
        return share(
            clean - behaviour.score(scored_logits(wired, behaviour, hooks)), clean, corrupt
        ).item()

    assert lost(behaviour.source, [1]) > 0.8
    assert abs(lost(behaviour.source, [0])) < 0.05
    assert abs(lost(behaviour.source - 1, [0, 1])) < 0.05


def test_edges_that_cannot_be_cut_are_refused(gpt2: TransformerBridge, tmp_path: Path) -> None:
    behaviour = behaviour_of(tokens(2, 7), [5])

    def cut(dest: list[int], src: list[int], layers: list[int] | None = None) -> None:
        two = [torch.tensor([x, x]) for x in (dest, src)]
        flow.knockout(gpt2, behaviour, two[0], two[1], layers)

    for edge in (([3], [4]), ([7], [3]), ([3], [-1])):
        with pytest.raises(IclError, match="0 <= src <= dest"):
            cut(*edge)
    for edge in (([0], [0]), ([1, 1], [0, 1])):
        with pytest.raises(IclError, match="keep something"):
            cut(*edge)
    with pytest.raises(IclError, match="one source for each"):
        cut([3], [1, 2])
    with pytest.raises(IclError, match="no layer 3"):
        cut([3], [1], [3])
    with pytest.raises(IclError, match="no layer -1"):
        next(flow.carried(gpt2, tokens(2, 7), -1))
    save_gptj(tmp_path)
    one = torch.tensor([[3], [3]])
    with pytest.raises(IclError, match="only after using it"):
        flow.knockout(load(tmp_path), behaviour, one, one - 1)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), coarse=st.booleans())
def test_rank_agreement_is_scipy_s_of_earlier_positions(seed: int, coarse: bool) -> None:
    """Catches: the entry itself or later positions counted, ties broken by order."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 2, 2, 9, generator=generator, dtype=torch.float64)
    if coarse:
        a = a.round()
    at = torch.tensor([[4, 8], [5, 6]])
    truth = []
    for row in range(2):
        some = [
            spearmanr(a[row, e, :t].numpy(), b[row, e, :t].numpy()).statistic
            for e, t in enumerate(at[row].tolist())
            if len(a[row, e, :t].unique()) > 1
        ]
        truth.append(sum(some) / len(some) if some else float("nan"))
    expected = torch.tensor(truth, dtype=torch.float64)
    torch.testing.assert_close(flow.rank_agreement(a, b, at), expected, equal_nan=True)


def test_rank_agreement_without_order_is_undefined() -> None:
    flat, other = torch.zeros(1, 1, 5), torch.arange(5.0)[None, None]
    assert flow.rank_agreement(flat, other, torch.tensor([[4]])).isnan().all()
    assert flow.rank_agreement(other, other, torch.tensor([[1]])).isnan().all()
    assert flow.rank_agreement(other, other, torch.tensor([[4]])).item() == pytest.approx(1)


def test_rows_of_entries() -> None:
    values = torch.arange(2 * 4 * 4).reshape(2, 4, 4).float()
    got = flow.at_entries(values, torch.tensor([[1, 3], [0, 2]]))
    assert torch.equal(got[1, 1], values[1, 2])
    assert torch.equal(got[0, 0], values[0, 1])
