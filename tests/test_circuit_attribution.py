"""Estimated effects of wires: against TransformerLens, finite differences and integrals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from tiny import save_gpt2, save_gptj, save_neox
from torch import Generator
from transformer_lens.tools.analysis import attribution_patching as theirs

from iclutils import IclError
from iclutils.interp import attribution, graph
from iclutils.interp.clean_corrupt import (
    CleanCorrupt,
    baselines,
    copying,
    scored_logits,
)
from iclutils.interp.graph import Node, head
from iclutils.models import TransformerBridge, cached, get_act_name, load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    folder = tmp_path_factory.mktemp("tiny")
    save_gpt2(folder)
    return load(folder)


def ask(model: TransformerBridge, count: int = 3, length: int = 6, seed: int = 0) -> CleanCorrupt:
    return copying(model, count, length, Generator().manual_seed(seed))


def turned(behaviour: CleanCorrupt) -> CleanCorrupt:
    """Clean for corrupt and the other way round."""
    given = dict(vars(behaviour), clean=behaviour.corrupt, corrupt=behaviour.clean)
    return CleanCorrupt(**given)


@pytest.mark.parametrize("make", [save_gpt2, save_neox])
def test_estimates_are_those_of_transformer_lens(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    """Catches gradients that hold more than what goes through the reader, and swapped readers."""
    make(tmp_path)
    model = load(tmp_path)
    behaviour, nodes = ask(model, 2, 2), graph.of(model)
    ours = attribution.edge_attribution(model, behaviour)
    model.requires_grad_(True)  # theirs needs weights that are not frozen

    def our(node: theirs.Node) -> Node:
        kind = {"attn_head_out": "head", "mlp_out": "mlp"}.get(node.kind, node.kind)
        kind = kind[0] if kind in ("q_input", "k_input", "v_input") else kind
        layer = -1 if node.layer is None or kind == "logits" else node.layer
        return Node(kind, layer, -1 if node.head is None else node.head)

    for i in range(len(behaviour)):
        row = behaviour[i : i + 1]
        found = theirs.attribution_patch(
            model,
            row.corrupt,  # its gradient is taken on the second of the two
            row.clean,
            lambda logits, row=row: row.score(logits[:, row.at[0]]).sum(),
            theirs.EdgeAttributionConfig(granularity="edge"),
        )
        expected = torch.zeros(nodes.exists.shape)
        for (writer, reader), value in found.edge_scores.items():
            expected[nodes.index((our(writer), our(reader)))] -= value
        torch.testing.assert_close(ours[..., i], expected, atol=1e-5, rtol=1e-5)
        assert expected.abs().max() > 0.1, "nothing to compare"
    assert not ours[~nodes.exists].any()


@pytest.mark.parametrize("at", ["clean", "corrupt"])
def test_a_small_part_of_a_patch_does_what_the_estimate_says(
    model: TransformerBridge, at: str
) -> None:
    """Catches a factor, a sign, or positions that are left out of the sum."""
    behaviour = ask(model)
    estimated = attribution.edge_attribution(model, behaviour, at=at)
    start = behaviour if at == "clean" else turned(behaviour)
    small = 1e-2
    for kind in ("q", "k", "v", "mlp_in", "logits"):
        nodes = graph.of(model)
        column = [v.kind == kind for v in nodes.readers]
        best = estimated.mean(-1).abs() * torch.tensor(column)
        u, v = divmod(int(best.argmax()), len(nodes.readers))
        writer, reader = nodes.writers[u], nodes.readers[v]
        change = (
            graph.component_outputs(model, behaviour.corrupt, [writer])[writer]
            - graph.component_outputs(model, behaviour.clean, [writer])[writer]
        )
        with graph.split_qkv_input(model):
            more, less = (
                start.score(
                    scored_logits(model, start, graph.add_to_inputs(model, {reader: part * change}))
                )
                for part in (small, -small)
            )
        slope = (less - more) / (2 * small)
        torch.testing.assert_close(estimated[u, v], slope, atol=1e-3, rtol=0.01)
        assert slope.abs().max() > 0.02, f"no effect on {kind} to compare"


def test_the_wires_of_a_writer_sum_to_what_all_of_it_does(model: TransformerBridge) -> None:
    """Catches a reader that is left out: the write itself is changed a little, for all readers."""
    behaviour, small = ask(model), 1e-2
    estimated = attribution.edge_attribution(model, behaviour).sum(1)
    for layer, index in ((0, 1), (1, 3), (2, 2)):
        (_, clean), (_, corrupt) = (
            cached(model, t, [get_act_name("z", layer)])
            for t in (behaviour.clean, behaviour.corrupt)
        )
        change = (corrupt[get_act_name("z", layer)] - clean[get_act_name("z", layer)])[:, :, index]

        def score(part: float, layer: int = layer, index: int = index, change=change):
            def add(z: torch.Tensor, hook: object) -> torch.Tensor:
                z = z.clone()
                z[:, :, index] += part * change
                return z

            return behaviour.score(
                scored_logits(model, behaviour, [(get_act_name("z", layer), add)])
            )

        slope = (score(-small) - score(small)) / (2 * small)
        row = graph.of(model).writers.index(head(layer, index))
        torch.testing.assert_close(estimated[row], slope, atol=1e-3, rtol=0.01)
        assert slope.abs().max() > 0.05, "no effect to compare"


def test_averaged_gradients_of_the_embedding_sum_to_the_gap(model: TransformerBridge) -> None:
    """Catches runs that do not lie between the two: the integral of a slope is the rise."""
    behaviour = ask(model, 2)
    clean, corrupt = baselines(model, behaviour)
    both = [attribution.edge_attribution(model, behaviour, 32, at) for at in ("clean", "corrupt")]
    total = ((both[0] + both[1]) / 2)[graph.of(model).writers.index(Node("embed"))].sum(0)
    torch.testing.assert_close(total, clean - corrupt, atol=0.02, rtol=0.02)
    once = attribution.edge_attribution(model, behaviour)[0].sum(0)
    assert (once - (clean - corrupt)).abs().max() > 0.1, "one step would do as well"


def test_the_corrupt_end_is_the_clean_end_of_the_turned_task(model: TransformerBridge) -> None:
    """Catches a gradient that is taken on the other run than asked for."""
    behaviour = ask(model)
    ours = attribution.edge_attribution(model, behaviour, at="corrupt")
    expected = -attribution.edge_attribution(model, turned(behaviour))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_sequences_do_not_mix(model: TransformerBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches means over the batch, and chunks that are put back in the wrong place."""
    behaviour = ask(model)
    together = attribution.edge_attribution(model, behaviour, 2)
    monkeypatch.setattr(attribution, "ROWS", 1)
    torch.testing.assert_close(
        attribution.edge_attribution(model, behaviour, 2), together, atol=1e-5, rtol=1e-4
    )


