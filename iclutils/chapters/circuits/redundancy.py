"""Redundancy: which heads a behaviour can spare, alone and together, and what to conclude.

Every advice here is a hypothesis together with the measurement that would confirm it. Removing
heads one at a time misleads where heads stand in for each other, so a set is removed in one run;
gradients tell what a small change would do, not what removal does. Sources: Michel et al. 2019,
section 2 (gradient importance, heads one at a time); Bhojanapalli et al. 2020 (rank of a head);
Roy and Vetterli 2007 (effective rank).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import redundancy
    >>> from iclutils.interp import clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> task = clean_corrupt.copying(net, 4, 6, generator)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError
from ...interp.clean_corrupt import CleanCorrupt, scored_logits
from ...interp.graph import Node, head
from ...interp.hooks import Hook, How, check_editable
from ...interp.patching import ablate
from ...models import TransformerBridge, check_tokens, get_act_name


def importance(
    model: TransformerBridge, behaviour: CleanCorrupt
) -> Float[Tensor, "layer head batch"]:
    """|d score / d mask| for a mask of 1 on what each head writes, in nats: one backward pass.

    The same as |sum over positions of z . d score / d z| (Michel et al. 2019, equation 2).

    Example:
        >>> bool((redundancy.importance(net, task) >= 0).all())
        True
    """
    check_editable(model)
    check_tokens(model, behaviour.clean)
    tokens, layers, heads = behaviour.clean, model.cfg.n_layers, model.cfg.n_heads
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    mask = torch.ones(layers, len(tokens), 1, heads, 1, device=tokens.device, requires_grad=True)

    def narrow(resid: Tensor, hook: object) -> Tensor:
        return resid[rows, behaviour.at]

    def masked(layer: int) -> Hook:
        return get_act_name("z", layer), lambda z, hook: z * mask[layer]

    hooks = [masked(layer) for layer in range(layers)]
    with torch.enable_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=[*hooks, ("unembed.hook_in", narrow)])
        scores = behaviour.score(logits)
        (slope,) = torch.autograd.grad(scores.sum(), mask)
    return slope[:, :, 0, :, 0].abs().transpose(1, 2)


def joint(
    model: TransformerBridge, behaviour: CleanCorrupt, nodes: Iterable[Node], how: How = "mean"
) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch"]]:
    """Nats lost without all of ``nodes`` together, and the sum of what is lost without each.

    Example:
        >>> heads = [graph.head(1, h) for h in range(4)]
        >>> together, alone = redundancy.joint(net, task, heads)
        >>> bool(together.mean() > 1)
        True
    """
    nodes = list(nodes)
    clean = behaviour.score(scored_logits(model, behaviour))
    lost = clean - ablate(model, behaviour, [nodes, *([n] for n in nodes)], how)
    return lost[0], lost[1:].sum(0)


def redundant(losses: Float[Tensor, "*item batch"], bar: float = 0.01) -> Bool[Tensor, "*item"]:
    """Which parts can be spared: mean loss plus two standard errors below ``bar`` (nats).

    A part whose loss is not known well enough is not called redundant.

    Example:
        >>> redundancy.redundant(torch.tensor([[0.0, 0.0], [1.0, 1.2]]))
        tensor([ True, False])
    """
    count = losses.shape[-1]
    if count < 2:
        raise IclError(f"A standard error needs at least two sequences; got {count}.")
    return losses.mean(-1) + 2 * losses.std(-1) / count**0.5 < bar


def fraction(losses: Float[Tensor, "*item batch"], bar: float = 0.01) -> float:
    """Share of the parts that are ``redundant``.

    Example:
        >>> redundancy.fraction(torch.tensor([[0.0, 0.0], [1.0, 1.2]]))
        0.5
    """
    return redundant(losses, bar).float().mean().item()


def ranks(outputs: Float[Tensor, "*item sample width"]) -> Float[Tensor, "*item"]:
    """Effective rank of what parts write: exp(entropy of the shares of variance).

    The variance of each principal direction is a squared singular value of the centred outputs.
    A head's is at most its width; below it if directions are used unevenly. NaN for a part whose
    output never changes.

    Example:
        >>> flat = torch.randn(50, 1, generator=generator) * torch.tensor([1.0, 2.0, 3.0])
        >>> redundancy.ranks(flat).round(decimals=2)
        tensor(1., dtype=torch.float64)
    """
    if outputs.shape[-2] < 2:
        raise IclError(f"A rank needs at least two samples; got {outputs.shape[-2]}.")
    return _effective_rank(outputs - outputs.mean(-2, keepdim=True))


def weight_ranks(model: TransformerBridge) -> Float[Tensor, "layer head"]:
    """Effective rank of each head's W_V W_O: how many directions it could move, read off weights.

    NaN for a head whose weights are zero.
    """
    values, outputs = model.W_V.detach(), model.W_O.detach()
    if values.shape[:2] != outputs.shape[:2]:
        raise IclError("Query heads of this model share values: a head has no W_V of its own.")
    # W_V W_O has the singular values of R_V R_O^T, which is as small as the head.
    left = torch.linalg.qr(values.double()).R
    right = torch.linalg.qr(outputs.double().transpose(-1, -2)).R
    return _effective_rank(left @ right.transpose(-1, -2))


def _effective_rank(matrix: Tensor) -> Tensor:
    power = torch.linalg.svdvals(matrix.double()).square()
    share = power / power.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


@dataclass(frozen=True)
class Advice:
    """What one might do, why it might help, and the measurement that would confirm it."""

    kind: str
    nodes: tuple[Node, ...]
    hypothesis: str
    confirmed_by: str


KINDS = {
    "prune": (
        "The behaviour, and whatever else the model is for, can do without these heads.",
        "Remove them together, on every task; tune; compare with an unpruned model tuned as long.",
    ),
    "widen": (
        "These heads write in as many directions as they have, so wider heads would help.",
        "Train the same model with wider heads, and as many weights elsewhere; compare the loss.",
    ),
    "rewire": (
        "Heads that do not work together need another architecture.",
        "Train both architectures at equal cost; compare the loss on the task.",
    ),
}


def advice(
    spared: Bool[Tensor, "layer head"],
    rank: Float[Tensor, "layer head"],
    width: int,
    trigger: float = 0.3,
    full: float = 0.9,
) -> list[Advice]:
    """The hypotheses that the measurements suggest; none of them is a result.

    Low coordination of heads suggests nothing, so ``rewire`` is never given: a low correlation
    depends on the basis of a head, and heads that do not interact are no defect.

    Args:
        spared: which heads are ``redundant``.
        rank: effective ranks of what heads write (``ranks``).
        width: of a head.
        trigger: prune if more than this share of the heads is spared.
        full: widen if the rank of a head is above this share of its width.

    Example:
        >>> spared, rank = torch.tensor([[True, False]]), torch.tensor([[8.0, 8.0]])
        >>> [a.kind for a in redundancy.advice(spared, rank, width=8)]
        ['prune', 'widen']
    """
    saturated = rank > full * width
    found = {"prune": spared if spared.float().mean() > trigger else spared & False}
    found["widen"] = saturated
    return [
        Advice(kind, tuple(head(*place) for place in which.nonzero().tolist()), *KINDS[kind])
        for kind, which in found.items()
        if bool(which.any())
    ]
