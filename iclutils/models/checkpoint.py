"""A language model on disk: a network that is whole, or what is wrong with its folder."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import IclError
from ..files import read_json

OWN = ("in-context regressors", "solvers")  # networks that read numbers, see ``storage``
FEW = 3  # names that a message lists
POINTER = b"version https://git-lfs"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Tensors of old files that networks compute for themselves.
BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|inv_freq$")


def refuse(folder: Path, name: str) -> None:
    """Refuse what holds no plain weights of a causal model, as far as its files tell unread."""
    if not (folder / "config.json").is_file():
        raise IclError(f"{folder} has no config.json: it is not a Hugging Face model folder.")
    files = list(folder.glob("*.safetensors"))
    for path in (*folder.glob("*.json"), *files):
        with path.open("rb") as stream:
            if stream.read(len(POINTER)) == POINTER:
                raise IclError(
                    f"{path.name} of {name!r} is a git-LFS pointer and not the file. Fetch it: "
                    "git lfs pull"
                )
    if not files and any(found for kind in PICKLES for found in folder.glob(kind)):
        raise IclError(
            f"{folder} has no .safetensors weights. Pickled weights are not loaded, because "
            "unpickling runs code: save the model with save_pretrained(..., "
            "safe_serialization=True)."
        )
    if not files:
        raise IclError(f"{folder} holds no weights: no .safetensors file. Copy it whole.")
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OWN):
        raise IclError(f"{name!r} is of the type {kind!r}, which is no causal language model.")
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise IclError(
            f"The weights of {name!r} are quantised ({method}). Load the model that they were made "
            "from, or save it dequantised."
        )


def size(folder: Path, name: str) -> int:
    """Bytes of the weights in memory, in single precision; only their headers are read."""
    config, count = read_json(folder / "config.json"), 0
    heads = config.get("num_attention_heads", 1)
    groups = heads // (config.get("num_key_value_heads") or heads)  # written out, see ``grouped``
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt") as held:
                for part in held.keys():  # noqa: SIM118 (no mapping)
                    times = groups if re.search(r"\.[kv]_proj\.", part) else 1
                    count += times * math.prod(held.get_slice(part).get_shape())
        except (SafetensorError, OSError) as error:
            raise IclError(f"{name!r} is damaged: {path.name}: {error}. Copy it again.") from error
    return 4 * count


def read(folder: Path, name: str) -> PreTrainedModel:
    """The Hugging Face network in float32, every weight of which came from the files."""
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
        first = str(error).strip().split("\n")[0].rstrip(".")
        raise IclError(f"{name!r} could not be loaded: {first}.") from error
    network, told = loaded
    wrong = {
        "lacking": told["missing_keys"],
        "left over": {k for k in told["unexpected_keys"] if not BUFFERS.search(k)},
        "of another shape": {
            f"{key} {tuple(held)} for {tuple(wanted)}"
            for key, held, wanted in told["mismatched_keys"]
        },
    }
    if found := [f"{what}: {_few(keys)}" for what, keys in wrong.items() if keys]:
        raise IclError(
            f"The weights of {name!r} do not fit its config.json. {'; '.join(found)}. Mend "
            "config.json, or copy the checkpoint again."
        )
    every = network.state_dict().items()
    if spoilt := {k for k, v in every if v.is_floating_point() and not v.isfinite().all()}:
        raise IclError(
            f"Weights of {name!r} are not finite: {_few(spoilt)}. Take an earlier checkpoint."
        )
    return network


def tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights, if there is one."""
    if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of the libraries of all kinds of tokenizers
        first = str(error).strip().split("\n")[0].rstrip(".")
        raise IclError(
            f"The tokenizer of {name!r} cannot be read ({first}). Copy its files again, or take "
            "them away to load the model without one."
        ) from error


def _few(names: Iterable[str]) -> str:
    """The first of the names, and how many there are if they are more."""
    listed = sorted(names)
    more = f" and {len(listed) - FEW} more" if len(listed) > FEW else ""
    return ", ".join(listed[:FEW]) + more
