"""What this room refuses: wrong names and sizes, and models that a lens cannot read."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers as hf
from random_layers import seeded
from tiny import save_grouped, tokens
from torch.nn.functional import pad

from iclutils import IclError, models
from iclutils.chapters.attention_circuits import stability
from iclutils.chapters.label_anchors import confusion, saliency
from iclutils.interp import (
    at_query,
    attribution,
    clean_corrupt,
    hooks,
    kv_cache,
    patching,
    readout,
    removal,
    weights,
)
from iclutils.models import regressors
from iclutils.tasks import topics
from iclutils.tasks.prompts import Role
from tools.architectures import save

small = partial(models.load, "induction-0")
MISSING = "blocks.2.hook_mlp_out"  # it has two layers


def answers(xs, ys):
    """Of two regressors of 3 dimensions and at most 5 pairs."""
    shape = regressors.Shape(3, 5, "two", 2, 16, 2)
    return regressors.InContextRegressors(shape, [0, 1])(xs, ys)


def save_clipped(folder):
    """An OLMo whose queries, keys and values are bounded."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 60}
    config = hf.OlmoConfig(**sizes, num_attention_heads=4, clip_qkv=2.0)
    hf.OlmoForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.load("gtp2"), "Unknown model 'gtp2'. Did you mean 'gpt2'"),
        (lambda: models.load("owner/name@main"), "full 40-hex commit"),
        (lambda: models.load("gpt2@" + "a" * 40), "Unknown model 'gpt2@a+'"),
        (lambda: models.load("./no/such/folder"), "There is no folder"),
        (lambda: models.load("a/b@" + "a" * 40), "Could not fetch a/b at aaaaaaaaaaaa .*mini tier"),
        (lambda: models.logits(small(), tokens(1, 97)), "97 tokens and the model reads at most 96"),
        (lambda: models.logits(small(), torch.tensor([[1, 512]])), "Token ids must lie in"),
        (lambda: hooks.run_with_hooks(small(), tokens(1, 4), [], [MISSING]), "no blocks.2.hook_ml"),
        (
            lambda: answers(torch.zeros(1, 4, 5, 2), torch.zeros(1, 4, 5)),
            r"n, 3\).* got \(1, 4, 5, 2",
        ),
        (lambda: answers(torch.zeros(1, 4, 6, 3), torch.zeros(1, 4, 6)), "1 to 5 pairs.*got 6"),
        (lambda: answers(torch.zeros(3, 4, 5, 3), torch.zeros(3, 4, 5)), "axis of 1 or 2 before"),
        (lambda: answers(torch.zeros(1, 4, 5, 3), torch.zeros(1, 4, 5) / 0), "NaN or infinite"),
    ],
)
def test_wrong_names_and_sizes_say_what_to_do(call, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(IclError, match=message):
        call()


WINDOW = {"sliding_window": 8, "vocab_size": topics.VOCAB, "max_position_embeddings": 256}
LATENT = "DeepSeek-V3, dense"  # keys and values of all heads come out of few numbers
ASKED = topics.sample(1, seeded(0), classes=2)
ASKED = replace(ASKED, tokens=ASKED.tokens % 59, label_words=ASKED.label_words % 59)
TOKENS = torch.randint(1, 59, (2, 11), generator=seeded(0))


@pytest.mark.parametrize(
    ("network", "lens", "message"),
    [
        ("BLOOM", lambda m: at_query.read(m, TOKENS), "dual models. .* no explicit positi"),
        ("BLOOM", lambda m: weights.qk_matching(m, (0, 0), (1, 0)), "^QK matching .* rotary"),
        ("BLOOM", lambda m: kv_cache.keys_values(m, TOKENS), "A cut memory .* no explicit posi"),
        ("BLOOM", lambda m: weights.qk_matching(m, (0, 0), (2, 0)), "There is no head 2.0"),
        (LATENT, lambda m: weights.qk_matching(m, (0, 0), (1, 0)), "not one for each of its 4"),
        ("GPT-J", lambda m: at_query.read(m, TOKENS), "editing the attention"),
        ("GPT-J", lambda m: hooks.cut_attention(m, {}), "only after using it"),
        ("GPT-Neo", lambda m: kv_cache.keys_values(m, TOKENS), "sliding window"),
        ("Qwen-3.5, full", lambda m: at_query.read(m, TOKENS), "each of its 4 heads .gates"),
        (
            "Qwen-3.5, full",
            lambda m: confusion.queries_and_keys(m, ASKED),
            "by keys of label words: its queries are not one for each",
        ),
        (
            partial(save_grouped, kind="mistral", **WINDOW),
            lambda m: saliency.saliency(m, topics.sample(2, seeded(0), classes=2)),
            "^Saliency .* see 8 tokens at once, and the prompts have",
        ),
        ("Qwen-3", lambda m: weights.composition_scores(m, "K"), "^K-composition .* norm their qu"),
        (
            save_clipped,
            lambda m: weights.composition_scores(m, "V"),
            "^V-composition .* its heads clip queries, keys and values at 2",
        ),
        (
            "Gemma-4, wide global heads",
            lambda m: removal.head_means(m, TOKENS),
            "heads of this model write 8 or 16 numbers, by layer",
        ),
        (
            "Gemma-4, wide global heads",
            lambda m: stability.head_outputs(m, TOKENS),
            "cannot be measured by its parts",
        ),
    ],
)
def test_a_lens_names_itself_and_the_reason(tmp_path, network, lens, message):
    network(tmp_path) if callable(network) else save(network, tmp_path)
    model = models.load(tmp_path, tokenizer="numbers")
    with pytest.raises(IclError, match=message):
        lens(model)


LONG = TOKENS.repeat(1, 3)  # 33
LONG_TASK = clean_corrupt.CleanCorrupt(LONG, LONG.flip(1), torch.full((2, 1), 9), LONG[:, 9:10])
LONG_PROMPTS = replace(  # the longest prompt of a batch would turn the others
    ASKED, tokens=pad(ASKED.tokens, (0, 12)), roles=pad(ASKED.roles, (0, 12), value=Role.QUERY)
)
DOORS = {
    "predictions": lambda m: readout.predictions(m, LONG),
    "a query": lambda m: at_query.read(m, LONG, torch.tensor([3, 3])),
    "a batch": lambda m: readout.target_logits(m, LONG_PROMPTS),
    "a memory": lambda m: kv_cache.keys_values(m, LONG),
    "the text up to what is scored": lambda m: patching.ablate(m, LONG_TASK, [[]]),
    "its slopes": lambda m: attribution.node_attribution(m, LONG_TASK),
    "saliency": lambda m: saliency.saliency(m, LONG_PROMPTS),
    "heads removed": lambda m: removal.outputs_on(m, LONG, ""),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_text_in_which_longrope_would_turn_the_others_is_refused(door, tmp_path):
    """It has other rotary positions in texts of more than 32 tokens, though it reads 64."""
    save("Llama, LongRoPE", tmp_path)
    model = models.load(tmp_path, tokenizer="numbers")
    assert model.cfg.n_ctx == 32
    with pytest.raises(IclError, match=r"3\d tokens and the model reads at most 32"):
        DOORS[door](model)
