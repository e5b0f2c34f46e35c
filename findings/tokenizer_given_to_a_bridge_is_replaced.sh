#!/usr/bin/env bash
# transformer-lens 4.3 and transformers 5.23: the tokenizer that a bridge is given is replaced by another.
#
# What happens: TransformerBridge.boot_transformers takes tokenizer=. It does not keep what it is given: unless
# add_bos_token is set, it reads the folder that the tokenizer came from once more, with AutoTokenizer. For a
# Qwen-2 that is the class of the architecture, whatever class tokenizer_config.json names: it keeps
# vocabulary and merges of tokenizer.json and puts its own normalizer and splitting in the place of those
# that stand there. A tokenizer that lowercases no longer does, and to_tokens gives other tokens than the
# object that was handed over; the first and the last token stay what they were named. Beside a Llama the same
# files and the same call give the right tokens. No error, no warning.
#
# Why a guess misses: an object that is handed over is taken to be used; save_pretrained wrote the folder,
# and reading it with the tokenizer's own class gives the same tokens again.
#
# Who meets it: whoever trained a Qwen-shaped network with a tokenizer of their own, and hands that to a bridge
# so that nothing else is used.
#
# Exits with 0 while this is so, and with 1 once these versions behave otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/read.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from transformer_lens.model_bridge import TransformerBridge

TEXT = "The CAT sat"
words = Tokenizer(models.BPE())
words.normalizer = normalizers.Lowercase()
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
words.train_from_iterator(
    ["the cat sat on the mat", "a dog sat"] * 20,
    trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], show_progress=False,
                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
SIZES = dict(vocab_size=words.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, intermediate_size=48, max_position_embeddings=32, bos_token_id=0,
             eos_token_id=0)


def read(kind):
    """Return the text's pieces by the tokenizer handed over and by the bridge, and nats between them."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES), attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
    folder = f"{sys.argv[1]}/{kind}"
    network.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>").save_pretrained(folder)
    given = PreTrainedTokenizerFast.from_pretrained(folder)
    own = given(TEXT, return_tensors="pt")["input_ids"]
    assert own[0].tolist() == words.encode(TEXT).ids
    bridge = TransformerBridge.boot_transformers(folder, hf_model=network, tokenizer=given, device="cpu")
    made = bridge.to_tokens(TEXT, prepend_bos=False)
    with torch.no_grad():
        ends = [network(ids).logits[0, -1].log_softmax(-1) for ids in (own, made)]
    return *(given.convert_ids_to_tokens(x[0].tolist()) for x in (own, made)), float((ends[0] - ends[1]).abs().max())


found = {kind: read(kind) for kind in ("llama", "qwen2")}
print(f"transformers {version('transformers')}, transformer-lens {version('transformer-lens')};",
      "; ".join(f"{kind}: {' '.join(own)} becomes {' '.join(made)}, next token {gap:.2g} nats away"
                for kind, (own, made, gap) in found.items()))
(own, kept, _), (same, made, gap) = found["llama"], found["qwen2"]
sys.exit(0 if own == kept == same != made and gap > 0.1 else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformer-lens==4.3.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/read.py" "$work" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
