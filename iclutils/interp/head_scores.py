"""Head scores read off attention patterns: where a head looks, not that the look matters.

Patterns are ``A[..., dest, src]`` (rows sum to 1, ``src <= dest``) of repeated tokens
``[BOS, r_1 .. r_L, r_1 .. r_L]``; scores are means over positions. Sources: Elhage et al. 2021;
Olsson et al. 2022 (prefix matching); Xiang 2024 (stripe).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from itertools import combinations, product
from statistics import fmean

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from ..errors import IclError
from ..models import TransformerBridge, get_act_name
from .hooks import activations

Pattern = Float[Tensor, "*lead dest src"]
Score = Float[Tensor, "*lead"]
LABEL = 0.4  # threshold in use for calling a head by a role (ARENA 2023)


def uniform_pattern(size: int) -> Float[Tensor, "dest src"]:
    """Spread causal attention evenly: row q gives 1/(q+1) to each of its q+1 sources."""
    lower = torch.ones(size, size).tril()
    return lower / lower.sum(-1, keepdim=True)


def previous_token(pattern: Pattern) -> Score:
    """Return the mean of A[q, q-1] over q >= 1."""
    return pattern.diagonal(-1, -2, -1).mean(-1)


def first_token(pattern: Pattern) -> Score:
    """Return the mean of A[q, 0]: the attention sink."""
    return pattern[..., 0].mean(-1)


def attention_at_offset(pattern: Pattern, length: int, offset: int) -> Score:
    """Return the mean of A[q, q-offset] over the second copy, q in [L+1, 2L]."""
    if pattern.shape[-1] != 2 * length + 1:
        raise IclError(
            f"Repeated tokens of length {length} have {2 * length + 1} positions; "
            f"this pattern has {pattern.shape[-1]}."
        )
    if not 0 <= offset <= length + 1:
        raise IclError(f"The offset must lie in 0..{length + 1}; got {offset}.")
    query = torch.arange(length + 1, 2 * length + 1)
    return pattern[..., query, query - offset].mean(-1)


def prefix_matching(pattern: Pattern, length: int) -> Score:
    """Return the prefix-matching score: attention L-1 back, to what followed the earlier copy."""
    return attention_at_offset(pattern, length, length - 1)


def stripe(pattern: Pattern, length: int) -> Score:
    """Return the mean of the whole diagonal of offset 1-L, as Xiang 2024 takes it: the L entries
    of ``prefix_matching``, and (L-1, 0) and (L, 1), where nothing has been repeated yet."""
    return pattern.diagonal(1 - length, -2, -1).mean(-1)


def distance_profile(pattern: Pattern, length: int) -> Float[Tensor, "*lead distance"]:
    """Return mean attention of the second copy at each distance back, 0 .. L+1."""
    offsets = range(length + 2)
    return torch.stack([attention_at_offset(pattern, length, offset) for offset in offsets], -1)


def repeats(tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch dest src"]:
    """Tell which earlier positions hold the same token; the first position never counts."""
    same = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    same[:, :, 0] = False
    return same


def followers(tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch dest src"]:
    """Tell which positions hold what came after an earlier occurrence of the token."""
    return repeats(tokens).roll(1, -1)  # no row repeats the last position


def attention_to(
    pattern: Float[Tensor, "batch head dest src"], where: Bool[Tensor, "batch dest src"]
) -> Float[Tensor, "batch head"]:
    """Sum attention to marked sources; mean over the rows that have one, NaN if none has."""
    rows = where.any(-1)
    return (pattern * where[:, None]).sum((-2, -1)) / rows.sum(-1)[:, None]


def olsson_prefix_matching(
    pattern: Float[Tensor, "batch head dest src"], tokens: Int[Tensor, "batch src"]
) -> Float[Tensor, "batch head"]:
    """Return mean attention to all that follows an earlier occurrence (NaN without any), the first
    position not counted: Olsson et al. 2022, appendix; there of 25 random tokens, four times."""
    return attention_to(pattern, followers(tokens))


SCORES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "previous": lambda pattern, length: previous_token(pattern),
    "current": lambda pattern, length: pattern.diagonal(0, -2, -1).mean(-1),
    "first": lambda pattern, length: first_token(pattern),
    "duplicate": lambda pattern, length: attention_at_offset(pattern, length, length),
    "prefix": prefix_matching,
    "stripe": stripe,
}


def score_heads(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], length: int
) -> dict[str, Float[Tensor, "batch layer head"]]:
    """Take all ``SCORES`` of every head on a batch of repeated tokens, from one forward pass.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.interp import head_scores
        >>> from iclutils.tasks.repeated import repeated_tokens
        >>> net = models.load("induction-0")
        >>> task = repeated_tokens(net, 8, 10, torch.Generator().manual_seed(0))
        >>> scores = head_scores.score_heads(net, task.tokens, task.length)
        >>> scores["prefix"].mean(0).max() > 0.5
        tensor(True)
    """
    patterns = attention_patterns(model, tokens)
    return {
        name: torch.stack([score(pattern, length) for pattern in patterns], 1)
        for name, score in SCORES.items()
    }


def uniform_baselines(length: int) -> dict[str, float]:
    """Return each score of ``score_heads`` for a head that attends evenly."""
    even = uniform_pattern(2 * length + 1)
    return {name: score(even, length).item() for name, score in SCORES.items()}


def strongest(scores: Float[Tensor, "layer head"]) -> tuple[int, int]:
    """Return (layer, head) of the largest score."""
    return divmod(int(scores.argmax()), scores.shape[1])


def top_heads(scores: Float[Tensor, "layer head"], count: int) -> list[tuple[int, int]]:
    """List (layer, head) of the largest scores, the largest first; of fewer heads, all."""
    best = scores.flatten().topk(min(count, scores.numel())).indices
    return [divmod(i, scores.shape[1]) for i in best.tolist()]


def same_layers(
    heads: Iterable[tuple[int, int]],
    per_layer: int,
    draws: int,
    generator: Generator,
    again: bool = False,
    outside: Iterable[tuple[int, int]] = (),
    layers: int = 0,
) -> list[list[tuple[int, int]]]:
    """Draw random sets of other heads, as many in each layer as ``heads`` has there, and none of
    ``outside``, the lists that these are compared with. What a layer has too few of comes from the
    nearest of so many ``layers``; of 0, a set has fewer heads. With ``again``, draw of all heads of
    these layers: what two sets share by chance."""
    chosen, barred = defaultdict[int, set[int]](set), {*outside}
    for layer, head in sorted(heads):
        chosen[layer].add(head)
        barred.add((layer, head))

    def draw() -> list[tuple[int, int]]:
        drawn, missing = list[tuple[int, int]](), list[int]()
        for layer, named in chosen.items():
            order = torch.randperm(per_layer, generator=generator).tolist()
            others = [(layer, head) for head in order if again or (layer, head) not in barred]
            drawn += others[: len(named)]
            missing += [layer] * (len(named) - len(others))
        if missing and layers:
            order = torch.randperm(layers * per_layer, generator=generator).tolist()
            free = [head for i in order if (head := divmod(i, per_layer)) not in barred | {*drawn}]
            for layer in missing[: len(free)]:
                drawn.append(min(free, key=lambda head: abs(head[0] - layer)))
                free.remove(drawn[-1])
        return drawn

    return [draw() for _ in range(draws)]


def controls(
    model: TransformerBridge,
    heads: Collection[tuple[int, int]],
    draws: int,
    generator: Generator,
    outside: Collection[tuple[int, int]] = (),
) -> list[list[tuple[int, int]]]:
    """Draw sets of heads to compare the removal of ``heads`` with, without those of ``outside``: of
    whole layers, all other sets of as many whole layers, else draws of ``same_layers``."""
    layers, every = {layer for layer, _ in heads}, range(model.cfg.n_heads)
    if len(heads) < len(layers) * len(every):
        size = model.cfg.n_layers
        drawn = same_layers(heads, len(every), draws, generator, outside=outside, layers=size)
        return [*map(list, dict.fromkeys(tuple(sorted(some)) for some in drawn))]
    spare = sorted({*range(model.cfg.n_layers)} - layers - {layer for layer, _ in outside})
    return [[*product(some, every)] for some in combinations(spare, len(layers))]


def from_other_layers(
    heads: Iterable[tuple[int, int]], controls: Iterable[Iterable[tuple[int, int]]]
) -> float:
    """Return how many heads of a control of ``same_layers`` come from other layers than ``heads``,
    which had too few left: the mean of the controls."""
    have = Counter(layer for layer, _ in heads)
    return fmean((Counter(layer for layer, _ in some) - have).total() for some in controls)


def attention_patterns(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> list[Float[Tensor, "batch head dest src"]]:
    """Return attention patterns of every layer."""
    names = [get_act_name("pattern", layer) for layer in range(model.cfg.n_layers)]
    cache = activations(model, tokens, names)
    return [cache[name] for name in names]


def by_distance(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], length: int
) -> Float[Tensor, "batch layer head distance"]:
    """Return the ``distance_profile`` of every head: its mean attention in the second copy."""
    patterns = attention_patterns(model, tokens)
    return torch.stack([distance_profile(x, length) for x in patterns], 1).cpu()
