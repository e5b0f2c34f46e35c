"""Controls: what Akyurek et al. 2023 publish passes chapter 03's criteria; other numbers fail."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest

from iclutils.bookkit import claims

# Figure 2: rows least squares and ridge 1/16, 1/9, 1/4, 4/9; columns the same ratios of noise.
FIGURE_2 = (
    (1.25e-05, 1.34e-04, 3.96e-04, 1.51e-03, 4.13e-03),
    (1.10e-04, 3.29e-05, 1.12e-04, 8.24e-04, 2.92e-03),
    (3.49e-04, 9.65e-05, 3.86e-05, 4.50e-04, 2.15e-03),
    (1.69e-03, 8.64e-04, 4.39e-04, 3.30e-05, 6.81e-04),
    (4.83e-03, 3.09e-03, 2.21e-03, 7.52e-04, 6.10e-05),
)
COLUMNS = ("noise_0", "noise_1_16", "noise_1_9", "noise_1_4", "noise_4_9")


def verdict(name: str, value: float, spread: float = 0.0, count: int = 1) -> str:
    return claims.ledger("03")[f"03.{name}"].verdict("mini", value, spread, count)


@pytest.mark.parametrize("column", range(5))
def test_figure_2_by_column(column: int) -> None:
    entries = [row[column] for row in FIGURE_2]
    own = entries.pop(column)
    name, lead = COLUMNS[column], min(entries) - own
    assert claims.ledger("03")[f"03.{name}"].published == pytest.approx(lead, rel=0.01)
    assert verdict(name, lead, lead / 10, 2000) == claims.HOLDS
    assert verdict(name, lead, 2 * lead, 2000) == claims.PARTLY
    assert verdict(name, own - min(entries), lead / 10, 2000) == claims.FAILS


def test_the_level_of_figure_2() -> None:
    diagonal = [FIGURE_2[i][i] for i in range(5)]
    mean, error = fmean(diagonal), stdev(diagonal) / 5**0.5
    assert claims.ledger("03")["03.mspd_level"].published == pytest.approx(mean)
    assert verdict("mspd_level", mean, error, 5) == claims.HOLDS
    first_row = FIGURE_2[0][1:]  # least squares for every noise
    assert verdict("mspd_level", fmean(first_row), stdev(first_row) / 2, 4) != claims.HOLDS


@pytest.mark.parametrize(
    ("name", "holds", "fails"),
    [
        ("width_threshold", 16.0, 32.0),
        ("width_threshold_16", 32.0, 16.0),
        ("probe_order", 5 / 16, -5 / 16),  # layers 7 and 12 of 16
    ],
)
def test_published_numbers(name: str, holds: float, fails: float) -> None:
    assert claims.ledger("03")[f"03.{name}"].published == holds
    assert verdict(name, holds) == claims.HOLDS
    assert verdict(name, fails) == claims.FAILS
