"""Removals against plain hooks of the Hugging Face network, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import seeded
from tiny import save_gpt2, save_grouped, tokens

from iclutils import models
from iclutils.errors import IclError
from iclutils.interp import removal
from iclutils.interp.clean_corrupt import CleanCorrupt

KINDS = {
    "gpt2": (save_gpt2, lambda net, la: net.transformer.h[la].attn.c_proj),
    "llama": (save_grouped, lambda net, la: net.model.layers[la].self_attn.o_proj),
}
HEADS = [(0, 1), (2, 0), (2, 3)]
# Llama takes norms in float32 whatever the weights are: 6e-9 was seen in a logit.
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """A small network twice, and where the outputs of a layer's heads go in."""
    folder = tmp_path_factory.mktemp(request.param)
    save, place = KINDS[request.param]
    network = save(folder).double()
    return models.load(folder).double(), network, lambda layer: place(network, layer)


def task(seed=0, rows=4):
    x, other = tokens(rows, 9, seed), tokens(rows, 9, seed + 1)
    answer = torch.arange(rows)[:, None]
    at = torch.full((rows, 1), 8)
    return CleanCorrupt(x, other, at, answer, choices=torch.cat([answer, answer + 20], 1))


def run(both, x, new=None, heads=()):
    """Logits at the end by plain hooks, and what every head writes: {layer: (batch, pos, all)}.
    ``new`` of a layer takes the place of the outputs of ``heads``."""
    model, network, place = both
    seen, handles, size = {}, [], model.cfg.d_head

    def hook(layer):
        def change(module, args):
            z = args[0].clone()
            seen[layer] = args[0].detach()
            for la, h in heads:
                if la == layer:
                    part = slice(h * size, (h + 1) * size)
                    z[..., part] = new(layer)[..., part]
            return (z,)

        return change

    for layer in range(model.cfg.n_layers):
        handles.append(place(layer).register_forward_pre_hook(hook(layer)))
    with torch.no_grad():
        logits = network(x).logits[:, -1]
    for handle in handles:
        handle.remove()
    return logits, seen


def replacements(both, here):
    """Each replacement of the package, and by hand."""
    model, _, _ = both
    _, seen = run(both, here.clean)
    _, other = run(both, here.corrupt)
    means = [removal.head_means(model, x) for x in (here.clean, here.corrupt)]
    return {
        "zero": (removal.zeros(model), lambda la: torch.zeros_like(seen[la])),
        "mean": (
            removal.mean_over(means, "both sides"),
            lambda la: (seen[la].mean((0, 1)) + other[la].mean((0, 1))) / 2,
        ),
        "other": (removal.outputs_on(model, here.corrupt, "the corrupt side"), other.get),
    }


@pytest.mark.parametrize("way", ["zero", "mean", "other"])
def test_what_is_left_without_heads_is_what_plain_hooks_leave(both, way):
    here = task()
    ours, by_hand = replacements(both, here)[way]
    found = removal.without(both[0], here, [HEADS, HEADS[1:], []], ours)
    for row, heads in enumerate((HEADS, HEADS[1:], [])):
        logits, _ = run(both, here.clean, by_hand, heads)
        p = logits.softmax(-1).gather(1, here.answer)[:, 0]
        pair = logits.gather(1, here.choices)
        margin, right = pair[:, 0] - pair[:, 1], logits.argmax(-1) == here.answer[:, 0]
        for one, other in zip(found, (p, margin, right.double()), strict=True):
            torch.testing.assert_close(one[row], other, **CLOSE)


def test_each_row_can_lose_its_own_heads(both):
    here, model = task(), both[0]
    rows = removal.dealt(HEADS, model.cfg.n_heads, len(here), seeded(), draws=3)
    assert rows[0] == rows[3]
    assert [sorted(la for la, _ in heads) for heads in rows] == [[0, 2, 2]] * 4
    assert not any({*heads} & {*HEADS} for heads in rows)
    found = removal.without(model, here, [rows], removal.zeros(model))
    for row, heads in enumerate(rows):
        alone = removal.without(model, here[row : row + 1], [heads], removal.zeros(model))
        torch.testing.assert_close(found.margin[0, row], alone.margin[0, 0], **CLOSE)
    with pytest.raises(IclError, match="for 2 rows"):
        removal.without(model, here, [rows[:2]], removal.zeros(model))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), head=st.integers(0, 3), layer=st.integers(0, 2))
def test_a_mean_over_one_token_is_the_output_there_and_nothing_changes_nothing(
    both, seed, head, layer
):
    model, here = both[0], task(seed, rows=1)
    one = here.corrupt[:, :1]  # a prompt of one position
    mean = removal.mean_over([removal.head_means(model, one)], "one position")
    output = removal.outputs_on(model, one, "one position")
    heads = [[(layer, head)], []]
    by_mean, by_output = (removal.without(model, here, heads, x) for x in (mean, output))
    torch.testing.assert_close(by_mean.margin, by_output.margin, **CLOSE)
    whole = removal.outcome(here, run(both, here.clean)[0])
    torch.testing.assert_close(by_mean.margin[1], whole.margin, **CLOSE)
    own = removal.outputs_on(model, here.clean, "itself")
    same = removal.without(model, here, [HEADS], own)
    torch.testing.assert_close(same.margin[0], whole.margin, **CLOSE)


def test_the_constant_that_hurts_least_hurts_less_than_the_mean(both):
    model, cases = both[0], [(task(0), HEADS), (task(5), HEADS[:2])]
    start = removal.mean_over([removal.head_means(model, x.clean) for x, _ in cases], "all")
    least = removal.least_harm(model, cases, start, steps=40)

    def loss(replacement):
        left = [removal.without(model, x, [heads], replacement).p for x, heads in cases]
        return -torch.cat(left, 1).log().mean().item()

    assert loss(least) < loss(start)
    untouched = torch.stack([least.by_layer[1], start.by_layer[1]])
    assert torch.equal(*untouched), "layer 1 loses no head"
    assert "8 prompts of 2 functions" in least.words


def test_a_caption_has_all_five_parts(both):
    means = [removal.head_means(both[0], tokens(2, 5))]
    ways = removal.zeros(both[0]), removal.mean_over(means, "2 prompts of another function")
    said = removal.caption("the seven that match and read", ways)
    for part in (
        "the seven that",
        "zero; or its mean",
        "2 prompts of another",
        "probability among",
    ):
        assert part in said
    assert "20 draws of as many other heads of the same layers" in said
    assert "Controls" not in removal.caption("all", ways, control=False)


def test_rivals_are_needed(both):
    here = task()
    bare = CleanCorrupt(here.clean, here.corrupt, here.at, here.answer)
    with pytest.raises(IclError, match="needs choices"):
        removal.without(both[0], bare, [HEADS], removal.zeros(both[0]))
