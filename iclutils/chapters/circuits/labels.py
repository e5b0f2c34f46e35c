"""Labels: which scores of a head are more than chance; several may be, or none.

A threshold is the largest of three things that happen by chance: what even attention scores, what
the heads of untrained models score, and (for what depends on content) what the model's own heads
score where the tokens that they read are shuffled. A head gets every label whose score is above,
even two standard errors lower. ``even`` is never given: even attention, which is chance, has the
highest score that there is, so no head can be told from it by looking even. Its score remains.

Thresholds replace those of seed note 004, section 5.2 (.7, .5, .6). Patterns depend on what is
read: labels belong to a head *and* a kind of sequence.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import labels, patterns
    >>> generator = torch.Generator().manual_seed(0)
    >>> null = models.random_init("induction-0", seed=1)
    >>> net = models.load("induction-0")
    >>> tokens = torch.randint(1, net.cfg.d_vocab, (32, 6), generator=generator).repeat(1, 2)
    >>> nulls = labels.null_scores([null], tokens)
    >>> limits = labels.thresholds([nulls], patterns.even_scores(tokens))
    >>> scores = patterns.every_score(net, tokens)
    >>> given = labels.labels(scores, limits)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from ...errors import IclError
from ...models import TransformerBridge
from ...progress import bar
from .patterns import SCORES, every_score

CONTENT = ("duplicate", "induction")  # scores that depend on which tokens are the same
FEWEST = 30  # sequences behind a label
Scores = Mapping[str, Float[Tensor, "batch layer head"]]


def null_scores(
    models: Sequence[TransformerBridge], tokens: Int[Tensor, "batch pos"]
) -> dict[str, Float[Tensor, "_"]]:
    """Scores of every head of untrained models on every sequence, undefined ones left out.

    Example:
        >>> sorted(nulls) == sorted(patterns.SCORES)
        True
    """
    if not models:
        raise IclError("The null needs at least one untrained model.")
    every = [every_score(m, tokens) for m in bar(models, "untrained models")]
    return {name: _defined(torch.cat([s[name].flatten() for s in every])) for name in SCORES}


def shuffled_scores(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], generator: Generator
) -> dict[str, Float[Tensor, "_"]]:
    """What position alone scores: shuffled tokens are read, the original ones say what repeats.

    Every sequence is shuffled for itself, the first token stays. (Scored by what repeats in the
    shuffled sequence, a real induction head would still score high: tokens still recur.)

    Example:
        >>> "induction" in labels.shuffled_scores(net, tokens, generator)
        True
    """
    count, size = tokens.shape
    order = torch.rand(count, size - 1, generator=generator).argsort(-1).to(tokens.device)
    mixed = torch.cat([tokens[:, :1], tokens[:, 1:].gather(1, order)], 1)
    scores = every_score(model, mixed, scored_as=tokens)
    return {name: _defined(scores[name].flatten()) for name in CONTENT}


def thresholds(
    nulls: Sequence[Mapping[str, Float[Tensor, "_"]]],
    even: Mapping[str, Float[Tensor, "batch"]],
    alpha: float = 0.01,
) -> dict[str, float]:
    """Largest (1 - alpha)-quantile of the nulls and of even attention, for each score.

    NaN, and no label, where no score can be above it (``even``) or nothing defines it.

    Example:
        >>> 0 < limits["induction"] < 1
        True
    """
    if not 0 < alpha < 1:
        raise IclError(f"alpha must lie between 0 and 1; got {alpha}.")
    out = {}
    for name in SCORES:
        held = [_defined(null[name]).double() for null in [*nulls, even] if name in null]
        limits = [values.quantile(1 - alpha).item() for values in held if len(values)]
        limit = max(limits, default=float("nan"))
        out[name] = limit if limit < 1 - 1e-6 else float("nan")
    return out


def labels(scores: Scores, limits: Mapping[str, float]) -> Bool[Tensor, "layer head label"]:
    """Which labels a head has, in the order of ``SCORES``: mean - 2 SE above the threshold.

    A score that fewer than 30 of the sequences define gives no label.

    Example:
        >>> given.shape == (2, 4, len(patterns.SCORES))
        True
    """
    count = len(scores[SCORES[0]])
    if count < FEWEST:
        raise IclError(f"Labels need at least {FEWEST} sequences; got {count}.")
    out = []
    for name in SCORES:
        values = scores[name].double()
        known = (~values.isnan()).sum(0)
        mean = values.nanmean(0)
        error = ((values - mean).square().nansum(0) / (known - 1) / known).sqrt()
        out.append((known >= FEWEST) & (mean - 2 * error > limits[name]))
    return torch.stack(out, -1)


def excess(scores: Scores, limits: Mapping[str, float]) -> Float[Tensor, "layer head label"]:
    """Calibrated scores: 0 at the threshold, 1 at the most there is; NaN where undefined.

    Example:
        >>> calibrated = labels.excess(scores, limits)[..., patterns.SCORES.index("induction")]
        >>> bool((calibrated[given[..., patterns.SCORES.index("induction")]] > 0).all())
        True
    """
    each = [(scores[n].double().nanmean(0) - limits[n]) / (1 - limits[n]) for n in SCORES]
    return torch.stack(each, -1)


def false_alarms(given: Bool[Tensor, "layer head label"], limits: Mapping[str, float]) -> float:
    """Share of the labels that could be given which these heads (untrained ones) have.

    Example:
        >>> alarms = labels.labels(patterns.every_score(null, tokens), limits)
        >>> labels.false_alarms(alarms, limits) < 0.1
        True
    """
    possible = [i for i, name in enumerate(SCORES) if not isnan(limits[name])]
    return given[..., possible].double().mean().item()


def likeness(
    first: Bool[Tensor, "layer head label"], second: Bool[Tensor, "layer head label"]
) -> float:
    """Mean Jaccard similarity of the labels of a head on two kinds of sequences.

    Over the heads that have a label on at least one; NaN if none has.

    Example:
        >>> labels.likeness(given, given)
        1.0
    """
    both, either = (first & second).sum(-1), (first | second).sum(-1)
    return (both[either > 0] / either[either > 0]).double().mean().item()


def rows(
    scores: Scores,
    limits: Mapping[str, float],
    given: Bool[Tensor, "layer head label"],
    **more: Float[Tensor, "layer head"],
) -> list[dict[str, object]]:
    """The table of heads, one row for each: every score beside its threshold, labels, ``more``.

    ``more``: further columns, such as ``removal`` and ``direct`` (effects in nats and logits).

    Example:
        >>> table = labels.rows(scores, limits, given)
        >>> len(table)
        8
    """
    means = {name: scores[name].double().nanmean(0) for name in SCORES}
    table: list[dict[str, object]] = []
    for layer in range(given.shape[0]):
        for head in range(given.shape[1]):
            row: dict[str, object] = {"layer": layer, "head": head}
            for name in SCORES:
                row[name] = means[name][layer, head].item()
                row[f"{name} by chance"] = limits[name]
            named = [n for n, has in zip(SCORES, given[layer, head].tolist(), strict=True) if has]
            row["labels"] = ", ".join(named)
            table.append(row | {k: v[layer, head].item() for k, v in more.items()})
    return table


def _defined(values: Float[Tensor, "*any"]) -> Float[Tensor, "known"]:
    return values[~values.isnan()]
