"""Repeated random tokens, for any sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import booleans, integers
from random_layers import seeded
from scipy.stats import chisquare
from tiny import BOS, VOCAB, tiny_gpt2

from iclutils import IclError
from iclutils.tasks.repeated import RepeatedTokens, repeated_tokens


@given(integers(1, 5), integers(2, 20), integers(1, 4), integers(25, 90), booleans(), st.data())
def test_copies_and_the_slices_of_their_predictions(count, length, times, vocab, distinct, data):
    bos, seed = data.draw(integers(0, vocab - 1)), data.draw(integers(0, 9))
    batch = RepeatedTokens.draw(count, length, vocab, bos, seeded(seed), times, distinct)
    again = RepeatedTokens.draw(count, length, vocab, bos, seeded(seed), times, distinct)
    assert torch.equal(batch.tokens, again.tokens)
    assert (batch.tokens[:, 0] == bos).all()
    copies = batch.tokens[:, 1:].reshape(count, times, length)
    assert (copies == copies[:, :1]).all()
    assert ((copies != bos) & (copies >= 0) & (copies < vocab)).all()
    if distinct:
        assert all(len(set(copy.tolist())) == length for copy in copies[:, 0])
    entries, row = list(range(2 * length)), batch.tokens[0].tolist()
    assert entries[batch.first_half] + entries[batch.second_half] == entries
    assert entries[batch.clean_half] == entries[batch.second_half][1:]
    if times > 1:  # what an entry predicts stood one copy earlier, after the same token
        for i in entries[batch.clean_half]:
            assert row[i : i + 2] == row[i - length : i + 2 - length]


def test_tokens_are_uniform_without_bos():
    tokens = RepeatedTokens.draw(2000, 10, 9, 4, seeded()).tokens[:, 1:11]
    counts = torch.bincount(tokens.flatten(), minlength=9).double()
    assert counts[4] == 0
    assert chisquare(counts[counts > 0].numpy()).pvalue > 1e-3


def test_a_models_vocabulary_bos_and_context_are_used(tmp_path):
    model = tiny_gpt2(tmp_path)
    drawn = repeated_tokens(model, 2, 5, seeded(), times=3)
    same = RepeatedTokens.draw(2, 5, VOCAB, BOS, seeded(), times=3)
    assert torch.equal(drawn.tokens, same.tokens)
    with pytest.raises(IclError, match=r"L = 24 needs 49 positions .* use L <= 23"):
        repeated_tokens(model, 1, 24, seeded())
