#!/usr/bin/env bash
# transformer-lens 4.3 and transformers 5.23: on DeepSeek-V3, hook_q, hook_k and hook_v have the head before
# the position.
#
# What happens: blocks.L.attn.hook_q has the queries as (batch, position, head, d_head) on other networks, and
# here as (batch, head, position, d_qk). Zeros in hook_q[:, :, 1] remove the query of head 1 elsewhere; here
# they remove the queries of all heads at position 1. hook_v[:, :, 1] likewise takes away a token, not a head.
# Nothing is said. hook_z and hook_pattern are as usual.
#
# Why a guess misses: the name of the hook is the same, the index is accepted by any text with as many tokens
# as there are heads, and where both numbers are equal even the shape is.
#
# Who meets it: whoever patches, ablates or averages queries, keys or values by head on a network with latent
# attention, and whoever compares it with another one.
#
# Exits with 0 while this is so, and with 1 once a bridge of these versions behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/try.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from transformer_lens.model_bridge import TransformerBridge

SIZES = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 0,
         "max_position_embeddings": 16}
KINDS = {"llama": {"head_dim": 8},
         "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 24, "first_k_dense_replace": 2, "kv_lora_rank": 8,
                         "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}}
words = Tokenizer(models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
PATTERN = "blocks.0.attn.hook_pattern"


def changed(kind):
    """Return the shape of hook_q, and the heads and the positions that attend otherwise once
    hook_q[:, :, 1] is zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in network.parameters():
        noise = 0.3 * torch.randn_like(weight)
        weight.data.copy_(weight + noise if weight.ndim == 1 else noise)
    network.save_pretrained(sys.argv[1])
    reader = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0")
    bridge = TransformerBridge.boot_transformers(
        sys.argv[1], hf_model=network, tokenizer=reader, device="cpu")
    seen, shapes = {}, []

    def remove(q, hook):
        shapes.append(tuple(q.shape))
        q = q.clone()
        q[:, :, 1] = 0
        return q

    def run(*edits):
        keep = (PATTERN, lambda x, hook: seen.update({PATTERN: x.clone()}))
        bridge.run_with_hooks(tokens, fwd_hooks=[*edits, keep])
        return seen[PATTERN]

    moved = (run() - run(("blocks.0.attn.hook_q", remove))).abs() > 1e-6  # (batch, head, query, key)
    heads, queries = moved.any(-1).any(0).any(1), moved.any(-1).any(0).any(0)
    return shapes[0], heads.nonzero()[:, 0].tolist(), queries.nonzero()[:, 0].tolist()


with torch.no_grad():
    found = {kind: changed(kind) for kind in KINDS}
print(f"transformers {version('transformers')}, transformer-lens {version('transformer-lens')}; shape of "
      "hook_q, and the heads and positions that attend otherwise without index 1 of its third dimension:",
      found)
usual = {"llama": ((1, 8, 4, 8), [1], [1, 2, 3, 4, 5, 6, 7])}  # position 0 has one key to look at
odd = {"deepseek_v3": ((1, 4, 8, 8), [0, 1, 2, 3], [1])}
sys.exit(0 if found == usual | odd else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformer-lens==4.3.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/try.py" "$work/net" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
