"""Samplers: what a doubled sequence is, for any sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iclutils import IclError
from iclutils.tasks.repeated import doubled, markov_chain, repeated


@given(
    count=st.integers(1, 5),
    length=st.integers(2, 20),
    vocab=st.integers(25, 90),
    data=st.data(),
    distinct=st.booleans(),
)
def test_doubled_sequences(
    count: int, length: int, vocab: int, data: st.DataObject, distinct: bool
) -> None:
    bos = data.draw(st.integers(0, vocab - 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    batch = doubled(count, length, vocab, bos, generator, distinct)
    tokens = batch.tokens
    assert tokens.shape == (count, 2 * length + 1)
    assert (tokens[:, 0] == bos).all()
    assert torch.equal(tokens[:, 1 : length + 1], tokens[:, length + 1 :])
    assert (tokens[:, 1:] != bos).all()
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < vocab
    if distinct:
        assert all(len(set(row.tolist())) == length + 1 for row in tokens)


@given(length=st.integers(2, 40))
def test_slices_of_the_predictions(length: int) -> None:
    batch = doubled(1, length, 60, 59, torch.Generator().manual_seed(0))
    entries = list(range(2 * length))
    row = batch.tokens[0].tolist()
    assert entries[batch.first_half] + entries[batch.second_half] == entries
    assert entries[batch.clean_half] == entries[batch.second_half][1:]
    for entry in entries[batch.clean_half]:
        # what entry predicts stood one copy earlier, after the same token
        assert row[entry] == row[entry - length]
        assert row[entry + 1] == row[entry + 1 - length]
    assert row[length] != row[0], "entry L is announced by nothing: only BOS stood before r_1"


@given(length=st.integers(1, 9), times=st.integers(1, 5))
def test_repeated_segments(length: int, times: int) -> None:
    tokens = repeated(2, length, times, 30, 0, torch.Generator().manual_seed(0))
    assert tokens.shape == (2, length * times + 1)
    copies = tokens[:, 1:].reshape(2, times, length)
    assert (copies == copies[:, :1]).all()


def test_tokens_are_uniform_without_bos() -> None:
    tokens = doubled(2000, 10, 9, 4, torch.Generator().manual_seed(0)).tokens[:, 1:11]
    counts = torch.bincount(tokens.flatten(), minlength=9).double()
    assert counts[4] == 0
    expected = 2000 * 10 / 8
    chi_square = ((counts[counts > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 24.3  # 99.9 % point of chi-square with 7 degrees of freedom


def test_equal_seeds_give_equal_tokens_and_others_do_not() -> None:
    a, b, c = (doubled(2, 10, 60, 59, torch.Generator().manual_seed(s)).tokens for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_markov_chain_has_cumulative_rows() -> None:
    chain = markov_chain(40, 2.0, seed=3)
    assert chain.shape == (40, 40)
    torch.testing.assert_close(chain[:, -1], torch.ones(40))
    assert (chain.diff(dim=1) >= 0).all()
    assert torch.equal(chain, markov_chain(40, 2.0, seed=3))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda g: doubled(1, 1, 9, 0, g), "length >= 2"),
        (lambda g: doubled(0, 4, 9, 0, g), "count >= 1"),
        (lambda g: doubled(1, 9, 9, 0, g, distinct=True), "no 9 distinct tokens"),
        (lambda g: repeated(1, 0, 2, 9, 0, g), "at least 1"),
    ],
)
def test_impossible_sizes_are_refused(act: object, message: str) -> None:
    with pytest.raises(IclError, match=message):
        act(torch.Generator())  # type: ignore[operator]
