"""A model that several tests of chapter 07 read."""

import pytest
from tiny import real_tokenizer, save_grouped

from iclutils import models


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A random Llama that reads the words of SmolLM2."""
    folder, words = tmp_path_factory.mktemp("reader"), real_tokenizer("smollm2")
    save_grouped(folder, vocab_size=len(words), max_position_embeddings=256)
    words.save_pretrained(folder)
    return models.load(folder)
