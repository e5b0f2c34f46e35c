"""A language model on disk: a whole network with a key and value for every head, or what is wrong.

``language.load`` begins here; the networks that read numbers have files of their own, ``storage``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.activations import NewGELUActivation
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import IclError
from ..files import read_json

OWN = ("in-context regressors", "solvers")  # networks that read numbers, see ``storage``
TOKENIZERS = ("vocab.json", "tokenizer.model")  # without tokenizer.json
UNKNOWN = "a\ue000"  # a character that no text has
SAMPLE = "Text: a great  film\nLabel: walked 12 ->"
LONGEST = 160  # characters of another library's message
LISTED = 3  # names that a message lists
# Tensors of old files that networks compute for themselves.
BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|inv_freq$")


def refuse(folder: Path, name: str) -> None:
    """Refuse a folder without plain weights of a causal model, as far as one can tell unread."""
    if (adapter := folder / "adapter_config.json").is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        of = f" of {base!r}" if base else ""
        raise IclError(
            f"{folder} holds an adapter{of} (adapter_config.json), and numbers of the base "
            "alone would be wrong. Merge it first, with the package peft: "
            f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload()"
            ".save_pretrained('merged'), then load 'merged', with the tokenizer copied into it."
        )
    if not (folder / "config.json").is_file():
        raise IclError(
            f"{folder} has no config.json: it is not a Hugging Face model folder. Give one that "
            "save_pretrained wrote; a GGUF file alone is not loaded."
        )
    if missing := [path.name for path in weights(folder) if not path.is_file()]:
        raise IclError(
            f"{folder} holds no weights: no {_listed(missing)}. Copy it whole; pickled weights are "
            "not loaded, because unpickling runs code: save the model with save_pretrained."
        )
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OWN):
        raise IclError(f"{name!r} is of the type {kind!r}, which is no causal language model.")
    if config.get("is_encoder_decoder"):
        raise IclError(
            f"{name!r} has an encoder beside its decoder, as T5 and BART have. Use a model that is "
            "a decoder alone, such as GPT-2."
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise IclError(f"The weights of {name!r} are quantised ({method}): save it dequantised.")


def weights(folder: Path) -> list[Path]:
    """Return the files that transformers reads the weights from: one, or the shards of an index.

    Whatever else lies beside them, such as the same weights in another layout, is not read.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole]
    places = read_json(index).get("weight_map")
    shards = sorted({*places.values()}) if isinstance(places, dict) else []
    return [folder / shard for shard in shards] or [whole]


def read(folder: Path, name: str) -> PreTrainedModel:
    """Read the Hugging Face network in float32; refuse one that has a weight not of the files."""
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
        raise IclError(f"{name!r} could not be loaded: {first_line(error)}.") from error
    network, info = loaded
    wrong = {
        "lacking": info["missing_keys"],
        "left over": {k for k in info["unexpected_keys"] if not BUFFERS.search(k)},
        "of another shape": {
            f"{key} {tuple(stored)} for {tuple(wanted)}"
            for key, stored, wanted in info["mismatched_keys"]
        },
    }
    if faults := [f"{what}: {_listed(keys)}" for what, keys in wrong.items() if keys]:
        raise IclError(
            f"The weights of {name!r} do not fit its config.json. {'; '.join(faults)}. Mend "
            "config.json, or copy the checkpoint again."
        )
    floats = {k: v for k, v in network.state_dict().items() if v.is_floating_point()}
    if spoilt := {k for k, v in floats.items() if not v.sum(dtype=torch.double).isfinite()}:
        raise IclError(
            f"Weights of {name!r} are not finite: {_listed(spoilt)}. Take an earlier checkpoint."
        )
    return network


