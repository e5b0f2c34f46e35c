#!/usr/bin/env bash
# transformers 5.23: a unigram tokenizer beside a Llama is read as one of pair merges.
#
# What happens: sentencepiece trains two kinds of tokenizers, pair merges (as Llama's own) and unigram, which
# takes the likeliest split of a word. Llamas with a unigram tokenizer of their own are common for languages
# other than English; their tokenizer_config.json names LlamaTokenizer. AutoTokenizer keeps the pieces, drops
# their probabilities, and merges pairs: words fall into other pieces. From a tokenizer.model merges are
# made up; from a tokenizer.json, which says that it is a unigram, there are none, and every word falls into
# letters. No error, no warning. tokenizers and sentencepiece alone agree on every text.
#
# Why a guess misses: both files say which kind they are, and transformers 4.57 follows them. All pieces
# are in the vocabulary, nothing is unknown, and decoding gives the text back.
#
# Who meets it: whoever reads log-probabilities, attention or perplexity of such a Llama with transformers 5.
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
work = Path(sys.argv[1])
WORDS = "walk walked walking talk talked talking call called calling film films time times".split()
TEXT = "walked talking films"
(work / "lines.txt").write_text("\n".join(f"{a} {b}" for a in WORDS for b in WORDS))
sentencepiece.SentencePieceTrainer.train(
    input=str(work / "lines.txt"), model_prefix=str(work / "tokenizer"), model_type="unigram", vocab_size=40,
    hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2)
pieces = sentencepiece.SentencePieceProcessor(str(work / "tokenizer.model"))
scored = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(len(pieces))]
whole = Tokenizer(models.Unigram(scored, unk_id=0))
whole.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
whole.decoder = decoders.Metaspace(prepend_scheme="first")
expected = pieces.encode(TEXT)
assert whole.encode(TEXT).ids == expected

torch.manual_seed(0)
network = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(pieces), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, intermediate_size=48, max_position_embeddings=64)).eval()
with torch.no_grad():
    for weight in network.parameters():
        weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
NAMED = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
read = {}
for file in ("tokenizer.model", "tokenizer.json"):
    folder = work / file.replace(".", "-")
    network.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMED))
    if file == "tokenizer.json":
        whole.save(str(folder / file))
    else:
        (folder / file).write_bytes((work / file).read_bytes())
    reader = AutoTokenizer.from_pretrained(folder)
    read[file] = reader(TEXT, add_special_tokens=False)["input_ids"]
    assert reader.decode(read[file]) == TEXT


def predicted(ids):
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0, -1].log_softmax(-1)


gaps = [float((predicted(ids) - predicted(expected)).abs().max()) for ids in read.values()]
told = {"sentencepiece and tokenizers": expected} | read
print(f"transformers {version('transformers')}, tokenizers {version('tokenizers')}, sentencepiece "
      f"{version('sentencepiece')};",
      "; ".join(f"{who}: {' '.join(map(pieces.id_to_piece, i))}" for who, i in told.items()),
      "; log-probabilities of the next token differ by", ", ".join(f"{gap:.2g}" for gap in gaps), "nats")
sys.exit(0 if expected not in read.values() and min(gaps) > 0.1 else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformers==5.23.0" "sentencepiece==0.2.3" "protobuf==7.36.2"
"$work/env/bin/python" "$work/read.py" "$work" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
