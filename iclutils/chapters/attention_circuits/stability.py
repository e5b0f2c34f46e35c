"""Stability of circuits: across models by name and by role, along training by re-extraction.

Roles are matched by what heads attend to and tested on what they write (CKA), because the best
matching of any matrix, noise included, beats random ones on that matrix. Two checkpoints can be no
more alike than two extractions from one of them: the re-extraction floor."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import groupby

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor
from torch.nn import functional

from ...interp.head_scores import attention_patterns, followers, repeats, uniform_pattern
from ...models import TransformerBridge, cached, get_act_name

MOST = 2048  # positions of head outputs kept
FAR = 1e6  # below any similarity

Tokens = Int[Tensor, "batch pos"]


def top(values: Float[Tensor, "item"], size: int) -> frozenset[int]:
    """The ``size`` items of the largest values; of equal ones the first. NaN counts as smallest."""
    order = torch.nan_to_num(values, nan=-torch.inf).sort(descending=True, stable=True).indices
    return frozenset(order[:size].tolist())


def jaccard(a: Set, b: Set) -> float:
    """Items in both over items in either: 0 none shared, 1 the same set."""
    return len(a & b) / len(a | b)


def overlap_excess(a: Set[int], b: Set[int], layer: Int[Tensor, "item"]) -> float:
    """Items in both, less what sets with as many items in each layer share when drawn at random."""
    inside = [[int((layer[list(s)] == la).sum()) for la in layer.unique()] for s in (a, b)]
    sizes = [int((layer == la).sum()) for la in layer.unique()]
    chance = sum(m * n / size for m, n, size in zip(*inside, sizes, strict=True))
    return len(a & b) - chance


def attention_profiles(model: TransformerBridge, tokens: Tokens) -> Float[Tensor, "head feature"]:
    """Features of every head's attention, in order of depth, less those of even attention: mass 0,
    1, ... tokens back, then on an earlier copy of the token, on what followed one, on the first
    token and on itself; the first position is left out."""
    same = repeats(tokens)
    first, itself = torch.zeros_like(same), torch.zeros_like(same)
    first[:, :, 0] = True
    itself.diagonal(0, 1, 2).fill_(True)
    relations = torch.stack([same, followers(tokens), first, itself])[:, :, 1:].double()

    def features(pattern: Float[Tensor, "batch head dest src"]) -> Float[Tensor, "head feature"]:
        rows = pattern[:, :, 1:].double()
        distances = [rows.diagonal(1 - d, -2, -1).sum((0, 2)) for d in range(rows.shape[-1])]
        related = einsum(rows, relations, "batch head d s, kind batch d s -> head kind")
        return torch.cat([torch.stack(distances, 1), related], 1) / (len(rows) * rows.shape[2])

    even = uniform_pattern(tokens.shape[1]).to(tokens.device).expand(len(tokens), 1, -1, -1)
    return torch.cat(list(map(features, attention_patterns(model, tokens)))) - features(even)


def profile_similarity(
    a: Float[Tensor, "a feature"], b: Float[Tensor, "b feature"]
) -> Float[Tensor, "a b"]:
    """Cosine of the attention profiles of two models' heads; 0 for a head that attends evenly."""
    return functional.normalize(a, dim=1) @ functional.normalize(b, dim=1).T


def head_outputs(
    model: TransformerBridge, tokens: Tokens
) -> Float[Tensor, "layer head sample d_model"]:
    """Writes of every head to the residual stream (z W_O) at all positions but the first, or at
    2,048 of them, evenly spaced; for ``cka``."""
    names = [get_act_name("z", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    count = len(tokens) * (tokens.shape[1] - 1)
    pick = torch.arange(min(count, MOST), device=tokens.device) * count // min(count, MOST)
    z = [cache[name][:, 1:].flatten(0, 1)[pick].transpose(0, 1) for name in names]
    return torch.stack(z) @ model.W_O


def cka(a: Float[Tensor, "a sample d_a"], b: Float[Tensor, "b sample d_b"]) -> Float[Tensor, "a b"]:
    """Linear CKA of what heads write at the same tokens: 0 to 1 (Kornblith et al. 2019, section 3),
    ||Y^T X||^2 / (||X^T X|| ||Y^T Y||) of centred rows, which rotating or scaling either side does
    not change. NaN for a head that always writes the same."""
    a, b = (x.double() - x.double().mean(1, keepdim=True) for x in (a, b))
    own = [(x.mT @ x).flatten(1).norm(dim=1) for x in (a, b)]
    cross = torch.stack([(one.mT @ b).square().sum((1, 2)) for one in a])
    return cross / (own[0][:, None] * own[1])


def match(
    similarity: Float[Tensor, "a b"], allowed: Bool[Tensor, "a b"] | None = None
) -> list[tuple[int, int]]:
    """The pairs of heads whose similarities have the largest sum (Kuhn 1955); each head in one pair
    at most. ``allowed``: which pairs there may be, say those of one layer."""
    values = similarity.detach().cpu().double()
    if allowed is not None:
        values = values.masked_fill(~allowed.cpu(), -FAR)
    first, second = linear_sum_assignment(values.numpy(), maximize=True)
    return list(zip(first.tolist(), second.tolist(), strict=True))


def matching_excess(
    similarity: Float[Tensor, "a b"],
    pairs: Sequence[tuple[int, int]],
    generator: Generator,
    allowed: Bool[Tensor, "a b"] | None = None,
    draws: int = 500,
) -> tuple[float, float]:
    """Mean similarity of matched heads less that of random matchings, and the SD of these: fair
    only if ``pairs`` were matched without looking at *this* matrix."""
    values = similarity.detach().cpu().double()

    def mean(matched: Sequence[tuple[int, int]]) -> Tensor:
        return values[tuple(torch.tensor(matched).T)].mean()

    noise = torch.rand(draws, *values.shape, generator=generator)
    null = torch.stack([mean(match(one, allowed)) for one in noise])
    return float(mean(pairs) - null.mean()), float(null.std())


def top_overlap(
    first: Float[Tensor, "item batch"], second: Float[Tensor, "item other_batch"], size: int
) -> float:
    """Jaccard similarity of two extractions: their ``size`` items of the largest |mean effect|."""
    best = [top(v.detach().cpu().double().mean(-1).abs(), size) for v in (first, second)]
    return jaccard(*best)


def reextraction_floor(
    effects: Float[Tensor, "item batch"],
    size: int,
    generator: Generator,
    draws: int = 200,
) -> float:
    """The ``top_overlap`` that two halves of one checkpoint's sequences undercut in 5 % of draws;
    for two checkpoints, compare ``first[:, :half]`` with ``second[:, half:]``."""
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
    """Kind of each interval between checkpoints: ``absent`` where the task is not solved
    (``present``) at both ends, ``stable`` where two intervals in a row are as similar as
    their floors, or ``unstable``. (Seed note 004, section 7.2; Tigges et al. 2024.)"""
    there = present[:-1] & present[1:]
    pairs = zip(there.tolist(), (similarity >= floors).tolist(), strict=True)
    kinds = ["absent" if not here else "stable" if alike else "unstable" for here, alike in pairs]
    out: list[str] = []
    for kind, run in groupby(kinds):
        count = len(list(run))
        out += ["unstable" if kind == "stable" and count < 2 else kind] * count
    return out
