"""Attention as a stand-in for influence: rolled out, weighted by what it carries, or cut.

Three ways to ask attention where a prediction comes from. ``rollout`` multiplies the patterns of
all layers (Abnar and Zuidema 2020), ``norm_weighted`` gives each edge the size of what it writes
(Kobayashi et al. 2020), ``knockout`` forbids edges and measures what is lost (Geva et al. 2023).
Only the last one intervenes.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import attention_flow
    >>> from iclutils.interp import clean_corrupt
    >>> net = models.load("induction-0")
    >>> task = clean_corrupt.copying(net, 2, 5, torch.Generator().manual_seed(0))
    >>> patterns = attention_flow.mean_patterns(net, task.clean)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from scipy.stats import rankdata
from torch import Tensor

from ...errors import IclError
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.hooks import Hook, check_layer, cut_attention
from ...models import TransformerBridge, cached, get_act_name
from ...progress import bar

ROWS = 16384  # rows of d_model held at once (sequences x destinations x sources)


def mean_patterns(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch layer dest src"]:
    """Attention of every layer, averaged over its heads.

    Example:
        >>> patterns.sum(-1).round(decimals=3).unique()
        tensor([1.])
    """
    names = [get_act_name("pattern", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    return torch.stack([cache[name].mean(1) for name in names], 1)


def rollout(
    patterns: Float[Tensor, "batch layer dest src"],
) -> Float[Tensor, "batch dest src"]:
    """Attention rolled out: the product over layers of half attention, half residual stream.

    Rows sum to 1, as those of the patterns do. (Abnar and Zuidema 2020, section 3.)

    Example:
        >>> attention_flow.rollout(patterns).sum(-1).round(decimals=3).unique()
        tensor([1.])
    """
    size = patterns.shape[-1]
    out = torch.eye(size, device=patterns.device, dtype=patterns.dtype)
    for layer in range(patterns.shape[1]):
        out = 0.5 * (patterns[:, layer] @ out + out)
    return out.expand(len(patterns), size, size)


def carried(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], layer: int
) -> Iterator[Float[Tensor, "some head dest src d_model"]]:
    """What every edge of every head of a layer writes, ``A[dest, src] v[src] W_O``.

    A few sequences at a time. Over heads and sources these sum to what the layer's attention
    writes, but for its bias after W_O.

    Example:
        >>> rows = torch.cat(list(attention_flow.carried(net, task.clean, layer=0)))
        >>> rows.shape[:2]
        torch.Size([2, 4])
    """
    pattern, moved = _pattern_and_writes(model, tokens, layer)
    size, heads = tokens.shape[1], model.cfg.n_heads
    for part in range(0, len(tokens), step := max(1, ROWS // (heads * size * size))):
        rows = slice(part, part + step)
        yield pattern[rows, ..., None] * moved[rows, :, None]


def norm_weighted(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch layer dest src"]:
    """Norm of what all heads of a layer together carry along each edge.

    (Kobayashi et al. 2020, section 3.)

    Example:
        >>> bool((attention_flow.norm_weighted(net, task.clean) >= 0).all())
        True
    """
    layers = [
        torch.cat([part.sum(1).norm(dim=-1) for part in carried(model, tokens, layer)])
        for layer in bar(range(model.cfg.n_layers), "layers")
    ]
    return torch.stack(layers, 1)


def head_norms(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch layer head dest src"]:
    """Norm of what each head carries along each edge: attention times the size of the value."""
    layers = []
    for layer in range(model.cfg.n_layers):
        pattern, moved = _pattern_and_writes(model, tokens, layer)
        layers.append(pattern * moved.norm(dim=-1)[:, :, None])
    return torch.stack(layers, 1)


def knockout(
    model: TransformerBridge,
    behaviour: CleanCorrupt,
    dest: Int[Tensor, "batch edge"],
    src: Int[Tensor, "batch_src edge_src"],
    layers: Iterable[int] | None = None,
) -> list[Hook]:
    """Hooks that forbid ``dest`` to attend to ``src``, in every head of some layers.

    The scores become -10,000 before the softmax, so that the rest of the row takes over what the
    cut edge had. Run them with ``clean_corrupt.scored_logits``. (Geva et al. 2023, section 4.)

    Args:
        model: the model.
        behaviour: whose clean sequences will be run.
        dest, src: positions of the edges of each sequence, pair by pair.
        layers: where to cut; a window of layers or all of them (None).

    Example:
        >>> hooks = attention_flow.knockout(net, task, task.at, task.source)
        >>> [name for name, _ in hooks]
        ['blocks.0.attn.hook_attn_scores', 'blocks.1.attn.hook_attn_scores']
    """
    cut = cut_edges(behaviour.clean, dest, src)
    return cut_attention(
        model, dict.fromkeys(range(model.cfg.n_layers) if layers is None else layers, cut)
    )


def cut_edges(
    tokens: Int[Tensor, "batch pos"],
    dest: Int[Tensor, "dests edge"],
    src: Int[Tensor, "sources edge_src"],
) -> Bool[Tensor, "batch dest src"]:
    """True at the edges from ``src`` to ``dest``."""
    count, size = tokens.shape
    if dest.shape != src.shape or len(dest) != count:
        raise IclError("Give one source for each destination, and one row for each sequence.")
    if not bool(((src >= 0) & (src <= dest) & (dest < size)).all()):
        raise IclError(
            "An edge runs from a position to itself or to a later one, inside the sequence: "
            "0 <= src <= dest."
        )
    cut = torch.zeros(count, size, size, dtype=torch.bool, device=tokens.device)
    cut[torch.arange(count, device=tokens.device)[:, None], dest, src] = True
    if bool((cut.sum(-1) > torch.arange(size, device=cut.device)).any()):
        raise IclError("A position must keep something to attend to: leave it at least itself.")
    return cut


def at_entries(
    values: Float[Tensor, "batch dest src"], at: Int[Tensor, "batch entry"]
) -> Float[Tensor, "batch entry src"]:
    """The rows of the scored positions.

    Example:
        >>> attention_flow.at_entries(patterns[:, 0], task.at).shape[:2] == task.at.shape
        True
    """
    return values[torch.arange(len(values), device=values.device)[:, None], at]


def rank_agreement(
    a: Float[Tensor, "batch entry pos"],
    b: Float[Tensor, "batch entry pos"],
    at: Int[Tensor, "batch entry"],
) -> Float[Tensor, "batch"]:
    """Spearman's rank correlation over the positions before each entry, mean over entries.

    NaN where either is the same at all positions (or there are fewer than two) in every entry.

    Example:
        >>> rows = attention_flow.at_entries(patterns[:, 0], task.at)
        >>> attention_flow.rank_agreement(rows, 2 * rows, task.at).round(decimals=3)
        tensor([1., 1.])
    """
    rows = []
    for x, y, places in zip(a.double().cpu(), b.double().cpu(), at.tolist(), strict=True):
        each = [_spearman(x[e, :t], y[e, :t]) for e, t in enumerate(places)]
        rows.append(torch.stack(each).nanmean())
    return torch.stack(rows).to(a)


def _spearman(x: Tensor, y: Tensor) -> Tensor:
    if len(x) < 2:
        return x.new_tensor(torch.nan)
    ranks = torch.stack([torch.as_tensor(rankdata(v.numpy())).to(x) for v in (x, y)])
    u, v = ranks - ranks.mean(1, keepdim=True)
    return (u * v).sum() / (u.norm() * v.norm())


def _pattern_and_writes(
    model: TransformerBridge, tokens: Tensor, layer: int
) -> tuple[Float[Tensor, "batch head dest src"], Float[Tensor, "batch head src d_model"]]:
    """Attention of a layer, and what its heads would write of each source alone, ``v W_O``."""
    value = f"blocks.{check_layer(model, layer)}.attn.hook_v"
    _, cache = cached(model, tokens, [get_act_name("pattern", layer), value])
    pattern, v = cache[get_act_name("pattern", layer)], cache[value].transpose(1, 2)
    v = v.repeat_interleave(pattern.shape[1] // v.shape[1], 1)  # fewer key heads than queries
    return pattern, v @ model.W_O[layer].detach()
