"""Stability of circuits: across models by name and by role, along training by re-extraction.

Roles are matched by what heads attend to and tested on what they write (CKA), because the best
matching of any matrix, noise included, beats random ones on that matrix. Two checkpoints can be no
more alike than two extractions from one of them: the re-extraction floor."""

from collections.abc import Set
from itertools import groupby

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor

from ...interp.hooks import activations
from ...interp.invariants import blocks
from ...models import TransformerBridge, get_act_name


def top(values: Float[Tensor, "item"], size: int) -> frozenset[int]:
    """Return the ``size`` items of the largest values; of equal ones the first, NaN last."""
    order = torch.nan_to_num(values, nan=-torch.inf).sort(descending=True, stable=True).indices
    return frozenset(order[:size].tolist())


def overlap_excess(a: Set[int], b: Set[int], layer: Int[Tensor, "item"]) -> float:
    """Return how many items two sets share beyond what random sets, as large in each layer, do."""
    inside = [[int((layer[list(s)] == la).sum()) for la in layer.unique()] for s in (a, b)]
    sizes = [int((layer == la).sum()) for la in layer.unique()]
    chance = sum(m * n / size for m, n, size in zip(*inside, sizes, strict=True))
    return len(a & b) - chance


def head_outputs(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "layer head sample d_model"]:
    """Return what every head adds to the residual stream at all positions but the first; a norm
    that stands between (Gemma-2) keeps the scale of the run."""
    every, names = blocks(model), [get_act_name("z", i) for i in range(model.cfg.n_layers)]
    cache = activations(model, tokens, names)
    z = [cache[name][:, 1:].flatten(0, 1) for name in names]  # (sample, head, d_head)
    written = torch.stack([each.transpose(0, 1) for each in z]) @ model.W_O
    parts = zip(every, z, written, strict=True)
    return torch.stack([block.share(each, own) for block, each, own in parts])


def cka(a: Float[Tensor, "a sample d_a"], b: Float[Tensor, "b sample d_b"]) -> Float[Tensor, "a b"]:
    """Return the linear CKA of what heads write at the same tokens, 0 to 1 (Kornblith et al. 2019,
    section 3): ||Y^T X||^2 / (||X^T X|| ||Y^T Y||) of centred rows, which rotating or scaling
    either side does not change. NaN for a head that always writes the same."""
    a, b = (x.double() - x.double().mean(1, keepdim=True) for x in (a, b))
    own = [(x.mT @ x).flatten(1).norm(dim=1) for x in (a, b)]
    cross = torch.stack([(one.mT @ b).square().sum((1, 2)) for one in a])
    return cross / (own[0][:, None] * own[1])


def match(
    similarity: Float[Tensor, "a b"], allowed: Bool[Tensor, "a b"] | None = None
) -> list[tuple[int, int]]:
    """Return the pairs of heads whose similarities have the largest sum (Kuhn 1955), each head in
    one pair at most. ``allowed``: which pairs there may be, say those of one layer."""
    values = similarity.detach().cpu().double()
    if allowed is not None:
        values = values.masked_fill(~allowed.cpu(), -1e6)
    first, second = linear_sum_assignment(values.numpy(), maximize=True)
    return list(zip(first.tolist(), second.tolist(), strict=True))


def top_overlap(
    first: Float[Tensor, "item batch"], second: Float[Tensor, "item other_batch"], size: int
) -> float:
    """Return the Jaccard similarity of two extractions: of their ``size`` items of the largest
    |mean effect|, those in both over those in either."""
    a, b = (top(v.detach().cpu().double().mean(-1).abs(), size) for v in (first, second))
    return len(a & b) / len(a | b)


def reextraction_floor(
    effects: Float[Tensor, "item batch"], size: int, generator: Generator, draws: int = 200
) -> float:
    """Return the ``top_overlap`` that two halves of one checkpoint's sequences undercut in 5 % of
    draws; for two checkpoints, compare ``first[:, :half]`` with ``second[:, half:]``."""
    count, overlaps = effects.shape[1], []
    for _ in range(draws):
        order = torch.randperm(count, generator=generator)
        one, two = (effects[:, half] for half in order.split((count + 1) // 2))
        overlaps.append(top_overlap(one, two, size))
    return float(torch.tensor(overlaps, dtype=torch.float64).quantile(0.05))


def phases(
    similarity: Float[Tensor, "interval"],
    floors: Float[Tensor, "interval"],
    present: Bool[Tensor, "checkpoint"],
) -> list[str]:
    """Return the kind of each interval between checkpoints: ``absent`` where the task is not solved
    (``present``) at both ends, ``stable`` where two intervals in a row are as similar as their
    floors, or ``unstable``. (Seed note 004, section 7.2; Tigges et al. 2024.)"""
    there = present[:-1] & present[1:]
    pairs = zip(there.tolist(), (similarity >= floors).tolist(), strict=True)
    kinds = ["absent" if not here else "stable" if alike else "unstable" for here, alike in pairs]
    out: list[str] = []
    for kind, run in groupby(kinds):
        count = len(list(run))
        out += ["unstable" if kind == "stable" and count < 2 else kind] * count
    return out
