"""Circuits of wires: against one patched wire, TransformerLens, and a circuit known by design."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import BOS, CONTEXT, VOCAB, save_gpt2, save_gptj, save_neox
from torch import Generator
from transformer_lens.tools.analysis import attribution_patching as theirs
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from wired import save_wired

from iclutils import IclError
from iclutils.interp import circuit, graph, patching
from iclutils.interp.clean_corrupt import CleanCorrupt, baselines, copying
from iclutils.interp.graph import Graph, Node, head
from iclutils.models import TransformerBridge, load


def save_parallel(folder: Path) -> None:
    """A small random GPT-NeoX whose MLPs read what the heads of their layer read."""
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        use_parallel_residual=True,
        initializer_range=0.3,
        bos_token_id=BOS,
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)


MAKE: dict[str, Callable[[Path], object]] = {
    "gpt2": save_gpt2,
    "neox": save_neox,
    "parallel": save_parallel,
    "one layer, one head": lambda folder: save_gpt2(folder, n_layer=1, n_head=1),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TransformerBridge]:
    held: dict[str, TransformerBridge] = {}

    def get(name: str) -> TransformerBridge:
        if name not in held:
            folder = tmp_path_factory.mktemp("model")
            MAKE[name](folder)
            held[name] = load(folder)
        return held[name]

    return get


@pytest.fixture(scope="module")
def textbook(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    folder = tmp_path_factory.mktemp("wired")
    save_wired(folder)
    return load(folder)


def ask(model: TransformerBridge, count: int = 3, length: int = 6, seed: int = 0) -> CleanCorrupt:
    return copying(model, count, length, Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MAKE)
def test_no_wire_is_the_corrupt_run_and_all_are_the_clean_one(
    made: Callable[[str], TransformerBridge], name: str
) -> None:
    """Catches a writer or reader that is left out, or written on the wrong sequence."""
    model = made(name)
    behaviour, exists = ask(model), graph.of(model).exists
    got = circuit.scores(model, behaviour, torch.stack([torch.zeros_like(exists), exists]))
    clean, corrupt = baselines(model, behaviour)
    torch.testing.assert_close(got, torch.stack([corrupt, clean]), atol=1e-5, rtol=1e-5)
    assert (clean - corrupt).abs().max() > 0.1, "nothing to compare"
    shares = circuit.faithfulness(got, clean, corrupt)
    torch.testing.assert_close(shares, torch.tensor([0.0, 1.0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "neox", "parallel"])
def test_all_wires_but_one_is_that_wire_patched(
    made: Callable[[str], TransformerBridge], name: str
) -> None:
    """Catches a mask applied to another wire, another head or another channel."""
    model = made(name)
    behaviour, nodes = ask(model, 2), graph.of(model)
    pick = torch.randperm(len(nodes.edges()), generator=Generator().manual_seed(1))[:25]
    chosen = [nodes.edges()[i] for i in pick.tolist()]
    kept = torch.stack([circuit.complement(nodes.mask([e]), nodes.exists) for e in chosen])
    expected = torch.stack([patching.patch_edges(model, behaviour, [e]) for e in chosen])
    got = circuit.scores(model, behaviour, kept)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    lost = baselines(model, behaviour)[0] - expected
    assert lost.abs().max() > 0.1, "no wire has an effect to compare"


def expanded(model: TransformerBridge, kept: torch.Tensor, size: int) -> list:
    """Wires in the words of TransformerLens, which takes each position for a wire of its own."""
    nodes = graph.of(model)

    def their(node: Node, position: int) -> theirs.Node:
        kind = {"head": "attn_head_out", "mlp": "mlp_out"}.get(node.kind, node.kind)
        kind = f"{kind}_input" if kind in graph.CHANNELS else kind
        layer = model.cfg.n_layers - 1 if kind == "logits" else node.layer
        return theirs.Node(
            kind, position, None if layer < 0 else layer, None if node.head < 0 else node.head
        )

    return [
        (their(nodes.writers[u], p), their(nodes.readers[v], p))
        for u, v in kept.nonzero().tolist()
        for p in range(size)
    ]


def test_faithfulness_is_that_of_transformer_lens(
    made: Callable[[str], TransformerBridge],
) -> None:
    """Catches wires inside a circuit that carry the clean write instead of what the run brings."""
    model = made("gpt2")
    behaviour = ask(model, 1, 3)
    clean, corrupt = baselines(model, behaviour)
    for kept in circuit.random_circuits(graph.of(model).exists, 90, 2, Generator().manual_seed(2)):
        result = theirs.faithfulness(
            model,
            behaviour.clean,
            behaviour.corrupt,
            lambda logits: behaviour.score(logits[:, behaviour.at[0]]).sum(),
            expanded(model, kept, behaviour.clean.shape[1]),
        )
        score = circuit.scores(model, behaviour, kept[None])
        ours = circuit.faithfulness(score, clean, corrupt).item()
        assert ours == pytest.approx(result.recovered, abs=1e-4)
        assert abs(ours) > 1e-3
        assert abs(ours - 1) > 1e-3


def test_circuits_do_not_touch_each_other(
    made: Callable[[str], TransformerBridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows of a batch that get the mask, or the corrupt write, of another row."""
    model = made("gpt2")
    behaviour, exists = ask(model, 3), graph.of(model).exists
    kept = circuit.random_circuits(exists, 80, 4, Generator().manual_seed(0))
    together = circuit.scores(model, behaviour, kept)
    alone = [
        [circuit.scores(model, behaviour[i : i + 1], one[None])[0, 0] for i in range(3)]
        for one in kept
    ]
    torch.testing.assert_close(together, torch.tensor(alone), atol=1e-5, rtol=1e-5)
    for rows in (1, 450):  # one row a pass; two sequences, of one circuit
        monkeypatch.setattr(circuit, "ROWS", rows)
        again = circuit.scores(model, behaviour, kept)
        torch.testing.assert_close(again, together, atol=1e-5, rtol=1e-5)


