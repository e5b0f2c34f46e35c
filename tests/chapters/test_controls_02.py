"""What the label-words paper publishes passes the criterion of chapter 02 that is about it; an
effect of nothing fails. (It publishes no spreads.)"""

import pytest

from iclutils.bookkit import claims

SETS = 4  # SST-2, TREC, AG News, EmoC
ONE_SHOT = (61.28, 57.56, 73.32, 15.44)  # table 1, percent
SEVERAL = (64.75, 60.40, 52.52, 9.80)
REWEIGHTED = (90.07, 60.92, 81.94, 41.64)
CHANCE = (100 / 2, 100 / 6, 100 / 4, 100 / 4)
HIDDEN, TEXT, TOP = (79.47, 45.04), (51.05, 38.77), (57.52, 41.72)  # table 2: loyalty, accuracy


def mean(values: tuple[float, ...]) -> float:
    return sum(values) / SETS


PUBLISHED = {
    "02.more_shots": (mean(SEVERAL) - mean(ONE_SHOT)) / 100,
    "02.reweighting": (mean(REWEIGHTED) - mean(ONE_SHOT)) / 100,
    "02.auc_deep": 0.8,
    "02.beats_text": (HIDDEN[1] - TEXT[1]) / 100,
    "02.beats_random": (HIDDEN[0] - TOP[0]) / 100,
    "02.compressed_accuracy": (HIDDEN[1] - mean(CHANCE)) / (mean(ONE_SHOT) - mean(CHANCE)),
    "02.faster": 1.8,
}


@pytest.mark.parametrize(("claim", "value"), PUBLISHED.items())
def test_the_paper_passes(claim: str, value: float) -> None:
    known = claims.ledger()[claim]
    assert known.published == pytest.approx(value, abs=6e-4)
    assert {known.verdict(tier, value, 0.0, 5) for tier in known.tiers} == {claims.HOLDS}


@pytest.mark.parametrize("claim", PUBLISHED)
def test_no_effect_fails(claim: str) -> None:
    nothing = {"02.auc_deep": 0.5, "02.faster": 1.0}.get(claim, 0.0)
    known = claims.ledger()[claim]
    assert {known.verdict(tier, nothing, 0.0, 5) for tier in known.tiers} == {claims.FAILS}


def test_every_published_number_is_here_or_a_cell_of_a_table() -> None:
    """The rest belong to GPT2-XL, and pass by construction: their bounds are around them."""
    known = claims.ledger("02")
    published = {name: claim for name, claim in known.items() if claim.published is not None}
    for name, claim in published.items():
        if name not in PUBLISHED:
            assert list(claim.tiers) == ["paper"], name
            assert claim.verdict("paper", claim.published, 0.0, 5) == claims.HOLDS, name
