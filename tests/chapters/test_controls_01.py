"""Chapter 01's criteria accept what the sources publish, and refuse what no training gives."""

from __future__ import annotations

import math

import pytest

from iclutils.bookkit import claims
from iclutils.interp.head_scores import uniform_baselines

LEDGER = claims.ledger("01")
PUBLISHED = {name: float(c.published) for name, c in LEDGER.items() if c.published is not None}
EVEN = uniform_baselines(50)
STATED = {"01.prefix_best": 0.932}  # GPT-2 small's strongest head in the published list
NOTHING = {
    "01.repetition_gain": 0.0,
    "01.second_half_accuracy": 0.0,
    "01.second_half_logp": -math.log(50257),
    "01.prefix_best": EVEN["prefix"],
    "01.previous_best": EVEN["previous"],
    "01.circuit_top1": 1 / 50257,
    "01.circuit_above_null": 0.5,
    "01.mlp_patch_first": 1 / 50,
    "01.cause_previous": 1.0,
    "01.cause_k_path": 1.0,
    "01.cause_all_previous": 1.0,
    "01.cause_all_k_paths": 1.0,
    "01.cause_other_heads": 0.0,
    "01.cause_loss": 0.0,
    "01.cause_loss_random": 1.0,
    "01.phase_change": 0.7,
}


def verdict(name: str, value: float) -> set[str]:
    claim = LEDGER[name]
    return {claim.verdict(tier, value, 0.0, 5) for tier in claim.tiers}


@pytest.mark.parametrize("name", sorted(PUBLISHED | STATED))
def test_what_the_source_publishes_holds(name: str) -> None:
    assert verdict(name, (STATED | PUBLISHED)[name]) == {claims.HOLDS}


@pytest.mark.parametrize("name", sorted(NOTHING))
def test_no_effect_does_not_hold(name: str) -> None:
    assert verdict(name, NOTHING[name]) == {claims.FAILS}
