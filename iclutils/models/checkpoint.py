"""A language model on disk: a whole network with a key and value for every head, or what is wrong.

``language.load`` begins here; the networks that read numbers have files of their own, ``storage``.
"""

import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.activations import NewGELUActivation

from ..errors import IclError
from ..files import read_json

UNKNOWN = "a\ue000"  # a character that no text has
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
LONGEST = 160  # characters of another library's message
# Tensors of old files that networks compute for themselves.
BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|inv_freq$")


def read(folder: Path, name: str) -> PreTrainedModel:
    """Read the Hugging Face network in float32; refuse one that has a weight not of the files."""
    if (folder / "adapter_config.json").is_file():
        raise IclError(
            f"{name!r} holds an adapter, and numbers of its base alone would be wrong. Merge it "
            "with the package peft (merge_and_unload), save that, and load it."
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except Exception as error:  # damaged files and unknown architectures alike
        raise IclError(
            f"{name!r} could not be loaded: {first_line(error)}. Give the whole folder that "
            "save_pretrained wrote, its weights in safetensors and not quantised."
        ) from error
    network, info = loaded
    extra = {key for key in info["unexpected_keys"] if not BUFFERS.search(key)}
    wrong = {"lacking": info["missing_keys"], "left over": extra}
    wrong["of another shape"] = {key for key, *_ in info["mismatched_keys"]}
    if faults := [f"{len(x)} {what}, {min(x)} first" for what, x in wrong.items() if x]:
        raise IclError(
            f"The weights of {name!r} do not fit its config.json: {'; '.join(faults)}. Mend "
            "config.json, or copy the checkpoint again."
        )
    return network


def tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer beside the weights, if there is one: a ``tokenizer.json`` as it stands,
    with the special tokens that the settings name, or a vocabulary and merges of the model's kind.

    ``AutoTokenizer`` would make another one of a tokenizer.json where the model is of a kind that
    has a class of its own, as GPT-2, and add words of old files beside it.
    """
    whole = folder / "tokenizer.json"
    if not whole.is_file() and (folder / "tokenizer.model").is_file():
        raise IclError(
            f"Of the tokenizer.model of {name!r} transformers makes other tokens than "
            "sentencepiece. Write a tokenizer.json with transformers 4, "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), or take the file away."
        )
    try:
        if whole.is_file():
            core = Tokenizer.from_file(str(whole))
            if hasattr(core.model, "dropout"):
                core.model.dropout = None  # a share that is left out at random, in training
            reader = PreTrainedTokenizerFast(tokenizer_object=core, **_roles(folder, core))
        elif (folder / "vocab.json").is_file():
            reader = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        else:
            return None
        reader(UNKNOWN)  # a vocabulary may have no token for what it lacks
    except Exception as error:  # of the libraries of all kinds of tokenizers
        raise IclError(
            f"The tokenizer of {name!r} cannot be read ({first_line(error)}). Copy its files "
            "again, or take them away to load the model without one."
        ) from error
    return reader


def _roles(folder: Path, core: Tokenizer) -> dict[str, str]:
    """Return the special tokens that the files beside a tokenizer.json name and it has."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= read_json(folder / name) if (folder / name).is_file() else {}
    named = {role: settings[role] for role in ROLES if settings.get(role)}
    words = {role: x["content"] if isinstance(x, dict) else x for role, x in named.items()}
    return {role: word for role, word in words.items() if core.token_to_id(word) is not None}


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what the tokenizer puts before a text: BOS for some (Llama, Gemma), ``[CLS]``, two
    tokens (GLM), or nothing."""
    whole = tokenizer("a", return_special_tokens_mask=True)
    return whole["input_ids"][: [*whole["special_tokens_mask"], 0].index(0)]


def bos(folder: Path, vocab: int, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """Return the id of the token that begins a sequence, if the model names one that it can read.

    It is the one with which the tokenizer begins texts, whatever its name, since the model was
    trained on such texts, or the tokenizer's BOS; else that of config.json itself, since a config
    class fills in a default (1 for Llama) that nobody chose.
    """
    start = [] if tokenizer is None else start_tokens(tokenizer)
    first = start[0] if len(start) == 1 else getattr(tokenizer, "bos_token_id", None)
    if first is None:
        first = read_json(folder / "config.json").get("bos_token_id")
    return first if isinstance(first, int) and 0 <= first < vocab else None


def turned_alike(config: PretrainedConfig, limit: int) -> int:
    """Return up to how many tokens, of ``limit``, a text has the same rotary positions. LongRoPE
    (Phi-3) has others beyond: the longest text of a batch would turn the others, too."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # or one by layer type
    long = [one for one in kinds if one.get("rope_type") == "longrope"]
    return min([limit, *(one.get("original_max_position_embeddings") or limit for one in long)])


def first_line(error: Exception) -> str:
    """Return the first line of an error of another library, without its full stop, or its type."""
    line = str(error).strip().split("\n")[0] or type(error).__name__
    return (line if len(line) <= LONGEST else line[:LONGEST] + " …").rstrip(".")


def write_out(network: PreTrainedModel) -> PreTrainedModel:
    """Give every query head its group's key and value as its own, in place; the output is equal.

    So each lens reads, patches or re-weights one head alone. It takes separate projections, as in
    Llama, Mistral and Qwen; other networks with grouped heads stay as they are.
    """
    config = network.config
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) or heads
    layers = [part for part in network.modules() if hasattr(part, "num_key_value_groups")]
    if shared == heads or not layers or not all(map(_separate, layers)):
        return network
    layer: Any
    for layer in layers:
        for projection in (layer.k_proj, layer.v_proj):
            for name, rows in list(projection.named_parameters()):
                by_group = rows.data.unflatten(0, (-1, layer.head_dim))
                own = by_group.repeat_interleave(layer.num_key_value_groups, 0).flatten(0, 1)
                setattr(projection, name, nn.Parameter(own))
            projection.out_features = len(projection.weight)
        layer.num_key_value_groups = 1
    config.num_key_value_heads = heads
    return network


def fuse_gelu(network: PreTrainedModel) -> PreTrainedModel:
    """Compute GPT-2's GELU by one kernel of torch in place of eight, in place.

    The function is the same, and equal up to rounding; an MLP takes a third less time.
    """
    for part in [*network.modules()]:
        for name, child in part.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(part, name, nn.GELU("tanh"))
    return network


def _separate(layer: nn.Module) -> bool:
    """Whether keys and values have matrices of their own, and no norm that runs over all heads."""
    norm = getattr(getattr(layer, "k_norm", None), "weight", torch.empty(0))
    norms_one_head = norm.shape in ((0,), (layer.head_dim,))
    linear = [isinstance(getattr(layer, f"{p}_proj", None), nn.Linear) for p in "kv"]
    return all(linear) and norms_one_head
