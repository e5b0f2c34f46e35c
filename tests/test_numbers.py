"""The numbers of the chapters that ran here are the committed ones: to 1e-4, with the same verdict.

The folder is the one that the notebooks wrote to, ``$ICLUTILS_RESULTS``, or the runner's. Two
processors differ by rounding, which no verdict may feel.
"""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from iclutils import claims
from tools.accept import is_close

ROOT = Path(__file__).parents[1]
WHOLE = bool(os.environ.get("WHOLE"))  # all notebooks were run: a file that is missing is a fault
FRESH = Path(os.environ.get("ICLUTILS_RESULTS") or ROOT / "_build/run/book/results")
COLUMNS = sorted(path.name for path in FRESH.glob("*") if path.is_dir())


def differences(column, fresh, committed, whole=False):
    """What is not the committed value, or was not measured, in a line each."""
    now, before = claims.read_results(fresh), claims.read_results(committed)
    for name, claim in claims.ledger().items():
        ran = whole or (fresh / column / f"{claim.chapter}.json").is_file()
        if not ran or claims.tier_of(column) not in claim.tiers or (column, name) not in before:
            continue
        if (column, name) not in now:
            yield f"{name} was not measured"
            continue
        pairs = [(now[column, name], before[column, name])]
        if all(each.null for each in pairs[0]):
            pairs.append(tuple(claims.null_of(each, {}) for each in pairs[0]))
        for one, other in pairs:
            if not is_close(one.value, other.value, claim.step) or one.verdict != other.verdict:
                a, b = (math.nan if x.value is None else x.value for x in (one, other))
                yield f"{name}: {b:.6g} ({other.verdict}) is committed, {a:.6g} ({one.verdict}) now"


@pytest.mark.parametrize("column", COLUMNS or [pytest.param("", marks=pytest.mark.skip(
    reason="no chapter was run here: python tools/run.py, or make test"))])  # fmt: skip
def test_numbers_are_the_committed_ones(column):
    assert not list(differences(column, FRESH, ROOT / "book/results", WHOLE))


@pytest.mark.parametrize("change", ["a number", "a verdict", "one missing"])
def test_a_change_is_seen(tmp_path, change):
    column, path = "mini", ROOT / "book/results/mini/01.json"
    results = claims.read_file(path)
    name = next(k for k, r in results.items() if (r.value or 0) > 0.2 and can_change(k, r))
    if change == "one missing":
        del results[name]
    else:
        factor = 1.001 if change == "a number" else 0.0
        results[name] = claims.replace(results[name], value=results[name].value * factor)
    (tmp_path / "now" / column).mkdir(parents=True)
    claims.write_file(tmp_path / "now" / column / "01.json", results)
    found = list(differences(column, tmp_path / "now", ROOT / "book/results"))
    assert len(found) == 1
    assert found[0].startswith(name)


def can_change(name, result):
    """Whether a value a thousandth larger, and 0, are values that the measure can give."""
    low, high = claims.find(name).range
    return low <= 0 and low <= result.value * 1.001 <= high


def test_one_swap_of_ranks_is_rounding_and_two_are_a_change(tmp_path):
    name, path = "06.estimate_ranks", ROOT / "book/results/real/06.json"
    results = claims.read_file(path)
    ranks = np.arange(30.0)
    swapped = ranks.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    largest = max(
        abs(spearmanr(ranks, order).statistic - spearmanr(swapped, order).statistic)
        for order in (np.roll(ranks, shift) for shift in range(30))
    )
    fresh = tmp_path / "now/real/06.json"
    fresh.parent.mkdir(parents=True)
    for count in (1, 2):
        value = results[name].value - count * largest / 6
        claims.write_file(fresh, results | {name: claims.replace(results[name], value=value)})
        assert len(list(differences("real", tmp_path / "now", ROOT / "book/results"))) == count - 1
