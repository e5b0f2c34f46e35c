"""The ledger refuses claims that cannot fail, and judges values as its criteria say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from iclutils.bookkit import claims, presets
from iclutils.bookkit.claims import Claim
from iclutils.errors import IclError

NUMBERS = st.floats(-1e6, 1e6)


def entry(**changes: object) -> dict[str, object]:
    """A sound ledger entry, with changes; ``None`` removes a field."""
    sound: dict[str, object] = {
        "id": "90.score",
        "statement": "The score is high.",
        "source": "nobody2026",
        "measure": "score, a fraction",
        "cell": "90-score",
        "range": [0, 1],
        "tolerance": "made up",
        "tiers": {"mini": {"reproduced": ">= 0.8", "partly": ">= 0.5"}},
    }
    return {k: v for k, v in (sound | changes).items() if v is not None}


def dump(entries: list[dict[str, object]]) -> str:
    """YAML in the order given: the order of criteria matters."""
    return yaml.safe_dump(entries, sort_keys=False)


def claim(criteria: dict[str, str], **changes: object) -> Claim:
    fields = entry(tiers={"mini": criteria}, range=(-math.inf, math.inf)) | changes
    return Claim(**fields)  # type: ignore[arg-type]


@pytest.fixture
def one(make_ledger: Callable[..., Path]) -> Callable[..., dict[str, Claim]]:
    """Reads a ledger of one entry, the sound one with changes."""

    def read(**changes: object) -> dict[str, Claim]:
        make_ledger("90_demo", dump([entry(**changes)]))
        return claims.ledger("90")

    return read


# Verdicts


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (1.0, "reproduced"),
        (0.8, "reproduced"),
        (0.79, "partly"),
        (0.5, "partly"),
        (0.49, "not reproduced"),
        (0.0, "not reproduced"),
    ],
)
def test_the_first_criterion_that_holds_decides(one: Callable, value: float, verdict: str) -> None:
    assert one()["90.score"].verdict("mini", value) == verdict


@pytest.mark.parametrize(
    ("text", "holds", "fails"),
    [
        ("> 0.5", [0.51, 7.0], [0.5, -1.0]),
        (">= 0.5", [0.5, 7.0], [0.49]),
        ("< -2", [-2.1], [-2.0, 0.0]),
        ("<= 1e-5", [1e-5, -1.0], [2e-5]),
        ("-1 .. 2.5", [-1.0, 0.0, 2.5], [-1.01, 2.51]),
    ],
)
def test_every_form_of_criterion(text: str, holds: list[float], fails: list[float]) -> None:
    it = claim({"corrected": text})
    assert [it.verdict("mini", x) for x in holds] == ["corrected"] * len(holds)
    assert [it.verdict("mini", x) for x in fails] == ["not reproduced"] * len(fails)


@given(
    bounds=st.lists(NUMBERS, min_size=2, max_size=2, unique=True),
    values=st.tuples(NUMBERS, NUMBERS),
)
def test_a_larger_value_never_has_a_worse_verdict(
    bounds: list[float], values: tuple[float, float]
) -> None:
    low, high = sorted(bounds)
    it = claim({"reproduced": f">= {high:.12f}", "partly": f">= {low:.12f}"})
    order = ["not reproduced", "partly", "reproduced"]
    ranks = [order.index(it.verdict("mini", value)) for value in sorted(values)]
    assert ranks == sorted(ranks)


@given(value=NUMBERS, spread=st.floats(0, 1e3), sigmas=st.floats(0, 5), bound=NUMBERS)
def test_a_spread_never_helps(value: float, spread: float, sigmas: float, bound: float) -> None:
    it = claim({"reproduced": f">= {bound:.12f}"}, sigmas=sigmas)
    if it.verdict("mini", value, spread) == "reproduced":
        assert it.verdict("mini", value) == "reproduced"
        assert value - sigmas * spread >= bound - 1e-9


def test_sigmas_ask_for_a_margin_on_both_sides() -> None:
    it = claim({"reproduced": "0.4 .. 0.6"}, sigmas=2.0)
    assert it.verdict("mini", 0.5, 0.04) == "reproduced"
    assert it.verdict("mini", 0.5, 0.06) == "not reproduced"
    assert it.verdict("mini", 0.42, 0.02) == "not reproduced"
    assert it.verdict("mini", 0.58, 0.02) == "not reproduced"


def test_a_spread_does_not_reach_beyond_the_range() -> None:
    it = claim({"reproduced": "0.9 .. 1"}, sigmas=3.0, range=(0.0, 1.0))
    assert it.verdict("mini", 0.99, 0.02) == "reproduced"
    assert it.verdict("mini", 0.99, 0.04) == "not reproduced"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_refused(one: Callable, value: float) -> None:
    it = one()["90.score"]
    with pytest.raises(IclError, match="not a number"):
        it.verdict("mini", value)
    with pytest.raises(IclError, match="not a number"):
        it.verdict("mini", 0.5, value)


@pytest.mark.parametrize("value", [-0.01, 1.01])
def test_a_value_outside_the_range_is_refused(one: Callable, value: float) -> None:
    with pytest.raises(IclError, match="outside its range"):
        one()["90.score"].verdict("mini", value)


# What the ledger refuses


@pytest.mark.parametrize(
    "criteria",
    [
        {},  # nothing to fail
        {"reproduced": ">= 0"},  # the whole range
        {"reproduced": "0 .. 1"},
        {"reproduced": "-5 .. 5"},
        {"reproduced": "<= 1"},
        {"reproduced": "> 0.5", "corrected": "<= 0.5"},  # together they cover it
        {"reproduced": ">= 0.5", "partly": "0.2 .. 0.7", "corrected": "<= 0.2"},
    ],
)
def test_a_claim_that_cannot_fail_is_refused(one: Callable, criteria: dict[str, str]) -> None:
    with pytest.raises(IclError, match="cannot fail"):
        one(tiers={"mini": criteria})


@pytest.mark.parametrize(
    "criteria",
    [
        {"reproduced": "> 1"},  # outside the range
        {"reproduced": "< 0"},
        {"reproduced": "0.9 .. 0.1"},  # empty
        {"reproduced": ">= 0.5", "partly": ">= 0.8"},  # never reached: the first always decides
    ],
)
def test_a_criterion_that_never_decides_is_refused(one: Callable, criteria: dict[str, str]) -> None:
    with pytest.raises(IclError, match="can never decide"):
        one(tiers={"mini": criteria})


@pytest.mark.parametrize("text", [">= -inf", "< nan", "= 0.5", "0.5", "about 1", "> a", ">0.5 <1"])
def test_a_malformed_criterion_is_refused(one: Callable, text: str) -> None:
    with pytest.raises(IclError, match="is not one of"):
        one(tiers={"mini": {"reproduced": text}})


@given(low=st.floats(-100, 100), width=st.floats(0.01, 100), where=st.floats(0.05, 0.95))
def test_a_bound_inside_the_range_is_accepted(low: float, width: float, where: float) -> None:
    it = claim({"reproduced": f">= {low + where * width:.9f}"}, range=(low, low + width))
    claims.refuse_if_it_cannot_fail(it)


@given(low=st.floats(-100, 100), width=st.floats(0.01, 100), below=st.floats(0.001, 100))
def test_a_bound_below_the_range_is_refused(low: float, width: float, below: float) -> None:
    it = claim({"reproduced": f">= {low - below:.9f}"}, range=(low, low + width))
    with pytest.raises(IclError, match="cannot fail"):
        claims.refuse_if_it_cannot_fail(it)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": {"mini": {"reprodused": ">= 0.8"}}}, "Did you mean 'reproduced'"),
        ({"tiers": {"mini": {"not run": ">= 0.8"}}}, "Unknown verdict"),
        ({"tiers": {"mni": {"reproduced": ">= 0.8"}}}, "Did you mean 'mini'"),
        ({"tiers": {}}, "needs criteria"),
        ({"tiers": {"mini": {"reproduced": 0.8}}}, "90"),
        ({"tiers": ["mini"]}, "90"),
        ({"tolerance": ""}, "tolerance"),
        ({"statement": None}, "statement"),
        ({"cell": None}, "cell"),
        ({"colour": "red"}, "colour"),
        ({"id": "91.score"}, "does not belong in 90_demo"),
        ({"range": [0]}, "90.score"),
        ({"range": [0, "much"]}, "much"),
        ({"sigmas": "two"}, "90.score"),
    ],
)
def test_a_malformed_entry_is_refused(
    one: Callable, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(IclError, match=message):
        one(**changes)


@pytest.mark.parametrize("text", ["", "just text", "- 1\n- 2\n", "a: [", "id: 90.x\n"])
def test_a_file_that_is_no_ledger_is_refused(make_ledger: Callable, text: str) -> None:
    make_ledger("90_demo", text)
    with pytest.raises(IclError, match="90_demo"):
        claims.ledger("90")


def test_a_repeated_id_is_refused(make_ledger: Callable) -> None:
    make_ledger("90_demo", dump([entry(), entry()]))
    with pytest.raises(IclError, match="two claims"):
        claims.ledger("90")


def test_ledgers_are_found_by_number_and_name(make_ledger: Callable) -> None:
    make_ledger("90_demo", dump([entry()]))
    make_ledger("91_other", dump([entry(id="91.score")]))
    assert claims.chapters() == ["90_demo", "91_other"]
    assert list(claims.ledger("90_demo")) == list(claims.ledger("90")) == ["90.score"]
    assert list(claims.ledger()) == ["90.score", "91.score"]
    with pytest.raises(IclError, match="Did you mean '91_other'"):
        claims.ledger("91_othr")


# Results


def test_check_prints_the_verdict_alone_and_writes_provenance(
    one: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one()
    claims.check(
        "90.score",
        0.8123456789,
        tier="mini",
        model="induction-0",
        seed=3,
        spread=0.01,
        count=5,
        heads=[1, 2],
    )
    assert capsys.readouterr().out == "reproduced      90.score\n"
    stored = json.loads((tmp_path / "results" / "mini" / "90.score.json").read_text())
    assert stored["value"] == 0.8123456789
    assert stored["spread"] == 0.01
    assert stored["count"] == 5
    assert stored["detail"] == {"heads": [1, 2]}
    assert (stored["tier"], stored["model"], stored["seed"]) == ("mini", "induction-0", 3)
    assert set(stored["versions"]) >= {"torch", "transformer-lens"}
    assert stored["device"] == "cpu"
    assert stored["python"]
    assert stored["date"]


@given(value=st.floats(0, 1), spread=st.floats(0, 1), seed=st.integers(0, 9))
def test_results_survive_the_round_trip(value: float, spread: float, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        place = _scratch(patch)
        wrote = claims.check(
            "90.score", value, tier="mini", model="m", seed=seed, spread=spread, note="é"
        )
        assert claims.read_results(place / "results") == {("mini", "90.score"): wrote}


def test_whole_numbers_in_yaml_are_numbers(one: Callable) -> None:
    it = one(sigmas=2, published=1)["90.score"]
    assert (it.sigmas, it.published) == (2.0, 1.0)


def _scratch(patch: pytest.MonkeyPatch) -> Path:
    """A ledger and a results folder of their own, for a property test."""
    import tempfile

    place = Path(tempfile.mkdtemp())
    (place / "claims").mkdir()
    (place / "claims" / "90_demo.yml").write_text(dump([entry()]))
    patch.setattr(claims, "ROOT", place / "claims")
    patch.setattr(claims, "commit", lambda: "")
    patch.setenv("ICLUTILS_RESULTS", str(place / "results"))
    claims.ledger.cache_clear()
    patch.setattr(claims, "ledger", claims.ledger.__wrapped__)
    return place


def test_a_changed_number_changes_the_printed_line(
    one: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    one()
    lines = []
    for value in (0.81, 0.79, 0.3):
        claims.check("90.score", value, tier="mini", model="m", seed=0)
        lines.append(capsys.readouterr().out)
    assert lines == [
        "reproduced      90.score\n",
        "partly          90.score\n",
        "not reproduced  90.score\n",
    ]


def test_what_cannot_be_judged_writes_and_prints_nothing(
    one: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one()
    kept = claims.check("90.score", 0.9, tier="mini", model="m", seed=0)
    capsys.readouterr()
    for change in ({"value": math.nan}, {"value": 2.0}, {"tier": "paper"}, {"detail": math.nan}):
        given = {"value": 0.9, "tier": "mini"} | change
        with pytest.raises(ValueError, match=r"90\.score|JSON"):
            claims.check("90.score", given.pop("value"), model="m", seed=0, **given)  # type: ignore
    assert capsys.readouterr().out == ""
    assert claims.read_results(tmp_path / "results") == {("mini", "90.score"): kept}


def test_an_unknown_claim_names_the_nearest(one: Callable) -> None:
    one()
    with pytest.raises(IclError, match=r"Did you mean '90\.score'"):
        claims.check("90.scor", 0.5, tier="mini", model="m", seed=0)


def test_later_folders_win_and_strangers_are_refused(one: Callable, tmp_path: Path) -> None:
    one()
    old, new = tmp_path / "old", tmp_path / "new"
    result = claims.check("90.score", 0.9, tier="mini", model="m", seed=0)
    text = (tmp_path / "results" / "mini" / "90.score.json").read_text()
    for folder, value in ((old, 0.6), (new, 0.7)):
        (folder / "mini").mkdir(parents=True)
        (folder / "mini" / "90.score.json").write_text(text.replace("0.9,", f"{value},"))
    found = claims.read_results(old, new, tmp_path / "missing")
    assert found["mini", "90.score"].value == 0.7
    assert claims.read_results(new, old)["mini", "90.score"].value == 0.6
    assert result.value == 0.9
    (new / "mini" / "90.gone.json").write_text(text.replace("90.score", "90.gone"))
    with pytest.raises(IclError, match=r"90\.gone.*no longer in the ledger\. Delete it"):
        claims.read_results(new)
    (old / "mini" / "90.score.json").write_text('{"id": "90.score"}')
    with pytest.raises(IclError, match=r"is not a result .*Delete it"):
        claims.read_results(old)


# The committed ledgers


def test_every_committed_claim_can_hold_and_can_fail() -> None:
    for it in claims.ledger().values():
        for tier, criteria in it.tiers.items():
            low, high = max(it.range[0], -1e9), min(it.range[1], 1e9)
            words = " ".join(criteria.values()).replace("..", " ").split()
            bounds = [float(word) for word in words if word.strip("<>=")]
            near = [b + d for b in bounds for d in (-1e-3, -1e-6, 0.0, 1e-6, 1e-3)]
            values = [v for v in (low, high, *near) if low <= v <= high]
            verdicts = {it.verdict(tier, value) for value in values}
            assert verdicts == {*criteria, "not reproduced"}, f"{it.id} at {tier}"


def test_committed_ledgers_are_written_with_care() -> None:
    ledger = claims.ledger()
    assert ledger, "there is no claim"
    for it in ledger.values():
        assert set(it.tiers) <= set(presets.TIERS)
        assert it.statement.rstrip().endswith("."), f"{it.id}: a statement is a sentence"
        assert it.source.strip(), it.id
        assert it.measure.strip(), it.id
        assert len(it.tolerance.split()) > 2, f"{it.id}: say where the bounds come from"
