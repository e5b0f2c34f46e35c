"""Regression in numbers written in tokens: what is written, and what is read off the model."""

import numpy as np
import pytest
import torch
from random_layers import seeded
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.neighbors import KNeighborsRegressor
from tiny import BOS, save_gpt2, save_grouped
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from iclutils import models
from iclutils.chapters.ridge_ols.text import predict_numbers, text_baselines
from iclutils.tasks import numbers

SAVE = {"gpt2": save_gpt2, "llama": save_grouped}


def test_numbers_in_digits():
    """A tokenizer that splits digits, and parts a space from them, as SmolLM2's does."""
    form = numbers.of_text(spelling("[\\s\\S]"))
    assert form.values.tolist() == [[ord(digit)] for digit in "0123456789"]
    ones = torch.full((1, 2, 1), numbers.LARGEST)
    tokens, at = form.write(ones, -ones[..., 0])
    assert "".join(map(chr, tokens[0].tolist())) == "9 -> 0\n" * 2
    assert all("".join(map(chr, tokens[0, : i + 1].tolist())).endswith("-> ") for i in at)


def spelling(pattern):
    """A tokenizer of ASCII, one token for each match of the pattern; 42 has a token."""
    words = {chr(i): i for i in range(128)} | {"42": 128}
    spelled = Tokenizer(WordLevel(words, unk_token=chr(0)))
    spelled.pre_tokenizer = Split(Regex(pattern), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=spelled)


def test_what_is_written_can_be_read():
    form = numbers.of_ids(60, 59)
    drawn = numbers.contexts(form, 5, 4, seeded(1))
    tokens, at = form.write(drawn.xs, drawn.ys)
    assert tokens.shape == (5, 9)
    assert set(tokens[:, 0].tolist()) == {59}
    torch.testing.assert_close(form.numbers[tokens[:, at + 1]].float(), drawn.ys)
    torch.testing.assert_close(form.numbers[tokens[:, at]].float(), drawn.xs[..., 0])


@pytest.mark.parametrize("kind", SAVE)
def test_numbers_are_predicted(kind, tmp_path):
    """Against the model's own log p of every number."""
    SAVE[kind](tmp_path)
    model = models.load(tmp_path)
    values = torch.arange(20, 27)[:, None]
    form = numbers.NumberFormat(values, start=(BOS,), between=(10,), after=(11, 12))
    drawn = numbers.contexts(form, 5, 3, seeded(4))
    mean, sure = predict_numbers(model, form, drawn.xs, drawn.ys, 2)
    tokens, at = form.write(drawn.xs, drawn.ys)
    p = models.logits(model, tokens).double().softmax(-1)[:, at][..., 20:27]
    torch.testing.assert_close(sure, p.sum(-1), atol=1e-5, rtol=1e-4)
    wanted = p @ form.numbers / p.sum(-1)
    torch.testing.assert_close(mean, wanted, atol=1e-4, rtol=0)


def test_baselines_are_those_of_scikit_learn_and_of_a_mean():
    """At the last of eight pairs: lines with an intercept, the nearest pair, labels alone."""
    xs = torch.randn(1, 8, 1, generator=seeded(1)).double()
    ys = torch.randn(1, 8, generator=seeded(2)).double()
    x, y, query = xs[0, :7].numpy(), ys[0, :7].numpy(), xs[0, 7:].numpy()
    both = np.concatenate([x, 0 * x + 1], 1)  # the constant is shrunk, too
    expected = {
        "line": LinearRegression().fit(x, y).predict(query)[0],
        "line, ridge 1": Ridge(1.0, fit_intercept=False).fit(both, y).coef_ @ [*query[0], 1],
        "1-NN": KNeighborsRegressor(1).fit(x, y).predict(query)[0],
        "mean label": y.mean(),
        "last label": y[-1],
    }
    found = {name: float(text_baselines()[name](xs, ys)[0, 7]) for name in expected}
    assert found == pytest.approx(expected)
