"""Growth: a model's state by plain Hugging Face passes."""

import pytest
import torch
from random_prompts import random_prompts
from transformers import GPT2LMHeadModel

from iclutils.chapters.label_anchors import copying
from iclutils.chapters.label_anchors.answers import answers
from iclutils.chapters.label_anchors.isolation import isolated
from iclutils.interp.hooks import ablate_heads, run_with_hooks
from iclutils.models import cached, get_act_name
from iclutils.tasks.repeated import repeated_tokens

LENGTH = 12
PROMPTS = random_prompts(seed=3, count=40, shots=2)


def copied(model):
    generator = torch.Generator().manual_seed(0)
    return repeated_tokens(model, 8, LENGTH, generator, distinct=True)


def prefix_scores(network, tokens):
    """Mean attention of the second copy's tokens to what followed the first: (layer, head)."""
    with torch.no_grad():
        patterns = torch.stack(network(tokens, output_attentions=True).attentions, 1)
    places = range(LENGTH + 1, 2 * LENGTH + 1)
    return torch.stack([patterns[..., p, p - LENGTH + 1] for p in places]).mean((0, 1))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_state_is_what_plain_passes_say(gpt2, layers):
    tokens = copied(gpt2).tokens
    found = copying.checkpoint_metrics(gpt2, PROMPTS, copied(gpt2), layers)
    network = GPT2LMHeadModel.from_pretrained(gpt2.cfg.model_name, attn_implementation="eager")
    with torch.no_grad():
        best = network.eval()(tokens).logits.argmax(-1)
        alone = [PROMPTS[row] for row in range(len(PROMPTS))]  # without padding
        asked = [network(one.tokens).logits[0, -1, one.label_words[0]] for one in alone]
    announced = slice(LENGTH + 2, 2 * LENGTH + 1)
    right = best[:, LENGTH + 1 : 2 * LENGTH] == tokens[:, announced]
    assert found["copying"] == pytest.approx(right.float().mean().item())
    heads = prefix_scores(network, tokens)
    assert found["prefix"] == pytest.approx(heads.max().item(), abs=1e-5)
    torch.testing.assert_close(copying.prefix_scores(gpt2, copied(gpt2)), heads)
    clean = torch.stack(asked).argmax(-1)
    assert found["accuracy"] == pytest.approx((clean == PROMPTS.gold).float().mean().item())
    cut = isolated(gpt2, PROMPTS, range(layers)).predicted
    assert found["aggregation"] == pytest.approx((clean != cut).float().mean().item())
    assert len(clean.unique()) == 3


def test_heads_are_removed_from_demonstrations_and_queries(model):
    """Against whole prompts, in which the heads write the same mean of other prompts."""
    prompts, others = random_prompts(3, count=4, shared=True), random_prompts(4, count=2)
    heads, name = [(0, 1), (1, 2)], get_act_name("z", 1)
    mean = cached(model, others.tokens, [name])[1][name][:, :, 2].mean((0, 1))
    hooks = ablate_heads(model, others.tokens, heads, "mean", others.tokens)
    written = run_with_hooks(model, prompts.tokens, hooks, [name])[1][name][:, :, 2]
    torch.testing.assert_close(written, mean.expand_as(written))
    (got,) = copying.answers_by_set_without(model, prompts, [heads], others)
    whole = answers(model, prompts, hooks)
    torch.testing.assert_close(got.class_logits, whole.class_logits, atol=2e-4, rtol=1e-4)
    hooks = ablate_heads(model, prompts.tokens, heads, "mean", prompts.tokens)
    (got,) = copying.answers_without(model, prompts, [heads])
    whole = answers(model, prompts, hooks)
    torch.testing.assert_close(got.class_logits, whole.class_logits, atol=2e-4, rtol=1e-4)


def test_depth_alone_is_no_correlation():
    """Two scores that both rise from layer to layer, and are at odds within each."""
    rise = 10.0 * torch.arange(3)[:, None]
    within = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    found = copying.correlation_within_layers(rise + within, rise + within.flip(1))
    assert found == pytest.approx(-1)
