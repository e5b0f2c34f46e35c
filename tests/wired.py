"""Hand-set weights with a known circuit: previous-token heads, induction heads, idle heads."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, CONTEXT = 24, 41  # tokens, positions
SIZE, SHARP = 48, 6.0  # width of a head, and how sharp its scores are at this width
TOKEN, PLACE = slice(VOCAB), slice(VOCAB, VOCAB + CONTEXT)  # slots of the residual stream
BEFORE, WIDTH = slice(PLACE.stop, PLACE.stop + VOCAB), 2 * SIZE  # all one-hot


def save_wired(folder, previous=((0, 0),), induction=((1, 0),), layers=2, heads=2):
    """Write a GPT-2 in which the named heads, and nothing else, write to the residual stream.

    A previous-token head asks by position for t - 1 and copies that token into the slot BEFORE;
    an induction head asks there for the current token and copies the token it finds. Several
    heads of one role share the work evenly: together they write what one would.
    """
    size = max(SIZE, WIDTH // heads)  # width of a head
    width, sharp = size * heads, SHARP * (size / SIZE) ** 0.5
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_inner": 4}
    sizes |= {"vocab_size": VOCAB, "n_positions": CONTEXT}
    network = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=VOCAB - 1, eos_token_id=VOCAB - 1))
    eye, here = torch.eye(VOCAB), torch.eye(CONTEXT)
    back = here.roll(-1, 1)  # position t asks for t - 1
    back[0] = 0
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "ln_" not in name:
                parameter.zero_()
        network.transformer.wte.weight[:, TOKEN] = eye
        network.transformer.wpe.weight[:, PLACE] = here
        for role, chosen in (("previous", previous), ("induction", induction)):
            for layer, head in chosen:
                attn = network.transformer.h[layer].attn
                q, k, v = (
                    attn.c_attn.weight[:, part * width + head * size :][:, :size]
                    for part in range(3)
                )
                out = attn.c_proj.weight[head * size : (head + 1) * size]
                if role == "previous":
                    q[PLACE, :CONTEXT] = sharp * back
                    k[PLACE, :CONTEXT] = here
                    out[:VOCAB, BEFORE] = 0.3 / len(chosen) * eye
                else:
                    q[TOKEN, :VOCAB] = sharp * eye
                    k[BEFORE, :VOCAB] = eye
                    out[:VOCAB, TOKEN] = 3 / len(chosen) * eye
                v[TOKEN, :VOCAB] = eye
    network.save_pretrained(folder)
