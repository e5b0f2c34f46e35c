"""The scorecard as data and text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger import LEDGER

from iclutils.bookkit import claims, scorecard


@pytest.mark.parametrize(
    ("value", "spread", "shown"),
    [
        (0.0, 0.0, "0"),
        (-13.898, 0.0, "−13.9"),
        (0.9123, 0.0, "0.912"),
        (0.9123, 0.004, "0.912 ± 0.004"),
        (-0.6441, 0.0312, "−0.64 ± 0.03"),
        (12.3, 4.0, "12 ± 4"),
        (0.9123, 1e-9, "0.912"),
        (1e-6, 0.0, "1.00 × 10⁻⁶"),
        (2e-6, 5e-7, "(2.0 ± 0.5) × 10⁻⁶"),
        (0.0, 0.02, "0.00 ± 0.02"),
        (50257.0, 0.0, "50257"),
    ],
)
def test_numbers_are_coarse(value: float, spread: float, shown: str) -> None:
    assert scorecard.number(value, spread) == shown


@given(st.floats(-1e12, 1e12).filter(lambda x: abs(x) > 1e-12))
def test_a_number_keeps_three_digits(value: float) -> None:
    text = scorecard.number(value).replace("−", "-")
    mantissa, _, power = text.partition(" × 10")
    plain = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    assert float(mantissa) * 10 ** int(plain or 0) == pytest.approx(value, rel=6e-3)


def test_one_row_for_each_claim_and_tier_and_no_result_is_not_run(
    make_ledger: Callable[..., Path], tmp_path: Path
) -> None:
    make_ledger("90_demo", LEDGER)
    claims.check("90.first", 0.5, tier="mini", model="m", seed=0)
    table = scorecard.rows(claims.read_results(tmp_path / "results"))
    assert [(row.claim.id, row.tier, row.verdict, row.value) for row in table] == [
        ("90.first", "mini", "partly", "0.500"),
        ("90.first", "paper", "not run", "not run"),
        ("90.second", "mini", "not run", "not run"),
    ]
    assert scorecard.published(table[0].claim) == "−13.898"
    assert scorecard.published(table[2].claim) == "no figure"


def test_text_counts_verdicts_and_names_what_failed(
    make_ledger: Callable[..., Path], tmp_path: Path
) -> None:
    assert scorecard.text([]) == "No claims yet."
    make_ledger("90_demo", LEDGER)
    assert "Not reproduced" not in scorecard.text(scorecard.rows({}))
    claims.check("90.first", -1.0, tier="mini", model="m", seed=0)
    text = scorecard.text(scorecard.rows(claims.read_results(tmp_path / "results")))
    rows = [re.split(r" {2,}", line) for line in text.splitlines()]
    assert rows[0] == ["chapter", "tier", *claims.VERDICTS]
    assert rows[1:3] == [
        ["90", "mini", "0", "0", "0", "1", "1"],
        ["90", "paper", "0", "0", "0", "0", "1"],
    ]
    assert rows[3] == ["Not reproduced: 90.first (mini)"]
