"""Tests of compression: exactness, what is kept, and what the query can see."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prompts import prompts_strategy, random_prompts
from tiny import VOCAB

from iclutils.chapters.label_anchors import compression
from iclutils.chapters.label_anchors.answers import label_loyalty
from iclutils.interp import kv_cache
from iclutils.interp.readout import target_logits
from iclutils.tasks.prompts import Role, join


@pytest.fixture(params=["gpt2", "neox", "qwen2", "gptj"])
def any_model(request):
    """Also one whose attention cannot be edited."""
    return request.getfixturevalue(request.param)


def cut(model, prompts, keep):
    """Independent truth: the whole prompt, the query's edges to what is not kept cut."""
    query = prompts.roles == Role.QUERY
    dropped = kv_cache.demonstrations(prompts) & ~keep
    edges = (query[:, :, None] & dropped[:, None, :])[:, None]

    def forbid(scores, hook):
        return scores.masked_fill(edges, torch.finfo(scores.dtype).min)

    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(model.cfg.n_layers)]
    return target_logits(model, prompts, [(name, forbid) for name in names])


@pytest.mark.parametrize("shared", [False, True])
def test_everything_with_offset_is_the_whole_prompt(any_model, shared):
    prompts = random_prompts(3, count=5, shots=2, shared=shared)
    whole = target_logits(any_model, prompts).gather(1, prompts.label_words)
    for size in (None, 2):
        for keep in (compression.everything, compression.everything(prompts)):  # rule, or mask
            again = compression.compress(any_model, prompts, keep, batch_size=size)
            torch.testing.assert_close(again.class_logits, whole, atol=1e-5, rtol=1e-5)


@given(prompts=prompts_strategy(), seed=st.integers(0, 99))
@settings(max_examples=7)
def test_answers_equal_cut_edges_whatever_the_padding(gpt2, prompts, seed):
    generator = torch.Generator().manual_seed(seed)
    keep = kv_cache.demonstrations(prompts) & (torch.rand(prompts.tokens.shape) < 0.5)
    masks = [keep, compression.hidden_anchor(prompts), compression.label_only(prompts)]
    masks += [torch.zeros_like(keep), compression.hidden_random(prompts, generator)]
    for mask in masks:
        held = kv_cache.cache_demonstrations(gpt2, prompts, mask)
        got = kv_cache.answer_from_cache(gpt2, held, prompts)
        torch.testing.assert_close(got, cut(gpt2, prompts, mask), atol=2e-5, rtol=1e-5)
        one = prompts[:1]
        held = kv_cache.cache_demonstrations(gpt2, one, mask[:1, : one.tokens.shape[1]])
        alone = kv_cache.answer_from_cache(gpt2, held, one)
        torch.testing.assert_close(alone, got[:1], atol=1e-5, rtol=1e-5)


def test_offset_is_the_query_moved(gpt2):
    network = gpt2.original_model
    prompts = random_prompts(0, count=1)
    size = int(kv_cache.demonstrations(prompts).sum())
    query, none = prompts.tokens[:, size:], torch.zeros_like(prompts.kept)
    held = kv_cache.cache_demonstrations(gpt2, prompts, none)
    for start in (0, size):
        with torch.no_grad():
            at = start + torch.arange(query.shape[1])[None]
            moved = network(query, position_ids=at).logits[:, -1]
        got = kv_cache.answer_from_cache(gpt2, held, prompts, offset=bool(start))
        torch.testing.assert_close(got, moved, atol=1e-5, rtol=1e-5)
    near, far = (kv_cache.answer_from_cache(gpt2, held, prompts, o) for o in (False, True))
    assert (near - far).abs().max() > 0.1
    # Where nothing is kept there is no distance to keep either.
    alone = compression.compress(gpt2, prompts, lambda p: ~p.kept)
    expected = near.gather(1, prompts.label_words)
    torch.testing.assert_close(alone.class_logits, expected, atol=1e-5, rtol=1e-5)


