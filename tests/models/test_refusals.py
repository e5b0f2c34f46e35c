"""What a lens does not know of a model it refuses, and names itself and the reason."""

import pytest
import torch
from random_layers import seeded
from tiny import save_gptj, save_grouped
from transformers import BloomConfig, BloomForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from iclutils import IclError, models
from iclutils.chapters.label_anchors import saliency
from iclutils.interp import at_query, hooks, kv_cache, weights
from iclutils.tasks import topics

WINDOW = {"sliding_window": 8, "vocab_size": topics.VOCAB, "max_position_embeddings": 256}
TOKENS = torch.randint(1, 59, (2, 11), generator=seeded(0))


def save_bloom(folder):
    """Positions as slopes of attention, and another scale."""
    sizes = {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    config = BloomConfig(**sizes, bos_token_id=59, eos_token_id=59)
    BloomForCausalLM(config).save_pretrained(folder)


def save_local(folder):
    """Attention to a window."""
    local = {"attention_types": [[["global", "local"], 1]], "window_size": 8, "num_layers": 2}
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_heads": 4}
    config = GPTNeoConfig(**sizes, **local, bos_token_id=59, eos_token_id=59)
    GPTNeoForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("save", "lens", "message"),
    [
        (save_bloom, lambda m: at_query.read(m, TOKENS), "dual models. .* no explicit positi"),
        (save_bloom, lambda m: weights.qk_matching(m, (0, 0), (1, 0)), "^QK matching .* rotary"),
        (save_bloom, lambda m: weights.composition_scores(m, "K", 1), "composition at a distance"),
        (save_bloom, lambda m: kv_cache.keys_values(m, TOKENS), "A cut memory .* no explicit posi"),
        (save_gptj, lambda m: at_query.read(m, TOKENS), "editing the attention"),
        (save_gptj, lambda m: hooks.cut_attention(m, {}), "only after using it"),
        (save_local, lambda m: kv_cache.keys_values(m, TOKENS), "sliding window"),
        (
            lambda folder: save_grouped(folder, "mistral", **WINDOW),
            lambda m: saliency.saliency(m, topics.sample(2, seeded(0), classes=2)),
            "^Saliency .* see 8 tokens at once, and the prompts have",
        ),
        (
            lambda folder: save_grouped(folder, "qwen3"),
            lambda m: weights.composition_scores(m, "K"),
            "^K-composition cannot be read .* its heads norm their queries",
        ),
    ],
)
def test_a_lens_names_itself_and_the_reason(tmp_path, save, lens, message):
    save(tmp_path)
    model = models.load(tmp_path, tokenizer="numbers")
    with pytest.raises(IclError, match=message):
        lens(model)
