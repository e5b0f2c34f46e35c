"""Starting a notebook: parameters checked, random draws fixed, claims judged or only reported."""

import math
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from ledger import dump, entry

import iclutils
from iclutils import claims, models, presets, session, zoo
from iclutils.errors import IclError
from iclutils.zoo import smollm2

MINI = presets.TIERS["mini"]


def ledger(chapter, tier):
    return dump(entry(id=f"{chapter}.score", tiers={tier: {"holds": ">= 0.8"}}))


@pytest.fixture
def score(make_ledger):
    make_ledger("01_demo", ledger("01", "mini"))


def test_beginning_says_what_runs_where(capsys, tmp_path, monkeypatch):
    book = iclutils.begin(seed=4)
    assert (book.tier, book.seed, book.device) == (MINI, 4, "cpu")
    assert book.models("01") == MINI.models("01")
    assert capsys.readouterr().out == "mini tier, the tier's own models, seed 4, cpu\n"
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    mine = iclutils.begin(model=tmp_path.name)
    monkeypatch.chdir("/")
    assert mine.models("01") == (str(tmp_path),), "a folder is the one that the user saw"
    assert iclutils.begin(model="gpt2", device="cpu").tier.name == "paper"
    assert iclutils.begin(model="smollm2-unquantised").tier.name == "real"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tier": "papre"}, "Unknown tier 'papre'. Did you mean 'paper'"),
        ({"seed": -1}, "seed must be a natural number; got -1"),
        ({"device": "mps"}, "Use 'auto', 'cpu' or 'cuda': Apple's mps gives wrong attention"),
        ({"device": "cuda"}, "no CUDA GPU is visible. Use device='cpu'"),
    ],
)
def test_mistakes_are_named_with_their_cure(given, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(IclError) as caught:
        iclutils.begin(**given)
    assert message in str(caught.value)


def test_every_purpose_draw_and_seed_has_its_own_stream():
    def sample(seed, purpose, draw):
        generator = iclutils.begin(seed=seed).generator(purpose, draw)
        return tuple(torch.randint(1_000_000, (4,), generator=generator).tolist())

    keys = [(seed, what, draw) for seed in (0, 1) for what in ("a", "b") for draw in (0, 1)]
    first = [sample(*key) for key in keys]
    drawn = torch.rand(7)
    assert [sample(*key) for key in reversed(keys)] == first[::-1]  # other draws do not matter
    assert len(set(first)) == len(keys)
    iclutils.begin(seed=1)
    assert torch.rand(7).equal(drawn), "the global seed is that of the session"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.usefixtures("score")
def test_a_check_is_judged_and_written(capsys, tmp_path):
    iclutils.begin().check("01.score", [0.9, 0.9, 0.9], null=(0.2, 0.1, 2), head=[4, 5])
    assert not capsys.readouterr().out.splitlines()[1:]
    result = claims.read_results(tmp_path / "results")["mini", "01.score"]
    assert (result.seed, result.count, result.detail) == (0, 3, {"head": [4, 5]})
    assert result.model == ", ".join(MINI.models("01"))
    assert [result.null[key] for key in ("value", "spread", "count")] == [0.2, 0.1, 2]


@pytest.mark.usefixtures("score")
@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, "results"),
        ({"seed": 2}, "results/seed-2"),
        ({"model": "owner/name@1", "seed": 1}, "results/seed-1/model-owner_name_1"),
        ({"model": "smollm2"}, "results"),  # the tier's own, by its name
    ],
)
def test_another_seed_or_model_is_not_taken_for_the_books(given, folder, tmp_path):
    assert iclutils.begin(**given, device="cpu").results == tmp_path / folder


def cut_out(network):
    network.transformer.wte.weight.zero_()


@pytest.mark.usefixtures("score")
def test_the_null_is_the_same_network_without_training(capsys, tmp_path):
    trained, null = (iclutils.begin(weights=w) for w in ("trained", "random"))
    assert "random weights" in capsys.readouterr().out
    made = {"load": "induction-0", "regressors": "regression-w8", "lsa": "lsa-1"}
    for make, name in made.items():
        nets = (getattr(book, make)(name) for book in (trained, null, null))
        parts = list(zip(*(net.parameters() for net in nets), strict=True))
        assert all(a.shape == b.shape and b.equal(c) for a, b, c in parts), make
        assert not all(a.equal(b) for a, b, _ in parts), make
    for book in (trained, null):  # weights are edited from those that load gives
        whole, cut = book.load("induction-0"), book.edit_weights("induction-0", cut_out)
        assert cut.W_E.abs().max() == 0
        assert torch.equal(cut.W_pos, whole.W_pos)
    null.check("01.score", math.nan)
    null.check("01.score", [0.1, 0.2])
    result = claims.read_results(tmp_path / "results")["mini-null", "01.score"]
    assert (result.value, result.count) == (pytest.approx(0.15), 2)


