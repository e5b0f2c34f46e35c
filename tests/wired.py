"""Hand-set weights with a known circuit: previous-token heads, induction heads, idle heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, CONTEXT, SIZE = 24, 41, 48  # tokens, positions, width of a head
TOKEN, PLACE, BEFORE = 0, VOCAB, VOCAB + CONTEXT  # slots of the residual stream, all one-hot
SLOTS = 96  # at least TOKEN + PLACE + BEFORE
SHARP = 6.0  # of the scores in a head of SIZE


def save_wired(
    folder: Path,
    previous: Sequence[tuple[int, int]] = ((0, 0),),
    induction: Sequence[tuple[int, int]] = ((1, 0),),
    layers: int = 2,
    heads: int = 2,
) -> None:
    """Write a GPT-2 in which the named heads, and nothing else, write to the residual stream.

    A previous-token head asks by position for t - 1 and copies that token into the slot BEFORE;
    an induction head asks there for the current token and copies the token it finds. Several
    heads of one role share the work evenly: together they write what one would.
    """
    size = max(SIZE, SLOTS // heads)  # width of a head
    width, sharp = size * heads, SHARP * (size / SIZE) ** 0.5
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_inner=4,
        bos_token_id=VOCAB - 1,
        eos_token_id=VOCAB - 1,
    )
    network = GPT2LMHeadModel(config)
    eye, here = torch.eye(VOCAB), torch.eye(CONTEXT)
    back = here.roll(-1, 1)  # position t asks for t - 1
    back[0] = 0
    token, place, before = (
        slice(start, start + length)
        for start, length in ((TOKEN, VOCAB), (PLACE, CONTEXT), (BEFORE, VOCAB))
    )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "ln_" not in name:
                parameter.zero_()
        network.transformer.wte.weight[:, token] = eye
        network.transformer.wpe.weight[:, place] = here
        for role, chosen in (("previous", previous), ("induction", induction)):
            for layer, head in chosen:
                attn = network.transformer.h[layer].attn
                q, k, v = (
                    attn.c_attn.weight[:, part * width + head * size :][:, :size]
                    for part in range(3)
                )
                out = attn.c_proj.weight[head * size : (head + 1) * size]
                if role == "previous":
                    q[place, :CONTEXT] = sharp * back
                    k[place, :CONTEXT] = here
                    out[:VOCAB, before] = 0.3 / len(chosen) * eye
                else:
                    q[token, :VOCAB] = sharp * eye
                    k[before, :VOCAB] = eye
                    out[:VOCAB, token] = 3 / len(chosen) * eye
                v[token, :VOCAB] = eye
    network.save_pretrained(folder)
