#!/usr/bin/env bash
# transformer-lens 4.3 and transformers 5.23: to load a network that reads images runs pip.
#
# What happens: TransformerBridge.boot_transformers looks for the image processor beside a network such as
# Gemma-3. If it cannot be read, for want of torchvision or because the folder has none, and torchvision
# is not installed, the call runs "uv pip install torchvision", or pip where there is no uv, and
# says nothing. A torchvision of another release brings the torch that it was built for, so that the
# environment has another torch afterwards. With a Gemma-3 that reads text alone nothing is installed.
#
# Why a guess misses: to load a network from a folder on disk is taken for reading; the network is handed
# in, and runs without any processor.
#
# Who meets it: whoever studies the text half of a multimodal network in an environment with pinned
# versions, on a machine where others compute with the same environment, or offline.
#
# A uv of two lines stands first on the path here; it writes down what it is asked, and installs nothing.
# Exits with 0 while this is so, and with 1 once a bridge of these versions behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"
printf '#!/bin/sh\necho "$@" >> "%s/asked"; exit 1\n' "$work" > "$work/bin/uv"
chmod +x "$work/bin/uv"
cat > "$work/try.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration,
                          Gemma3TextConfig, PreTrainedTokenizerFast)

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from transformer_lens.model_bridge import TransformerBridge

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
WORDS = SIZES | {"vocab_size": 20, "num_key_value_heads": 2, "head_dim": 8}
IMAGES = SIZES | {"image_size": 32, "patch_size": 16}
asked = Path(sys.argv[1]) / "asked"
words = Tokenizer(models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()


def installs(network):
    """Save and load a network; return what the installer was asked for."""
    asked.write_text("")
    folder = f"{sys.argv[1]}/{type(network).__name__}"
    network.save_pretrained(folder)
    reader = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0")
    TransformerBridge.boot_transformers(folder, hf_model=network.eval(), tokenizer=reader, device="cpu")
    return asked.read_text().strip()


text = installs(Gemma3ForCausalLM(Gemma3TextConfig(**WORDS)))
both = installs(Gemma3ForConditionalGeneration(
    Gemma3Config(text_config=WORDS, vision_config=IMAGES, mm_tokens_per_image=4, image_token_index=19)))
print(f"transformers {version('transformers')}, transformer-lens {version('transformer-lens')}; "
      f"installs for text alone: {text!r}, for text and images: {both!r}")
sys.exit(0 if text == "" and both.startswith("pip install torchvision") else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformer-lens==4.3.0" "transformers==5.23.0"
PATH="$work/bin:$PATH" "$work/env/bin/python" "$work/try.py" "$work" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
