#!/usr/bin/env bash
# transformers 4.57 and 5.23: a new end token is saved, and the old one comes back when it is loaded.
#
# What happens: a tokenizer was saved by transformers 4, which writes special_tokens_map.json beside
# tokenizer_config.json. transformers 5 loads it, is given another eos_token, and saves it to the same folder.
# The new token stands in tokenizer_config.json. The next load gives the old one, without a word: version 5
# writes no special_tokens_map.json, leaves the old file where it is, and prefers it when it loads. Saved to
# an empty folder the new token stays; with transformers 4.57 it stays in the same folder, too.
#
# Why a guess misses: save_pretrained and from_pretrained of one version are each other's inverse, and the
# file that one would look into holds the right token. The same lines are right with the version before, and
# right with a tokenizer that was never saved by it.
#
# Who meets it: whoever adapts an existing checkpoint to a chat format, in place: the end of a turn becomes
# eos_token, and after a reload texts end with, and are cut at, a token that the new training never saw.
#
# Exits with 0 while this is so, and with 1 once these versions behave otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/write.py" << 'PY'
import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, "the", "cat"])}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.add_special_tokens(SPECIAL)
reader = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
for folder in ("four", "five"):
    reader.save_pretrained(f"{sys.argv[1]}/{folder}")
PY
cat > "$work/change.py" << 'PY'
import json, logging, sys
from importlib.metadata import version
from pathlib import Path

from transformers import AutoTokenizer

logging.disable(logging.WARNING)
folder = Path(sys.argv[1])
reader = AutoTokenizer.from_pretrained(folder)
reader.eos_token = "<|im_end|>"
seen = {}
for name, place in (("in place", folder), ("in an empty folder", folder / "new")):
    reader.save_pretrained(place)
    stored = json.loads((place / "tokenizer_config.json").read_text())["eos_token"]
    seen[name] = AutoTokenizer.from_pretrained(place).eos_token
    print(f"transformers {version('transformers')}, saved {name}: tokenizer_config.json says {stored}, "
          f"loaded it is {seen[name]}")
right = {"in place": "<|im_end|>", "in an empty folder": "<|im_end|>"}
expected = right if sys.argv[2] == "right" else right | {"in place": "</s>"}
sys.exit(0 if seen == expected else 1)
PY
try() { "$work/env/bin/python" "$@" 2> "$work/err" || { cat "$work/err"; exit 1; }; }
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "transformers==4.57.1"
try "$work/write.py" "$work"
try "$work/change.py" "$work/four" right
"$work/env/bin/pip" install --quiet "transformers==5.23.0"
try "$work/change.py" "$work/five" wrong
echo "still so"