@pytest.mark.usefixtures("score")
@pytest.mark.parametrize(
    ("given", "value", "said"),
    [
        ({"model": "./own"}, 0.123456, "measured        01.score = 0.1235 (score, a fraction)"),
        ({"tier": "paper"}, 0.9, ""),
        ({}, float("nan"), "not measurable  01.score"),
    ],
)
def test_what_is_not_judged_is_said_and_not_kept(given, value, said, capsys, tmp_path):
    book = iclutils.begin(**given, device="cpu")
    book.check("01.score", value)
    assert capsys.readouterr().out.splitlines()[1:] == [said] * bool(said)
    assert not (tmp_path / "results").exists()
    with pytest.raises(IclError, match=r"Unknown claim '01\.scor'\. Did you mean '01\.score'"):
        book.check("01.scor", 0.9)


def test_what_was_noted_beside_a_claim_of_the_real_model(make_ledger, capsys):
    make_ledger("01_demo", ledger("01", "real"))
    real, null = (iclutils.begin("real", device="cpu", weights=w) for w in ("trained", "random"))
    real.check("01.score", [0.9, 0.8], curve=[1.0, 2.0])
    null.check("01.score", 0.1, curve=[3.0])
    stored = real.stored_result("01.score")
    assert stored.pop("curve") == [1.0, 2.0]
    assert stored == pytest.approx({"value": 0.85, "spread": 0.05})
    assert null.stored_result("01.score")["curve"] == [3.0]
    assert iclutils.begin(device="cpu").stored_result("01.score") == {}  # it is not committed


def test_a_table_shows_claims_in_every_column(score, capsys):
    book = iclutils.begin()
    book.check("01.score", [0.9] * 5)
    capsys.readouterr()
    book.table("01.score")
    said = capsys.readouterr().out
    assert "01.score  The score is high." in said
    assert "Small models  0.900 (holds)" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError("write this first"), "write this first."),
        (AssertionError("One and one are two."), "not yet. One and one are two."),
        (AssertionError(), "not yet."),
        (None, "right."),
        (KeyError("x"), ""),
        (NotImplementedError("no such operator"), ""),
    ],
)
def test_an_exercise_is_to_be_written_not_yet_or_right_and_other_errors_pass(error, said, capsys):
    passes = nullcontext() if said else pytest.raises(type(error))
    with passes, session.Session.exercise("01-ex-sum"):
        if error:
            raise error
    assert capsys.readouterr().out == f"01-ex-sum: {said}\n" * bool(said)


def test_worked_examples_take_smollm2_or_say_what_takes_its_place(capsys, monkeypatch):
    book, text = iclutils.begin(weights="random"), "A rose is\na rose, is"
    monkeypatch.setattr(smollm2, "folder", lambda: zoo.folder("induction-0"))
    assert book.example("induction-3").W_E.equal(models.load("induction-0").W_E), "trained"
    capsys.readouterr()
    unlike = IclError("No network.")
    monkeypatch.setattr(smollm2, "folder", Mock(side_effect=unlike))
    net = book.example("induction-3", text)
    said = "No network.\nThe small model induction-3 takes its place; the text speaks of SmolLM2.\n"
    assert capsys.readouterr().out == said
    assert net.W_E.equal(models.load("induction-3").W_E)
    words = ["<bos>", "A", " rose", " is", "\n", "a", " rose", ",", " is"]
    assert net.to_str_tokens(text) == words
    assert net.to_tokens(text + " tulip")[0].tolist() == [511, 0, 1, 2, 3, 4, 1, 5, 2, 511]


def test_of_several_cases_the_means_are_repeated_and_of_one_its_samples():
    two = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([5.0])}
    assert session.repetitions(two).tolist() == [2.0, 5.0]
    assert session.repetitions({"a": two["a"]}).tolist() == [1.0, 3.0]
    assert session.repetitions({"a": 4.0, "b": 6.0}).tolist() == [4.0, 6.0]
    assert session.repetitions({"a": 4.0}) == 4.0
    assert math.isnan(session.repetitions({"a": torch.empty(0)})), "undefined, as of no head"
