"""The scorecard as data and text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger import LEDGER, measured

from iclutils import claims, scorecard


@pytest.mark.parametrize(
    ("value", "spread", "shown"),
    [
        (0.0, 0.0, "0"),
        (-13.898, 0.0, "−13.9"),
        (0.9123, 0.004, "0.912 ± 0.004"),
        (-0.6441, 0.0312, "−0.64 ± 0.03"),
        (1e-6, 0.0, "1.00 × 10⁻⁶"),
        (2e-6, 5e-7, "(2.0 ± 0.5) × 10⁻⁶"),
    ],
)
def test_numbers_are_coarse(value, spread, shown):
    assert scorecard.number(value, spread) == shown


@given(st.floats(-1e12, 1e12).filter(lambda x: abs(x) > 1e-12))
def test_a_number_keeps_three_digits(value):
    text = scorecard.number(value).replace("−", "-")
    mantissa, _, power = text.partition(" × 10")
    plain = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    assert float(mantissa) * 10 ** int(plain or 0) == pytest.approx(value, rel=6e-3)


def test_a_row_has_every_column_and_no_result_is_not_run(make_ledger, tmp_path):
    make_ledger("90_demo", LEDGER)
    measured("90.first", 0.5)
    table = scorecard.rows(claims.read_results(tmp_path / "results"))
    assert [[(entry.verdict, entry.value) for entry in row.values()] for row in table] == [
        [("weaker", "0.500"), *[("not run",) * 2] * 5],
        [*[("not run",) * 2] * 2, *[("–",) * 2] * 4],
    ]
    assert scorecard.published(table[0]["mini"].claim) == "−13.898"
    assert scorecard.published(table[1]["mini"].claim) == "no number"


def test_the_null_is_the_run_with_random_weights_or_the_cells_own(make_ledger, tmp_path):
    make_ledger("90_demo", LEDGER)
    measured("90.first", [2.0, 3.0, 4.0])
    measured("90.first", float("nan"), tier="mini-null")
    measured("90.first", 3.0, tier="paper")
    row, _ = scorecard.rows(claims.read_results(tmp_path / "results"))
    said = [(entry.verdict, entry.value) for entry in row.values()]
    undefined = ("not measurable",) * 2
    none = ("not run", "not run")
    wanted = [("weaker", "3.0 ± 0.6"), undefined, none, none]
    assert said == [*wanted, ("reproduced", "3.00"), none]
    measured("90.first", 2.0, null=[0.0, 0.0])
    row, _ = scorecard.rows(claims.read_results(tmp_path / "results"))
    assert (row["mini-null"].verdict, row["mini-null"].value) == ("fails its bar", "0")


def test_verdicts_are_counted_by_fields_of_their_claims(make_ledger, tmp_path):
    make_ledger("90_demo", LEDGER)
    measured("90.first", -1.0)
    table = scorecard.rows(claims.read_results(tmp_path / "results"))
    assert scorecard.tally(scorecard.of(table, kind="finding")) == {"fails its bar": 1}
    assert scorecard.tally(scorecard.of(table, kind="erratum")) == {"not run": 1}
    assert scorecard.of(table, origin="note") == []
