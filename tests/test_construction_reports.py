"""Reports on programs: sizes, what improves, where it breaks."""

from __future__ import annotations

import math

import pytest

from iclutils import IclError
from iclutils.chapters.constructions.reports import report, reports


def test_a_report_says_what_was_built() -> None:
    found = report("ridge", "improved", dim=2, examples=3, penalty=0.5, contexts=4)
    assert (found.layers, found.per_example, found.width) == (13, 4, 27)
    assert (found.kind, found.variant, found.precision) == ("ridge", "improved", "float64")
    assert (found.dim, found.examples, found.penalty) == (2, 3, 0.5)
    assert 1e-15 < found.error < 1e-9
    assert found.direct_error < 1e-13
    assert found == report("ridge", "improved", dim=2, examples=3, penalty=0.5, contexts=4)
    assert report("gradient").penalty == 0
    assert report("ridge").penalty == 1
    single = report("ridge", precision="float32")
    assert 1e-8 < single.direct_error < single.error < 1e-3


def test_each_improvement_improves() -> None:
    rows = reports("ridge", variant=["paper", "stencil", "improved"], penalty=[0.01, 1.0], dim=3)
    errors = {(row.variant, row.penalty): row.error for row in rows}
    assert len(errors) == 6
    assert errors["paper", 1.0] > 30 * errors["stencil", 1.0]
    assert errors["paper", 0.01] > 1000 * errors["improved", 0.01]
    assert errors["stencil", 0.01] > 1000 * errors["improved", 0.01]
    paper, improved = reports("gradient", variant=["paper", "improved"])
    assert paper.error > 100 * improved.error
    assert paper.largest > 1e6 * improved.largest


def test_where_the_paper_breaks() -> None:
    """Single precision with a small penalty: no digit is right; the improved form keeps three."""
    paper, improved = reports(
        "ridge", variant=["paper", "improved"], penalty=0.001, dim=3, precision="float32"
    )
    assert paper.error > 1 > 1e-2 > improved.error
    assert report("gradient", "improved", eps=1e-9).error > 1e-8  # rounding
    assert report("gradient", "improved", eps=2.0).error > 1e-3  # truncation
    assert report("gradient", scale=1.0).error < report("gradient", scale=8.0).error
    # Far out the plain formula overflows to what is not a number.
    assert report("ridge", scale=1e30, precision="float32").direct_error == math.inf


def test_wrong_reports_are_refused() -> None:
    for changes, message in (
        ({"dim": 0}, "d ≥ 1"),
        ({"examples": 0}, "n ≥ 1"),
        ({"contexts": 0}, "context"),
        ({"penalty": 0.0}, "penalty"),
        ({"eps": -1.0}, "ε"),
        ({"scale": float("nan")}, "scale"),
    ):
        with pytest.raises(IclError, match=message):
            report("ridge", **changes)
