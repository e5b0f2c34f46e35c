"""Starting a notebook: parameters checked, random draws fixed, claims judged or only reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import iclutils
from iclutils.bookkit import claims, presets
from iclutils.errors import IclError
from iclutils.files import read_json

ENTRY = {
    "id": "01.score",
    "statement": "The score is high.",
    "source": "nobody2026",
    "measure": "score, a fraction",
    "cell": "score",
    "range": [0, 1],
    "tolerance": "made up",
    "tiers": {"mini": {"reproduced": ">= 0.8"}},
}


@pytest.fixture
def score(make_ledger: Callable[..., Path]) -> None:
    make_ledger("01_demo", yaml.safe_dump([ENTRY]))


def test_beginning_says_what_runs_where(capsys: pytest.CaptureFixture[str]) -> None:
    book = iclutils.begin(seed=4)
    assert (book.tier.name, book.seed, book.device) == ("mini", 4, "cpu")
    assert capsys.readouterr().out == ("mini tier, the tier's own models, seed 4, cpu\n")


def test_a_model_of_the_paper_tier_means_that_tier(capsys: pytest.CaptureFixture[str]) -> None:
    book = iclutils.begin(model="gpt2", device="cpu")
    assert (book.tier.name, book.own_model) == ("paper", "gpt2")
    assert "gpt2" in book.models("01")
    assert "paper tier" in capsys.readouterr().out


def test_the_readers_model_takes_the_place_of_the_tiers(tmp_path: Path) -> None:
    assert iclutils.begin(model=str(tmp_path)).models("01") == (str(tmp_path),)
    assert iclutils.begin().models("01") == presets.TIERS["mini"].models("01")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tier": "papre"}, "Unknown tier 'papre'. Did you mean 'paper'"),
        ({"seed": -1}, "seed must be a natural number; got -1"),
        ({"seed": True}, "seed must be a natural number; got True"),
        ({"device": "gpu"}, "Unknown device 'gpu'. Use 'auto', 'cpu' or 'cuda'"),
        ({"device": "mps"}, "mps gives wrong attention"),
    ],
)
def test_mistakes_are_named_with_their_cure(given: dict[str, object], message: str) -> None:
    with pytest.raises(IclError) as caught:
        iclutils.begin(**given)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IclError, match=r"no CUDA GPU is visible\. Use device='cpu'"):
        iclutils.begin(device="cuda")
    assert iclutils.begin(tier="paper").device == "cpu"


def test_every_purpose_draw_and_seed_has_its_own_stream() -> None:
    def sample(seed: int, purpose: str, draw: int) -> tuple[int, ...]:
        generator = iclutils.begin(seed=seed).generator(purpose, draw)
        return tuple(torch.randint(1_000_000, (4,), generator=generator).tolist())

    keys = [(seed, what, draw) for seed in (0, 1) for what in ("a", "b") for draw in (0, 1)]
    first = [sample(*key) for key in keys]
    torch.rand(7)  # other draws do not matter
    assert [sample(*key) for key in reversed(keys)] == first[::-1]
    assert len(set(first)) == len(keys)


def test_beginning_fixes_the_global_seed_and_float32() -> None:
    iclutils.begin(seed=5)
    first = torch.rand(3)
    iclutils.begin(seed=5)
    assert torch.equal(torch.rand(3), first)
    iclutils.begin(seed=6)
    assert not torch.equal(torch.rand(3), first)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.usefixtures("score")
def test_a_check_is_judged_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    book = iclutils.begin(seed=2)
    capsys.readouterr()
    book.check("01.score", 0.9, spread=0.1, count=3, head=[4, 5])
    assert capsys.readouterr().out == "reproduced      01.score\n"
    stored = read_json(tmp_path / "results" / "mini" / "01.score.json")
    assert (stored["seed"], stored["count"], stored["detail"]) == (2, 3, {"head": [4, 5]})
    assert stored["model"] == ", ".join(presets.TIERS["mini"].models("01"))


@pytest.mark.usefixtures("score")
def test_on_the_readers_model_it_is_only_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    book = iclutils.begin(model=str(tmp_path))
    capsys.readouterr()
    book.check("01.score", 0.123456)
    assert capsys.readouterr().out == "measured        01.score = 0.1235 (score, a fraction)\n"
    assert not (tmp_path / "results").exists()


@pytest.mark.usefixtures("score")
def test_at_a_tier_without_the_claim_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    book = iclutils.begin(tier="paper", device="cpu")
    capsys.readouterr()
    book.check("01.score", 0.9)
    assert capsys.readouterr().out == "no claim        01.score at the paper tier\n"
    assert not (tmp_path / "results").exists()


@pytest.mark.usefixtures("score")
def test_an_unknown_claim_is_an_error_on_every_model(tmp_path: Path) -> None:
    for model in ("", str(tmp_path)):
        with pytest.raises(IclError, match=r"Unknown claim '01\.scor'\. Did you mean '01\.score'"):
            iclutils.begin(model=model).check("01.scor", 0.9)


def test_every_chapter_with_a_ledger_has_models_at_every_tier() -> None:
    for name in claims.chapters():
        for tier in presets.TIERS.values():
            assert tier.models(name[:2]), f"{name} at the {tier.name} tier"


def test_a_published_model_is_judged_where_it_belongs_and_reported_elsewhere(
    make_ledger: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for chapter in ("01", "02"):
        entry = ENTRY | {"id": f"{chapter}.score", "tiers": {"paper": {"reproduced": ">= 0.8"}}}
        make_ledger(f"{chapter}_demo", yaml.safe_dump([entry]))
    for model, home, away in (("gpt2", "01", "02"), ("gpt2-xl", "02", "01")):
        stored = tmp_path / "results" / "paper"
        assert not (stored / f"{home}.score.json").exists()
        book = iclutils.begin(model=model, device="cpu")
        assert book.models(home) == book.models(away) == (model,)
        kept = {p.name: p.read_bytes() for p in stored.glob("*")}
        capsys.readouterr()
        book.check(f"{away}.score", 0.25)
        said = capsys.readouterr().out
        assert said == f"measured        {away}.score = 0.25 (score, a fraction)\n"
        assert {p.name: p.read_bytes() for p in stored.glob("*")} == kept
        book.check(f"{home}.score", 0.9)
        assert capsys.readouterr().out == f"reproduced      {home}.score\n"
        assert read_json(stored / f"{home}.score.json")["model"] == model


def test_an_undefined_value_is_said_to_be_so_and_not_kept(
    score: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ICLUTILS_RESULTS", str(tmp_path / "results"))
    book = iclutils.begin()
    monkeypatch.setattr(type(book.tier), "models", lambda self, chapter: ("demo",))
    book.check(ENTRY["id"], float("nan"))
    assert capsys.readouterr().out.splitlines()[-1] == f"undefined       {ENTRY['id']}"
    assert not (tmp_path / "results").exists()
