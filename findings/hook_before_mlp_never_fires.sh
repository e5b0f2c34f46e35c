#!/usr/bin/env bash
# transformer-lens 4.3 and transformers 5.23: the hook before an MLP is switched on, and never fires.
#
# What happens: set_use_hook_mlp_in(True) makes blocks.L.hook_mlp_in a point where what an MLP reads
# can be edited, as path patching does. On GPT-2 and Llama it works. On Phi, Cohere, Falcon with
# parallel blocks and BLOOM the call succeeds as well, a hook can be added at that point, and it is
# never called: the logits of a patched run are those of the clean one. An edge into
# such an MLP is then measured as exactly 0.
#
# Why a guess misses: the switch returns without a word, and the hook is accepted, so that silence is
# taken for support; and 0 is a result that one may well expect of an edge.
#
# Who meets it: whoever patches paths or edges through TransformerBridge on one of these networks.
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
    "phi": t.PhiConfig(**SIZES),
    "cohere": t.CohereConfig(**SIZES, pad_token_id=None),
    "falcon": t.FalconConfig(vocab_size=20, hidden_size=32, num_hidden_layers=2, bias=True,
                             num_attention_heads=4, parallel_attn=True, alibi=False,
                             new_decoder_architecture=False, bos_token_id=0, eos_token_id=0),
    "bloom": t.BloomConfig(vocab_size=20, hidden_size=32, n_layer=2, n_head=4, bos_token_id=0,
                           eos_token_id=0),
}
effect = {}
with torch.no_grad():
    for name, config in CONFIGS.items():
        _, bridge = bridge_of(config)
        bridge.set_use_hook_mlp_in(True)
        calls = []

        def erase(value, hook):
            """Put zeros where the MLP of the first block reads."""
            calls.append(1)
            return torch.zeros_like(value)

        edited = bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_mlp_in", erase)])
        effect[name] = len(calls), float((edited - bridge(tokens)).abs().max())
print(f"transformers {version('transformers')}, transformer-lens {version('transformer-lens')}; calls "
      "of the hook, and by how much the logits change:",
      ", ".join(f"{k} {n} and {x:.2g}" for k, (n, x) in effect.items()))
alive = all(effect[k][0] and effect[k][1] > 1e-4 for k in ("gpt2", "llama"))
sys.exit(0 if alive and all(effect[k] == (0, 0.0) for k in ("phi", "cohere", "falcon", "bloom")) else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformer-lens==4.3.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/try.py" "$work/net" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
