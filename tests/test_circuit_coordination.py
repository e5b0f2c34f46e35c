"""Coordination: wired pipelines and back-ups, bases turned, numpy, scipy and TransformerLens."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles
from scipy.spatial.distance import jensenshannon
from scipy.stats import ortho_group
from tiny import save_gpt2, save_neox, tiny_gpt2, tokens
from transformer_lens.tools.analysis import direct_logit_attribution
from transformers import GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM
from wired import save_wired

from iclutils import IclError
from iclutils.chapters.circuits import coordination, similarity, subspaces
from iclutils.interp import clean_corrupt, patching
from iclutils.interp.graph import Node, all_heads, head, of
from iclutils.interp.hooks import ablate_heads, run_with_hooks
from iclutils.models import TransformerBridge, cached, edit_weights, get_act_name, load, logits


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    save_gpt2(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(folder: Path) -> TransformerBridge:
    return load(folder)


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> TransformerBridge:
    folder = tmp_path_factory.mktemp("neox")
    save_neox(folder)
    return load(folder)


# --- Interactions --------------------------------------------------------------------------------


def test_wired_pipeline_and_back_ups(tmp_path: Path) -> None:
    """The sign key: a pipeline is below 0, back-ups above, idle heads at 0."""
    save_wired(tmp_path / "pipeline")
    model = load(tmp_path / "pipeline")
    made = clean_corrupt.copying(model, 8, 11, generator())
    ends = clean_corrupt.baselines(model, made)
    both = coordination.interactions(model, made, [[n] for n in all_heads(model)])
    syn = clean_corrupt.share(both.syn, *ends)
    assert -1.1 < syn[0, 2] < -0.9
    assert syn[[0, 0, 1, 1, 2], [1, 3, 2, 3, 3]].abs().max() < 1e-2
    torch.testing.assert_close(both.joint[0, 0], both.single[0])

    save_wired(tmp_path / "backups", ((0, 0), (0, 1)), ((1, 0), (1, 2)), heads=3)
    model = load(tmp_path / "backups")
    made = clean_corrupt.copying(model, 8, 11, generator())
    pairs = [[head(0, 0)], [head(0, 1)], [head(1, 0)], [head(1, 2)]]
    syn = clean_corrupt.share(
        coordination.interactions(model, made, pairs).syn, *clean_corrupt.baselines(model, made)
    )
    assert syn[0, 1] > 0.8
    assert syn[2, 3] > 0.8


@pytest.mark.parametrize("how", ["resample", "mean", "zero"])
def test_interactions_against_removal(gpt2: TransformerBridge, how: str) -> None:
    """Against one hooked run per set; catches a pair of the wrong two, or a stale replacement."""
    made = clean_corrupt.copying(gpt2, 3, 8, generator())
    groups = [[head(0, 1), head(2, 3)], [Node("mlp", 1), head(0, 1)], []]
    got = coordination.interactions(gpt2, made, groups, how)
    clean, _ = clean_corrupt.baselines(gpt2, made)
    single = clean - patching.ablate(gpt2, made, groups, how)
    torch.testing.assert_close(got.single, single, atol=1e-5, rtol=1e-5)
    for a, b in combinations(range(len(groups)), 2):
        (union,) = clean - patching.ablate(gpt2, made, [list({*groups[a], *groups[b]})], how)
        torch.testing.assert_close(got.joint[a, b], union, atol=1e-5, rtol=1e-5)
        expected = union - single[a] - single[b]
        torch.testing.assert_close(got.syn[b, a], expected, atol=1e-5, rtol=1e-5)
    assert bool(got.syn.diagonal().isnan().all())
    assert float(got.single[2].abs().max()) == 0


@pytest.mark.parametrize("name", ["gpt2", "neox"])
def test_heads_of_a_layer_do_not_feed_each_other(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    ids = tokens(2, 9)
    assert coordination.same_layer(model, ids) < 1e-6
    hooks = ablate_heads(model, ids, [(0, 0)], "zero", ids)  # but those of the next they do
    names = [get_act_name("z", 1)]
    change = (
        run_with_hooks(model, ids, hooks, names)[1][get_act_name("z", 1)]
        - run_with_hooks(model, ids, [], names)[1][get_act_name("z", 1)]
    )
    assert change.abs().max() > 1e-2


# --- Direct effects ------------------------------------------------------------------------------


def test_direct_logits_against_transformer_lens(folder: Path) -> None:
    """Their stack of heads on the folded model; catches a missing centring, scale or mean."""
    model = load(folder, fold=True)
    made = clean_corrupt.copying(model, 3, 8, generator())
    got = coordination.direct_logits(model, made)
    rows = [u for u, n in enumerate(of(model).writers) if n.kind == "head"]
    each = []
    for entry in range(made.at.shape[1]):
        theirs = direct_logit_attribution(
            model,
            made.clean,
            answer_tokens=made.answer[:, entry],
            unit="head",
            pos=int(made.at[0, entry]),
        )
        each.append(theirs.attribution[: len(rows)])
    torch.testing.assert_close(got[rows], torch.stack(each).mean(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("narrow", [False, True])
def test_direct_logits_sum_to_the_logit(folder: Path, narrow: bool) -> None:
    """Without biases of attention and final LayerNorm nothing is missing."""

    def edit(network: GPT2LMHeadModel) -> None:
        network.transformer.ln_f.bias.zero_()
        for block in network.transformer.h:
            block.attn.c_proj.bias.zero_()

    model = edit_weights(folder, edit)
    made = clean_corrupt.copying(model, 3, 8, generator(), narrow=narrow)
    read = clean_corrupt.scored_logits(model, made)
    chosen = read if made.choices is None else read.gather(-1, pick(made, read))
    right = read.gather(-1, made.answer[..., None])[..., 0]
    expected = (right - chosen.mean(-1)).mean(-1)
    got = coordination.direct_logits(model, made).sum(0)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def pick(made: clean_corrupt.CleanCorrupt, read: torch.Tensor) -> torch.Tensor:
    assert made.choices is not None
    return made.choices[:, None].expand(-1, read.shape[1], -1)


def test_direct_logits_of_other_shapes(neox: TransformerBridge) -> None:
    """Final LayerNorm of another family; its unembedding is not tied."""
    made = clean_corrupt.copying(neox, 2, 6, generator())
    got = coordination.direct_logits(neox, made)
    assert got.shape == (1 + 2 * 5, 2)
    assert bool(got.isfinite().all())


# --- Kinds ---------------------------------------------------------------------------------------


def test_serial_needs_effect_and_composition() -> None:
    """Planted: one path with both, one with each alone; catches an or, or a wrong direction."""
    effects = 0.01 * torch.randn(3, 2, 3, 2, 12, generator=generator())
    composition = torch.full((3, 2, 3, 2), 0.1)
    effects[0, 1, 2, 0] += 1
    composition[0, 1, 2, 0] = 0.5
    effects[1, 0, 2, 1] += 1
    composition[0, 0, 1, 0] = 0.5
    effects[2, 0, 0, 1] += 5  # no such path
    composition[2, 0, 0, 1] = 0.5
    feeds = coordination.serial(effects, composition, (0.1, 0.1), generator())
    assert feeds.nonzero().tolist() == [[0, 1, 2, 0]]
    none = coordination.serial(effects[:1, :, :1], composition[:1, :, :1], (0.1, 0.1), generator())
    assert not bool(none.any())
    with pytest.raises(IclError, match="same heads"):
        coordination.serial(effects, composition[:2], (0.1, 0.1), generator())
    with pytest.raises(IclError, match="six samples"):
        coordination.serial(effects[..., :3], composition, (0.1, 0.1), generator())


def test_kinds() -> None:
    """One pair of every kind, by hand; catches sets swapped, or one kind that excludes others."""
    noise = 0.01 * torch.randn(4, 4, 10, generator=generator())
    syn = noise + noise.transpose(0, 1) + torch.full((4, 4, 1), 2.0)
    syn[0, 3] -= 2  # heads 0.0 and 1.1 do not interact
    direct = torch.tensor([1.0, 2.0, -1.0, 0.0])[:, None] + noise[:, 0]
    kernel = torch.full((4, 4), 5.0)
    kernel[0, 3] = 1.1
    feeds = torch.zeros(2, 2, 2, 2, dtype=torch.bool)
    feeds[0, 1, 1, 0] = True
    overlap = subspaces.Overlap(kernel, kernel, 1.0, 0.1)
    got = coordination.kinds(feeds, syn, 3.0, overlap, direct)
    a, b, c, d = (head(layer, index) for layer in range(2) for index in range(2))
    assert got == {
        (a, b): {"aggregative"},
        (a, c): set(),  # opposite signs
        (a, d): {"parallel"},
        (b, c): {"serial"},
        (b, d): set(),
        (c, d): set(),
    }
    fed = feeds.clone()
    fed[0, 0, 0, 1] = True
    assert coordination.kinds(fed, syn, 3.0, overlap, direct)[a, b] == {"aggregative", "serial"}
    with pytest.raises(IclError, match="all 4 heads"):
        coordination.kinds(feeds, syn[:2], 3.0, overlap, direct)


# --- Similarity ----------------------------------------------------------------------------------


def test_outputs_add_up(gpt2: TransformerBridge) -> None:
    """All heads of a layer and its bias are the layer's output; catches heads or rows mixed."""
    ids = tokens(3, 9)
    got = similarity.outputs(gpt2, ids, skip_first=False)
    for layer in range(gpt2.cfg.n_layers):
        name = f"blocks.{layer}.hook_attn_out"
        _, cache = cached(gpt2, ids, [name])
        whole = got[layer].sum(0) + gpt2.b_O[layer]
        torch.testing.assert_close(whole, cache[name].flatten(0, 1), atol=1e-5, rtol=1e-4)
    assert similarity.outputs(gpt2, ids).shape[2] == 3 * 8
    assert similarity.outputs(gpt2, tokens(60, 40)).shape[2] == similarity.MOST


