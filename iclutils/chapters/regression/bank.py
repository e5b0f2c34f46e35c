"""The textbook algorithms that a learner is compared with, by name.

Example:
    >>> from iclutils.chapters.regression import bank
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from torch import Tensor

from ...errors import IclError, unknown
from .algorithms import (
    Linear,
    Predictor,
    averaging_weights,
    gd_weights,
    knn,
    ols_weights,
    released_gd_weights,
    released_sgd_weights,
    ridge_weights,
    sgd_weights,
    tuned_rate,
)


def bank(which: str = "wide", ratio: float = 0.0) -> dict[str, Predictor]:
    """Algorithms to compare a learner with, by name; those with weights are ``Linear``.

    Args:
        which: ``paper``, those of {cite}`akyurek2023`; ``released``, those of its code; ``wide``,
            the paper's and averaging, with ridge penalties from 1/64 to 16 (so that "it is GD"
            cannot mean that no ridge was strong enough), more rates, the best rates, and GD of
            several steps.
        ratio: noise² / prior² of the task, for the best rate of GD (``tuned_rate``). That of SGD
            is 1 / (2 (d + 2)), at which |w - w_n|² shrinks fastest.

    Example:
        >>> [name for name in bank.bank("paper") if "GD" in name]
        ['GD 0.01', 'GD 0.02', 'SGD 0.01', 'SGD 0.03']
    """
    if which not in ("wide", "paper", "released"):
        raise unknown("bank", which, ["wide", "paper", "released"])
    if not 0 <= ratio < math.inf:
        raise IclError(f"noise² / prior² must be finite and at least 0; got {ratio}.")
    found: dict[str, Predictor] = {"OLS": Linear(ols_weights)}

    def add(name: str, weights: Callable[..., Tensor], **given: Any) -> None:
        found[name] = Linear(partial(weights, **given))

    strengths = [
        *("1/64", "1/32", "1/16", "1/10", "1/9", "1/8", "1/4", "4/9", "1/2"),
        *("1", "2", "4", "8", "16"),
    ]
    for strength in strengths if which == "wide" else ["1/10", "1/2"]:
        add(f"ridge {strength}", ridge_weights, penalty=float(Fraction(strength)))
    if which == "released":
        for rate in (0.02, 0.03):
            add(f"GD {rate} (released)", released_gd_weights, rate=rate)
            add(f"SGD {rate} (released)", released_sgd_weights, rate=rate)
        return found | {"5-NN": partial(knn, k=5), "5-NN 1/r": partial(knn, k=5, power=1.0)}
    more = [0.05, 0.1] if which == "wide" else []
    for rate in [0.01, 0.02, *more]:
        add(f"GD {rate}", gd_weights, rate=rate)
    for rate in [0.01, 0.03, *more]:
        add(f"SGD {rate}", sgd_weights, rate=rate)
    if which == "wide":
        add("GD best", _best_gd, ratio=ratio, steps=1)
        for steps in (2, 4, 8):
            add(f"GD best, {steps} steps", _best_gd, ratio=ratio, steps=steps)
        add("SGD best", _best_sgd)
        add("averaging", averaging_weights)
    return found | {"3-NN": partial(knn, k=3), "3-NN 1/r²": partial(knn, k=3, power=2.0)}


def _best_gd(xs: Tensor, ys: Tensor, ratio: float, steps: int) -> Tensor:
    return gd_weights(xs, ys, tuned_rate(xs.shape[-2], xs.shape[-1], ratio), steps)


def _best_sgd(xs: Tensor, ys: Tensor) -> Tensor:
    return sgd_weights(xs, ys, 0.5 / (xs.shape[-1] + 2))
