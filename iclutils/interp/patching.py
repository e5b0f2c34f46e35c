"""The engine: a batch of changes, computed from where they matter.

A change to what one part of layer l reads leaves everything before it as it was. So one clean
pass is kept, the changed part alone is redone (of a head: one slice of one projection, one
attention), and all changes of a batch go through the later layers together. Positions after the
last scored one are left out; the last layer's queries, its MLP and the unembedding run at scored
positions only, and where few are scored its keys and values are never formed:
softmax((W_K q) . x) needs the inputs x alone.

The engine knows one attention: softmax(q k / sqrt(d_head)) v with positions added to the
embedding, one part after the other, as in GPT-2. ``Clean.plain`` says whether that is what the
model does; what is not plain goes by hooks (``wires``).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import clean_corrupt, patching
    >>> net = models.load("induction-0")
    >>> task = clean_corrupt.repeating(net, 2, 5, torch.Generator().manual_seed(0))
    >>> clean = patching.Clean(net, task)
    >>> start = clean.resid_pre[0][None]
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ..errors import IclError
from ..models import TransformerBridge, cached
from .clean_corrupt import Behaviour
from .edges import write_name, written
from .graph import CHANNELS, Graph, Node, of

ROWS = 4096  # rows of d_model (patch x batch x pos) held at once; more leave the cache
FEW = 8  # scored entries up to which the last layer's keys and values are not formed
LOGITS = 2**25  # logits held at once: 128 MB
CLOSE = 1e-4  # how well the engine must reproduce the model


class Clean:
    """What one clean and one corrupt pass leave behind, up to the last scored position.

    Attributes:
        behaviour: without what follows the last scored position.
        graph: the model's.
        score: of the clean pass, in nats, (batch,).
        plain: whether the engine reproduces the model; if not, only ``change`` may be used.
        resid_pre, resid_mid, mlp_out: for each layer, (batch, pos, d_model).
        resid_post: of the last layer.
        q, k, v, z: for each layer, (batch, pos, head, d_head).
    """

    def __init__(self, model: TransformerBridge, behaviour: Behaviour) -> None:
        reach = int(behaviour.at.max()) + 1
        clean, corrupt = behaviour.clean[:, :reach], behaviour.corrupt[:, :reach]
        self.behaviour = replace(behaviour, clean=clean, corrupt=corrupt)
        self.graph: Graph = of(model)
        self.model = model
        ends = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_mlp_out")
        heads = tuple(f"attn.hook_{part}" for part in ("q", "k", "v", "z"))
        wanted = {write_name(w) for w in self.graph.writers}
        logits, self._clean = cached(model, clean, lambda name: name.endswith(ends + heads))
        _, self._corrupt = cached(model, corrupt, wanted)
        self._rows = torch.arange(len(clean), device=clean.device)[:, None]
        self.score = behaviour.score(logits[self._rows, behaviour.at])
        place = torch.arange(reach, device=clean.device)
        self.seen = place <= behaviour.at[..., None]  # (batch, entry, pos)
        self.causal = place <= place[:, None]
        if self._clean["blocks.0.attn.hook_k"].shape != self._clean["blocks.0.attn.hook_q"].shape:
            raise IclError(
                "Query heads of this model share keys and values, so they have no wires of their "
                "own: use a model with as many key heads as query heads."
            )
        self.plain = self._fits() and self._reproduces()

    @property
    def last(self) -> int:
        """The last layer."""
        return self.graph.layers - 1

    def pick(self, value: Float[Tensor, "*lead pos width"]) -> Float[Tensor, "*lead entry width"]:
        """The scored positions alone."""
        return value[..., self._rows, self.behaviour.at, :]

    def asked(
        self, layer: int, value: Float[Tensor, "*lead pos width"]
    ) -> Float[Tensor, "*lead asked width"]:
        """Those positions of a layer's output that are read: in the last layer the scored ones."""
        return self.pick(value) if layer == self.last else value

    def change(self, writer: Node) -> Float[Tensor, "batch pos d_model"]:
        """What a writer writes on the corrupt sequences minus what it writes on the clean ones."""
        corrupt = written(self.model, self._corrupt, writer)
        return corrupt - written(self.model, self._clean, writer)

    def _fits(self) -> bool:
        if self.graph.parallel or self.model.cfg.positional_embedding_type != "standard":
            return False
        layers = range(self.graph.layers)
        names = {"resid_pre": "", "resid_mid": "", "mlp_out": "", "q": "attn.", "k": "attn."}
        for part, where in (names | {"v": "attn.", "z": "attn."}).items():
            held = [f"blocks.{layer}.{where}hook_{part}" for layer in layers]
            if any(name not in self._clean for name in held):
                return False
            setattr(self, part, [self._clean[name] for name in held])
        self.resid_post = self._clean[f"blocks.{self.last}.hook_resid_post"]
        return True

    def _reproduces(self) -> bool:
        after = [*self.resid_pre[1:], self.resid_post]
        pairs = [(readout(self, self.pick(self.resid_post)[None])[0], self.score)]
        for layer in range(self.graph.layers):
            middle = self.asked(layer, self.resid_mid[layer])[None]
            start = self.asked(layer, self.resid_pre[layer])
            pairs.append((start + attention(self, layer, self.resid_pre[layer][None]), middle))
            pairs.append((middle + mlp(self, layer, middle), self.asked(layer, after[layer])[None]))
        return all(torch.allclose(ours, theirs, CLOSE, CLOSE) for ours, theirs in pairs)

    resid_pre: list[Tensor]
    resid_mid: list[Tensor]
    mlp_out: list[Tensor]
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    z: list[Tensor]


