#!/usr/bin/env bash
# transformers 5.23: with LongRoPE a text's log-probabilities depend on the length of its neighbours in a batch.
#
# What happens: a network with LongRoPE (Phi-3 of 128k tokens) has two sets of rotary frequencies, one for texts
# up to the original length of training, and one for longer ones. Which set a forward pass uses is decided once,
# by the largest position in the batch. A text of 8 tokens that stands beside one of 20, padded and masked as the
# documentation asks, is read with the frequencies of the long one: its log-probabilities are off by nats from
# those that it has alone. Nothing is raised. With plain rotary positions the same batch is right to rounding.
#
# Why a guess misses: that a padded batch gives what its texts give alone, up to rounding, is what masks are for,
# and it is so for other networks. Who knows of the two sets expects each text to be read by its own length.
#
# Who meets it: whoever scores documents of mixed lengths in batches with such a network. A result then changes
# with the batch size and with the order of the documents.
#
# Exits with 0 while this is so, and with 1 once this version behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/batch.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
from transformers import Phi3Config, Phi3ForCausalLM

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
ORIGINAL, SHORT = 16, 8  # tokens: of the texts in training; of the text that is looked at
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
             "long_factor": [2.0, 2.5, 3.0, 4.0], "original_max_position_embeddings": ORIGINAL}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
texts = torch.randint(1, 20, (2, 20), generator=torch.Generator().manual_seed(0))


def gap(rope, beside):
    """Return nats between what the short text gives alone and beside a text of some length."""
    torch.manual_seed(0)
    network = Phi3ForCausalLM(Phi3Config(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=48, max_position_embeddings=64, original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope, pad_token_id=0, bos_token_id=1, eos_token_id=1)).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
        alone = network(texts[:1, :SHORT]).logits.log_softmax(-1)
        batch, mask = texts[:, :beside].clone(), torch.ones(2, beside, dtype=torch.long)
        batch[0, SHORT:], mask[0, SHORT:] = 0, 0
        together = network(batch, attention_mask=mask).logits[:1, :SHORT].log_softmax(-1)
    return float((together - alone).abs().max())


plain, within, beyond = gap(PLAIN, 20), gap(LONG_ROPE, ORIGINAL), gap(LONG_ROPE, 20)
print(f"transformers {version('transformers')}, a text of {SHORT} tokens alone and in a batch, largest difference "
      f"of its log-probabilities: plain rotary positions beside 20 tokens {plain:.2g} nats; LongRoPE beside "
      f"{ORIGINAL} tokens {within:.2g}, beside 20 tokens {beyond:.2g}")
sys.exit(0 if max(plain, within) < 1e-4 < 0.1 < beyond else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/batch.py" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
