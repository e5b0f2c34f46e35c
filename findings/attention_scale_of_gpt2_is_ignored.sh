#!/usr/bin/env bash
# transformer-lens 4.3 and transformers 5.23: a GPT-2 without attention scaling is another network.
#
# What happens: GPT-2's config has two switches for the scale of its attention scores.
# scale_attn_weights=false leaves out the division by the root of the head's width;
# scale_attn_by_inverse_layer_idx=true divides by the layer's number as well. TransformerBridge follows
# the second and ignores the first: it always divides. It is given the very network that transformers
# runs, raises nothing, and its log-probabilities are off by nats.
#
# Why a guess misses: the bridge wraps the network of transformers, so that one expects its forward
# pass; that the neighbouring switch is followed makes it less likely that anybody looks.
#
# Who meets it: whoever trained a small GPT-2 with scale_attn_weights=false, a documented option that
# experiments with attention vary, and studies it through TransformerBridge.
#
# Exits with 0 while this is so, and with 1 once a bridge of these versions behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/scale.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from transformer_lens.model_bridge import TransformerBridge


def reader():
    """Make a tokenizer of numbers, which a bridge wants to have."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0")


tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])


def gap(**options):
    """Build a random GPT-2 with these options; return nats between the bridge and transformers."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_positions=16, n_embd=32, n_layer=2, n_head=4,
                        bos_token_id=0, eos_token_id=0, **options)
    network = GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            is_norm = "ln_" in name and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.3 + is_norm)
        network.save_pretrained(sys.argv[1])
        expected = network(tokens).logits.log_softmax(-1)
        bridge = TransformerBridge.boot_transformers(
            sys.argv[1], hf_model=network, tokenizer=reader(), device="cpu")
        return float((bridge(tokens).log_softmax(-1) - expected).abs().max())


plain, by_layer = gap(), gap(scale_attn_by_inverse_layer_idx=True)
unscaled = gap(scale_attn_weights=False)
print(f"transformers {version('transformers')}, transformer-lens {version('transformer-lens')}, "
      f"largest difference of log-probabilities: GPT-2 {plain:.2g}, scaled by layer {by_layer:.2g}, "
      f"unscaled {unscaled:.2g} nats")
sys.exit(0 if max(plain, by_layer) < 1e-3 < 0.1 < unscaled else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformer-lens==4.3.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/scale.py" "$work/net" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