def test_the_textbook_pair_is_the_circuit(textbook: TransformerBridge) -> None:
    """Catches a wire that the textbook's list forgets, and signs that are turned round."""
    behaviour, nodes = ask(textbook, 8, 11), graph.of(textbook)
    clean, corrupt = baselines(textbook, behaviour)
    chosen = circuit.induction_edges(nodes, [head(0, 0)], [head(1, 0)])
    kept = nodes.mask(chosen)
    score = circuit.scores(textbook, behaviour, kept[None])
    assert circuit.faithfulness(score, clean, corrupt).item() > 0.95
    left = circuit.completeness(textbook, behaviour, kept)
    assert abs(circuit.faithfulness(left, clean, corrupt).item()) < 0.05
    lost = circuit.minimality(textbook, behaviour, kept).mean(1) / (clean - corrupt).mean()
    places = [(nodes.writers[u], nodes.readers[v]) for u, v in kept.nonzero().tolist()]
    needed = {edge for edge, loss in zip(places, lost.tolist(), strict=True) if loss > 0.9}
    embed = Node("embed")
    # Positions and the second copy are the same on both sequences, so what the queries, the keys
    # of 0.0 and the logits read of the embedding cannot be told apart.
    assert needed == {
        (embed, Node("v", 0, 0)),
        (embed, Node("v", 1, 0)),
        (head(0, 0), Node("k", 1, 0)),
        (head(1, 0), Node("logits")),
    }
    assert lost.abs()[[edge not in needed for edge in places]].max() < 1e-5


def test_exact_effects_rank_the_circuit_first(textbook: TransformerBridge) -> None:
    """Catches rankings, curves and bars that count from the wrong end."""
    behaviour, nodes = ask(textbook, 8, 11), graph.of(textbook)
    clean, corrupt = baselines(textbook, behaviour)
    effects = torch.zeros(*nodes.exists.shape, 8)
    for edge in nodes.edges():
        effects[nodes.index(edge)] = clean - patching.patch_edges(textbook, behaviour, [edge])
    least = circuit.threshold(effects, nodes.exists, Generator().manual_seed(0))
    strong = circuit.above_threshold(effects, nodes.exists, least)
    ranking = circuit.rank_edges(effects.mean(-1), nodes)
    assert 4 <= int(strong.sum()) <= 8
    assert torch.equal(strong, nodes.mask(ranking[: int(strong.sum())]))
    sizes = [0, 1, 2, 3, 4, 8, len(ranking)]
    curve = circuit.curve(textbook, behaviour, ranking, sizes)
    torch.testing.assert_close(curve[[0, -1]], torch.stack([corrupt, clean]), atol=1e-5, rtol=0)
    shares = circuit.faithfulness(curve, clean, corrupt)
    assert circuit.smallest_size(sizes, shares) == 4
    control = circuit.random_circuits(nodes.exists, 4, 10, Generator().manual_seed(0))
    kept = circuit.faithfulness(circuit.scores(textbook, behaviour, control), clean, corrupt)
    assert kept.mean() < 0.1


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.0, 0.75, 0.25, 0.5, 1.0], 3),
        ([0.5, 0.5, 0.5, 0.5, 0.5], 0),
        ([1.0, 1.0, 1.0, 1.0, 0.4], None),
        ([0.0, 0.0, float("nan"), 1.0, 1.0], 3),
    ],
)
def test_the_smallest_size_is_where_a_curve_comes_to_stay(
    shares: list[float], expected: int | None
) -> None:
    assert circuit.smallest_size(range(5), torch.tensor(shares), 0.5) == expected


