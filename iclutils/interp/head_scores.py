"""Head scores read off attention patterns: what a head looks at, as one number per head.

Every score takes patterns ``A[..., dest, src]`` (rows sum to 1, ``src <= dest``) of repeated
tokens ``[BOS, r_1 .. r_L, r_1 .. r_L]`` and averages over positions. The baseline of a score is
the same function applied to ``uniform_pattern``: a head that spreads its attention evenly already
scores that much. Attention is not contribution: a high score says where a head looks, not that
the look matters (see ``iclutils.interp.hooks`` for that).

Sources: Elhage et al. 2021; Olsson et al. 2022 (prefix matching); seed note 003 (stripe).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import head_scores
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> net = models.load("induction-0")
    >>> task = repeated_tokens(net, 8, 10, torch.Generator().manual_seed(0))
    >>> even = head_scores.uniform_pattern(21)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import IclError
from ..models import TransformerBridge, cached, get_act_name, head_detector

Pattern = Float[Tensor, "*lead dest src"]
Score = Float[Tensor, "*lead"]


def uniform_pattern(size: int) -> Float[Tensor, "dest src"]:
    """Causal attention spread evenly: row q gives 1/(q+1) to each of its q+1 sources.

    Example:
        >>> head_scores.uniform_pattern(3)
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    lower = torch.ones(size, size).tril()
    return lower / lower.sum(-1, keepdim=True)


def previous_token(pattern: Pattern) -> Score:
    """Mean of A[q, q-1] over q >= 1.

    Example:
        >>> round(head_scores.previous_token(head_scores.uniform_pattern(3)).item(), 4)
        0.4167
    """
    return pattern.diagonal(-1, -2, -1).mean(-1)


def current_token(pattern: Pattern) -> Score:
    """Mean of A[q, q]."""
    return pattern.diagonal(0, -2, -1).mean(-1)


def first_token(pattern: Pattern) -> Score:
    """Mean of A[q, 0]: the attention sink."""
    return pattern[..., 0].mean(-1)


def attention_at_offset(pattern: Pattern, length: int, offset: int) -> Score:
    """Mean of A[q, q-offset] over the second copy, q in [L+1, 2L].

    Example:
        >>> head_scores.attention_at_offset(torch.eye(21), length=10, offset=0)
        tensor(1.)
    """
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
    """Prefix-matching score: attention L-1 back, to what followed the earlier copy."""
    return attention_at_offset(pattern, length, length - 1)


def duplicate_token(pattern: Pattern, length: int) -> Score:
    """Attention L back, to the earlier copy of the current token itself."""
    return attention_at_offset(pattern, length, length)


def stripe(pattern: Pattern, length: int) -> Score:
    """Mean of the whole diagonal of offset 1-L, as the seed note takes it.

    It has L+2 entries: the L of ``prefix_matching``, and (L-1, 0) and (L, 1), where nothing has
    been repeated yet.
    """
    return pattern.diagonal(1 - length, -2, -1).mean(-1)


def distance_profile(pattern: Pattern, length: int) -> Float[Tensor, "*lead distance"]:
    """Mean attention of the second copy at each distance back, 0 .. L+1.

    Example:
        >>> head_scores.distance_profile(even, length=10).shape
        torch.Size([12])
    """
    offsets = range(length + 2)
    return torch.stack([attention_at_offset(pattern, length, offset) for offset in offsets], -1)


def olsson_prefix_matching(
    pattern: Float[Tensor, "batch head dest src"], tokens: Int[Tensor, "batch src"]
) -> Float[Tensor, "batch head"]:
    """Olsson's evaluator: attention to all positions that follow an earlier occurrence.

    Summed over those positions, averaged over the queries that have one. ``tokens`` starts with
    BOS, which never counts as an occurrence. (Olsson et al. 2022, appendix on head activation
    evaluators; they use 25 random tokens repeated four times.)
    """
    same = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    same[:, :, 0] = False
    target = torch.zeros_like(same)
    target[:, :, 1:] = same[:, :, :-1]
    target = target.tril()
    asked = target.any(-1)
    if not bool(asked.any(-1).all()):
        raise IclError("No token is repeated in at least one sequence: nothing to match.")
    found = (pattern * target[:, None]).sum(-1) * asked[:, None]
    return found.sum(-1) / asked.sum(-1)[:, None]


