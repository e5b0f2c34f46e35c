"""SmolLM2 by Hugging Face's transformers alone: everything inside can be seen and changed.

Nothing of the package is imported, nor TransformerLens. ``python tests/truth/01.py`` computes the
numbers of a chapter anew and writes them beside the prompts, as token ids, that they belong to.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iclutils"
FOLDER = Path(os.environ.get("ICLUTILS_CACHE") or CACHE) / "smollm2"
LAYERS, HEADS, SIZE, BOS, VOCAB = 30, 9, 64, 1, 49152
Place = tuple[str, int]  # q, k, v (turned; one for each query head), weights, z, attn, mlp, resid
Edit = Callable[[Tensor], Tensor]
EDITS = {}
SEEN = {}


def passing(name, layer, value):
    """A value on its way through the network: changed as asked, and kept."""
    if (name, layer) in EDITS:
        value = EDITS[name, layer](value)
    SEEN[name, layer] = value
    return value


def attention(module, query, key, value, mask, scaling, **_):
    """Grouped attention with every head by itself."""
    layer, groups = module.layer_idx, module.num_key_value_groups
    q, k, v = (
        passing(name, layer, states)
        for name, states in (
            ("q", query),
            ("k", key.repeat_interleave(groups, 1)),
            ("v", value.repeat_interleave(groups, 1)),
        )
    )
    scores = passing("scores", layer, q @ k.mT * scaling)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = passing("weights", layer, scores.masked_fill(later, -torch.inf).softmax(-1))
    z = passing("z", layer, weights @ v)
    return z.transpose(1, 2).contiguous(), weights


modeling_llama.eager_attention_forward = attention
MODEL = AutoModelForCausalLM.from_pretrained(
    FOLDER, dtype=torch.float32, attn_implementation="eager"
).requires_grad_(False)
WORDS = AutoTokenizer.from_pretrained(FOLDER)
BLOCKS = MODEL.model.layers
UNEMBED = MODEL.lm_head.weight


def _after(name, layer):
    def hook(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        changed = passing(name, layer, first)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook


MODEL.model.embed_tokens.register_forward_hook(_after("resid", -1))
for number, block in enumerate(BLOCKS):
    block.self_attn.register_forward_hook(_after("attn", number))
    for name in ("q_proj", "k_proj"):
        getattr(block.self_attn, name).register_forward_hook(_after(name, number))
    block.mlp.register_forward_hook(_after("mlp", number))
    block.register_forward_hook(_after("resid", number))


def run(tokens, edits=None):
    """Logits of all positions under edits, and all that was seen."""
    EDITS.clear()
    EDITS.update(edits or {})
    SEEN.clear()
    logits = MODEL(tokens, use_cache=False).logits
    EDITS.clear()
    return logits, dict(SEEN)


def ids(text):
    return WORDS(text, add_special_tokens=False)["input_ids"]


def copies(count, length, seed):
    """BOS and distinct random tokens, twice."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(VOCAB - 2, generator=generator)[:length] + 2 for _ in range(count)]
    first = torch.stack(drawn)
    return torch.cat([torch.full((count, 1), BOS), first, first], 1)


def write_of(seen, layer, head):
    """What a head writes to the residual stream: (batch, pos, d_model)."""
    out = BLOCKS[layer].self_attn.o_proj.weight[:, head * SIZE : (head + 1) * SIZE]
    return seen["z", layer][:, head] @ out.T


def instead(heads, new):
    """Edits that put a new z in the place of each head's."""

    def edit(layer):
        def change(z):
            z = z.clone()
            for la, head in heads:
                if la == layer:
                    z[:, head] = new(la, head)
            return z

        return change

    return {("z", layer): edit(layer) for layer, _ in heads}


def mean_z(seen):
    """A head's z: its mean over sequences and positions."""
    return lambda layer, head: seen["z", layer][:, head].mean((0, 1))


def write(script, given, values):
    """Write the numbers of a chapter to the JSON beside the script that computed them."""

    def plain(value):
        if isinstance(value, Tensor):
            value = value.tolist()
        if isinstance(value, list):
            return [plain(each) for each in value]
        return float(f"{value:.6g}") if isinstance(value, float) else value

    found = {
        part: {name: plain(value) for name, value in each.items()}
        for part, each in (("given", given), ("values", values))
    }
    Path(script).with_suffix(".json").write_text(lines(found), encoding="utf-8")
    for name, value in found["values"].items():
        print(name, value)


def lines(found):
    parts = []
    for part, each in found.items():
        rows = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in each.items())
        parts.append(f" {json.dumps(part)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"
