"""Dual models of real heads: against Hugging Face's modules in float64, and edits by hand there."""

from functools import partial

import pytest
import torch
from random_prompts import random_prompts
from tiny import VOCAB, save_gpt2, save_grouped, save_neox, tiny_gpt2, tokens
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from iclutils import models, zoo
from iclutils.chapters.contrastive_kernel import ablation
from iclutils.chapters.contrastive_kernel.ablation import PARTS, change_heads
from iclutils.chapters.contrastive_kernel.dual import contrast, dual_form
from iclutils.chapters.contrastive_kernel.heads import (
    direct_logit_attribution,
    dual_heads,
    examples,
    explicit_head_step,
    share_rising,
)
from iclutils.interp.at_query import read, read_heads

KINDS = ("gpt2", "neox", "llama", "qwen2", "induction-0")
SINGLE = 2e-5  # the model computes in float32


class Both:
    """A model as the package loads it, and the same by Hugging Face alone, in float64."""

    def __init__(self, kind, folder):
        grouped = {name: partial(save_grouped, kind=name) for name in ("llama", "qwen2")}
        makers = {"gpt2": save_gpt2, "neox": save_neox, **grouped}
        if kind in makers:
            makers[kind](folder)
            self.model = models.load(folder)
        else:
            folder = zoo.folder(kind)
            self.model = models.load(kind)
        network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.network = network.double().eval()
        name = {"neox": "dense", "llama": "o_proj", "qwen2": "o_proj"}.get(kind, "c_proj")
        modules = network.named_modules()
        self.out = [m for n, m in modules if n.split(".")[-1] == name and "mlp" not in n]

    def run(self, x):
        """Logits and z (batch, layer, pos, head, d_head)."""
        seen = []
        handles = [m.register_forward_pre_hook(lambda _, a: seen.append(a[0])) for m in self.out]
        with torch.no_grad():
            logits = self.network(x).logits
        for handle in handles:
            handle.remove()
        heads = self.model.cfg.n_heads
        z = torch.stack([part.unflatten(-1, (heads, -1)) for part in seen], 1)
        return logits, z

    def run_with_z(self, x, layer, head, z):
        """Logits when one head's z at the last position is replaced."""

        def replace(module, given):
            flat = given[0].clone()
            flat.unflatten(-1, (self.model.cfg.n_heads, -1))[:, -1, head] = z
            return (flat,)

        handle = self.out[layer].register_forward_pre_hook(replace)
        with torch.no_grad():
            logits = self.network(x).logits
        handle.remove()
        return logits


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    return Both(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return tiny_gpt2(tmp_path_factory.mktemp("wide"), n_positions=128)


def some_mask(count, size):
    """Random demonstrations among the tokens before the last two."""
    mask = torch.rand(count, size, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, -2:] = False
    mask[:, 1] = True
    return mask


def close(found, expected, gap=SINGLE):
    torch.testing.assert_close(found.double(), expected.double(), atol=gap, rtol=gap)


def test_start_and_update_are_the_heads_output(both):
    """z from Hugging Face. Fails if q and k are read before their rotation."""
    x, mask = tokens(3, 12), some_mask(3, 12)
    _, z = both.run(x)
    query = read(both.model, x)
    found = dual_heads(query, mask)
    close(found.start + found.update, z[:, :, -1])
    assert found.z.dtype == torch.float64
    every = dual_heads(query, mask | True)
    assert not every.start.any()
    close(every.update, found.z)


def test_one_heads_steps(both):
    """A gradient step by autograd."""
    query, mask = read(both.model, tokens(3, 12)), some_mask(3, 12)
    duals = dual_heads(query, mask)
    for layer, head in [(0, 1), (1, 3)]:
        before, stepped = explicit_head_step(query, mask, (layer, head))
        close(stepped, duals.z[:, layer, head])
        close(before, duals.start[:, layer, head], 1e-10)


@pytest.mark.parametrize("against", [None, "one", "each"])
def test_direct_contributions_sum_to_the_logit(both, against):
    x, mask = tokens(3, 12), some_mask(3, 12)
    logits, answer = both.run(x)[0][:, -1], torch.tensor([4, 5, 6])
    each = torch.tensor([[1, 2], [3, 4], [5, 9]])
    others = {None: None, "one": torch.arange(VOCAB)[None], "each": each}[against]
    query = read(both.model, x)
    duals = dual_heads(query, mask)
    found = direct_logit_attribution(query, duals, answer, others)
    expected = logits.gather(1, answer[:, None])[:, 0]
    if others is not None:
        expected = expected - logits.gather(1, others.expand(3, -1)).mean(1)
    updates = found.update.sum((1, 2))
    rest = found.start.sum((1, 2)) + found.mlp.sum(1) + found.embedding + found.constant
    close(updates + rest, expected, 1e-4)
    close(found.logit, expected, 1e-4)
    assert float(found.update_share) == pytest.approx(float(updates.mean() / expected.mean()), 1e-3)


CHANGES = {
    "no update": ablation.no_update,
    "no start": ablation.no_start,
    "shorter start": partial(ablation.regularised, alpha=0.7),
    "negative samples": partial(ablation.negative_samples, beta=0.7),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_z_replaced_by_hand(both, name):
    """Hugging Face with one head's z from its keys and values. Fails if other heads change too."""
    x, mask, layer, head = tokens(3, 12), some_mask(3, 12), 1, 2
    query = read(both.model, x)
    (parts,) = read_heads(query, [layer])
    q, key, value = (part[:, head] for part in parts[:3])
    start, update = (part[:, 0] for part in dual_form(q[:, None], key, value, mask))
    z = {"no update": start, "no start": update, "shorter start": 0.3 * start + update}
    z["negative samples"] = scaled_dot_product_attention(
        q[:, None], key, contrast(value, mask, 0.7)
    )[:, 0]
    expected = both.run_with_z(x, layer, head, z[name])[:, -1]
    hooks = change_heads(query, mask, CHANGES[name], [(layer, head)])
    close(query.again(hooks), expected, 1e-3)
    assert (both.run(x)[0][:, -1] - expected).abs().max() > 1e-3


def test_what_a_change_removes(both):
    """The part itself, or a share of it."""
    query, mask = read(both.model, tokens(3, 12)), some_mask(3, 12)
    start, update, _ = dual_heads(query, mask)
    tenth = partial(ablation.regularised, alpha=0.1)
    for change, part in ((PARTS["update"], update), (PARTS["start"], start), (tenth, 0.1 * start)):
        close(ablation.removed_by(query, mask, change), part, 1e-10)


def test_answers_that_stay_right():
    """Two of three right answers stay; with three choices a guess, one third, is put to 0."""
    whole, changed = (
        ablation.Predictions(torch.zeros(4), torch.tensor(right).bool())
        for right in ([1, 1, 1, 0], [1, 0, 1, 1])
    )
    assert float(ablation.still_right(changed, whole, None).mean()) == pytest.approx(2 / 3)
    three = torch.zeros(4, 3, dtype=torch.long)
    assert float(ablation.still_right(changed, whole, three).mean()) == pytest.approx(1 / 2)
    assert ablation.is_able(whole, None)
    assert not ablation.is_able(whole, three)


def test_the_inner_products_that_rise_with_a_step(wide):
    """v_i·ΔW φ(k_i) by loops over heads and demonstrations."""
    query, mask = read(wide, tokens(2, 9)), some_mask(2, 9)
    rises = torch.zeros(2)
    for layer in read_heads(query):
        for row in range(2):
            shown = mask[row].nonzero()[:, 0].tolist()
            for _, key, value, _ in zip(*(part[row] for part in layer), strict=True):
                for i in shown:
                    near = [(key[i] @ key[j] / len(key[i]) ** 0.5).exp() for j in shown]
                    total = sum(w * value[i] @ value[j] for w, j in zip(near, shown, strict=True))
                    rises[row] += float(total > 0) / len(shown)
    heads_of_all = wide.cfg.n_layers * wide.cfg.n_heads
    close(share_rising(query, mask), rises / heads_of_all)


def test_tokens_know_their_example():
    """From the positions: an example ends with the token after its label word."""
    prompts = random_prompts(seed=1, count=4)
    found = examples(prompts)
    for row in range(len(prompts)):
        for n, place in enumerate(prompts.label_pos[row].tolist()):
            assert found[row, place] == n
        assert found[row, prompts.target[row]] == prompts.label_pos.shape[1]
    assert bool((found.diff(dim=1) >= 0).all())
    assert not found[:, 0].any()