@given(prompts=prompts_strategy(), seed=st.integers(0, 99))
@settings(max_examples=50)
def test_hidden_random_replaces_labels_by_their_own_text(prompts, seed):
    keep = compression.hidden_random(prompts, torch.Generator().manual_seed(seed))
    drawn = keep & (prompts.roles == Role.TEXT)
    assert torch.equal(keep ^ drawn, prompts.roles == Role.FORMAT)
    for row, ends in zip(drawn, prompts.label_pos.tolist(), strict=True):
        starts = [0, *ends[:-1]]
        assert [int(row[a:b].sum()) for a, b in zip(starts, ends, strict=True)] == [1] * len(ends)


def test_work_counts_every_product(gpt2):
    d, mlp, vocab, layers = 32, 48, VOCAB, 3
    by_hand = layers * (4 * d * d + 2 * d * mlp) + layers * 2 * d * (5 + 1) + d * vocab
    assert compression.multiply_adds(gpt2, 1, 5) == by_hand
    # Feeding tokens one at a time is the same work, but for the unembedding of each.
    steps = sum(compression.multiply_adds(gpt2, 1, before) for before in range(7))
    assert steps - 6 * d * vocab == compression.multiply_adds(gpt2, 7)


def test_sets_of_demonstrations_are_read_once_each(model):
    """Mixed prompts of two sets answer as each alone does, whatever is kept for each."""
    parts = [random_prompts(seed, count=3, shared=True) for seed in (5, 6)]
    mixed = join(parts)[torch.tensor([0, 3, 1, 4, 5, 2])]
    draw = torch.Generator().manual_seed(0)
    keep = kv_cache.demonstrations(mixed) & (torch.rand(mixed.tokens.shape, generator=draw) < 0.6)
    got = compression.compress(model, mixed, keep).class_logits
    for i in range(len(mixed)):
        one = mixed[i]
        mask = keep[i : i + 1, : one.tokens.shape[1]]
        alone = compression.compress(model, one, mask).class_logits
        torch.testing.assert_close(got[i : i + 1], alone, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_several_rules_and_the_most_loyal_draw(gpt2, shared):
    """Answers of each rule as alone; of random draws those most like the whole prompt's."""
    prompts = random_prompts(5, count=9, shots=2, shared=shared)
    rules = compression.everything, compression.hidden_anchor, compression.label_only
    for rule, got in zip(rules, compression.compress_each(gpt2, prompts, rules), strict=True):
        alone = compression.compress(gpt2, prompts, rule)
        torch.testing.assert_close(got.class_logits, alone.class_logits, atol=1e-5, rtol=1e-5)
    clean = compression.compress(gpt2, prompts, compression.everything)
    draw, shown = (torch.Generator().manual_seed(1) for _ in range(2)), prompts
    best = compression.hidden_random_top(gpt2, prompts, clean, next(draw), 6)
    few, again = (prompts[:1] if shared else shown), next(draw)
    masks = [compression.hidden_random(few, again) for _ in range(6)]
    each = compression.compress_each(gpt2, prompts, masks)
    loyal = [label_loyalty(one, clean).sum() for one in each]
    assert label_loyalty(best, clean).sum() == max(loyal)
    assert min(loyal) < max(loyal)


def test_plain_reuse_saves_most_and_seconds_are_taken(gpt2):
    prompts = random_prompts(2, count=3, shots=2, shared=True)
    found = compression.costs(gpt2, prompts, compression.hidden_anchor(prompts))
    whole, prefix, small = (found[k].multiply_adds for k in ("re-encoded", "prefix", "compressed"))
    assert whole > prefix > small
    assert (whole - prefix) / (whole - small) > 0.5
    lengths = (prompts.target + 1).double().mean().item()
    assert (found["re-encoded"].fed, found["re-encoded"].memory) == (pytest.approx(lengths), 0)
    assert found["prefix"].fed + found["prefix"].memory == pytest.approx(lengths)
    taken = compression.seconds(gpt2, prompts, batch=2, repeats=1)
    assert taken.keys() == found.keys()
    assert min(taken.values()) > 0
