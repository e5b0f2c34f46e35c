"""What a head looks at, as scores of its attention pattern, and which scores are above chance.

Chance is the largest of what even attention, heads of untrained models and (for scores that depend
on content) the model's own heads on shuffled tokens score. A head may be above it in several scores
or in none; they belong to a head and a kind of sequence."""

from collections.abc import Mapping, Sequence
from math import isnan, nan

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ...interp import head_scores
from ...interp.head_scores import attention_patterns, uniform_pattern
from ...models import TransformerBridge

CONTENT = ("duplicate", "induction")  # scores that depend on which tokens are the same
SCORES = ("previous", "current", "local", "first", "even", "hierarchical", *CONTENT)
NEAR = 3  # positions back that still are local

Tokens = Int[Tensor, "batch pos"]
Scores = Mapping[str, Float[Tensor, "batch layer head"]]
Pooled = Mapping[str, Float[Tensor, "_"]]  # scores of many heads and sequences together


def pattern_scores(
    pattern: Float[Tensor, "batch head dest src"], tokens: Int[Tensor, "batch dest"]
) -> dict[str, Float[Tensor, "batch head"]]:
    """Return all scores of some heads, by sequence: means over rows, 0 to 1; row 0 is left out of
    all but ``first``. ``previous``, ``current``: attention to the token before, to the token
    itself. ``local``: to the last four positions. ``first``: to the first token (sink; Xiao et al.
    2024). ``even``: entropy over ln(t + 1). ``hierarchical`` (ours): entropy of the mass in the
    distance bands {0}, {1}, {2, 3}, {4 .. 7}, .. over the log of their number, for rows with at
    least three. ``duplicate``: to earlier occurrences of the token; ``induction``: to what followed
    them (Olsson et al. 2022); both NaN where nothing repeats."""
    size = tokens.shape[1]
    entropy = torch.special.entr(pattern).sum(-1)[..., 1:]
    highest = torch.arange(2, size + 1, device=pattern.device).log()
    place = torch.arange(size, device=pattern.device)
    back = place[:, None] - place  # (dest, src)
    return {
        "previous": head_scores.previous_token(pattern),
        "current": pattern.diagonal(0, -2, -1)[..., 1:].mean(-1),
        "local": (pattern * (back <= NEAR)).sum(-1)[..., 1:].mean(-1),
        "first": head_scores.first_token(pattern),
        "even": (entropy / highest).mean(-1),
        "hierarchical": _band_entropy(pattern, back),
        "duplicate": head_scores.attention_to(pattern, head_scores.repeats(tokens)),
        "induction": head_scores.attention_to(pattern, head_scores.followers(tokens)),
    }


def _band_entropy(pattern: Tensor, back: Int[Tensor, "dest src"]) -> Float[Tensor, "*lead"]:
    """Return the entropy over dyadic bands of the distance back, over that of equal mass."""
    # The exponent of a distance is its band: 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3, ..
    band = torch.frexp(back.clamp_min(0).float()).exponent.long()
    in_band = torch.nn.functional.one_hot(band).to(pattern)
    mass = torch.einsum("...ts,tsk->...tk", pattern, in_band)
    highest = (band[:, 0] + 1).log()  # a row's own bands: those up to its distance from the start
    return (torch.special.entr(mass).sum(-1) / highest)[..., 2:].mean(-1)


def scores(
    model: TransformerBridge, tokens: Tokens, repeats_of: Tokens | None = None
) -> dict[str, Float[Tensor, "batch layer head"]]:
    """Return all scores of all heads, from one forward pass. ``repeats_of``: tokens that decide
    what repeats, where it is not those that the model reads."""
    ids = tokens if repeats_of is None else repeats_of
    layers = [pattern_scores(pattern, ids) for pattern in attention_patterns(model, tokens)]
    return {name: torch.stack([layer[name] for layer in layers], 1) for name in SCORES}


def uniform_scores(tokens: Tokens) -> dict[str, Float[Tensor, "batch"]]:
    """Return the same scores for a head that spreads its attention evenly."""
    even = uniform_pattern(tokens.shape[1]).to(tokens.device).expand(len(tokens), 1, -1, -1)
    return {name: values[:, 0] for name, values in pattern_scores(even, tokens).items()}


def null_scores(models: Sequence[TransformerBridge], tokens: Tokens) -> Pooled:
    """Return the scores of every head of untrained models on every sequence."""
    of_models = [scores(model, tokens) for model in models]
    return {name: torch.cat([one[name].flatten() for one in of_models]) for name in SCORES}


def shuffled_scores(model: TransformerBridge, tokens: Tokens, generator: Generator) -> Pooled:
    """Return the scores that position alone gives, the null of those in ``CONTENT``: shuffled
    tokens (all but the first) are read, the original ones say what repeats."""
    order = torch.rand(tokens[:, 1:].shape, generator=generator).argsort(-1).to(tokens.device)
    shuffled = torch.cat([tokens[:, :1], tokens[:, 1:].gather(1, order)], 1)
    by_position = scores(model, shuffled, repeats_of=tokens)
    return {name: by_position[name].flatten() for name in CONTENT}


def thresholds(
    nulls: Sequence[Pooled], uniform: Mapping[str, Float[Tensor, "batch"]], alpha: float = 0.01
) -> dict[str, float]:
    """Return the largest (1 - alpha)-quantile of the nulls and of even attention for each score;
    NaN where no score can be above it (``even``) or nothing defines it."""
    limits = {}
    for name in SCORES:
        defined = [null[name].double() for null in [*nulls, uniform] if name in null]
        highest = [values.nanquantile(1 - alpha).item() for values in defined]
        limit = max((q for q in highest if not isnan(q)), default=nan)
        limits[name] = limit if limit < 1 - 1e-6 else nan
    return limits


def excess(scores: Scores, limits: Mapping[str, float]) -> Float[Tensor, "layer head score"]:
    """Return calibrated scores, in the order of ``SCORES``: 0 at the threshold, 1 at the highest
    possible, NaN if undefined."""
    above = [(scores[n].double().nanmean(0) - limits[n]) / (1 - limits[n]) for n in SCORES]
    return torch.stack(above, -1)
