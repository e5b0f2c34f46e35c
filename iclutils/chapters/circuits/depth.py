"""Depth: what a prediction looks like halfway up, and at which height its work is done.

``lens`` reads every depth of the residual stream through the model's own final LayerNorm and
unembedding (logit lens, nostalgebraist 2020), or through a translator for each depth first (tuned
lens, Belrose et al. 2023). ``gravity`` is the mean layer of causal effects, weighted by their
size: where a behaviour is done, not where it can be read.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import depth
    >>> from iclutils.interp import clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task = clean_corrupt.copying(net, 4, 6, generator)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ...errors import IclError
from ...interp.clean_corrupt import CleanCorrupt, scored_logits
from ...interp.graph import Node
from ...models import TransformerBridge, cached, logit_lens
from ...progress import bar

Translate = Callable[[Tensor, int], Tensor]  # (batch, pos, d_model), depth -> the same shape
Effects = Float[Tensor, "node batch"]


@dataclass(frozen=True)
class Lens:
    """The prediction read at every depth: 0 after the embedding, l after layer l - 1.

    Means over the scored entries, one number per sequence.

    Attributes:
        kl: KL(final prediction || prediction read here), over the whole vocabulary, in nats.
        log_p: score of the right answers, in nats (``behaviour.score``).
        rank: rank of the right answer among the vocabulary or the choices; 1 is the best.
    """

    kl: Float[Tensor, "depth batch"]
    log_p: Float[Tensor, "depth batch"]
    rank: Float[Tensor, "depth batch"]


def depths(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> list[Float[Tensor, "batch pos d_model"]]:
    """The residual stream at every depth, from one pass: before each layer and after the last.

    Example:
        >>> len(depth.depths(net, task.clean)) == net.cfg.n_layers + 1
        True
    """
    _, cache = cached(model, tokens, _names(model))
    return [cache[name] for name in _names(model)]


def lens(
    model: TransformerBridge, behaviour: CleanCorrupt, translate: Translate | None = None
) -> Lens:
    """Read the prediction of the clean sequences at every depth.

    Args:
        model: the model.
        behaviour: what is asked and where.
        translate: what to do with the residual stream of a depth before it is read.

    Example:
        >>> read = depth.lens(net, task)
        >>> bool(read.kl[-1].max() < 1e-4), bool(read.log_p[-1].mean() > read.log_p[0].mean())
        (True, True)
    """
    final = scored_logits(model, behaviour).log_softmax(-1)
    _, cache = cached(model, behaviour.clean, _names(model))
    asked, where = behaviour.at.unique(return_inverse=True)
    rows = torch.arange(len(behaviour), device=behaviour.at.device)[:, None]
    kl, log_p, rank = [], [], []
    for depth in bar(range(model.cfg.n_layers + 1), "depths"):
        try:
            seen = logit_lens(
                cache, layers=[depth], positions=asked.tolist(), lens=translate, chunk_size=256
            ).values[0]
        except (NotImplementedError, ValueError) as error:
            raise IclError(
                "This model's predictions are not read from its last layer by a final LayerNorm "
                "and the unembedding alone, so no depth can be read so."
            ) from error
        logits = seen[rows, where]
        kl.append((final.exp() * (final - logits.log_softmax(-1))).sum(-1).mean(-1))
        log_p.append(behaviour.score(logits))
        rank.append(_rank(behaviour, logits).mean(-1))
    return Lens(torch.stack(kl).clamp_min(0), torch.stack(log_p), torch.stack(rank))


def by_layer(effects: Effects, nodes: Sequence[Node], layers: int) -> Float[Tensor, "layer"]:
    """Size of the effects of each layer: |mean over sequences| of its heads and MLP, summed.

    Args:
        effects: what removing each node alone costs, in nats.
        nodes: heads and MLP layers, in the order of ``effects``.
        layers: how many layers the model has.

    Example:
        >>> nodes = [graph.head(0, 0), graph.head(1, 0), graph.Node("mlp", 1)]
        >>> depth.by_layer(torch.tensor([[1.0, 3.0], [-1.0, -1.0], [0.5, 0.5]]), nodes, layers=2)
        tensor([2.0000, 1.5000])
    """
    if len(nodes) != len(effects):
        raise IclError(f"Got {len(effects)} effects for {len(nodes)} nodes.")
    if any(not 0 <= node.layer < layers for node in nodes):
        raise IclError(f"Every node must be a head or an MLP layer of layers 0..{layers - 1}.")
    index = torch.tensor([node.layer for node in nodes], device=effects.device)
    return effects.new_zeros(layers).index_add_(0, index, effects.mean(1).abs())


def gravity(sizes: Float[Tensor, "layer"]) -> float:
    """Mean layer, weighted by the size of its effects; NaN if there is none at all.

    Example:
        >>> depth.gravity(torch.tensor([1.0, 3.0]))
        0.75
    """
    layer = torch.arange(len(sizes), device=sizes.device, dtype=sizes.dtype)
    return float((layer * sizes).sum() / sizes.sum())


def upper_share(sizes: Float[Tensor, "layer"]) -> float:
    """Share of the effects that lies in the upper half of the layers; NaN if there is none.

    Of an odd number of layers the middle one counts half.

    Example:
        >>> depth.upper_share(torch.tensor([1.0, 3.0]))
        0.75
    """
    count = len(sizes)
    upper = sizes[(count + 1) // 2 :].sum() + (count % 2) * 0.5 * sizes[count // 2]
    return float(upper / sizes.sum())


def gravity_difference(
    a: Effects,
    b: Float[Tensor, "node other"],
    nodes: Sequence[Node],
    layers: int,
    generator: Generator,
    draws: int = 200,
) -> tuple[float, float]:
    """Centre of gravity of ``a`` minus that of ``b``, in layers, and its standard error.

    By bootstrap over the sequences of both, each drawn anew on its own (Efron 1979). Errors as in
    ``by_layer``.

    Example:
        >>> nodes = [graph.head(0, 0), graph.head(1, 0)]
        >>> low, high = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]])
        >>> depth.gravity_difference(high, low, nodes, 2, generator)[0]
        1.0
    """

    def again(effects: Tensor) -> Tensor:
        pick = torch.randint(0, effects.shape[1], (effects.shape[1],), generator=generator)
        return effects[:, pick.to(effects.device)]

    def difference(x: Tensor, y: Tensor) -> float:
        return gravity(by_layer(x, nodes, layers)) - gravity(by_layer(y, nodes, layers))

    drawn = torch.tensor([difference(again(a), again(b)) for _ in range(draws)])
    return difference(a, b), float(drawn.std())


def _names(model: TransformerBridge) -> list[str]:
    last = model.cfg.n_layers - 1
    before = [f"blocks.{layer}.hook_resid_pre" for layer in range(last + 1)]
    return [*before, f"blocks.{last}.hook_resid_post"]


def _rank(behaviour: CleanCorrupt, logits: Tensor) -> Float[Tensor, "batch entry"]:
    right = logits.gather(-1, behaviour.answer[..., None])
    if behaviour.choices is not None:
        pick = behaviour.choices[:, None].expand(*logits.shape[:-1], -1)
        logits = logits.gather(-1, pick)
    return 1.0 + (logits > right).sum(-1)
