#!/usr/bin/env bash
# transformers 5.23: the shorter texts of a batch, padded on the left, are continued wrongly by MiniMax.
#
# What happens: two texts of twelve and of eight tokens are a batch, the shorter one padded on the left, as
# generation wants it. Llama, Jamba, Falcon-H1 and Qwen-3.5 continue the shorter text as they do when it is alone.
# MiniMax does so without a cache; with one, the default, it writes other tokens, and what it says after the
# first token that it reads on the cache is off by nats. The longer text is right. If the first layer has full
# attention, all is right. No error, no warning.
#
# The cause: the masks of all layers are made for the length of the cache in its first layer. In the published
# MiniMax, which has a full attention after every seven linear ones, that layer is a linear one; it stores no
# keys, so that the cache says that it holds nothing. The mask is then one column wide, the text's first one, and
# holds for every key. Where that column is padding, full attention hands on zeros (sdpa), or the mean of all
# values, padding with the rest (eager). The default layers of MiniMaxConfig begin with full attention.
#
# Why a guess misses: a mask and positions are handed in and right, a text alone is right, and so is the padded
# one in the run that fills the cache. Whoever looks at the longest text of a batch, or at texts of one length,
# sees nothing.
#
# Who meets it: whoever generates with MiniMax for several prompts at once.
#
# Exits with 0 while this is so, and with 1 once this version behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/write.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
from transformers import AutoConfig, AutoModelForCausalLM

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
short, long = torch.arange(1, 9), torch.arange(3, 15)
batch = torch.stack([long, torch.cat([torch.zeros(4, dtype=torch.long), short])])
mask = torch.ones_like(batch)
mask[1, :4] = 0
SIZES = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 48, "bos_token_id": 0, "eos_token_id": None,
         "pad_token_id": 0}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LINEAR, FULL = "linear_attention", "full_attention"
KINDS = {
    "llama": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1,
              "mamba_d_state": 8, "mamba_dt_rank": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
                  "mamba_n_groups": 1},
    "qwen3_5_text": {"head_dim": 8, "layer_types": [LINEAR, FULL]},
    "minimax, full first": EXPERTS | {"layer_types": [FULL, LINEAR]},
    "minimax": EXPERTS | {"layer_types": [LINEAR, FULL]},
}  # fmt: skip


def look(kind):
    """Return nats of the next token but one for both texts, and if both are continued as they are alone, without
    a cache and with one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.split(",")[0], **{**SIZES, **KINDS[kind]})
    network = AutoModelForCausalLM.from_config(config).eval()
    for weight in network.parameters():
        noise = 0.3 * torch.randn_like(weight)
        weight.data.copy_(weight + noise if weight.ndim == 1 else noise)
    more, places = torch.tensor([[15], [16]]), (mask.cumsum(1) - 1).clamp(min=0)
    cache = network(batch, attention_mask=mask, position_ids=places, use_cache=True).past_key_values
    out = network(more, attention_mask=torch.cat([mask, torch.ones_like(more)], 1), use_cache=True,
                  position_ids=places[:, -1:] + 1, past_key_values=cache)
    gaps, equal = [], {True: [], False: []}
    for i, text in enumerate([long, short]):
        alone = network(torch.cat([text, more[i]])[None], use_cache=False).logits[0, -1].log_softmax(-1)
        gaps.append(float((out.logits[i, -1].log_softmax(-1) - alone).abs().max()))
        for use in equal:
            options = {"max_new_tokens": 12, "do_sample": False, "use_cache": use}
            written = network.generate(batch, attention_mask=mask, **options)[i, -12:]
            equal[use].append(torch.equal(written, network.generate(text[None], **options)[0, -12:]))
    return gaps, equal[False], equal[True]


with torch.no_grad():
    found = {kind: look(kind) for kind in KINDS}
told = "; ".join(f"{kind} {gaps[0]:.1g} and {gaps[1]:.1g}" for kind, (gaps, *_) in found.items())
print(f"transformers {version('transformers')}, nats on a cache, the longer and the shorter text: {told}")
gaps, without, with_cache = found.pop("minimax")
print(f"minimax writes as for a text alone, longer and shorter: {without} without a cache, {with_cache} with one")
right = all(max(gaps) < 1e-3 and all(plain + cached) for gaps, plain, cached in found.values())
right = right and gaps[0] < 1e-3 and all(without) and with_cache[0]
sys.exit(0 if right and gaps[1] > 0.1 and not with_cache[1] else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/write.py" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
