"""In-context regressors: blocks against independent ones, ensembles, files, bad input."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import GPT2Config, GPT2Model

from iclutils.models.regressors import InContextRegressors, Shape, as_tokens

SMALL = Shape(3, 5, "two", 2, 16, 2)


def data(shape=SMALL, networks=1, contexts=4):
    source = torch.Generator().manual_seed(0)
    size = (networks, contexts, shape.pairs)
    return [torch.randn(*size, shape.dim, generator=source), torch.randn(size, generator=source)]


def double(shape, seed=3):
    """In float64, and with LayerNorms that are not 1 and 0."""
    network = InContextRegressors(SMALL, [seed]).double()
    torch.manual_seed(0)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return network.requires_grad_(False)


def test_the_block_is_that_of_gpt2():
    """The same weights in Hugging Face's GPT-2: the predictions."""
    network = double(SMALL)
    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=9, vocab_size=1, attn_implementation="eager"
    )
    twin = GPT2Model(config).double().eval().requires_grad_(False)
    twin.wpe.weight.copy_(network.positions[0])
    pairs = [(network.norm, twin.ln_f)]
    for ours, theirs in zip(network.blocks, twin.h, strict=True):
        pairs += [(ours["norm_1"], theirs.ln_1), (ours["norm_2"], theirs.ln_2)]
        pairs += [(ours["qkv"], theirs.attn.c_attn), (ours["out"], theirs.attn.c_proj)]
        pairs += [(ours["up"], theirs.mlp.c_fc), (ours["down"], theirs.mlp.c_proj)]
    for ours, theirs in pairs:
        theirs.weight.copy_(ours["weight"][0].view_as(theirs.weight))
        theirs.bias.copy_(ours["bias"][0, 0])
    xs, ys = data()
    tokens = as_tokens(xs.double(), ys.double(), "two")[0]
    embedded = tokens @ network.read_in["weight"][0] + network.read_in["bias"][0]
    out = twin(inputs_embeds=embedded, use_cache=False)
    read = out.last_hidden_state @ network.read_out["weight"][0] + network.read_out["bias"][0]
    assert_close(network(xs, ys)[0], read[:, ::2, 0], atol=1e-12, rtol=1e-10)


def test_tokens_are_those_of_the_paper_and_of_one_for_each_pair():
    xs, ys = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])
    assert as_tokens(xs, ys, "two").tolist() == [[0, 1, 2], [5, 0, 0], [0, 3, 4]]
    assert as_tokens(xs, ys, "one").tolist() == [[1, 2, 0, 0, 0], [3, 4, 1, 2, 5]]


@settings(max_examples=15)
@given(at=st.integers(0, 4), form=st.sampled_from(["one", "two"]))
def test_no_prediction_sees_its_own_y_or_what_comes_later(at, form):
    network = InContextRegressors(replace(SMALL, format=form), [1])
    xs, ys = data()
    before = network(xs, ys)
    assert_close(network(xs[:, :, : at + 1], ys[:, :, : at + 1]), before[..., : at + 1])
    ys[..., at] = torch.nan if at == 4 else ys[..., at] + 1  # the last y is never read
    if at < 4:
        xs[..., at + 1 :, :] += 1.0
    changed = (network(xs, ys) - before).abs().amax((0, 1)) > 0
    assert not changed[: at + 1].any()
    assert changed[at + 1 :].all()


def test_an_ensemble_is_its_networks_one_by_one():
    """Drawn alone, picked out, and built from their weights."""
    xs, ys = data(networks=3)
    ensemble = InContextRegressors(SMALL, [4, 5, 6])
    ensemble.tasks = [{"dim": 3}, {"dim": 4}, {"dim": 5}]
    together = ensemble(xs, ys)
    for i, seed in enumerate([4, 5, 6]):
        alone = InContextRegressors(SMALL, [seed])
        given = InContextRegressors.from_weights(SMALL, alone.state_dict())
        for one in (alone, given, ensemble.select(i)):
            found = one(xs[i], ys[i])
            assert_close(together[i : i + 1], found, atol=1e-6, rtol=1e-5)
    last = ensemble.select(-1)
    assert (last.seeds, last.tasks) == ((6,), [{"dim": 5}])
    assert (together[0] - together[1]).abs().max() > 1e-3
    assert torch.equal(ensemble(xs[0], ys[0]), ensemble(xs[:1], ys[:1]))
