"""Smeared keys and cut paths, against the parts of a GPT-2; the curves that ship."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2LMHeadModel

from iclutils import zoo
from training import induction, phase_change


def by_parts(network, tokens, cut=""):
    """Logits (pos, vocab) with attention written out; ``cut`` names what layer 1 reads apart."""
    body, heads = network.transformer, network.config.n_head
    stream = body.wte(tokens) + body.wpe(torch.arange(len(tokens)))
    unread = stream + body.h[0].mlp(body.h[0].ln_2(stream))  # where layer 0 has no attention
    for number, block in enumerate(body.h):

        def project(x, block=block):
            three = block.ln_1(x) @ block.attn.c_attn.weight + block.attn.c_attn.bias
            return [part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in three.chunk(3, -1)]

        states = dict(zip(phase_change.INPUTS, project(stream), strict=True))
        if cut and number == 1:
            states[cut] = dict(zip(states, project(unread), strict=True))[cut]
        q, k, v = states.values()
        if hasattr(block.attn, "smear"):
            share = 1 / (1 + (-block.attn.smear[:, None, None]).exp())
            k = share * k + (1 - share) * torch.cat([k[:, :1], k[:, :-1]], 1)
        z = scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + block.attn.c_proj(z.transpose(0, 1).flatten(1))
        stream = stream + block.mlp(block.ln_2(stream))
    return network.lm_head(body.ln_f(stream))


@pytest.mark.parametrize("variant", phase_change.VARIANTS)
def test_a_changed_network_answers_as_its_parts_do(variant):
    network = phase_change.recipe(f"phase-{variant}-3").network().double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.tensor([5, 9, 2, 5, 9, 2, 7])
    cut = variant.removeprefix("no-") if variant.startswith("no-") else ""
    for _ in range(2):  # nothing is left over from a pass
        found = network(tokens[None]).logits[0]
        torch.testing.assert_close(found, by_parts(network, tokens, cut), atol=1e-10, rtol=0)
    if cut:
        assert not torch.allclose(found, by_parts(network, tokens), atol=1e-3)


def test_a_variant_differs_from_the_shipped_recipe_in_its_change_alone():
    plain, recipe = induction.recipe(3), phase_change.recipe("phase-two-layers-3")
    assert recipe.loss(recipe.network(), 5) == plain.loss(plain.network(), 5)
    network = recipe.network()
    assert recipe.held_out(network).items() >= plain.held_out(network).items()
    smeared = phase_change.recipe("phase-two-layers-smeared-3").network()
    assert {n for n, _ in smeared.named_parameters()} - {n for n, _ in network.named_parameters()}
    for name, weight in network.named_parameters():
        assert smeared.get_parameter(name).equal(weight)


def test_the_measures_see_the_heads_of_the_shipped_model():
    network = GPT2LMHeadModel.from_pretrained(zoo.folder("induction-3"))
    found, shipped = phase_change.measure(network), zoo.curves("induction-3")
    assert found == {k: pytest.approx(shipped[k][-1], abs=0.03) for k in ("prefix", "previous")} | {
        k: pytest.approx(v, abs=2e-3) for k, v in induction.measure(network).items()
    }
