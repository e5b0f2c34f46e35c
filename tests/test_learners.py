"""Learners: their blocks against independent ones, members by themselves, files, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2Model

from iclutils import IclError, models
from iclutils.models import regressors
from iclutils.models.regressors import Learners, Shape, as_tokens

SMALL = Shape(3, 5, "two", 2, 16, 2)


def data(shape: Shape, members: int = 1, contexts: int = 4, seed: int = 0) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    size = (members, contexts, shape.pairs)
    return [torch.randn(*size, shape.dim, generator=source), torch.randn(size, generator=source)]


def test_the_standard_block_is_that_of_gpt2() -> None:
    """The same weights in Hugging Face's GPT-2, in float64."""
    network = Learners(SMALL, [3]).double()
    torch.manual_seed(0)
    for parameter in network.parameters():  # norms too: fresh ones are 1 and 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=9, vocab_size=1, attn_pdrop=0, resid_pdrop=0
    )
    twin = GPT2Model(config).double().eval()
    with torch.no_grad():
        twin.wpe.weight.copy_(network.positions[0])
        pairs = [(network.norm, twin.ln_f)]
        for ours, theirs in zip(network.blocks, twin.h, strict=True):
            pairs += [(ours["norm_1"], theirs.ln_1), (ours["norm_2"], theirs.ln_2)]
            pairs += [(ours["qkv"], theirs.attn.c_attn), (ours["out"], theirs.attn.c_proj)]
            pairs += [(ours["up"], theirs.mlp.c_fc), (ours["down"], theirs.mlp.c_proj)]
        for ours, theirs in pairs:
            theirs.weight.copy_(ours["weight"][0].view_as(theirs.weight))
            theirs.bias.copy_(ours["bias"][0, 0])
        xs, ys = (part.double() for part in data(SMALL))
        tokens = as_tokens(xs, ys, "two")[0]
        embedded = tokens @ network.read_in["weight"][0] + network.read_in["bias"][0]
        config.embd_pdrop = 0.0
        twin.drop.p = 0.0
        hidden = twin(inputs_embeds=embedded, use_cache=False).last_hidden_state
        expected = (hidden @ network.read_out["weight"][0] + network.read_out["bias"][0])[..., 0]
        torch.testing.assert_close(network(xs, ys)[0], expected[:, ::2], atol=1e-12, rtol=1e-10)


def plain_norm(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + 1e-5
    ) * scale + shift


def test_the_released_block_passes_the_stream_through_its_norms() -> None:
    """Written out position by position and head by head in numpy (facts of the released code)."""
    shape = replace(SMALL, layers=1, block="released")
    assert shape.head == 16 // 2**2
    network = Learners(shape, [1]).double()
    torch.manual_seed(0)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    xs, ys = (part.double() for part in data(shape, contexts=1))
    stream = [part[0, 0].detach().numpy() for part in network.resid(xs, ys)]
    at = {
        f"{kind}.{part}": network.blocks[0][kind][part].detach().numpy()[0]
        for kind in ("norm_1", "qkv", "out", "norm_2", "up", "down")
        for part in ("weight", "bias")
    }
    x = plain_norm(stream[0], at["norm_1.weight"], at["norm_1.bias"])
    query, key, value = np.split(x @ at["qkv.weight"] + at["qkv.bias"], 3, axis=-1)
    mixed = np.zeros_like(query)
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        for i in range(len(x)):
            score = np.exp(key[: i + 1, part] @ query[i, part] / 2)
            mixed[i, part] = score @ value[: i + 1, part] / score.sum()
    x = x + mixed @ at["out.weight"] + at["out.bias"]
    x = plain_norm(x, at["norm_2.weight"], at["norm_2.bias"])
    up = x @ at["up.weight"] + at["up.bias"]
    gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    expected = x + gelu @ at["down.weight"] + at["down.bias"]
    np.testing.assert_allclose(stream[1], expected, atol=1e-12)
    # and no norm before the read-out
    out = expected @ network.read_out["weight"][0].detach().numpy()[:, 0]
    out = out + network.read_out["bias"].item()
    np.testing.assert_allclose(network(xs, ys)[0, 0].detach().numpy(), out[::2], atol=1e-12)


def test_tokens_are_those_of_the_paper_and_of_one_for_each_pair() -> None:
    xs, ys = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])
    assert as_tokens(xs, ys, "two").tolist() == [[0, 1, 2], [5, 0, 0], [0, 3, 4]]
    assert as_tokens(xs, ys, "one").tolist() == [[1, 2, 0, 0, 0], [3, 4, 1, 2, 5]]


