"""What a source publishes passes the criterion of chapter 04 that is about it; what it does not,
fails."""

import pytest

from iclutils.bookkit import claims

HELD = [
    ("04.published_loss", (0.20468888,)),  # the constant of the released notebook
    ("04.one_cosine", (1.0, 0.0, 5)),  # where the curves of the paper end
    ("04.two_shared_plus", (1.0, 0.0, 5)),
    ("05.random_rate", (-0.5, 0.01, 100)),  # one over the square root of the number
]


@pytest.mark.parametrize(("claim", "measured"), HELD)
def test_the_source_passes(claim: str, measured: tuple[float, ...]) -> None:
    assert claims.ledger()[claim].verdict("mini", *measured) == claims.HOLDS


@pytest.mark.parametrize("claim", [claim for claim, _ in HELD])
def test_what_learnt_nothing_fails(claim: str) -> None:
    assert claims.ledger()[claim].verdict("mini", 0.0, 0.0, 5) == claims.FAILS
