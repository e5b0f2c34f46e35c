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


def test_a_row_has_every_column_and_the_null_of_its_own_or_random_weights(make_ledger, tmp_path):
    def said():
        table = scorecard.rows(claims.read_results(tmp_path / "results"))
        return [[(entry.verdict, entry.value) for entry in row.values()] for row in table]

    make_ledger("90_demo", LEDGER)
    measured("90.first", 0.5)
    no, none = ("not run",) * 2, ("–",) * 2
    assert said() == [[("weaker", "0.500"), *[no] * 5], [*[no] * 2, *[none] * 4]]
    measured("90.first", [2.0, 3.0, 4.0])
    measured("90.first", float("nan"), tier="mini-null")
    measured("90.first", 3.0, tier="paper")
    undefined = ("not measurable",) * 2
    wanted = [("weaker", "3.0 ± 0.6"), undefined, no, no, ("reproduced", "3.00"), no]
    assert said()[0] == wanted
    measured("90.first", 2.0, null=[0.0, 0.0])
    assert said()[0][1] == ("fails its bar", "0")
    published = [scorecard.published(claim) for claim in claims.ledger().values()]
    assert published == ["−13.898", "no number"]
