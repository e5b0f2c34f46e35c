"""The ledger refuses claims that cannot fail, and judges values as its criteria say."""

import json
import math
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from ledger import dump, entry, measured

from iclutils import claims
from iclutils.claims import Claim, verdicts
from iclutils.errors import IclError

NUMBERS = st.floats(-1e6, 1e6)
ROOT = Path(__file__).parents[1]


def claim(criteria, **changes):
    fields = entry(tiers={"mini": criteria}, range=(-math.inf, math.inf)) | changes
    return Claim(**fields)


@pytest.fixture
def one(make_ledger):
    make_ledger("90_demo", dump(entry()))


def test_every_form_of_criterion():
    for text, holds, fails in (
        ("> 0.5", [0.51, 7.0], [0.5, -1.0]),
        (">= 0.5", [0.5, 7.0], [0.49]),
        ("< -2", [-2.1], [-2.0, 0.0]),
        ("<= 1e-5", [1e-5, -1.0], [2e-5]),
        ("-1 .. 2.5", [-1.0, 0.0, 2.5], [-1.01, 2.51]),
    ):
        it = claim({"holds": text})
        assert {it.verdict("mini", x) for x in holds} == {verdicts.HOLDS}
        assert {it.verdict("mini-null", x) for x in fails} == {verdicts.FAILS}


@given(st.lists(NUMBERS, min_size=2, max_size=2, unique=True), st.tuples(NUMBERS, NUMBERS))
def test_the_stronger_criterion_decides(bounds, values):
    low, high = (float(f"{bound:.12f}") for bound in sorted(bounds))
    it = claim({"holds": f">= {high:.12f}", "weaker": f">= {low:.12f}"})
    for value in (*values, low, high):
        wanted = (
            verdicts.HOLDS if value >= high else verdicts.WEAKER if value >= low else verdicts.FAILS
        )
        assert it.verdict("mini", value) == wanted


@given(
    values=st.lists(st.integers(-1000, 1000), min_size=5, max_size=20), bound=st.integers(-900, 900)
)
def test_a_claim_holds_where_the_whole_interval_of_student_does(values, bound):
    it = claim({"holds": f"> {bound}", "weaker": f"> {bound - 50}"})
    value, error, count = claims.summary(values)
    found = scipy.stats.ttest_1samp(values, bound).confidence_interval(0.95)
    low, high = (found.low, found.high) if error else (value, value)
    wanted = verdicts.UNCLEAR if high > bound else verdicts.FAILS
    wanted = verdicts.HOLDS if low > bound else verdicts.WEAKER if low > bound - 50 else wanted
    if min(abs(end - x) for end in (low, high) for x in (bound, bound - 50)) > 1e-6:
        assert it.verdict("mini", value, error, count) == wanted


def test_an_interval_ends_where_values_do_and_straddles_a_band_that_it_contains():
    bounded = claim({"holds": "0.9 .. 1"}, range=(0.0, 1.0))
    assert bounded.verdict("mini", 0.99, 0.02, 10) == verdicts.HOLDS
    assert bounded.verdict("mini", 0.99, 0.05, 10) == verdicts.UNCLEAR
    assert claim({"holds": "0.4 .. 0.6"}).verdict("mini", 0.7, 0.2, 10) == verdicts.UNCLEAR


def mini(**criteria):
    return {"tiers": {"mini": criteria}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (mini(), "needs the criterion"),
        (mini(holds=">= 0"), "cannot fail"),  # the whole range
        (mini(holds="> 0.5", weaker="<= 0.5"), "cannot fail"),  # together they cover it
        (mini(holds="> 1"), "can never decide"),  # outside the range
        (mini(holds=">= 0.5", weaker=">= 0.8"), "can never decide"),  # the first does
        *((mini(holds=x), "is not one of") for x in ("< nan", "= 0.5", "1")),
        (mini(hold=">= 0.8"), "Did you mean 'holds'"),
        ({"tiers": {"mni": {"holds": ">= 0.8"}}}, "Did you mean 'mini'"),
        ({"statement": None}, "statement"),
        ({"id": "91.score"}, "does not belong here"),
        *((x, "90_demo") for x in ("just text", "a: [", dump(entry(), entry()))),
    ],
)
def test_a_malformed_claim_or_file_is_refused(make_ledger, changes, message):
    make_ledger("90_demo", changes if isinstance(changes, str) else dump(entry(**changes)))
    with pytest.raises(IclError, match=message) as caught:
        claims.ledger("90")
    own = "90" if isinstance(changes, str) else changes.get("id", "90")
    assert own in str(caught.value), "it names the claim"


def test_ledgers_are_found_by_number_and_name(make_ledger):
    tiers = {"mini": {"holds": "> 0.5"}, "paper": "mini"}
    make_ledger("90_demo", dump(entry(tiers=tiers)))
    make_ledger("91_other", dump(entry(id="91.score")))
    assert list(claims.ledger("90_demo")) == list(claims.ledger("90")) == ["90.score"]
    assert list(claims.ledger()) == ["90.score", "91.score"]
    it = claims.ledger()["90.score"]
    assert it.tiers["paper"] == it.tiers["mini"] == {"holds": "> 0.5"}, "criteria of another tier"
    with pytest.raises(IclError, match="Did you mean '91_other'"):
        claims.ledger("91_othr")


