"""Regression in numbers written in tokens: what is written, and what is read off the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_layers import seeded
from tiny import BOS, VOCAB

from iclutils import IclError, models
from iclutils.chapters.regression.text import predict_numbers
from iclutils.tasks import numbers


@pytest.mark.shared
def test_numbers_are_written_in_words(text_model: Path) -> None:
    model = models.load(text_model)
    form = numbers.of_text(models.words(model))
    drawn = numbers.contexts(form, 2, 3, seeded(0))
    text = model.tokenizer.decode(form.write(drawn.xs, drawn.ys)[0][0])
    step = 2 * numbers.LARGEST / 99
    pairs = zip(drawn.xs[0, :, 0].tolist(), drawn.ys[0].tolist(), strict=True)
    as_read = [[round((v + numbers.LARGEST) / step) for v in pair] for pair in pairs]
    assert text == "".join(f"Input: {x} Output: {y}\n" for x, y in as_read)


def test_what_is_written_can_be_read() -> None:
    form = numbers.of_ids(60, 59)
    drawn = numbers.contexts(form, 5, 4, seeded(1))
    tokens, at = form.write(drawn.xs, drawn.ys)
    assert tokens.shape == (5, 9)
    assert set(tokens[:, 0].tolist()) == {59}
    torch.testing.assert_close(form.numbers[tokens[:, at + 1]].float(), drawn.ys)
    torch.testing.assert_close(form.numbers[tokens[:, at]].float(), drawn.xs[..., 0])
    with pytest.raises(IclError, match="too small"):
        numbers.of_ids(5, 4)


def test_a_prediction_is_the_mean_over_value_tokens(gpt2: Any) -> None:
    form = numbers.of_ids(VOCAB, BOS)
    drawn = numbers.contexts(form, 3, 4, seeded(2))
    found, sure = predict_numbers(gpt2, form, drawn.xs, drawn.ys, batch_size=2)
    tokens, at = form.write(drawn.xs, drawn.ys)
    p = models.logits(gpt2, tokens[1:2, : at[2] + 1])[0, -1].double().softmax(-1)
    p = p[form.values]
    assert sure[1, 2].item() == pytest.approx(p.sum().item(), abs=1e-5)
    assert found[1, 2].item() == pytest.approx((p @ form.numbers / p.sum()).item(), abs=1e-4)
    with pytest.raises(IclError, match="one dimension; got 2"):
        predict_numbers(gpt2, form, torch.zeros(1, 2, 2), torch.zeros(1, 2))