SCORES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "previous": lambda pattern, length: previous_token(pattern),
    "current": lambda pattern, length: current_token(pattern),
    "first": lambda pattern, length: first_token(pattern),
    "duplicate": duplicate_token,
    "prefix": prefix_matching,
    "stripe": stripe,
}


def head_scores(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], length: int
) -> dict[str, Float[Tensor, "batch layer head"]]:
    """All ``SCORES`` of every head on a batch of repeated tokens, from one forward pass.

    Example:
        >>> scores = head_scores.head_scores(net, task.tokens, 10)
        >>> scores["prefix"].mean(0).max() > 0.5
        tensor(True)
    """
    patterns = _patterns(model, tokens)
    return {
        name: torch.stack([score(pattern, length) for pattern in patterns], 1)
        for name, score in SCORES.items()
    }


def uniform_baselines(length: int) -> dict[str, float]:
    """Each score of ``head_scores`` for a head that attends evenly.

    Example:
        >>> even = head_scores.uniform_baselines(50)
        >>> round(even["previous"], 4), round(even["first"], 4)
        (0.042, 0.0515)
    """
    even = uniform_pattern(2 * length + 1)
    return {name: score(even, length).item() for name, score in SCORES.items()}


def olsson_scores(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch layer head"]:
    """Olsson's evaluator for every head (see ``olsson_prefix_matching``).

    Example:
        >>> head_scores.olsson_scores(net, task.tokens).shape
        torch.Size([8, 2, 4])
    """
    patterns = _patterns(model, tokens)
    return torch.stack([olsson_prefix_matching(pattern, tokens) for pattern in patterns], 1)


def detector_scores(
    model: TransformerBridge, tokens: Int[Tensor, "1 pos"]
) -> dict[str, Float[Tensor, "layer head"]]:
    """TransformerLens' own head detector ("mul" score) on one sequence.

    It divides by the attention of *all* rows, so on repeated tokens without chance repeats it
    equals ``previous * 2L/S``, ``prefix * L/S`` and ``duplicate * L/S``, S = 2L + 1.

    Example:
        >>> sorted(head_scores.detector_scores(net, task.tokens[:1]))
        ['duplicate', 'prefix', 'previous']
    """
    patterns = torch.stack(_patterns(model, tokens), 1)[0].cpu()  # layer, head, dest, src
    wanted = {
        "previous": head_detector.get_previous_token_head_detection_pattern,
        "duplicate": head_detector.get_duplicate_token_head_detection_pattern,
        "prefix": head_detector.get_induction_head_detection_pattern,
    }
    options: dict = {"exclude_bos": False, "exclude_current_token": False, "error_measure": "mul"}
    similarity = head_detector.compute_head_attention_similarity_score
    scores = {}
    for name, build in wanted.items():
        expected = build(tokens.cpu())
        found = [similarity(pattern, expected, **options) for pattern in patterns.flatten(0, 1)]
        scores[name] = torch.tensor(found).view(patterns.shape[:2])
    return scores


def strongest(scores: Float[Tensor, "layer head"]) -> tuple[int, int]:
    """(layer, head) of the largest score.

    Example:
        >>> head_scores.strongest(torch.tensor([[0.1, 0.2], [0.9, 0.3]]))
        (1, 0)
    """
    return divmod(int(scores.argmax()), scores.shape[1])


def _patterns(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> list[Float[Tensor, "batch head dest src"]]:
    """Attention patterns of every layer."""
    names = [get_act_name("pattern", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    return [cache[name] for name in names]
