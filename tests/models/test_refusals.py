"""What a lens does not know of a model it refuses, and names itself and the reason."""

from functools import partial

import pytest
import torch
from random_layers import seeded
from tiny import save_grouped

from iclutils import IclError, models
from iclutils.chapters.label_anchors import saliency
from iclutils.interp import at_query, hooks, kv_cache, weights
from iclutils.tasks import topics
from tools.architectures import save

WINDOW = {"sliding_window": 8, "vocab_size": topics.VOCAB, "max_position_embeddings": 256}
TOKENS = torch.randint(1, 59, (2, 11), generator=seeded(0))


@pytest.mark.parametrize(
    ("network", "lens", "message"),
    [
        ("BLOOM", lambda m: at_query.read(m, TOKENS), "dual models. .* no explicit positi"),
        ("BLOOM", lambda m: weights.qk_matching(m, (0, 0), (1, 0)), "^QK matching .* rotary"),
        ("BLOOM", lambda m: weights.composition_scores(m, "K", 1), "composition at a distance"),
        ("BLOOM", lambda m: kv_cache.keys_values(m, TOKENS), "A cut memory .* no explicit posi"),
        ("GPT-J", lambda m: at_query.read(m, TOKENS), "editing the attention"),
        ("GPT-J", lambda m: hooks.cut_attention(m, {}), "only after using it"),
        ("GPT-Neo", lambda m: kv_cache.keys_values(m, TOKENS), "sliding window"),
        (
            partial(save_grouped, kind="mistral", **WINDOW),
            lambda m: saliency.saliency(m, topics.sample(2, seeded(0), classes=2)),
            "^Saliency .* see 8 tokens at once, and the prompts have",
        ),
        ("Qwen-3", lambda m: weights.composition_scores(m, "K"), "^K-composition .* norm their qu"),
    ],
)
def test_a_lens_names_itself_and_the_reason(tmp_path, network, lens, message):
    network(tmp_path) if callable(network) else save(network, tmp_path)
    model = models.load(tmp_path, tokenizer="numbers")
    with pytest.raises(IclError, match=message):
        lens(model)
