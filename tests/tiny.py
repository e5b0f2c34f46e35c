"""Small models that the tests make: in the format of the hub, with random or hand-set weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from iclutils.models import TransformerBridge, load

VOCAB, BOS, CONTEXT = 60, 59, 48


def save_gpt2(folder: Path, seed: int = 0, **changes: int) -> GPT2LMHeadModel:
    """Write a small random GPT-2 to ``folder`` and return it."""
    settings = {
        "vocab_size": VOCAB,
        "n_positions": CONTEXT,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 48,
        "bos_token_id": BOS,
        "eos_token_id": BOS,
        # Large weights, so that patches have effects well above rounding error.
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    config = GPT2Config(**(settings | changes), attn_implementation="eager")
    network = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "ln_" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    return network


def tiny_gpt2(folder: Path, **changes: int) -> TransformerBridge:
    """A small random GPT-2, loaded the way a reader's model is."""
    save_gpt2(folder, **changes)
    return load(folder)


def tokens(count: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count, length), generator=generator)