def test_a_model_of_one_layer_and_head_has_estimates(tmp_path: Path) -> None:
    save_gpt2(tmp_path, n_layer=1, n_head=1)
    model = load(tmp_path)
    found = attribution.edge_attribution(model, ask(model))
    assert found.shape == (3, 5, 3)
    assert found.isfinite().all()


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), size=st.integers(2, 12))
def test_agreement_is_that_of_scipy_and_of_sets(seed: int, size: int) -> None:
    """Catches wires that do not exist among those compared, and signed ranks of the largest."""
    generator = Generator().manual_seed(seed)
    estimated, exact = torch.randn(2, 3, 6, generator=generator)
    exists = torch.zeros(18, dtype=torch.bool)
    exists[torch.randperm(18, generator=generator)[:size]] = True
    exists = exists.reshape(3, 6)
    got = attribution.agreement(estimated, exact, exists)
    ours, truth = estimated[exists].tolist(), exact[exists].tolist()
    assert got.rank == pytest.approx(spearmanr(ours, truth).statistic, abs=1e-10)
    error = math.dist(ours, truth) / math.hypot(*truth)
    assert got.relative_error == pytest.approx(error, rel=1e-6)
    for k in range(1, size + 1):
        best = [set(sorted(range(size), key=lambda i, v=v: -abs(v[i]))[:k]) for v in (ours, truth)]
        assert got.top[k - 1] == pytest.approx(len(best[0] & best[1]) / k)
    assert attribution.agreement(exact, exact, exists)[:2] == pytest.approx((1, 0))
    assert math.isnan(attribution.agreement(exact, 0 * exact, exists).rank)


def test_mistakes_are_refused(model: TransformerBridge, tmp_path: Path) -> None:
    behaviour = ask(model)
    with pytest.raises(IclError, match="Unknown end of the path 'clear'"):
        attribution.edge_attribution(model, behaviour, at="clear")
    with pytest.raises(IclError, match="steps must be at least 1"):
        attribution.edge_attribution(model, behaviour, steps=0)
    with pytest.raises(IclError, match="two wires"):
        attribution.agreement(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1).bool())
    save_gptj(tmp_path)
    other = load(tmp_path)
    with pytest.raises(IclError, match="only after using it"):
        attribution.edge_attribution(other, ask(other))
