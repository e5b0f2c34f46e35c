"""Sweeps: thousands of interventions for the price of a few forward passes.

A patch at layer l and position p changes the residual stream only at p, and after that only at
later positions of later layers. So a sweep keeps one clean pass and, for a whole layer of
patches at once, recomputes exactly the (patch, position) rows that can differ: earlier
positions lend their clean keys and values, earlier layers are skipped, the last layer and the
unembedding run on scored positions only. Results equal the loop of hooked forward passes to
rounding error (``benchmarks/`` asserts it and states the ratio).

The engine knows one attention: softmax(q k / sqrt(d_head)) v with positions added to the
embedding, as in GPT-2. It checks itself against the model on the clean prompt and falls back to
hooked forward passes where they disagree (rotary positions, grouped heads, ...).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import sweeps
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> net = models.load("induction-0")
    >>> task = repeated_tokens(net, 1, 10, torch.Generator().manual_seed(0))
    >>> entries = torch.arange(11, 20)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ..errors import IclError
from ..models import TransformerBridge, cached
from ..progress import bar
from .hooks import mlp_name, run, z_name

READOUT_ROWS = 512  # rows of logits held at once: 512 x 50,257 floats are 100 MB


@dataclass(frozen=True)
class Rows:
    """The (patch, position) pairs that a layer of patches can change."""

    patch: Int[Tensor, "rows"]
    position: Int[Tensor, "rows"]
    count: int

    def keep(self, mask: Bool[Tensor, "rows"]) -> Rows:
        """Only the rows under ``mask``."""
        return Rows(self.patch[mask], self.position[mask], self.count)


def mlp_position_sweep(
    model: TransformerBridge,
    tokens: Int[Tensor, "one pos"],
    positions: Int[Tensor, "position"],
    sources: Int[Tensor, "position"],
    scored: Int[Tensor, "entry"],
) -> Float[Tensor, "layer position entry"]:
    """Swap MLP outputs between positions, at every layer: change of log p, in nats.

    For every layer, and every position alone, the MLP's output there is replaced by its clean
    output at the source position of the same sequence. The seed note's patch has positions
    L .. 2L-1 of a doubled sequence and the sources L before them.

    Args:
        model: the model.
        tokens: one sequence.
        positions: where to patch.
        sources: where each patch is taken from, one per position.
        scored: prediction entries to read (entry i is about token i + 1), increasing.

    Returns:
        Change of log p for each layer, position and entry; negative where the patch hurts.

    Example:
        >>> positions = torch.arange(10, 20)
        >>> same = sweeps.mlp_position_sweep(net, task.tokens, positions, positions, entries)
        >>> same.abs().max() < 1e-5
        tensor(True)
    """
    _check(tokens, scored)
    if len(positions) != len(sources) or not bool(_inside(torch.cat([positions, sources]), tokens)):
        raise IclError("Need one source per position, and both inside the sequence.")
    clean = _Clean(model, tokens, scored)
    if not clean.plain:
        return _slow_mlp_sweep(model, tokens, positions, sources, scored)
    reach = torch.arange(int(scored[-1]) + 1, device=tokens.device)
    patch, position = torch.nonzero(reach[None] >= positions[:, None], as_tuple=True)
    rows = Rows(patch, position, len(positions))
    layers = []
    for layer in bar(range(model.cfg.n_layers), "layers"):
        moved = clean.mlp_out[layer][sources] - clean.mlp_out[layer][positions]
        resid = clean.resid_post[layer][position].clone()
        struck = position == positions[patch]
        resid[struck] += moved[patch[struck]]
        layers.append(_resume(model, clean, layer + 1, rows, resid, struck) - clean.log_prob)
    return torch.stack(layers)


def head_sweep(
    model: TransformerBridge,
    tokens: Int[Tensor, "one pos"],
    scored: Int[Tensor, "entry"],
    mean: Float[Tensor, "layer head d_head"] | None = None,
) -> Float[Tensor, "layer head entry"]:
    """Ablate every head of the model, one at a time: change of log p at ``scored``, in nats.

    Args:
        model: the model.
        tokens: one sequence.
        scored: prediction entries to read (entry i is about token i + 1), increasing.
        mean: what the heads write instead (before ``W_O``); zero if omitted.

    Example:
        >>> change = sweeps.head_sweep(net, task.tokens, entries)
        >>> change.shape
        torch.Size([2, 4, 9])
    """
    _check(tokens, scored)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    fill = torch.zeros(n_layers, n_heads, model.cfg.d_head, device=tokens.device)
    fill = fill if mean is None else mean
    clean = _Clean(model, tokens, scored)
    if not clean.plain:
        return _slow_head_sweep(model, tokens, scored, fill)
    width = int(scored[-1]) + 1
    patch = torch.arange(n_heads, device=tokens.device).repeat_interleave(width)
    position = torch.arange(width, device=tokens.device).repeat(n_heads)
    rows = Rows(patch, position, n_heads)
    layers = []
    for layer in bar(range(n_layers), "layers"):
        change = fill[layer][:, None] - clean.z[layer][:width].transpose(0, 1)
        write = einsum(change, model.W_O[layer], "head pos d, head d model -> head pos model")
        write = rearrange(write, "head pos model -> (head pos) model")
        here, middle = rows, clean.resid_mid[layer][position] + write
        if layer == n_layers - 1:
            mask = torch.isin(position, scored)
            here, middle = rows.keep(mask), middle[mask]
        resid = middle + _mlp(model, layer, middle)
        everywhere = torch.ones_like(here.patch, dtype=torch.bool)
        after = _resume(model, clean, layer + 1, here, resid, everywhere)
        layers.append(after - clean.log_prob)
    return torch.stack(layers)


def _inside(index: Tensor, tokens: Tensor) -> Tensor:
    return ((index >= 0) & (index < tokens.shape[1])).all()


def _check(tokens: Tensor, scored: Tensor) -> None:
    if tokens.shape[0] != 1 or not bool(_inside(scored + 1, tokens)):
        raise IclError("Need one sequence, and entries that predict one of its tokens.")


class _Clean:
    """What one clean forward pass leaves behind, and whether the engine can reproduce it."""

    def __init__(
        self, model: TransformerBridge, tokens: Int[Tensor, "one pos"], scored: Int[Tensor, "entry"]
    ) -> None:
        parts = ("hook_resid_mid", "hook_resid_post", "hook_mlp_out", "hook_resid_pre")
        heads = ("attn.hook_z", "attn.hook_q", "attn.hook_k", "attn.hook_v")
        logits, cache = cached(model, tokens, lambda name: name.endswith(parts + heads))
        layers = range(model.cfg.n_layers)
        self.scored = scored
        self.target = tokens[0, scored + 1]
        self.log_prob = logits[0, scored].log_softmax(-1).gather(-1, self.target[:, None])[:, 0]
        self.resid_mid, self.resid_post, self.mlp_out, self.resid_pre = (
            [cache[f"blocks.{layer}.{name}"][0] for layer in layers] for name in parts
        )
        self.z, self.q, self.k, self.v = (
            [cache[f"blocks.{layer}.{name}"][0] for layer in layers] for name in heads
        )
        self.plain = self._reproduces(model, int(tokens.shape[1]))

    def _reproduces(self, model: TransformerBridge, size: int) -> bool:
        if self.k[0].shape != self.q[0].shape or model.cfg.parallel_attn_mlp:
            return False
        if model.cfg.positional_embedding_type != "standard":
            return False
        lower = torch.ones(size, size, dtype=torch.bool, device=self.scored.device).tril()
        for layer in range(model.cfg.n_layers):
            q, k, v = (t[layer].transpose(0, 1)[None] for t in (self.q, self.k, self.v))
            z = functional.scaled_dot_product_attention(q, k, v, lower)[0].transpose(0, 1)
            middle = self.resid_pre[layer] + _attention_out(model, layer, z)
            ours = middle + _mlp(model, layer, middle)
            if not torch.allclose(ours, self.resid_post[layer], rtol=1e-4, atol=1e-4):
                return False
        return True


def _resume(
    model: TransformerBridge,
    clean: _Clean,
    layer: int,
    rows: Rows,
    resid: Float[Tensor, "rows d_model"],
    dirty: Bool[Tensor, "rows"],
) -> Float[Tensor, "patch entry"]:
    """Go on from the input of ``layer`` and return log p at the scored entries.

    ``dirty`` marks the rows that already differ from the clean pass; with the first attention
    they spread to all rows. Rows that stay clean are not read out.
    """
    final = model.cfg.n_layers - 1
    for block in range(layer, model.cfg.n_layers):
        k, v = _patched_keys_values(model, clean, block, rows, resid, dirty)
        asked = rows
        if block == final:
            mask = torch.isin(rows.position, clean.scored)
            asked, resid, dirty = rows.keep(mask), resid[mask], dirty[mask]
        q = clean.q[block][asked.position].clone()
        q[dirty] = _project(model, block, "q", resid[dirty])
        middle = resid + _attention_out(model, block, _attend(asked, q, k, v))
        resid = middle + _mlp(model, block, middle)
        rows, dirty = asked, torch.ones_like(asked.patch, dtype=torch.bool)
    read = dirty & torch.isin(rows.position, clean.scored)
    rows, resid = rows.keep(read), resid[read]
    entry = torch.searchsorted(clean.scored, rows.position)
    out = clean.log_prob.expand(rows.count, -1).clone()
    for part in torch.arange(len(entry), device=resid.device).split(READOUT_ROWS):
        scores = model.unembed(model.ln_final(resid[part][None]))[0]
        hit = scores.gather(-1, clean.target[entry[part], None])[:, 0]
        out[rows.patch[part], entry[part]] = hit - scores.logsumexp(-1)
    return out


def _patched_keys_values(
    model: TransformerBridge,
    clean: _Clean,
    layer: int,
    rows: Rows,
    resid: Float[Tensor, "rows d_model"],
    dirty: Bool[Tensor, "rows"],
) -> tuple[Tensor, Tensor]:
    """Keys and values of every patch: (patch, pos, head, d_head), clean where nothing changed."""
    width = int(rows.position.max()) + 1
    both = []
    for name, source in (("k", clean.k), ("v", clean.v)):
        full = source[layer][:width].expand(rows.count, -1, -1, -1).clone()
        full[rows.patch[dirty], rows.position[dirty]] = _project(model, layer, name, resid[dirty])
        both.append(full)
    return both[0], both[1]


def _attend(
    rows: Rows, q: Float[Tensor, "rows head d_head"], k: Tensor, v: Tensor
) -> Float[Tensor, "rows head d_head"]:
    """Causal attention of ragged query rows over their patch's keys and values."""
    first, last = int(rows.position.min()), int(rows.position.max())
    window = q.new_zeros(rows.count, last + 1 - first, *q.shape[1:])
    window[rows.patch, rows.position - first] = q
    query = torch.arange(first, last + 1, device=q.device)
    lower = torch.arange(k.shape[1], device=q.device)[None] <= query[:, None]
    z = functional.scaled_dot_product_attention(
        window.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), lower
    )
    return z.transpose(1, 2)[rows.patch, rows.position - first]