def attention(
    clean: Clean, layer: int, resid: Float[Tensor, "patch batch pos d_model"]
) -> Float[Tensor, "patch batch asked d_model"]:
    """What all heads of a layer write, biases included, where it is asked for.

    Example:
        >>> written = patching.attention(clean, 0, start)
        >>> torch.allclose(start + written, clean.resid_mid[0][None], atol=1e-3)
        True
    """
    attn, heads = clean.model.blocks[layer].attn, clean.graph.heads
    normal = _through(clean.model.blocks[layer].ln1, resid)

    def project(name: str, value: Tensor) -> Tensor:
        flat = _through(getattr(attn, name), value).flatten(0, 1)
        return flat.unflatten(-1, (heads, -1)).transpose(1, 2)  # rows, head, pos, d_head

    q = project("q", clean.asked(layer, normal))
    if layer < clean.last:
        k, v = project("k", normal), project("v", normal)
        z = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        seen = clean.seen.expand(len(resid), -1, -1, -1).flatten(0, 1)[:, None]
        if q.shape[2] > FEW:
            z = functional.scaled_dot_product_attention(
                q, project("k", normal), project("v", normal), seen
            )
        else:  # a key's bias moves all scores alike
            flat = normal.flatten(0, 1)[:, None]
            wanted = q @ attn.W_K.transpose(-1, -2) / q.shape[-1] ** 0.5  # rows, head, entry, d
            scores = (wanted.flatten(1, 2) @ flat[:, 0].transpose(-1, -2)).view(
                *q.shape[:3], flat.shape[2]
            )
            pattern = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            gathered = (pattern.flatten(1, 2) @ flat[:, 0]).view_as(wanted)
            z = gathered @ attn.W_V + attn.b_V[:, None]
    return attn.o(z.transpose(1, 2).flatten(2)).unflatten(0, resid.shape[:2])


def head_change(
    clean: Clean, layer: int, head: int, channels: str, shift: Float[Tensor, "patch batch pos d"]
) -> Float[Tensor, "patch batch asked d"]:
    """What one head writes minus what it wrote, when some of its three inputs are shifted.

    Args:
        clean: the clean pass.
        layer, head: which head.
        channels: which of ``q``, ``k`` and ``v`` read the shifted residual stream.
        shift: what is added to it, before the LayerNorm.
    """
    attn = clean.model.blocks[layer].attn
    normal = _through(clean.model.blocks[layer].ln1, clean.resid_pre[layer] + shift)
    inputs = {}
    for channel in CHANNELS:
        wanted = (lambda value: clean.asked(layer, value)) if channel == "q" else (lambda v: v)
        if channel in channels:
            weight = getattr(attn, f"W_{channel.upper()}")[head]
            bias = getattr(attn, f"b_{channel.upper()}")[head]
            inputs[channel] = wanted(normal) @ weight + bias
        else:
            held = wanted(getattr(clean, channel)[layer][:, :, head])
            inputs[channel] = held.expand(len(shift), -1, -1, -1)
    mask = clean.seen if layer == clean.last else clean.causal
    z = functional.scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], mask)
    return (z - clean.asked(layer, clean.z[layer][:, :, head])) @ attn.W_O[head]


def mlp(
    clean: Clean, layer: int, middle: Float[Tensor, "patch batch asked d_model"]
) -> Float[Tensor, "patch batch asked d_model"]:
    """What the MLP of a layer writes.

    Example:
        >>> written = patching.mlp(clean, 0, clean.resid_mid[0][None])
        >>> torch.allclose(written[0], clean.mlp_out[0], atol=1e-3)
        True
    """
    block = clean.model.blocks[layer]
    return _through(block.mlp, _through(block.ln2, middle))


def resume(
    clean: Clean, layer: int, resid: Float[Tensor, "patch batch asked d_model"]
) -> Float[Tensor, "patch batch"]:
    """Go on from the input of ``layer`` to the score, in nats.

    ``resid`` holds all positions; after the last layer, the scored ones.
    """
    for block in range(layer, clean.graph.layers):
        middle = clean.asked(block, resid) + attention(clean, block, resid)
        resid = middle + mlp(clean, block, middle)
    return readout(clean, resid)


def readout(
    clean: Clean, resid: Float[Tensor, "patch batch entry d_model"]
) -> Float[Tensor, "patch batch"]:
    """The score, in nats, from the last residual stream at scored positions.

    With ``choices``, only their columns of the unembedding are multiplied.

    Example:
        >>> last = clean.pick(clean.resid_post)[None]
        >>> torch.allclose(patching.readout(clean, last)[0], clean.score, atol=1e-3)
        True
    """
    behaviour, model = clean.behaviour, clean.model
    normal = _through(model.ln_final, resid)
    if behaviour.choices is not None:
        columns, bias = model.W_U.T, model.b_U
        right = (normal * columns[behaviour.answer]).sum(-1) + bias[behaviour.answer]
        rest = normal @ columns[behaviour.choices].transpose(-1, -2)
        rest = rest + bias[behaviour.choices][:, None]
        return (right - rest.logsumexp(-1)).mean(-1)
    held = max(1, LOGITS // (resid.shape[1] * resid.shape[2] * model.cfg.d_vocab))
    scores = [behaviour.score(_through(model.unembed, part)) for part in normal.split(held)]
    return torch.cat(scores)


def _through(module: nn.Module, value: Float[Tensor, "patch batch any width"]) -> Tensor:
    """A module of the model, which takes one batch axis, on two."""
    return module(value.flatten(0, 1)).unflatten(0, value.shape[:2])