def config(folder: Path, name: str) -> PretrainedConfig:
    """Read the config of a network alone."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files and unknown architectures alike
        raise IclError(f"{name!r} could not be loaded: {first_line(error)}.") from error


def log_probabilities(
    network: PreTrainedModel, tokens: Int[Tensor, "1 pos"], name: str
) -> Float[Tensor, "1 pos vocab"]:
    """Return what the network itself predicts, before TransformerLens takes hold of it."""
    try:
        with torch.no_grad():
            return network.eval()(tokens).logits.log_softmax(-1)
    except Exception as error:  # a config whose options contradict each other
        raise IclError(
            f"transformers cannot run {name!r} with its config.json ({type(error).__name__}: "
            f"{first_line(error)}). Mend config.json, or copy the checkpoint again."
        ) from error


def tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer beside the weights, if there is one.

    A ``tokenizer.json`` is read as it stands. ``AutoTokenizer`` would take its vocabulary and
    merges alone where the model is of a kind that has a tokenizer class of its own, as GPT-2.
    """
    whole = (folder / "tokenizer.json").is_file()
    if not whole and not any((folder / file).is_file() for file in TOKENIZERS):
        return None
    kind = PreTrainedTokenizerFast if whole else AutoTokenizer
    try:
        reader = kind.from_pretrained(folder, local_files_only=True)
        reader(UNKNOWN)  # a vocabulary may have no token for what it lacks
        wrong = _contradiction(folder, reader)
    except Exception as error:  # of the libraries of all kinds of tokenizers
        raise IclError(
            f"The tokenizer of {name!r} cannot be read ({first_line(error)}). Copy its files "
            "again, or take them away to load the model without one."
        ) from error
    if wrong:
        raise IclError(
            f"Of the tokenizer files of {name!r} transformers makes another tokenizer than they "
            f"describe ({wrong}), so that texts would be other tokens. Take away a file that is "
            "out of date, or write tokenizer.json anew with a version that reads them right, such "
            "as transformers 4: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    merges: Any = getattr(getattr(reader, "backend_tokenizer", None), "model", None)
    if getattr(merges, "dropout", None):
        merges.dropout = None  # a share that is left out at random, in training
    return reader


def _contradiction(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return where a tokenizer is not what its files describe, or nothing.

    BOS is that of the settings, and words that files add have the ids that they name. Without a
    tokenizer.json the class is the one named, and a sample is split as by the sentencepiece beside.
    """
    files = "tokenizer_config.json", "added_tokens.json", "tokenizer.json", "tokenizer.model"
    paths = [folder / file for file in files]
    settings, older, whole = (read_json(x) if x.is_file() else {} for x in paths[:3])
    bos = settings.get("bos_token")
    bos = bos["content"] if isinstance(bos, dict) else bos
    if bos and bos != tokenizer.bos_token:
        return f"BOS is {bos!r} in {files[0]}, and becomes {tokenizer.bos_token!r}"
    added = [(t, int(i)) for i, t in settings.get("added_tokens_decoder", {}).items()]
    words = [(t["content"], i) for t, i in added if t["content"] == bos or not t.get("special")]
    words += older.items()
    for word, token in words:
        if (own := tokenizer.convert_tokens_to_ids(word)) != token:
            return f"{word!r} is token {token} in {files[word in older]}, and becomes {own}"
    if whole:
        return _change(whole, tokenizer, {word for word, _ in words})
    named: Any = getattr(transformers, settings.get("tokenizer_class") or "", object)
    if not isinstance(tokenizer, named):
        return f"{files[0]} names a {named.__name__}, and it becomes a {type(tokenizer).__name__}"
    if not paths[3].is_file():
        return ""
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(paths[3])).encode(SAMPLE)
    same = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"] == pieces
    return "" if same else f"{files[3]} splits a sample otherwise"


def _change(whole: dict[str, Any], tokenizer: PreTrainedTokenizerBase, words: set[str]) -> str:
    """Return what settings change of a tokenizer.json, or nothing: its BOS is its own, or one of
    ``words``, and the words that it adds, other than special ones, are read as it has them."""
    added = {token["content"]: token for token in whole.get("added_tokens", [])}
    vocabulary = whole["model"].get("vocab", ())  # words, or pairs of a word and its score
    known = words.union(added, (x if isinstance(x, str) else x[0] for x in vocabulary))
    if tokenizer.bos_token and tokenizer.bos_token not in known:
        return f"BOS is {tokenizer.bos_token!r}, which tokenizer.json does not have"
    for i, token in tokenizer.added_tokens_decoder.items():
        stored = added.get(token.content, {}).items()
        if not token.special and any(getattr(token, what, i) != value for what, value in stored):
            return f"{token.content!r} is not read as it stands in tokenizer.json"
    return ""


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


def _listed(names: Iterable[str]) -> str:
    """Return the first of the names, and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(every[:LISTED]) + more


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
