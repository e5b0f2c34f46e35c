"""Criteria of chapters 01, 02 and 04: what a source publishes holds, and no effect does not.

Numbers are those of Olsson et al. 2022 (01), Wang et al. 2023 (02) and von Oswald et al. 2023 (04).
"""

from statistics import fmean

import pytest

from iclutils import claims
from iclutils.claims.verdicts import FAILS, HOLDS
from iclutils.interp.head_scores import uniform_baselines

EVEN = uniform_baselines(50)
LEDGER = claims.ledger()
# Table 1 of the label-words paper, in percent: SST-2, TREC, AG News, EmoC.
ONE_SHOT = fmean((61.28, 57.56, 73.32, 15.44))
SEVERAL, REWEIGHTED = fmean((64.75, 60.40, 52.52, 9.80)), fmean((90.07, 60.92, 81.94, 41.64))
LABEL_WORDS = {
    "02.more_shots": (SEVERAL - ONE_SHOT) / 100,
    "02.reweighting": (REWEIGHTED - ONE_SHOT) / 100,
    "02.auc_deep": 0.8,
}
PUBLISHED = {
    **{name: float(c.published) for name, c in LEDGER.items()
       if name.startswith("01.") and c.published is not None},
    "01.prefix_best": 0.932,  # GPT-2 small's strongest head in the published list
    **LABEL_WORDS,
    "04.one_cosine": 1.0,  # where the curves of the paper end
}  # fmt: skip
EFFECTS = "01.repetition_gain 01.second_half_accuracy 01.cause_loss"
EFFECTS += " 04.one_cosine"
RATIOS = "previous", "k_path", "loss_random"
NOTHING = {
    **dict.fromkeys([*EFFECTS.split(), *LABEL_WORDS], 0.0),
    **dict.fromkeys([f"01.cause_{name}" for name in RATIOS], 1.0),
    **dict.fromkeys(["01.circuit_above_null", "02.auc_deep"], 0.5),
    **{"01.prefix_best": EVEN["prefix"], "01.phase_change": 0.7},
}


def verdicts(name, value):
    """At every tier, of five cases without a spread."""
    return {LEDGER[name].verdict(tier, value, 0.0, 5) for tier in LEDGER[name].tiers}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_what_the_source_publishes_holds(name):
    assert verdicts(name, PUBLISHED[name]) == {HOLDS}


@pytest.mark.parametrize("name", sorted(NOTHING))
def test_no_effect_does_not_hold(name):
    assert verdicts(name, NOTHING[name]) == {FAILS}
