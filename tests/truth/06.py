"""Chapter 06: the circuit of copying; nodes and edges patched, and slopes."""

import torch
from alone import (
    BLOCKS,
    LAYERS,
    MODEL,
    SIZE,
    UNEMBED,
    copies,
    instead,
    mean_z,
    run,
    write,
    write_of,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

LENGTH, FIRST, SECOND, THIRD = 8, (16, 0), (18, 6), (17, 3)
clean, other = copies(2, LENGTH, 4), copies(2, LENGTH, 5)
corrupt = torch.cat([clean[:, :1], other[:, 1 : LENGTH + 1], clean[:, LENGTH + 1 :]], 1)
at, rows = torch.arange(LENGTH + 1, 2 * LENGTH), torch.arange(2)[:, None]
choices = clean[:, LENGTH + 1 :]
size = clean.shape[1]
layer, head = SECOND


def score(logits):
    """Mean log p of the right token among those of the second copy."""
    found = logits[rows[..., None], at[None, :, None], choices[:, None]].log_softmax(-1)
    return found[:, torch.arange(LENGTH - 1), torch.arange(1, LENGTH)].mean(1)


def read_out(final):
    return score(MODEL.lm_head(MODEL.model.norm(final)))


logits, seen = run(clean)
before, off = run(corrupt)
whole = score(logits)


def change(place):
    return write_of(off, *place) - write_of(seen, *place)


def keys(stream):
    """The induction head's keys, turned."""
    group = slice(head // 3 * SIZE, head // 3 * SIZE + SIZE)
    weight = BLOCKS[layer].self_attn.k_proj.weight[group]
    states = (BLOCKS[layer].input_layernorm(stream) @ weight.T)[:, None]
    turns = MODEL.model.rotary_emb(states, torch.arange(size)[None])
    return apply_rotary_pos_emb(states, states, *turns)[1][:, 0]


def k_path(part):
    """The induction head's keys read some of the corrupt write of the earlier head."""

    def edit(k):
        k = k.clone()
        k[:, head] = keys(seen["resid", layer - 1] + part * change(FIRST))
        return k

    return {("k", layer): edit}


def mlp_path(part):
    middle = seen["resid", 4] + seen["attn", 5] + part * (off["mlp", 2] - seen["mlp", 2])
    block = BLOCKS[5]
    return {("mlp", 5): lambda x: block.mlp.forward(block.post_attention_layernorm(middle))}


one = torch.ones(())
without_k, live = run(clean, k_path(one))
final = seen["resid", LAYERS - 1]
paths = {
    "16.0 to the keys of 18.6": score(without_k),
    "MLP 2 to MLP 5": score(run(clean, mlp_path(one))[0]),
    "18.6 to the logits": read_out(final + change(SECOND)),
    "MLP 29 to the logits": read_out(final + off["mlp", 29] - seen["mlp", 29]),
}
both = read_out(live["resid", LAYERS - 1] + write_of(off, *SECOND) - write_of(live, *SECOND))


def slope(way):
    part = torch.zeros(2, 1, 1, requires_grad=True)
    return -torch.autograd.grad(score(run(clean, way(part))[0]).sum(), part)[0][:, 0, 0]


def alone(*heads):
    return whole - score(run(clean, instead(heads, lambda la, h: off["z", la][:, h]))[0])


normed = UNEMBED * MODEL.model.norm.weight
answer = normed[clean[:, LENGTH + 2 :]] - normed[choices].mean(1, keepdim=True)
scale = (final.square().mean(-1, keepdim=True) + MODEL.config.rms_norm_eps).sqrt()[:, at]
direct = ((write_of(seen, *SECOND)[:, at] / scale * answer).sum(-1)).mean(1)

source = at - LENGTH + 1

given = {"clean": clean, "corrupt": corrupt, "at": at.expand(2, -1)}
given |= {"answer": clean[:, LENGTH + 2 :], "source": source.expand(2, -1), "choices": choices}
values = {
    "score": whole,
    "score of the corrupt side": score(before),
    "lost without 18.6": alone(SECOND),
    "interaction of 18.6 and 17.3": alone(SECOND, THIRD) - alone(SECOND) - alone(THIRD),
    "score without 18.6 and 17.3, mean": score(
        run(clean, instead((SECOND, THIRD), mean_z(seen)))[0]
    ),
    **{f"lost, {name}": whole - value for name, value in paths.items()},
    "slope, 16.0 to the keys of 18.6": slope(k_path),
    "slope, MLP 2 to MLP 5": slope(mlp_path),
    "circuit without two edges": both,
    "faithfulness": ((both - score(before)).mean() / (whole - score(before)).mean()).item(),
    "direct logit of 18.6": direct,
}
write(__file__, given, values)
