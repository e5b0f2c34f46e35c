#!/usr/bin/env bash
# transformer-lens 4.3 and transformers 5.23: a GPT-2 whose MLP is as wide as its stream is another
# network once its weights are folded.
#
# What happens: TransformerBridge loads such a GPT-2 right: its log-probabilities are those of
# transformers to rounding. After enable_compatibility_mode(), which folds norms into other weights and
# is documented to leave predictions alone, they are off. No error, no warning. With an MLP of any
# other width they are right.
#
# Why a guess misses: folding is a standard step that loses nothing, and GPT-2 is the model that it is
# tested on most. Which axis of the MLP's first matrix is the stream's is read from its shape, and the
# layout of nn.Linear (out, in) is asked for first. A GPT-2 stores it as (in, out). If both have one
# length, the scale of the norm lands on the wrong axis.
#
# Who meets it: whoever makes a small GPT-2 for an experiment with n_inner=n_embd, and reads weights.
#
# Exits with 0 while this is so, and with 1 once a bridge of these versions behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/fold.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from transformer_lens.model_bridge import TransformerBridge

tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])


def reader():
    """Make a tokenizer of numbers, which a bridge wants to have."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0")


def gaps(inner):
    """Return nats from transformers, as loaded and folded, of a GPT-2 with an MLP of this width."""
    folder = f"{sys.argv[1]}-{inner}"
    config = GPT2Config(vocab_size=20, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                        n_inner=inner, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    network = GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + ("ln_" in name and "weight" in name))
        expected = network(tokens).logits.log_softmax(-1)
    network.save_pretrained(folder)
    found = []
    for fold in (False, True):
        copy = GPT2LMHeadModel.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager")
        bridge = TransformerBridge.boot_transformers(
            folder, hf_model=copy.eval(), tokenizer=reader(), device="cpu")
        if fold:
            bridge.enable_compatibility_mode(disable_warnings=True)
        with torch.no_grad():
            found.append(float((bridge(tokens).log_softmax(-1) - expected).abs().max()))
    return found


(loaded, folded), others = gaps(32), gaps(48)
print(f"transformers {version('transformers')}, transformer-lens {version('transformer-lens')}, "
      f"largest difference of log-probabilities from transformers alone: n_inner = n_embd, as loaded "
      f"{loaded:.2g}, folded {folded:.2g} nats; n_inner = 1.5 n_embd, {max(others):.2g} nats")
sys.exit(0 if max(loaded, *others) < 1e-3 < 0.01 < folded else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformer-lens==4.3.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/fold.py" "$work/net" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
