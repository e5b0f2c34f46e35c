#!/usr/bin/env bash
# transformers 5.23: a tokenizer.model beside a Mistral loses the space before a text, beside a Llama not.
#
# What happens: a folder holds a network, the tokenizer.model of sentencepiece that it was trained with, and a
# tokenizer_config.json that names LlamaTokenizer: what save_pretrained of the slow tokenizer wrote in
# transformers 4. If config.json says llama, AutoTokenizer gives the pieces that sentencepiece gives. If it
# says mistral, the named class is put aside, and what is made instead leaves out the space that
# sentencepiece puts before every text: the first word becomes other pieces, and the network, whose weights
# are the same in both folders, predicts otherwise. No error, no warning. transformers 4.57 reads both right.
#
# Why a guess misses: the tokenizer's class is named and exists, its file is complete, and the only
# difference between the folders is the name of an architecture, of which both have one tokenizer. Decoded,
# both give the text back, so that a look at the text does not show it.
#
# Who meets it: whoever measures a fine-tuned Mistral that was saved with its slow tokenizer, or takes a
# checkpoint's tokenizer.model without its tokenizer.json.
#
# Exits with 0 while this is so, and with 1 once these versions behave otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/read.py" << 'PY'
import json, logging, sys, warnings
from importlib.metadata import version
from pathlib import Path

import sentencepiece
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
work = Path(sys.argv[1])
LINES = ["a great film", "a waste of time", "walk and walked", "great films of a great time"]
TEXT = "walked a great film"
(work / "lines.txt").write_text("\n".join(LINES * 20))
sentencepiece.SentencePieceTrainer.train(
    input=str(work / "lines.txt"), model_prefix=str(work / "tokenizer"), model_type="bpe", vocab_size=330,
    byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
    hard_vocab_limit=False, minloglevel=2)  # as Llama's and Mistral's
pieces = sentencepiece.SentencePieceProcessor(str(work / "tokenizer.model"))
SIZES = dict(vocab_size=len(pieces), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, intermediate_size=48, max_position_embeddings=64, sliding_window=None)
NAMED = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
         "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
ids, predicted = {}, {}
for kind in ("llama", "mistral"):
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
    network.save_pretrained(work / kind)
    (work / kind / "tokenizer.model").write_bytes((work / "tokenizer.model").read_bytes())
    (work / kind / "tokenizer_config.json").write_text(json.dumps(NAMED))
    reader = AutoTokenizer.from_pretrained(work / kind)
    ids[kind] = reader(TEXT, add_special_tokens=False)["input_ids"]
    assert reader.decode(ids[kind]) == TEXT
    with torch.no_grad():
        predicted[kind] = network(reader(TEXT, return_tensors="pt")["input_ids"]).logits[0, -1].log_softmax(-1)
expected = pieces.encode(TEXT)
gap = float((predicted["llama"] - predicted["mistral"]).abs().max())
told = {"sentencepiece": expected} | ids
print(f"transformers {version('transformers')}, sentencepiece {version('sentencepiece')};",
      "; ".join(f"{who}: {' '.join(map(pieces.id_to_piece, i))}" for who, i in told.items()),
      f"; log-probabilities of the next token differ by {gap:.2g} nats")
sys.exit(0 if ids["llama"] == expected != ids["mistral"] and gap > 0.1 else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformers==5.23.0" "sentencepiece==0.2.3" "protobuf==7.36.2"
"$work/env/bin/python" "$work/read.py" "$work" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