def test_results_of_a_chapter_share_a_file_with_their_provenance(
    make_ledger, tmp_path, monkeypatch
):
    """A chapter and its appendix, or two runs; the same conditions stand once."""
    make_ledger("90_demo", dump(entry(), entry(id="90.other")))
    detail, path = {"heads": [1], "note": "é"}, tmp_path / "results/mini/90.json"
    first = measured("90.score", 0.8123456789, 0.001, 5, null=[0.2, 0.2], detail=detail)
    (run,) = json.loads(path.read_text())["runs"]
    known = {"value": 0.8123456789, "spread": 0.001, "count": 5, "detail": detail}
    known["null"] = {"value": 0.2, "spread": 0.0, "count": 2}
    assert run.pop("claims") == {"90.score": known}, "and no verdict"
    assert run == claims.provenance() | {"tier": "mini", "model": "m", "seed": 0, "device": "cpu"}
    conditions = {"versions": {}, "python": "3", "commit": "", "date": ""}
    monkeypatch.setattr(claims, "provenance", lambda: conditions)
    second = measured("90.other", 0.6)
    assert len(json.loads(path.read_text())["runs"]) == 2
    assert claims.read_file(path) == {"90.score": first, "90.other": second}
    again = measured("90.score", 0.7)
    assert len(json.loads(path.read_text())["runs"]) == 1
    assert claims.read_file(path) == {"90.score": again, "90.other": second}
    assert claims.read_results(path.parents[1], name="90.score") == {("mini", "90.score"): again}


@pytest.mark.usefixtures("one")
def test_what_left_the_ledger_is_left_out_and_damage_is_named(tmp_path):
    """A value that the measure cannot give is refused when it is read, too."""
    measured("90.score", 0.9, null=[0.1, 0.1, 0.1])
    path = tmp_path / "results/mini/90.json"
    text = path.read_text()
    path.write_text(text.replace("90.score", "90.gone"))
    assert claims.read_results(tmp_path / "results") == {}
    much = (text.replace("0.9,", value) for value in ("7.5,", '"much",'))
    for damaged in (*much, "[]", '{"runs": [1]}'):
        path.write_text(damaged)
        with pytest.raises(IclError, match=r"(?s)90\.json holds no results .*Delete it"):
            claims.read_results(tmp_path / "results")


@pytest.mark.usefixtures("one")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": math.inf}, "not a number"),
        ({"spread": math.nan}, "not a number"),
        ({"value": 2.0}, "outside its range"),
        ({"detail": {"gain": math.nan}}, "JSON"),
    ],
)
def test_what_cannot_be_judged_writes_and_prints_nothing(tmp_path, capsys, change, message):
    with pytest.raises(ValueError, match=message):
        measured(**({"name": "90.score", "value": 0.9} | change))
    assert capsys.readouterr().out == ""
    assert claims.read_results(tmp_path / "results") == {}


@pytest.mark.usefixtures("one")
def test_a_null_that_does_as_well_is_named():
    """Only one that holds, in full or with the weaker bar, and only a finding."""
    good, weaker, fails = [0.9] * 5, [0.6] * 5, [0.1] * 5
    for value, null, wanted in (
        (good, good, verdicts.SAME),
        (good, weaker, verdicts.HOLDS),
        (weaker, good, verdicts.SAME),
        (weaker, fails, verdicts.WEAKER),
        (fails, good, verdicts.FAILS),
        (weaker, [0.65, 0.1, 0.2, 0.6, 0.65], verdicts.UNCLEAR),  # its pairs may do no worse
        (weaker, [0.65, 0.1, 0.2, 0.6], verdicts.WEAKER),  # no pairs
    ):
        found = measured("90.score", value, null=null)
        assert verdicts.judge(found, claims.null_of(found, {})) == wanted
        assert verdicts.judge(found, None) == found.verdict


@pytest.mark.usefixtures("one")
def test_the_difference_from_the_null_has_the_interval_of_scipy():
    """Welch's; of pairs where the cell gives as many."""
    value, null = [0.9, 0.8, 0.84, 0.7], [0.2, 0.31, 0.3]
    for other, test in (
        (null, partial(scipy.stats.ttest_ind, equal_var=False)),
        ([*null, 0.25], scipy.stats.ttest_rel),
    ):
        found = measured("90.score", value, null=other)
        wanted = fmean(value) - fmean(other), *test(value, other).confidence_interval(0.95)
        assert verdicts.difference(found, claims.null_of(found, {})) == pytest.approx(wanted)
    single = measured("90.score", 0.9, null=[0.3, 0.4])
    assert verdicts.difference(single, claims.null_of(single, {})) is None, "it has no spread"
    assert claims.paired_difference(torch.tensor([1.0, 3.0]), [0.0, 1.0]) == (1.5, 0.5, 2)
    assert claims.paired_difference([1.0, 2.0], [math.nan, 1.0]) is None
    assert claims.paired_difference([1.0, 2.0], (1.0, 0.0, 2)) is None, "a mean has no pairs"


def test_training_seeds_are_as_many_as_models():
    for (tier, name), result in claims.read_results(ROOT / "book/results").items():
        over = claims.find(name).text_at("over", tier)
        if tier == "mini" and over.startswith("training seeds") and name[:2] not in ("04", "05"):
            assert result.count == len(result.model.split(", ")), name
