#!/usr/bin/env bash
# transformers 5.23: a GGUF of a Llama with stretched positions is read as one with plain positions.
#
# What happens: a network that was trained for long texts turns its queries and keys more slowly. A GGUF says so
# in llama.rope.scaling.type and .factor, or, as files of Llama 3.1 and 3.2 do, in the tensor
# rope_freqs.weight. from_pretrained(gguf_file=...) takes all weights and llama.rope.freq_base from the file, and
# neither of the two: the network has plain rotary positions, and its log-probabilities are off by nats from
# those of the network that the file was written from, on a text of 16 tokens. No error, no warning. llama.cpp
# gives the right ones from the same files. A file without stretching is read right by both.
#
# Why a guess misses: the file is complete, every other number of it is followed, the base of the rotary
# positions too, and transformers has all these kinds of stretching. The weights are equal to the last bit, so
# that a comparison of weights, which is how loading is commonly checked, finds nothing.
#
# Who meets it: whoever studies a Llama 3.1, or another network for long texts, from its GGUF.
#
# Exits with 0 while this is so, and with 1 once these versions behave otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/read.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import gguf
import numpy as np
import torch
import xllamacpp
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
tokens = torch.arange(3, 19)[None]
BASE = {"rope_theta": 10000.0}
LINEAR = BASE | {"rope_type": "linear", "factor": 4.0}
LLAMA3 = BASE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16}


def write(network, rope, file):
    """Write a network as a GGUF, with the keys and the order of rows that llama.cpp's converter gives it."""
    out, config = gguf.GGUFWriter(file, "llama"), network.config
    for key, value in {"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
                       "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 8,
                       "vocab_size": 32}.items():
        out.add_uint32(f"llama.{key}", value)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** (-torch.arange(0, 8, 2) / 8)
        out.add_tensor("rope_freqs.weight", (plain / network.model.rotary_emb.inv_freq).numpy())
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([f"<{i}>" for i in range(32)])
    out.add_token_types([1] * 32)
    out.add_token_merges(["< 1"])
    out.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in network.state_dict().items():
        rows = weight.numpy()
        if "q_proj" in name or "k_proj" in name:
            rows = np.ascontiguousarray(rows.reshape(-1, 2, 4, 32).swapaxes(1, 2)).reshape(rows.shape)
        out.add_tensor(names.get_name(name, (".weight",)), rows)
    for step in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        step()


def gaps(rope):
    """Return nats between a network and its GGUF, as transformers and as llama.cpp read the file."""
    torch.manual_seed(0)
    network = LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, rope_parameters=rope)).eval()
    for weight in network.parameters():
        noise = 0.3 * torch.randn_like(weight)
        weight.data.copy_(weight + noise if weight.ndim == 1 else noise)
    write(network, rope, f"{sys.argv[1]}/tiny.gguf")
    again = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file="tiny.gguf").eval()
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in network.state_dict().items())
    right, theirs = (each(tokens).logits[0, -1].log_softmax(-1) for each in (network, again))
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = f"{sys.argv[1]}/tiny.gguf", 64, False
    said = xllamacpp.Server(params).handle_completions({
        "prompt": tokens.tolist(), "max_tokens": 1, "logprobs": 32, "temperature": 0})
    cpp = torch.empty(32)
    for token in said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        cpp[token["id"]] = token["logprob"]
    return [float((read - right).abs().max()) for read in (theirs, cpp)]


with torch.no_grad():
    found = {rope["rope_type"]: gaps(rope) for rope in (BASE | {"rope_type": "default"}, LINEAR, LLAMA3)}
told = ", ".join(f"{kind} {theirs:.1g} and {cpp:.1g}" for kind, (theirs, cpp) in found.items())
used = f"transformers {version('transformers')} and llama.cpp of xllamacpp {version('xllamacpp')}"
print(f"{used}, nats that each is off by: {told}")
right = max(found["default"][0], *(cpp for _, cpp in found.values())) < 0.02
sys.exit(0 if right and min(found["linear"][0], found["llama3"][0]) > 0.1 else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformers==5.23.0" "accelerate==1.15.0" "gguf==0.19.0" \
  "xllamacpp==2026.10.11549"
"$work/env/bin/python" "$work/read.py" "$work" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
