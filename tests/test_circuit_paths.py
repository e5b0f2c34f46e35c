"""Effects of wires against hooked passes, TransformerLens and a model with a known circuit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import VOCAB, save_neox, tiny_gpt2
from transformer_lens.patching import get_act_patch_direct_path_all_sources
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, LlamaForCausalLM
from wired import save_wired

from iclutils import IclError, models
from iclutils.interp import clean_corrupt as asked
from iclutils.interp import patching
from iclutils.interp.clean_corrupt import CleanCorrupt, copying, share
from iclutils.interp.graph import Node, head, of
from iclutils.models import TransformerBridge


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    return tiny_gpt2(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    folder = tmp_path_factory.mktemp("neox")
    save_neox(folder)
    return models.load(folder)


def behave(
    model: TransformerBridge, count: int = 2, length: int = 7, seed: int = 0, narrow: bool = False
) -> CleanCorrupt:
    return copying(model, count, length, torch.Generator().manual_seed(seed), narrow=narrow)


def some(behaviour: CleanCorrupt, *entries: int) -> CleanCorrupt:
    """Scored at a few entries alone, so that the last layer forms no keys and values."""
    at = list(entries)
    return replace(behaviour, at=behaviour.at[:, at], answer=behaviour.answer[:, at], source=None)


def by_hooks(
    model: TransformerBridge, behaviour: CleanCorrupt, chosen: list[tuple[Node, Node]]
) -> torch.Tensor:
    return asked.baselines(model, behaviour)[0] - patching.patch_edges(model, behaviour, chosen)


def check_wires(model: TransformerBridge, behaviour: CleanCorrupt, every: int = 1) -> None:
    """Every n-th wire, and all into the logits."""
    graph = of(model)
    got = patching.path_patching(model, behaviour)
    assert got.shape == (*graph.exists.shape, len(behaviour))
    assert not got[~graph.exists].any()
    clean = asked.baselines(model, behaviour)[0]
    for edge in {*graph.edges()[::every], *[(w, Node("logits")) for w in graph.writers[::3]]}:
        expected = clean - patching.patch_edges(model, behaviour, [edge])
        torch.testing.assert_close(got[graph.index(edge)], expected, atol=1e-5, rtol=1e-5)
    assert got.abs().max() > 1e-2, "the wires have no effect to compare"


# Would catch a part of the reader that is not redone, or redone from the wrong stream: a frozen
# LayerNorm, a patched channel mixed up with another, an own MLP that keeps its clean output.
@pytest.mark.parametrize("narrow", [False, True])
def test_every_wire_of_a_gpt2_is_what_a_hooked_pass_says(
    model: TransformerBridge, narrow: bool
) -> None:
    assert patching.CleanRun(model, behave(model)).plain
    behaviour = behave(model, length=11, narrow=narrow)
    assert behaviour.at.shape[1] > patching.FEW
    check_wires(model, behaviour, 13 if narrow else 5)


# Would catch a last layer that mixes up what it attends to where no keys are formed, or a bias
# of the keys that does not cancel, or the positions of one sequence used for all.
@pytest.mark.parametrize("narrow", [False, True])
def test_few_and_uneven_entries_too(model: TransformerBridge, narrow: bool) -> None:
    behaviour = some(behave(model, narrow=narrow), 1, 4)
    uneven = replace(behaviour, at=behaviour.at - torch.tensor([[0], [3]]))
    check_wires(model, uneven, 9)


# Would catch a readout that takes the answer's logit from the choices, where it need not be.
def test_the_answer_need_not_be_a_choice(model: TransformerBridge) -> None:
    behaviour = behave(model)
    other = torch.arange(4).expand(2, -1)
    check_wires(model, replace(behaviour, choices=other), 17)


# Would catch a shape that only fits three layers of four heads.
@pytest.mark.parametrize("changes", [{"n_layer": 1}, {"n_head": 1, "n_layer": 2}])
def test_one_layer_or_one_head(tmp_path: Path, changes: dict[str, int]) -> None:
    small = tiny_gpt2(tmp_path, **changes)
    check_wires(small, behave(small), 2)
    pairs = patching.pairs(small, behave(small))
    assert pairs.shape[:4] == (small.cfg.n_layers, small.cfg.n_heads) * 2
    if small.cfg.n_layers == 1:
        assert not pairs.any()


# Would catch results that depend on how many patches fit into memory, or on the last chunk.
def test_chunks_change_nothing(model: TransformerBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour = behave(model)
    whole = patching.path_patching(model, behaviour)
    monkeypatch.setattr(patching, "ROWS", 3 * behaviour.clean.numel())
    monkeypatch.setattr(patching, "LOGITS", 1)
    torch.testing.assert_close(
        patching.path_patching(model, behaviour), whole, atol=1e-6, rtol=1e-5
    )


# Would catch a fallback that patches another reader or caches the wrong run; a parallel block's
# heads write nothing to their own MLP.
def test_rotary_positions_go_by_hooks(neox: TransformerBridge, tmp_path: Path) -> None:
    behaviour = some(behave(neox), 0, 3)
    assert not patching.CleanRun(neox, behaviour).plain
    check_wires(neox, behaviour, 11)
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=48,
        use_parallel_residual=True,
        initializer_range=0.3,
        bos_token_id=VOCAB - 1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    parallel = models.load(tmp_path)
    assert of(parallel).parallel
    check_wires(parallel, behave(parallel), 5)
    graph = of(parallel)
    got = patching.layer_flow(parallel, behave(parallel))
    layer = [r for r in graph.readers if r.layer == 1]
    expected = by_hooks(parallel, behave(parallel), [(Node("embed"), r) for r in layer])
    torch.testing.assert_close(got[0, 1], expected, atol=1e-5, rtol=1e-5)


# Would catch an engine that trusts the configuration: folded weights are still plain attention,
# scores divided by the layer's number are not.
def test_what_is_plain_is_measured(tmp_path: Path) -> None:
    tiny_gpt2(tmp_path / "plain")
    folded = models.load(tmp_path / "plain", fold=True)
    assert patching.CleanRun(folded, behave(folded)).plain
    check_wires(folded, behave(folded), 13)
    scaled = tiny_gpt2(tmp_path / "scaled", scale_attn_by_inverse_layer_idx=True)
    assert not patching.CleanRun(scaled, behave(scaled)).plain
    flow, behaviour = patching.layer_flow(scaled, behave(scaled)), behave(scaled)
    chosen = [(Node("embed"), r) for r in of(scaled).readers if r.layer == 2]
    expected = by_hooks(scaled, behaviour, chosen)
    torch.testing.assert_close(flow[0, 2], expected, atol=1e-5, rtol=1e-5)


# Would catch an effect with the wrong sign or direction, or values patched with keys: the tool of
# TransformerLens puts the second cache's writes into runs of the first.
@pytest.mark.parametrize("channel", ["q", "k", "v"])
def test_pairs_are_those_of_transformerlens(model: TransformerBridge, channel: str) -> None:
    behaviour = behave(model)
    rows = torch.arange(2)[:, None]
    _, clean = model.run_with_cache(behaviour.clean)
    _, corrupt = model.run_with_cache(behaviour.corrupt)
    expected = get_act_patch_direct_path_all_sources(
        model,
        behaviour.clean,
        corrupt,
        clean,
        lambda logits: behaviour.score(logits[rows, behaviour.at]).mean(),
        component=channel,
        verbose=False,
    )
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)[:, None, :, None]
    expected = (asked.baselines(model, behaviour)[0].mean() - expected) * later
    got = patching.pairs(model, behaviour, channel)
    torch.testing.assert_close(got.mean(-1), expected, atol=1e-5, rtol=1e-5)
    whole = of(model).head_pairs(patching.path_patching(model, behaviour))["qkv".index(channel)]
    torch.testing.assert_close(got, whole, atol=1e-6, rtol=1e-5)


# Would catch channels that are patched one after the other and added up.
def test_channels_are_patched_together(model: TransformerBridge) -> None:
    behaviour = behave(model)
    got = patching.pairs(model, behaviour, "qkv")
    for source, target in (((0, 1), (1, 2)), ((0, 3), (2, 0)), ((1, 0), (2, 3))):
        chosen = [(head(*source), Node(channel, *target)) for channel in "qkv"]
        expected = by_hooks(model, behaviour, chosen)
        torch.testing.assert_close(got[(*source, *target)], expected, atol=1e-5, rtol=1e-5)


# Would catch a block whose MLP does not see the shifted stream, a stream that keeps the shift
# after the block, or biases counted among what a layer writes.
def test_layer_flow_is_all_wires_of_two_layers_at_once(model: TransformerBridge) -> None:
    behaviour, graph = behave(model), of(model)
    got = patching.layer_flow(model, behaviour)
    for source in range(-1, 3):
        for target in range(4):
            writers = [w for w in graph.writers if w.layer == source]
            readers = [r for r in graph.readers if r.layer == (target if target < 3 else -1)]
            if target <= source:
                assert not got[source + 1, target].any()
                continue
            chosen = [(u, v) for u in writers for v in readers]
            expected = by_hooks(model, behaviour, chosen)
            torch.testing.assert_close(got[source + 1, target], expected, atol=1e-5, rtol=1e-5)


# Would catch a hook that reaches back, or a measure that reads the layer that was changed.
def test_nothing_flows_backward(model: TransformerBridge, neox: TransformerBridge) -> None:
    assert patching.backward_flow(model, behave(model)) == 0
    assert patching.backward_flow(neox, behave(neox)) == 0


# The residual stream is the sum of what is written: with every writer corrupt at the logits, the
# corrupt run is left. Would catch a writer that is missing or counted twice.
def test_all_writers_into_the_logits_are_the_corrupt_run(model: TransformerBridge) -> None:
    behaviour = behave(model)
    clean = patching.CleanRun(model, behaviour)
    whole = torch.stack([clean.change(w) for w in clean.graph.writers]).sum(0)
    stream = clean.pick(clean.resid_post + whole)[None]
    expected = asked.baselines(model, behaviour)[1]
    torch.testing.assert_close(patching.readout(clean, stream)[0], expected, atol=1e-5, rtol=1e-5)
    none = torch.zeros_like(clean.resid_pre[0])[None]
    for layer in range(3):  # from every layer on, no change gives the clean score
        start = clean.resid_pre[layer] + none
        torch.testing.assert_close(
            patching.resume(clean, layer, start)[0], clean.score, atol=1e-5, rtol=1e-5
        )
        assert patching.head_change(clean, layer, 0, "qkv", none).abs().max() < 1e-5


# Would catch a baseline that is not the clean run, and sequences that mix.
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(length=st.integers(2, 12), seed=st.integers(0, 9))
def test_equal_runs_have_no_effect_and_sequences_do_not_mix(
    model: TransformerBridge, length: int, seed: int
) -> None:
    behaviour = behave(model, 3, length, seed)
    same = replace(behaviour, corrupt=behaviour.clean)
    assert patching.pairs(model, same).abs().max() < 2e-5
    assert patching.layer_flow(model, same).abs().max() < 2e-5
    order = torch.tensor([2, 0, 1])
    flow = patching.layer_flow(model, behaviour)
    torch.testing.assert_close(
        patching.layer_flow(model, behaviour[order]), flow[..., order], atol=2e-5, rtol=1e-4
    )


# The circuit that was wired by hand is found, and nothing else.
def test_the_wired_circuit_is_found(tmp_path: Path) -> None:
    save_wired(tmp_path)
    wired = models.load(tmp_path)
    behaviour = behave(wired, 8, 11)
    graph, (clean, corrupt) = of(wired), asked.baselines(wired, behaviour)
    shares = share(patching.path_patching(wired, behaviour), clean, corrupt)
    found = {
        (str(graph.writers[u]), str(graph.readers[v])): float(shares[u, v])
        for u, v in (shares > 0.5).nonzero().tolist()
    }
    assert set(found) == {
        ("embed", "v 0.0"),
        ("0.0", "k 1.0"),
        ("embed", "v 1.0"),
        ("1.0", "logits"),
    }
    assert found["0.0", "k 1.0"] == pytest.approx(1.02, abs=0.02)
    assert found["embed", "v 1.0"] == pytest.approx(1.33, abs=0.02)
    idle = [u for u, w in enumerate(graph.writers) if str(w) in ("0.1", "1.1", "mlp 0", "mlp 1")]
    assert shares[idle].abs().max() < 1e-3
    save_wired(tmp_path / "three", previous=((0, 1),), induction=((2, 0),), layers=3)
    deeper = models.load(tmp_path / "three")
    behaviour = behave(deeper, 8, 11)
    flow = share(patching.layer_flow(deeper, behaviour), *asked.baselines(deeper, behaviour))
    assert flow[1, 1].abs() < 1e-3, "layer 1 reads nothing that counts"
    assert flow[2, 2].abs() < 1e-3, "layer 1 writes nothing"
    assert flow[1, 2] == pytest.approx(1.0, abs=0.05)


# Would catch a difference taken against the engine itself.
def test_sampled_difference_sees_a_wrong_wire(model: TransformerBridge) -> None:
    behaviour, generator = behave(model), torch.Generator().manual_seed(0)
    found = patching.path_patching(model, behaviour)
    assert patching.sampled_difference(model, behaviour, found, 6, generator) < 1e-5
    wrong = patching.sampled_difference(model, behaviour, found + 0.5, 6, generator)
    assert wrong == pytest.approx(0.5, abs=1e-4)


def test_some_wires_can_be_asked_for(model: TransformerBridge) -> None:
    behaviour, graph = behave(model), of(model)
    chosen = [(Node("embed"), Node("q", 1, 2)), (head(0, 1), Node("q", 1, 2))]
    got, whole = (patching.path_patching(model, behaviour, e) for e in (chosen, None))
    mask = graph.mask(chosen)
    torch.testing.assert_close(got[mask], whole[mask], atol=1e-6, rtol=1e-5)
    assert not got[~mask].any()
    assert not patching.path_patching(model, behaviour, []).any()


def test_what_cannot_be_asked_is_refused(model: TransformerBridge, tmp_path: Path) -> None:
    behaviour = behave(model)
    with pytest.raises(IclError, match="a reader must come later"):
        patching.path_patching(model, behaviour, [(head(1, 0), Node("q", 1, 1))])
    for wrong in ("", "z", "qx"):
        with pytest.raises(IclError, match="channel"):
            patching.pairs(model, behaviour, wrong)
    with pytest.raises(IclError, match="at least one wire"):
        patching.sampled_difference(
            model, behaviour, patching.path_patching(model, behaviour, []), 0, torch.Generator()
        )
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
        bos_token_id=VOCAB - 1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    grouped = models.load(tmp_path)
    with pytest.raises(IclError, match="share keys and values"):
        patching.path_patching(grouped, behave(grouped))
