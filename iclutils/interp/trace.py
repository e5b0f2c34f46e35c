"""One pass of a model, watched: what passes its points, and from which points it is computed.

Gradients are not computed, but torch notes on the way which tensor is made of which. Every point
cuts these notes off, so that they name the points that come directly before the next one.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..models import TransformerBridge

# What measures change in a block, and what they read of it besides.
CHANGED = (*(f"attn.hook_{part}" for part in "qkvz"), "mlp.hook_in", "hook_mlp_out")
READ = ("attn.hook_in", "hook_in", "hook_attn_out", "hook_out")
ATTENTION = ("attn.hook_attn_scores", "attn.hook_pattern")
END = "ln_final.hook_in"  # what the logits read
NORMAL = "unembed.hook_in"  # what the final norm gives
LOGITS = "logits"


@dataclass(frozen=True)
class Trace:
    """What one pass over a few tokens showed, by the name of the point."""

    tokens: Int[Tensor, "1 pos"]
    logits: Float[Tensor, "1 pos vocab"]
    seen: Mapping[str, Tensor]  # without the points that nothing passed
    sources: Mapping[str, set[str]]  # the points that come directly before; of LOGITS, too
    twice: list[str]  # points that something passed more than once
    tuples: bool  # a block hands on a tuple, or a list (GPT-1), with the stream in it

    def behind(self, name: str, start: str = "") -> set[str]:
        """Return the points at which a change reaches this one, none before ``start``."""
        todo, met = [name], set[str]()
        while todo:
            new = self.sources.get(todo.pop(), set()) - met
            met |= new
            todo += new - {start}
        return met


def trace(model: TransformerBridge) -> Trace:
    """Run a model on eight tokens and note what passes."""
    few = torch.arange(1, min(8, model.cfg.n_ctx) + 1, device=model.cfg.device)[None]
    tokens = few * 7919 % model.cfg.d_vocab
    parts, layers = (*CHANGED, *READ, *ATTENTION), range(model.cfg.n_layers)
    names = [f"blocks.{layer}.{part}" for layer in layers for part in parts] + [END, NORMAL]
    begins, seen = dict[object, str](), dict[str, Tensor]()
    sources, twice, handed = dict[str, set[str]](), list[str](), list[object]()

    def before(value: Tensor) -> set[str]:
        """Return the points that a tensor is made of, from torch's notes."""
        todo, met, points = [value.grad_fn], set[object](), set[str]()
        while todo:
            node = todo.pop()
            if node in begins:
                points.add(begins[node])
            elif node is not None and node not in met:
                met.add(node)
                todo += [each for each, _ in node.next_functions]
        return points

    def cut(name: str, value: Tensor, hook: object) -> Tensor:
        if name in seen:
            twice.append(name)
        sources[name] = sources.get(name, set()) | before(value)
        seen[name] = value.detach()
        new = seen[name].clone().requires_grad_().clone()  # may be changed in place
        begins[new.grad_fn] = name
        return new

    points = model.hook_dict  # made anew each time
    hooks: list[Any] = [(x, partial(cut, x)) for x in names if x in points]
    handle = model.blocks[0].register_forward_hook(lambda block, args, out: handed.append(out))
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of attention that can be seen, but not changed
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
    finally:
        handle.remove()
    sources[LOGITS], tuples = before(logits), isinstance(handed[0], (tuple, list))
    return Trace(tokens, logits.detach(), seen, sources, twice, tuples)
