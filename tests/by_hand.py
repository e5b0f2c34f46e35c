"""A Llama or Qwen in float64, head by head from its Hugging Face weights: the truth of the tests.

Heads stay grouped: each query head takes the rows of its group's key and value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from iclutils.interp.graph import Node


@dataclass
class Pass:
    """What one forward pass leaves behind."""

    writes: dict[Node, Tensor]  # (batch, pos, d_model)
    patterns: dict[tuple[int, int], Tensor]  # (batch, dest, src)
    logits: Tensor


class ByHand:
    """``run(tokens, shift)``: a forward pass; ``shift`` is added to what a reader reads."""

    def __init__(self, network):
        self.network, self.config = network, network.config
        self.heads = network.config.num_attention_heads
        self.group = self.heads // network.config.num_key_value_heads

    def matrix(self, layer, head, name):
        """Matrix and bias of a head's query, key or value (its group's), for row vectors."""
        projection = getattr(self.network.model.layers[layer].self_attn, f"{name}_proj")
        width = self.config.head_dim
        at = head if name == "q" else head // self.group
        rows = slice(at * width, (at + 1) * width)
        bias = torch.zeros(width) if projection.bias is None else projection.bias[rows]
        return projection.weight[rows].double().T, bias.double()

    def out(self, layer, head):
        width = self.config.head_dim
        weight = self.network.model.layers[layer].self_attn.o_proj.weight.double()
        return weight[:, head * width : (head + 1) * width].T

    def norm(self, module, value):
        scale = (value.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return value * scale * module.weight.double()

    def turn(self, states, places):
        """Pairs of channels, as complex numbers, turned by the position."""
        half = states.shape[-1] // 2
        theta = self.config.rope_parameters["rope_theta"]
        angle = places[:, None] * theta ** (-torch.arange(half).double() / half)
        turned = torch.complex(states[..., :half], states[..., half:]) * torch.exp(1j * angle)
        return torch.cat([turned.real, turned.imag], -1)

    def state(self, layer, head, name, normal):
        """A head's queries, keys or values of normed inputs (..., pos, d_model), positions 0.."""
        weight, bias = self.matrix(layer, head, name)
        value = normal @ weight + bias
        if name == "v":
            return value
        own = getattr(self.network.model.layers[layer].self_attn, f"{name}_norm", None)
        value = value if own is None else self.norm(own, value)
        return self.turn(value, torch.arange(value.shape[-2]).double())

    def run(self, tokens, shift=None):
        added, model = shift or {}, self.network.model
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        stream = model.embed_tokens.weight.double()[tokens]
        found = Pass({Node("embed"): stream}, {}, stream)
        for at, block in enumerate(model.layers):
            heads = []
            for h in range(self.heads):
                read = (stream + added.get(Node(c, at, h), 0) for c in "qkv")
                normal = (self.norm(block.input_layernorm, each) for each in read)
                q, k, v = (self.state(at, h, *each) for each in zip("qkv", normal, strict=True))
                scores = q @ k.mT / self.config.head_dim**0.5
                pattern = scores.masked_fill(later, -torch.inf).softmax(-1)
                heads.append(pattern @ v @ self.out(at, h))
                found.writes[Node("head", at, h)] = heads[-1]
                found.patterns[at, h] = pattern
            stream = stream + sum(heads)
            seen = stream + added.get(Node("mlp_in", at), 0)
            normal, mlp = self.norm(block.post_attention_layernorm, seen), block.mlp
            up = normal @ mlp.up_proj.weight.double().T
            gate = functional.silu(normal @ mlp.gate_proj.weight.double().T)
            found.writes[Node("mlp", at)] = (gate * up) @ mlp.down_proj.weight.double().T
            stream = stream + found.writes[Node("mlp", at)]
        end = self.norm(model.norm, stream + added.get(Node("logits"), 0))
        found.logits = end @ self.network.lm_head.weight.double().T
        return found

    def score(self, task, shift=None):
        rows = torch.arange(len(task))[:, None]
        return task.score(self.run(task.clean, shift).logits[rows, task.at])

    def lost(self, task, edge):
        """Nats lost when one edge alone carries what its writer writes on the corrupt side."""
        writer, reader = edge
        clean, corrupt = (self.run(tokens).writes[writer] for tokens in (task.clean, task.corrupt))
        return self.score(task) - self.score(task, {reader: corrupt - clean})