def test_turning_a_basis_changes_the_notes_measure_alone(
    folder: Path, gpt2: TransformerBridge
) -> None:
    """Logits, CKA and output spaces stay, as the algebra says; the correlation does not."""
    rotation = similarity.rotation(8, generator())
    turned = edit_weights(folder, lambda net: similarity.turn(net, 1, 2, rotation))
    ids = tokens(4, 20)
    torch.testing.assert_close(logits(turned, ids), logits(gpt2, ids), atol=1e-4, rtol=1e-4)
    ckas, overlaps = [], []
    for model in (turned, gpt2):
        ckas.append(similarity.cka_matrix(similarity.outputs(model, ids).flatten(0, 1)))
        overlaps.append(subspaces.output_overlap(model).kernel)
    torch.testing.assert_close(ckas[0], ckas[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(overlaps[0], overlaps[1], atol=1e-4, rtol=1e-4)
    before, after = (similarity.note_correlation(m, ids) for m in (gpt2, turned))
    change = (after - before).abs()
    assert change[1, 2, [0, 1, 3]].max() > 0.05
    change[1, 2], change[1, :, 2] = 0, 0
    assert change.max() < 1e-4


def test_note_correlation_is_pearsons(gpt2: TransformerBridge) -> None:
    ids = tokens(3, 9)
    _, cache = cached(gpt2, ids, [get_act_name("z", 1)])
    z = cache[get_act_name("z", 1)].numpy()
    expected = np.corrcoef(z[:, :, 0].ravel(), z[:, :, 3].ravel())[0, 1]
    assert float(similarity.note_correlation(gpt2, ids)[1, 0, 3]) == pytest.approx(expected)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.integers(4, 12), st.integers(1, 5), st.integers(2, 5))
def test_cka(seed: int, count: int, left: int, right: int) -> None:
    """Gram matrices in numpy; catches a missing centring, and a basis or scale that matters."""
    noise = np.random.default_rng(seed)
    x, y = noise.normal(1, 1, (count, left)), noise.normal(1, 1, (count, right))
    middle = np.eye(count) - 1 / count
    k, m = middle @ x @ x.T @ middle, middle @ y @ y.T @ middle
    expected = (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())
    ours = similarity.cka(torch.tensor(x), torch.tensor(y))
    assert ours == pytest.approx(expected, abs=1e-10)
    turned = torch.tensor(3 * y @ ortho_group.rvs(right, random_state=noise) + 7)
    assert similarity.cka(torch.tensor(x), turned) == pytest.approx(expected, abs=1e-8)
    assert similarity.cka(torch.tensor(y), turned) == pytest.approx(1, abs=1e-8)
    assert -1e-9 <= ours <= 1 + 1e-9


def test_cka_matrix() -> None:
    """Pair by pair; catches directions of one head compared with rows of another."""
    outputs = torch.randn(3, 30, 6, generator=generator())
    outputs[1, :, 2:] = 0  # of lower rank
    outputs = torch.cat([outputs, torch.ones(1, 30, 6)])  # writes the same everywhere
    got = similarity.cka_matrix(outputs)
    for a in range(3):
        for b in range(3):
            expected = similarity.cka(outputs[a], outputs[b])
            assert float(got[a, b]) == pytest.approx(expected, abs=1e-9)
    assert bool(got[3].isnan().all())
    assert math.isnan(similarity.cka(outputs[0], outputs[3]))
    alike = torch.randn(1, 200, 4, generator=generator()).expand(2, -1, -1)
    null = similarity.cka_null(alike, generator(), draws=10)
    assert null.shape == (10, 2, 2)
    assert null[:, 0, 1].max() < 0.1 < float(similarity.cka_matrix(alike)[0, 1])


def test_attention_divergence() -> None:
    """scipy, row by row; identical rows 0 bits, disjoint ones 1."""
    first, second = torch.rand(2, 3, 6, 6, generator=generator()).tril()
    first, second = (p / p.sum(-1, keepdim=True) for p in (first, second))
    got = similarity.attention_divergence(first, second)
    rows = [jensenshannon(first[1, t], second[1, t], base=2) ** 2 for t in range(1, 6)]
    assert float(got[1]) == pytest.approx(np.mean(rows), abs=1e-6)
    assert float(similarity.attention_divergence(first, first).max()) == 0
    eye = torch.eye(6)
    back = torch.eye(6)[(torch.arange(6) - 1).clamp_min(0)]
    assert float(similarity.attention_divergence(eye, back)) == pytest.approx(1)


def test_output_overlap(folder: Path, gpt2: TransformerBridge) -> None:
    """Principal angles by scipy, and random spaces; catches columns of W_O for its rows."""
    heads = [head(2, 1), head(0, 0), head(0, 3)]
    got = subspaces.output_overlap(gpt2, heads)
    for i, one in enumerate(heads):
        for j, two in enumerate(heads):
            spaces = [gpt2.W_O[n.layer, n.head].T.numpy() for n in (one, two)]
            cosines = np.cos(subspace_angles(*spaces))
            assert float(got.kernel[i, j]) == pytest.approx((cosines**2).sum(), abs=1e-4)
            assert float(got.largest_cosine[i, j]) == pytest.approx(cosines.max(), abs=1e-4)
    size, width = gpt2.cfg.d_head, gpt2.cfg.d_model
    noise = np.random.default_rng(0)
    drawn = [np.linalg.qr(noise.normal(size=(width, size)))[0] for _ in range(400)]
    kernels = [((a.T @ b) ** 2).sum() for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
    assert got.expected == pytest.approx(np.mean(kernels), abs=0.1)
    assert got.sd == pytest.approx(np.std(kernels), rel=0.2)

    def mute(network: GPT2LMHeadModel) -> None:
        network.transformer.h[0].attn.c_proj.weight[:8] = 0

    muted = subspaces.output_overlap(edit_weights(folder, mute), heads)
    assert bool(muted.kernel[1].isnan().all())
    assert float(muted.kernel[0, 2]) == pytest.approx(float(got.kernel[0, 2]))


def test_one_head_one_layer(tmp_path: Path) -> None:
    model = tiny_gpt2(tmp_path, n_layer=1, n_head=1)
    ids = tokens(2, 9)
    assert similarity.note_correlation(model, ids).shape == (1, 1, 1)
    assert similarity.cka_matrix(similarity.outputs(model, ids)[0]).tolist() == [
        [pytest.approx(1, abs=1e-6)]
    ]
    assert coordination.same_layer(model, ids) == 0
    assert float(subspaces.output_overlap(model).kernel) == pytest.approx(32, abs=1e-3)


def test_bad_input(gpt2: TransformerBridge) -> None:
    made = clean_corrupt.copying(gpt2, 2, 6, generator())
    with pytest.raises(IclError, match="heads and MLP layers"):
        coordination.interactions(gpt2, made, [[Node("embed")]])
    with pytest.raises(IclError, match="at least one group"):
        coordination.interactions(gpt2, made, [])
    with pytest.raises(IclError, match="belong to heads"):
        subspaces.output_overlap(gpt2, [head(7, 0)])
    with pytest.raises(IclError, match="same samples"):
        similarity.cka(torch.zeros(3, 2), torch.zeros(4, 2))
    with pytest.raises(IclError, match="same shape"):
        similarity.attention_divergence(torch.zeros(3, 3), torch.zeros(4, 4))
    other = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=9,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
        )
    )
    with pytest.raises(IclError, match="Only a GPT-2"):
        similarity.turn(other, 0, 0, torch.eye(8))
    network = gpt2.original_model
    with pytest.raises(IclError, match="Only a GPT-2"):
        similarity.turn(network, 9, 0, torch.eye(8))
    with pytest.raises(IclError, match="rotation of width 8"):
        similarity.turn(network, 0, 0, torch.eye(4))
    with pytest.raises(IclError, match="no rotation"):
        similarity.turn(network, 0, 0, 2 * torch.eye(8))
