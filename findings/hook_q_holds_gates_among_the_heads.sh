#!/usr/bin/env bash
# transformer-lens 4.3 and transformers 5.23: on Qwen-3-Next and Qwen-3.5 every second head of hook_q is a
# gate.
#
# What happens: blocks.L.attn.hook_q has the queries as (batch, position, head, d_head) on other networks.
# Here it has twice as many heads as the network, the query and the gate of each in turn. Zeros in
# hook_q[:, :, 1] leave the attention of head 1 as it was, and change what head 0 writes. Zeros in
# hook_q[:, :, 2] are what removes the query of head 1. Nothing is said.
#
# Why a guess misses: cfg.n_heads, hook_k, hook_pattern and hook_z count the heads as usual, and an index
# below n_heads is accepted and does something.
#
# Who meets it: whoever patches or ablates queries by head on one of these networks.
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
         "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48, "bos_token_id": 0,
         "eos_token_id": 0, "max_position_embeddings": 16}
FULL = {"layer_types": ["full_attention", "full_attention"]}
KINDS = {"qwen3": {}, "qwen3_5_text": FULL,
         "qwen3_next": {**FULL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                        "shared_expert_intermediate_size": 24}}
words = Tokenizer(models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
PATTERN, Z = "blocks.0.attn.hook_pattern", "blocks.0.attn.hook_z"


def changed(kind, index):
    """Return the heads that attend otherwise, and those that write otherwise, without a query."""
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
    seen = {}

    def remove(q, hook):
        q = q.clone()
        q[:, :, index] = 0
        return q

    def run(*edits):
        keep = [(n, lambda x, hook, n=n: seen.update({n: x.clone()})) for n in (PATTERN, Z)]
        bridge.run_with_hooks(tokens, fwd_hooks=[*edits, *keep])
        return dict(seen)

    plain, edited = run(), run(("blocks.0.attn.hook_q", remove))
    attends = (plain[PATTERN] - edited[PATTERN]).abs().amax((0, 2, 3)) > 1e-6
    writes = (plain[Z] - edited[Z]).abs().amax((0, 1, 3)) > 1e-6
    return attends.nonzero()[:, 0].tolist(), writes.nonzero()[:, 0].tolist()


with torch.no_grad():
    found = {(kind, index): changed(kind, index) for kind in KINDS for index in (1, 2)}
print(f"transformers {version('transformers')}, transformer-lens {version('transformer-lens')}; "
      "zeros at an index of hook_q, heads that attend and that write otherwise:", found)
usual = {("qwen3", 1): ([1], [1]), ("qwen3", 2): ([2], [2])}
odd = {(k, i): x for k in KINDS if k != "qwen3" for i, x in ((1, ([], [0])), (2, ([1], [1])))}
sys.exit(0 if found == usual | odd else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformer-lens==4.3.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/try.py" "$work/net" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
