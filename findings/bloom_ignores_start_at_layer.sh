#!/usr/bin/env bash
# transformer-lens 4.3 and transformers 5.23: BLOOM ignores start_at_layer.
#
# What happens: model(residual, start_at_layer=1) is to run the blocks from 1 on, on a residual stream
# that is handed in. Fed with the stream that its own run had there, GPT-2, Llama and GPT-NeoX give the
# logits of that run. A bridge of BLOOM gives other logits, and says nothing.
#
# Why a guess misses: the argument is one of TransformerLens' own, so that one expects it to be followed,
# or refused, on every architecture alike; and the logits have the right shape and size.
#
# Who meets it: whoever patches in the middle of a network and, to save time, restarts above the patch.
#
# Exits with 0 while this is so, and with 1 once a bridge of these versions behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/try.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from transformer_lens.model_bridge import TransformerBridge

SIZES = dict(vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             intermediate_size=48, max_position_embeddings=32, bos_token_id=0, eos_token_id=0)
tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])


def bridge_of(config):
    """Build a random network of this config; return it and its bridge."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    reader = t.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0")
    network = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    folder = f"{sys.argv[1]}/{config.model_type}"
    network.save_pretrained(folder)
    return network, TransformerBridge.boot_transformers(
        folder, hf_model=network, tokenizer=reader, device="cpu")


CONFIGS = {
    "gpt2": t.GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=32,
                         bos_token_id=0, eos_token_id=0),
    "llama": t.LlamaConfig(**SIZES),
    "gpt_neox": t.GPTNeoXConfig(**SIZES),
    "bloom": t.BloomConfig(vocab_size=20, hidden_size=32, n_layer=2, n_head=4, bos_token_id=0,
                           eos_token_id=0),
}
gaps = {}
with torch.no_grad():
    for name, config in CONFIGS.items():
        network, bridge = bridge_of(config)
        for key, weight in network.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in key or "ln_" in key))
        whole, cache = bridge.run_with_cache(tokens)
        again = bridge(cache["blocks.0.hook_resid_post"], start_at_layer=1)
        gaps[name] = float((again - whole).abs().max())
print(f"transformers {version('transformers')}, transformer-lens {version('transformer-lens')}; logits "
      "of a run that restarts above block 0, off by:",
      ", ".join(f"{k} {x:.2g}" for k, x in gaps.items()))
sys.exit(0 if max(gaps[k] for k in ("gpt2", "llama", "gpt_neox")) < 1e-3 < 0.1 < gaps["bloom"] else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformer-lens==4.3.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/try.py" "$work/net" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
