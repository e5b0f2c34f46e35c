#!/usr/bin/env bash
# transformers 5.23: Mamba-2 and five that are built like it limit their time steps until they have a state.
#
# What happens: the config says between which bounds a head's time step lies, time_step_limit in Mamba-2, Bamba,
# Falcon-H1 and Granite-4, time_step_min as the lower bound of Zamba-2 and Nemotron-H. Each network reads fourteen
# tokens in one run, eight and then six together, and eight and then six one by one. The first two agree. One by one
# the bounds are left out, and the log-probabilities are off by nats: the function for several tokens is told of the
# limit, the one that takes a single token from a state to the next is not. So generate() writes other texts with
# a cache than with use_cache=False. Without bounds all three agree. Zamba-2 and Nemotron-H have a lower bound by
# default, 0.001, and are off by thousandths of a nat then; what Nemotron-H calls time_step_limit does nothing. No
# error, no warning.
#
# Why a guess misses: a recurrence is its step, and a run over many tokens a quick way to take it often. A limit is
# saved in the config as any part of the architecture, and transformers 4.57 keeps to it both ways in its own code
# of Mamba-2 and Zamba-2. With Mamba-2's default, which is no limit, a test of the cache passes.
#
# Who meets it: whoever trains or loads such a network with a limit, and compares what it writes with what it would
# say of that text, as one does when log-probabilities of generated answers are measured or trained on.
#
# Exits with 0 while this is so, and with 1 once this version behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/read.py" << 'PY'
import logging, sys, warnings
from importlib.metadata import version

import torch
from transformers import AutoConfig, AutoModelForCausalLM

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
tokens = torch.arange(1, 15)[None]
BEGUN = 8
SIZES = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 48, "bos_token_id": 0, "eos_token_id": None,
         "pad_token_id": 0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
BOTH, LOWER = {"time_step_limit": [0.0, 0.1]}, {"time_step_min": 0.5, "time_step_max": 4.0}
NONE, LEAST = {"time_step_limit": [0.0, float("inf")]}, {"time_step_min": 1e-9}
KINDS = {
    "mamba2": ({"num_heads": 8, "head_dim": 8, "n_groups": 1}, BOTH, NONE),
    "bamba": (MAMBA | {"attn_layer_indices": [1]}, BOTH, NONE),
    "falcon_h1": (MAMBA | {"mamba_d_ssm": 64}, BOTH, NONE),
    "granitemoehybrid": (MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 2,
                                  "num_experts_per_tok": 1}, BOTH, NONE),
    "zamba2": ({"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_d_state": 8,
                "adapter_rank": 4}, LOWER, LEAST),
    "nemotron_h": ({"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8,
                    "ssm_state_size": 8, "n_groups": 1, "head_dim": 8}, LOWER, LEAST),
}  # fmt: skip


def build(kind, limit):
    """Build a small random network under a limit."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind][0], **limit})).eval()
    for weight in network.parameters():
        noise = 0.3 * torch.randn_like(weight)
        weight.data.copy_(weight + noise if weight.ndim == 1 else noise)
    return network


def read(network, *sizes):
    """Return log-probabilities at the last tokens, read in parts of these sizes."""
    out, parts = None, []
    for places in torch.arange(tokens.shape[1]).split(list(sizes)):
        name = "cache_params" if out is None or "cache_params" in out else "past_key_values"
        cache = {} if out is None else {name: out[name]}
        out = network(tokens[:, places], use_cache=True, position_ids=places[None], **cache)
        parts.append(out.logits.log_softmax(-1))
    return torch.cat(parts, 1)[:, BEGUN:]


def look(kind):
    """Return nats one by one and together under a limit, without one and by default; are texts equal?"""
    gaps = []
    for limit in (*KINDS[kind][1:], {}):
        network = build(kind, limit)
        whole = read(network, 14)
        gaps += [float((read(network, *sizes) - whole).abs().max()) for sizes in ([8] + [1] * 6, [8, 6])]
    network = build(kind, KINDS[kind][1])
    texts = [network.generate(tokens[:, :BEGUN], max_new_tokens=24, do_sample=False, use_cache=use)
             for use in (True, False)]
    return [gaps[0], max(gaps[1::2]), gaps[2], gaps[4]], torch.equal(*texts)


with torch.no_grad():
    found = {kind: look(kind) for kind in KINDS}
    unheard = [read(build("nemotron_h", limit), 14) for limit in (BOTH, NONE)]
told = "; ".join(f"{kind} " + ", ".join(f"{gap:.1g}" for gap in gaps) for kind, (gaps, _) in found.items())
print(f"transformers {version('transformers')}, nats one by one and together, one by one without limits and by "
      f"default: {told}")
other = [kind for kind, (_, equal) in found.items() if not equal]
print(f"other texts with a cache: {', '.join(other)}; Nemotron-H hears of time_step_limit: "
      f"{not torch.equal(*unheard)}")
by_default = [gaps.pop() for gaps, _ in found.values()]
right = max(max(gaps[1:]) for gaps, _ in found.values()) < 1e-3
right = right and max(by_default[:4]) < 1e-3 and min(by_default[4:]) > 1e-3
right = right and len(other) == len(KINDS) and torch.equal(*unheard)
sys.exit(0 if right and min(gaps[0] for gaps, _ in found.values()) > 0.1 else 1)
PY
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==2.13.0" "transformers==5.23.0"
"$work/env/bin/python" "$work/read.py" 2> "$work/err" || { cat "$work/err"; exit 1; }
echo "still so"