@settings(max_examples=20, deadline=None)
@given(at=st.integers(0, 4), form=st.sampled_from(["one", "two"]), seed=st.integers(0, 99))
def test_no_prediction_sees_its_own_y_or_what_comes_later(at: int, form: str, seed: int) -> None:
    network = Learners(replace(SMALL, format=form), [seed])
    xs, ys = data(SMALL, seed=seed)
    before = network(xs, ys)
    ys[..., at] += 1.0
    if at < 4:
        xs[..., at + 1 :, :] += 1.0
    changed = (network(xs, ys) - before).abs().amax((0, 1)) > 0
    assert not changed[: at + 1].any()
    assert changed[at + 1 :].all()


@pytest.mark.parametrize("block", ["standard", "released"])
def test_members_side_by_side_are_those_alone(block: str) -> None:
    shape = replace(SMALL, block=block)
    xs, ys = data(shape, members=3)
    together = Learners(shape, [4, 5, 6])(xs, ys)
    for i, seed in enumerate([4, 5, 6]):
        alone = Learners(shape, [seed])(xs[i : i + 1], ys[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-6, rtol=1e-5)
    assert (together[0] - Learners(shape, [5])(xs[:1], ys[:1])).abs().max() > 1e-3
    same = Learners(shape, [4, 5, 6])(xs[:1], ys[:1])
    assert same.shape == together.shape


def test_shorter_contexts_are_prefixes() -> None:
    network = Learners(SMALL, [0])
    xs, ys = data(SMALL)
    whole = network(xs, ys)
    torch.testing.assert_close(network(xs[:, :, :3], ys[:, :, :3]), whole[..., :3])


def test_what_is_saved_comes_back_in_half_precision(tmp_path: Path) -> None:
    network = Learners(SMALL, [0, 7])
    network.tasks = [{"dim": 3, "noise": 0.0}, {"dim": 3, "noise": 0.5}]
    network.save(tmp_path)
    again = regressors.load(tmp_path)
    assert (again.shape, again.seeds, again.tasks) == (SMALL, (0, 7), network.tasks)
    for ours, theirs in zip(again.parameters(), network.parameters(), strict=True):
        assert torch.equal(ours, theirs.half().float())
        assert not ours.requires_grad
    assert not again.training


def test_bad_files_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(IclError, match=r"no model 'regression-d9'.*train it: python -m"):
        regressors.load("regression-d9")
    Learners(SMALL, [0]).save(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(IclError, match="does not hold learners"):
        regressors.load(tmp_path)
    weights.unlink()
    with pytest.raises(IclError, match="does not hold learners"):
        regressors.load(tmp_path)
    with pytest.raises(IclError, match=r"induction-0.*does not hold learners.*models\.load"):
        regressors.load("induction-0")
    with pytest.raises(IclError, match=r"load it with iclutils\.models\.regressors\.load"):
        models.load("regression-d2")


def test_learners_trained_here_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from iclutils.files import write_sums

    folder = tmp_path / "mine" / "step-00009"
    folder.mkdir(parents=True)
    Learners(SMALL, [0]).save(folder)
    write_sums(tmp_path / "mine")
    monkeypatch.setenv("ICLUTILS_TRAINED", str(tmp_path))
    assert regressors.load("mine").shape == SMALL
    with pytest.raises(IclError, match="Unknown training step of mine 8"):
        regressors.load("mine", step=8)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(IclError, match="damaged"):
        regressors.load("mine")


def test_contexts_that_do_not_fit_are_refused() -> None:
    network = Learners(SMALL, [0, 1])
    xs, ys = data(SMALL)
    with pytest.raises(IclError, match=r"x of 3 dimensions; got 2"):
        network(xs[..., :2], ys)
    with pytest.raises(IclError, match=r"1 to 5 pairs.*got 6"):
        network(torch.zeros(1, 2, 6, 3), torch.zeros(1, 2, 6))
    with pytest.raises(IclError, match="got 0"):
        network(xs[:, :, :0], ys[:, :, :0])
    with pytest.raises(IclError, match="for 1 or for all 2 members"):
        network(xs.expand(3, -1, -1, -1), ys.expand(3, -1, -1))
    ys[0, 1, -1] = torch.nan  # never read
    assert network(xs, ys).isfinite().all()
    ys[0, 1, 2] = torch.nan
    with pytest.raises(IclError, match="NaN or infinite"):
        network(xs, ys)
    with pytest.raises(IclError, match="cannot be cut into 3 heads"):
        Learners(replace(SMALL, heads=3), [0])
