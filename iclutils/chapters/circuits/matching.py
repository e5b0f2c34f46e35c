"""Matching heads of different models: by what they do, because their names are arbitrary.

A head of one seed has no counterpart of the same name in another. Heads are compared by what they
attend to (``profiles``) or what they write (``cka_across``), paired so that the sum of
similarities is largest (Kuhn 1955), and the pairs compared with random ones.

The best matching of any matrix beats random ones *on that matrix*, noise included: four by four
random numbers in four layers already give four standard deviations. So match on one measure and
take the ``excess`` on another, or on other data.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import matching
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> tokens = torch.randint(1, net.cfg.d_vocab, (4, 12), generator=generator)
    >>> profiles = matching.profiles(net, tokens)
    >>> alike = matching.similarity(profiles, profiles)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import einsum
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor
from torch.nn import functional

from ...errors import IclError
from ...interp.head_scores import uniform_pattern
from ...models import TransformerBridge, cached

DRAWS = 500  # random matchings
Groups = tuple[Int[Tensor, "group_a"], Int[Tensor, "group_b"]]


def profiles(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "head feature"]:
    """What every head looks at: its mean attention by distance back and by relation.

    Features: the mass 0, 1, ... tokens back, then on an earlier copy of the token, on what
    followed one, on the first token and on itself; averaged over sequences and positions, the
    first position left out, and less what even attention has there. They mean the same in every
    model that reads sequences of the same length and make, whatever its vocabulary. Heads in the
    order of ``graph.all_heads``.

    Example:
        >>> len(profiles) == net.cfg.n_layers * net.cfg.n_heads
        True
    """
    if tokens.shape[1] < 2:
        raise IclError("A profile of attention needs sequences of at least two tokens.")
    _, cache = cached(model, tokens, lambda name: name.endswith("attn.hook_pattern"))
    relations = _relations(tokens)
    even = uniform_pattern(tokens.shape[1]).to(tokens.device).expand(len(tokens), 1, -1, -1)
    layers = range(model.cfg.n_layers)
    rows = [_features(cache["pattern", layer], relations) for layer in layers]
    return torch.cat(rows) - _features(even, relations)


def _relations(tokens: Tensor) -> Tensor:
    """1 where a source is one of the relations of ``profiles``: (relation, batch, dest, src)."""
    same = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    same[:, :, 0] = False  # BOS is no occurrence
    after = functional.pad(same[:, :, :-1], (1, 0)).tril()
    first, itself = torch.zeros_like(same), torch.zeros_like(same)
    first[:, :, 0] = True
    itself.diagonal(0, 1, 2).fill_(True)
    return torch.stack([same, after, first, itself]).double()


def _features(pattern: Tensor, relations: Tensor) -> Tensor:
    """(batch, head, dest, src) to (head, feature)."""
    rows = pattern[:, :, 1:].double()
    distances = [rows.diagonal(1 - d, -2, -1).sum((0, 2)) for d in range(rows.shape[-1])]
    related = einsum(
        rows, relations[:, :, 1:], "batch head d s, relation batch d s -> head relation"
    )
    return torch.cat([torch.stack(distances, 1), related], 1) / (len(rows) * rows.shape[2])


def similarity(
    a: Float[Tensor, "a feature_a"], b: Float[Tensor, "b feature_b"]
) -> Float[Tensor, "a b"]:
    """Cosine of the profiles of two models' heads; 0 for a head that attends evenly.

    Example:
        >>> alike.diagonal().round(decimals=3).unique()
        tensor([1.], dtype=torch.float64)
    """
    if a.shape[1] != b.shape[1]:
        raise IclError("Profiles compare only on sequences of one length: make them as long.")
    return functional.normalize(a, dim=1) @ functional.normalize(b, dim=1).T


def cka_across(
    a: Float[Tensor, "a sample_a d_a"], b: Float[Tensor, "b sample_b d_b"]
) -> Float[Tensor, "a b"]:
    """Similarity (linear CKA) of what two models' heads write at the same tokens, 0 to 1.

    Row i of both is one position of one sequence that both models read. NaN for a head that
    always writes the same. (Kornblith et al. 2019, section 3.)

    Example:
        >>> writes = torch.randn(2, 30, 4, generator=generator)
        >>> matching.cka_across(writes, 2 * writes).diagonal().round(decimals=3)
        tensor([1., 1.], dtype=torch.float64)
    """
    if a.shape[1] != b.shape[1]:
        raise IclError(f"Rows must be the same tokens; got {a.shape[1]} and {b.shape[1]} of them.")
    a, b = (x.double() - x.double().mean(1, keepdim=True) for x in (a, b))
    own = [(x.mT @ x).flatten(1).norm(dim=1) for x in (a, b)]
    cross = torch.stack([(one.mT @ b).square().sum((1, 2)) for one in a])
    return cross / (own[0][:, None] * own[1])


def layer_of(layers: int, heads: int) -> Int[Tensor, "head"]:
    """The layer of every head, in the order of ``profiles``: groups to match within.

    Example:
        >>> matching.layer_of(2, 2)
        tensor([0, 0, 1, 1])
    """
    return torch.arange(layers).repeat_interleave(heads)


def depth(layer: int, layers: int) -> float:
    """How deep a layer lies, (layer + 1/2) / layers, to compare models of different depth.

    Example:
        >>> matching.depth(0, layers=2)
        0.25
    """
    return (layer + 0.5) / layers


def match(similarity: Float[Tensor, "a b"], within: Groups | None = None) -> list[tuple[int, int]]:
    """The pairs of heads whose similarities have the largest sum; each head in one pair at most.

    ``within``: the group of each head of either model (``layer_of``); pairs stay in a group.

    Example:
        >>> matching.match(torch.tensor([[0.1, 0.9], [0.8, 0.2]]))
        [(0, 1), (1, 0)]
    """
    if not bool(similarity.isfinite().all()):
        raise IclError("A similarity is not finite: leave heads out that write or see nothing.")
    pairs: list[tuple[int, int]] = []
    for rows, columns in _blocks(similarity, within):
        block = similarity[rows][:, columns].detach().cpu().double().numpy()
        found = linear_sum_assignment(block, maximize=True)
        pairs += [(int(rows[i]), int(columns[j])) for i, j in zip(*found, strict=True)]
    return sorted(pairs)


def excess(
    similarity: Float[Tensor, "a b"],
    matching: Sequence[tuple[int, int]],
    generator: Generator,
    within: Groups | None = None,
    draws: int = DRAWS,
) -> tuple[float, float]:
    """Mean similarity of the matched heads less that of random matchings, and the SD of these.

    A permutation test, and as such fair only if the matching was made without looking at
    *this* matrix: match on another measure (attention) than the one that is tested (writes).

    Example:
        >>> above, spread = matching.excess(alike, matching.match(alike), generator)
        >>> above > 0
        True
    """
    if not matching:
        raise IclError("Nothing is matched: give at least one pair.")
    values = similarity.detach().cpu().double()
    blocks = _blocks(values, within)
    by_chance = []
    for _ in range(draws):
        drawn = []
        for rows, columns in blocks:
            size = min(len(rows), len(columns))
            first, second = (
                one[torch.randperm(len(one), generator=generator)[:size]] for one in (rows, columns)
            )
            drawn.append(values[first, second])
        by_chance.append(torch.cat(drawn).mean())
    null = torch.stack(by_chance)
    first, second = torch.tensor(list(matching)).T
    return float(values[first, second].mean() - null.mean()), float(null.std())


def _blocks(similarity: Tensor, within: Groups | None) -> list[tuple[Tensor, Tensor]]:
    """Rows and columns of each group that both models have."""
    everyone = (torch.zeros(n, dtype=torch.long) for n in similarity.shape)
    ours, theirs = (group.cpu() for group in within or everyone)
    if (len(ours), len(theirs)) != tuple(similarity.shape):
        raise IclError(
            f"Give a group for each of {similarity.shape[0]} and {similarity.shape[1]} heads; "
            f"got {len(ours)} and {len(theirs)}."
        )
    common = sorted(set(ours.tolist()) & set(theirs.tolist()))
    if not common:
        raise IclError("The two models have no group in common: match them without groups.")
    return [((ours == g).nonzero()[:, 0], (theirs == g).nonzero()[:, 0]) for g in common]
