#!/usr/bin/env bash
# transformers 5.24 and transformer-lens 4.3: a cache of keys and values that stays empty.
#
# What happens: TransformerBridge reads two tokens with use_cache=True, no error and no warning is
# raised, and the cache that it returns holds no token. A third token that is read "with" this cache
# is then read as if nothing stood before it. With transformers 5.23 the same three lines are right.
#
# Why a guess misses: both versions satisfy what transformer-lens 4.3.0 asks for, so pip installs the
# newer one; logits without a cache are right in both, so the usual check of a bridge (its logits
# against those of transformers) passes.
#
# Who meets it: whoever generates text or re-uses a prompt's cache through TransformerBridge in an
# environment that was installed after transformers 5.24 came out.
#
# Exits with 0 while this is so, and with 1 once a pair of these versions behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/read.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
from transformers import GPT2Config, GPT2LMHeadModel

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from transformer_lens.model_bridge import TransformerBridge

torch.manual_seed(0)
config = GPT2Config(vocab_size=20, n_positions=16, n_embd=32, n_layer=2, n_head=4,
                    bos_token_id=0, eos_token_id=0)
network = GPT2LMHeadModel(config).eval()
with torch.no_grad():
    for weight in network.parameters():
        weight.copy_(torch.randn_like(weight) * 0.3)
folder = sys.argv[1]
network.save_pretrained(folder)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
bridge = TransformerBridge.boot_transformers(
    folder, hf_model=network,
    tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0"))
tokens = torch.tensor([[1, 2, 3]])
with torch.no_grad():
    whole = bridge(tokens)[0, -1]
    _, cache = bridge(tokens[:, :2], use_cache=True, return_type="logits_and_cache")
    held = cache.get_seq_length()
    again = bridge(tokens[:, 2:], past_key_values=cache)[0, -1]
gap = float((whole - again).abs().max())
print(f"transformers {version('transformers')}, transformer-lens {version('transformer-lens')}: "
      f"the cache holds {held} of 2 tokens; the third token's logits differ by {gap:.3g}")
print(held, "right" if gap < 1e-3 else "wrong", file=open(sys.argv[2], "w"))
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformer-lens==4.3.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/read.py" "$work/net" "$work/old" 2> "$work/err" || { cat "$work/err"; exit 1; }
"$work/env/bin/pip" install --quiet "transformers==5.24.0"
"$work/env/bin/python" "$work/read.py" "$work/net" "$work/new" 2> "$work/err" || { cat "$work/err"; exit 1; }
[ "$(cat "$work/old")" = "2 right" ] && [ "$(cat "$work/new")" = "0 wrong" ] && echo "still so"
