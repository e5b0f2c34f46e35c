#!/usr/bin/env bash
# transformers 5.23: Bamba takes the tokens that it reads on a cache for the first ones of the text.
#
# What happens: a network reads eight tokens with use_cache=True, and then six more with the cache that it
# returned. Llama, Falcon-H1 and Granite-4 give the logits that they give when they read all fourteen in one run:
# the length of the cache says where the six stand. Bamba gives them positions from 0 on, together or one by one
# (then each stands at 0). Keys and states of the cache are used as usual, so that the text before is seen, at
# wrong distances, and the log-probabilities are off by nats. With position_ids handed in, all is right. No
# error, no warning.
#
# Why a guess misses: position_ids may be left out, in all of these networks, and the others count on from the
# cache. generate() hands them in, so that generated text is right; a run without a cache is, too.
#
# Who meets it: whoever reads the common beginning of many prompts once and each ending on its cache, or writes
# the loop that generates himself.
#
# Exits with 0 while this is so, and with 1 once this version behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/read.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
from transformers import AutoConfig, AutoModelForCausalLM

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
tokens = torch.arange(1, 15)[None]
BEGUN = 8
SIZES = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 0,
         "pad_token_id": 0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
KINDS = {
    "llama": {},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 2,
                                 "num_experts_per_tok": 1, "position_embedding_type": "rope"},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
}  # fmt: skip


def gaps(kind):
    """Return nats between a whole run and one on a cache: together, one by one, and with positions."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})).eval()
    for weight in network.parameters():
        noise = 0.3 * torch.randn_like(weight)
        weight.data.copy_(weight + noise if weight.ndim == 1 else noise)
    whole = network(tokens).logits.log_softmax(-1)[:, BEGUN:]

    def read(size, told):
        cache, parts = network(tokens[:, :BEGUN], use_cache=True).past_key_values, []
        for places in torch.arange(BEGUN, tokens.shape[1]).split(size):
            positions = {"position_ids": places[None]} if told else {}
            out = network(tokens[:, places], past_key_values=cache, use_cache=True, **positions)
            parts.append(out.logits.log_softmax(-1))
        return float((torch.cat(parts, 1) - whole).abs().max())

    return [read(6, False), read(1, False), max(read(6, True), read(1, True))]


with torch.no_grad():
    found = {kind: gaps(kind) for kind in KINDS}
told = "; ".join(f"{kind} " + ", ".join(f"{gap:.1g}" for gap in all_) for kind, all_ in found.items())
print(f"transformers {version('transformers')}, nats together, one by one, with position_ids: {told}")
*wrong, right = found.pop("bamba")
right = max(right, *(max(all_) for all_ in found.values())) < 1e-3
sys.exit(0 if right and min(wrong) > 0.1 else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/read.py" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
