"""Chapter 01: heads that look where a token stood before, and what is lost without them."""

import torch
from alone import BLOCKS, MODEL, UNEMBED, copies, instead, mean_z, run, write, write_of
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

LENGTH, FIRST, SECOND = 15, (16, 0), (18, 6)  # a previous-token head, an induction head
SET = [(18, 6), (17, 3), (17, 4), (17, 5)]
tokens, other = copies(2, LENGTH, 1), copies(2, LENGTH, 2)
other = torch.cat([tokens[:, :1], other[:, 1 : LENGTH + 1], tokens[:, LENGTH + 1 :]], 1)
place = torch.arange(LENGTH + 1, 2 * LENGTH + 1)  # the second copy
logits, seen = run(tokens)


def matching(weights):
    """Attention from the second copy to what followed the first."""
    return weights[..., place, place - LENGTH + 1].mean(-1)


def losses(scores):
    log_p = scores[:, :-1].log_softmax(-1)
    return -log_p.gather(-1, tokens[:, 1:, None])[..., 0]


def after(edits):
    return run(tokens, edits)


clean = slice(LENGTH + 1, 2 * LENGTH)
right = logits[:, :-1].argmax(-1) == tokens[:, 1:]
without, missing = after(instead(SET, mean_z(seen)))
_, cut = after(instead([FIRST], mean_z(seen)))
_, elsewhere = run(other)

# what the previous-token head writes on other sequences, read by the induction head's keys alone
layer, head = SECOND
pattern = seen["weights", layer][:, head]
change = write_of(elsewhere, *FIRST) - write_of(seen, *FIRST)
attn = BLOCKS[layer].self_attn
group = slice(head // 3 * 64, head // 3 * 64 + 64)
key = BLOCKS[layer].input_layernorm(seen["resid", layer - 1] + change) @ attn.k_proj.weight[group].T
cos, sin = MODEL.model.rotary_emb(key, torch.arange(tokens.shape[1])[None])
turned = apply_rotary_pos_emb(key[:, None], key[:, None], cos, sin)[1][:, 0]
scores = seen["q", layer][:, head] @ turned.mT / 8
later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
patched = scores.masked_fill(later, -torch.inf).softmax(-1)

# what the head adds to the right token's logit directly, above the mean over the vocabulary
final = seen["resid", 29]
scale = (final.square().mean(-1) + MODEL.config.rms_norm_eps).sqrt()[:, clean]
normed = UNEMBED * MODEL.model.norm.weight
columns = normed[tokens[:, 1:][:, clean]] - normed.mean(0)
direct = ((write_of(seen, layer, head)[:, clean] * columns).sum(-1) / scale).mean(1)

# weights with the norms folded in
value = attn.v_proj.weight[group] * BLOCKS[layer].input_layernorm.weight
out = attn.o_proj.weight[:, head * 64 : head * 64 + 64]
centred = normed - normed.mean(0)
core = (value @ (MODEL.model.embed_tokens.weight.T @ centred) @ out).double()
eigen = torch.linalg.eigvals(core)

given = {"tokens": tokens, "other": other, "length": LENGTH, "heads": [list(h) for h in SET]}
values = {
    "prefix_matching 18.6": matching(pattern),
    "accuracy": right[:, clean].double().mean(1),
    "loss": losses(logits)[:, clean].mean(1),
    "loss without four heads": losses(without)[:, clean].mean(1),
    "matching without 16.0": matching(cut["weights", layer][:, head]),
    "matching without the path from 16.0": matching(patched),
    "direct effect of 18.6": direct,
    "copying score of 18.6": (eigen.sum().real / eigen.abs().sum()).item(),
    "share of the matching lost with the path": (
        (matching(pattern) - matching(patched)) / matching(pattern).mean()
    ),
}
write(__file__, given, values)
