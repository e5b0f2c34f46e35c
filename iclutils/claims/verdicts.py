"""Verdicts: what is said of a mean, by its criterion, and beside its null.

A criterion is ``"> a"``, ``">= a"``, ``"< a"``, ``"<= a"`` or ``"a .. b"`` (both ends included). A
claim *holds* if the whole 95 % interval of the mean meets the criterion. It is *weaker* if the
whole interval meets that or a second criterion that the ledger names. It *fails its bar* if no part
of the interval meets the first, and there are *too few to tell* if a part does. Where the finding
is reached, but the null reaches as much, the verdict is that the *null does as well*.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from scipy.special import stdtrit as student_quantile

from ..errors import IclError

if TYPE_CHECKING:
    from . import Result

HOLDS, WEAKER, UNCLEAR, FAILS = "holds", "weaker", "too few to tell", "fails its bar"
SAME, UNDEFINED = "null does as well", "not measurable"
JUDGED = (HOLDS, WEAKER, UNCLEAR, FAILS, SAME)
CRITERIA = ("holds", "weaker")
NUMBER = r"-?\d+(?:\.\d*)?(?:e-?\d+)?"
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def judge_mean(
    criteria: Mapping[str, str], possible: tuple[float, float], mean: tuple[float, float, int]
) -> str:
    """Judge a mean, given with its standard error and the number of repetitions, whatever its null;
    no repetition can lie outside ``possible``."""
    (first, last), (low, high), value = interval(*mean), possible, mean[0]
    first, last = max(low, first), min(high, last)
    inside = [x for text in criteria.values() for x in bounds(text) if first < x < last]
    points = [first, value, last, *inside]
    strong, weaker = (criterion(criteria.get(k, criteria["holds"])) for k in CRITERIA)
    if all(map(strong, points)):
        return HOLDS
    if all(strong(x) or weaker(x) for x in points):
        return WEAKER
    return UNCLEAR if any(map(strong, points)) else FAILS


def judge(result: "Result", null: "Result | None") -> str:
    """Judge a result beside its null. The null does as well as a finding if its verdict is
    as good; of pairs there are too few to tell if the interval of their difference has 0 in it."""
    word, good = result.verdict, (HOLDS, WEAKER)
    if not null or word not in good:
        return word
    if null.verdict in good[: good.index(word) + 1]:
        return SAME
    apart = difference(result, null) if (result.null or {}).get("paired") else None
    return UNCLEAR if apart and apart[1] <= 0 <= apart[2] else word


def difference(result: "Result", null: "Result | None") -> tuple[float, float, float] | None:
    """Return a result less its null, with the 95 % interval: of the pairs where the cell gave them,
    else Welch's; None where one of the two has no spread to judge by."""
    if paired := (result.null or {}).get("paired"):
        value, error, freedom = paired[0], paired[1], paired[2] - 1
    elif null and None not in (result.value, null.value) and min(result.count, null.count) > 1:
        value = result.value - null.value  # type: ignore[operator]
        parts = [(each.spread**2, each.count - 1) for each in (result, null)]
        error = math.hypot(result.spread, null.spread)
        freedom = error**4 / sum(part**2 / n for part, n in parts) if error else 1
    else:
        return None
    reach = error * float(student_quantile(freedom, 0.975))
    return value, value - reach, value + reach


def interval(value: float, spread: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a mean, from its standard error and how many it is of."""
    reach = spread * (float(student_quantile(count - 1, 0.975)) if count > 1 else 2.0)
    return value - reach, value + reach


@cache
def criterion(text: str) -> Callable[[float], bool]:
    """Return the test that a criterion stands for."""
    if not isinstance(text, str):
        raise IclError(f"Criterion {text!r} is not text: put it in quotation marks.")
    if between := re.fullmatch(rf"({NUMBER}) \.\. ({NUMBER})", text.strip()):
        low, high = map(float, between.groups())
        return lambda x: low <= x <= high
    if compare := re.fullmatch(rf"(<=|>=|<|>) ({NUMBER})", text.strip()):
        holds, bound = COMPARE[compare[1]], float(compare[2])
        return lambda x: holds(x, bound)
    raise IclError(f"Criterion {text!r} is not one of '> a', '>= a', '< a', '<= a', 'a .. b'.")


def bounds(text: str) -> list[float]:
    """Return the numbers of a criterion."""
    return [float(x) for x in re.findall(NUMBER, text)]