@settings(deadline=None, max_examples=25)
@given(layers=st.integers(1, 3), heads=st.integers(1, 3), seed=st.integers(0, 99))
def test_rankings_and_random_circuits_hold_each_wire_once(
    layers: int, heads: int, seed: int
) -> None:
    """Catches wires that do not exist, or twice the same, in a ranking or a draw."""
    nodes, generator = Graph(layers, heads), Generator().manual_seed(seed)
    values = torch.randn(nodes.exists.shape, generator=generator).round()  # with ties
    ranking = circuit.rank_edges(values, nodes)
    assert set(ranking) == set(nodes.edges())
    order = [(-values[nodes.index(e)].abs().item(), nodes.edges().index(e)) for e in ranking]
    assert order == sorted(order)
    size = seed % (len(ranking) + 1)
    drawn = circuit.random_circuits(nodes.exists, size, 3, generator)
    assert drawn.sum((1, 2)).tolist() == [size] * 3
    assert not (drawn & ~nodes.exists).any()
    rest = circuit.complement(drawn[0], nodes.exists)
    assert torch.equal(rest ^ drawn[0], nodes.exists)


def test_a_pair_has_wires_only_from_an_earlier_layer() -> None:
    nodes = Graph(3, 2)
    chosen = circuit.induction_edges(nodes, [head(0, 1), head(1, 0)], [head(1, 1), head(2, 0)])
    between = [(str(u), str(v)) for u, v in chosen if u.kind == "head" and v.kind == "k"]
    assert between == [("0.1", "k 1.1"), ("0.1", "k 2.0"), ("1.0", "k 2.0")]
    assert len(chosen) == len(set(chosen)) == 2 * 3 + 2 * 2 + 3 + 2 + 1
    with pytest.raises(IclError, match="before an induction head"):
        circuit.induction_edges(nodes, [head(1, 0)], [head(1, 1)])
    with pytest.raises(IclError, match=r"Unknown reader 'q 0\.7'"):
        circuit.induction_edges(nodes, [head(0, 7)], [head(1, 1)])


def test_mistakes_are_refused(made: Callable[[str], TransformerBridge], tmp_path: Path) -> None:
    model = made("gpt2")
    behaviour, nodes = ask(model), graph.of(model)
    nothing = torch.zeros_like(nodes.exists)
    with pytest.raises(IclError, match="size zero"):
        circuit.minimality(model, behaviour, nothing)
    with pytest.raises(IclError, match="wire that does not exist"):
        circuit.scores(model, behaviour, ~nothing[None])
    with pytest.raises(IclError, match="another model"):
        circuit.scores(model, behaviour, nothing[None, 1:])
    with pytest.raises(IclError, match="another model"):
        circuit.completeness(model, behaviour, nothing[1:])
    with pytest.raises(IclError, match="at least one"):
        circuit.curve(model, behaviour, nodes.edges(), [])
    with pytest.raises(IclError, match="a circuit of 10 cannot be"):
        circuit.curve(model, behaviour, nodes.edges()[:9], [10])
    with pytest.raises(IclError, match="cannot draw"):
        circuit.random_circuits(nodes.exists, 10**6, 1, Generator())
    with pytest.raises(IclError, match="2 shares for 3 sizes"):
        circuit.smallest_size([1, 2, 3], torch.ones(2))
    save_gptj(tmp_path)
    other = load(tmp_path)
    with pytest.raises(IclError, match="cannot fork"):
        circuit.scores(other, ask(other), graph.of(other).exists[None])