def _project(
    model: TransformerBridge, layer: int, name: str, resid: Float[Tensor, "rows d_model"]
) -> Float[Tensor, "rows head d_head"]:
    normal = model.blocks[layer].ln1(resid[None])
    flat = getattr(model.blocks[layer].attn, name)(normal)
    return rearrange(flat[0], "rows (head d) -> rows head d", head=model.cfg.n_heads)


def _attention_out(
    model: TransformerBridge, layer: int, z: Float[Tensor, "rows head d_head"]
) -> Float[Tensor, "rows d_model"]:
    return model.blocks[layer].attn.o(rearrange(z, "rows head d -> 1 rows (head d)"))[0]


def _mlp(
    model: TransformerBridge, layer: int, middle: Float[Tensor, "rows d_model"]
) -> Float[Tensor, "rows d_model"]:
    block = model.blocks[layer]
    return block.mlp(block.ln2(middle[None]))[0]


def _log_prob(model: TransformerBridge, tokens: Tensor, scored: Tensor, hooks: list) -> Tensor:
    out, _ = run(model, tokens, hooks)
    return out[0, scored].log_softmax(-1).gather(-1, tokens[0, scored + 1, None])[:, 0]


def _slow_mlp_sweep(
    model: TransformerBridge, tokens: Tensor, positions: Tensor, sources: Tensor, scored: Tensor
) -> Tensor:
    """The straightforward loop: one hooked forward pass per layer and position."""
    names = [mlp_name(layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    clean = _log_prob(model, tokens, scored, [])
    out = torch.zeros(len(names), len(positions), len(scored), device=tokens.device)
    for layer, name in enumerate(bar(names, "layers")):
        for i, (p, source) in enumerate(zip(positions, sources, strict=True)):

            def patch(
                value: Tensor,
                hook: object,
                p: Tensor = p,
                source: Tensor = source,
                name: str = name,
            ) -> Tensor:
                value = value.clone()
                value[:, p] = cache[name][:, source]
                return value

            out[layer, i] = _log_prob(model, tokens, scored, [(name, patch)]) - clean
    return out


def _slow_head_sweep(
    model: TransformerBridge, tokens: Tensor, scored: Tensor, fill: Tensor
) -> Tensor:
    """The straightforward loop: one hooked forward pass per head."""
    clean = _log_prob(model, tokens, scored, [])
    out = torch.zeros(*fill.shape[:2], len(scored), device=tokens.device)
    for layer in bar(range(model.cfg.n_layers), "layers"):
        for head in range(model.cfg.n_heads):

            def drop(z: Tensor, hook: object, layer: int = layer, head: int = head) -> Tensor:
                z = z.clone()
                z[:, :, head] = fill[layer, head]
                return z

            after = _log_prob(model, tokens, scored, [(z_name(layer), drop)])
            out[layer, head] = after - clean
    return out
