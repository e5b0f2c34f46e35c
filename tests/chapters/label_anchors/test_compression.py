"""Compression: exactness, what is kept, what the query can see, and what is saved."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prompts import prompts_strategy, random_prompts, two_sets
from tiny import VOCAB

from iclutils.chapters.label_anchors import compression
from iclutils.interp import kv_cache
from iclutils.interp.readout import target_logits
from iclutils.tasks.prompts import Role


def cut(model, prompts, keep):
    """Independent truth: the whole prompt, the query's edges to what is not kept cut."""
    query = prompts.roles == Role.QUERY
    dropped = kv_cache.demonstrations(prompts) & ~keep
    edges = (query[:, :, None] & dropped[:, None, :])[:, None]

    def forbid(scores, hook):
        return scores.masked_fill(edges, torch.finfo(scores.dtype).min)

    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(model.cfg.n_layers)]
    return target_logits(model, prompts, [(name, forbid) for name in names])


@given(prompts=prompts_strategy(), seed=st.integers(0, 99))
@settings(max_examples=7)
def test_answers_equal_cut_edges_whatever_the_padding(gpt2, prompts, seed):
    generator = torch.Generator().manual_seed(seed)
    keep = kv_cache.demonstrations(prompts) & (torch.rand(prompts.tokens.shape) < 0.5)
    masks = [keep, compression.hidden_anchor(prompts), compression.label_only(prompts)]
    masks += [kv_cache.demonstrations(prompts), compression.hidden_random(prompts, generator)]
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
    query, none = prompts.tokens[:, size:], torch.zeros_like(prompts.real)
    held = kv_cache.cache_demonstrations(gpt2, prompts, none)
    both = []
    for start in (0, size):
        with torch.no_grad():
            at = start + torch.arange(query.shape[1])[None]
            moved = network(query, position_ids=at).logits[:, -1]
        both.append(kv_cache.answer_from_cache(gpt2, held, prompts, offset=bool(start)))
        torch.testing.assert_close(both[-1], moved, atol=1e-5, rtol=1e-5)
    assert (both[0] - both[1]).abs().max() > 0.1
    # Where nothing is kept there is no distance to keep either.
    alone, _ = compression.compress(gpt2, prompts, [none, kv_cache.demonstrations], offset=False)
    expected = both[0].gather(1, prompts.label_words)
    torch.testing.assert_close(alone.class_logits, expected, atol=1e-5, rtol=1e-5)


@given(prompts=prompts_strategy(), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_hidden_random_replaces_labels_by_their_own_text(prompts, seed):
    keep = compression.hidden_random(prompts, torch.Generator().manual_seed(seed))
    drawn = keep & (prompts.roles == Role.TEXT)
    assert torch.equal(keep ^ drawn, prompts.roles == Role.FORMAT)
    for row, ends in zip(drawn, prompts.label_pos.tolist(), strict=True):
        starts = [0, *ends[:-1]]
        assert [int(row[a:b].sum()) for a, b in zip(starts, ends, strict=True)] == [1] * len(ends)


def test_text_anchor_leaves_out_the_texts_alone(gpt2):
    prompts = random_prompts(4, count=4, shots=2)
    short = compression.text_anchor(prompts)
    found = target_logits(gpt2, short)
    for row in range(len(prompts)):
        one = prompts[row]
        left = one.tokens[:, one.roles[0] != Role.TEXT]
        torch.testing.assert_close(found[row], gpt2(left)[0, -1], atol=1e-5, rtol=1e-5)
        assert torch.equal(short[row].tokens, left)
    short.check()


def test_mixed_sets_and_several_rules_answer_as_each_alone(model):
    mixed = two_sets()
    draw = torch.Generator().manual_seed(0)
    keep = kv_cache.demonstrations(mixed) & (torch.rand(mixed.tokens.shape, generator=draw) < 0.6)
    keeps = [keep, compression.hidden_anchor, compression.label_only]
    found = compression.compress(model, mixed, keeps, batch_size=2)
    for i in range(len(mixed)):
        one = mixed[i]
        mask = keep[i : i + 1, : one.tokens.shape[1]]
        for rule, got in zip([mask, *keeps[1:]], found, strict=True):
            alone = compression.compress(model, one, [rule])[0].class_logits
            torch.testing.assert_close(got.class_logits[i : i + 1], alone, atol=2e-4, rtol=1e-4)


def test_work_counts_every_product(gpt2):
    d, mlp, vocab, layers = 32, 48, VOCAB, 3
    by_hand = layers * (4 * d * d + 2 * d * mlp) + layers * 2 * d * (5 + 1) + d * vocab
    one = torch.ones(7, dtype=torch.long)
    each = compression.multiply_adds(gpt2, one, torch.arange(7))
    assert each[5] == by_hand
    # Feeding tokens one at a time is the same work, but for the unembedding of each.
    whole = compression.multiply_adds(gpt2, 7 * one[:1], 0 * one[:1])
    assert each.sum() - 6 * d * vocab == whole
    prompts = random_prompts(2, count=3, shots=2, shared=True)
    ways = compression.tokens_read(prompts, compression.hidden_anchor(prompts))
    assert torch.equal(sum(ways["prefix"]), prompts.target + 1)
