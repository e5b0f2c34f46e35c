"""The command line: each mistake is one line on stderr and status 2."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from iclutils import __main__, training, zoo
from iclutils.__main__ import main
from iclutils.bookkit import claims, commands, run

ROOT = Path(__file__).parents[2]
COMMANDS = list(commands.COMMANDS)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may write into the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ICLUTILS_RESULTS", str(tmp_path / "results"))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], dict]]:
    """The runs that the command line asks for, without running them."""
    calls: list[tuple[list[str], dict]] = []

    def pretend(names: list[str], given: dict, build: Path, *, force: bool = False) -> list:
        calls.append((names, given | ({"force": True} if force else {})))
        return [run.Run(name, {}, tmp_path, fresh=not force) for name in names]

    monkeypatch.setattr(run, "run_chapters", pretend)
    monkeypatch.setattr(run, "chapters", lambda: ["90_demo", "91_other"])
    return calls


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m iclutils {command}" in shown
    examples = shown.partition("\nexamples:\n")[2].splitlines()
    assert examples
    assert all(line.startswith(f"  python -m iclutils {command}") for line in examples)


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    listed = re.findall(r"^    (\w+)\s+\S.*$", out, re.MULTILINE)
    assert listed == COMMANDS, "each with a line of its own"
    assert {"doctor", "run", "claims", "models", "train"} <= set(COMMANDS)
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == out


def examples() -> list[list[str]]:
    """The words of every example that a help text shows."""
    lines = re.findall(r"^  python -m iclutils ?(.*)$", __main__.OVERVIEW, re.MULTILINE)
    lines += [f"{name} {x}" for name, it in commands.COMMANDS.items() for x in it.examples]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("words", examples(), ids=" ".join)
def test_every_example_is_one_that_is_understood(words: list[str]) -> None:
    assert callable(__main__.parser().parse_args(words).act)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runn"], "Unknown command 'runn'. Did you mean 'run'? Known: doctor, run,"),
        (["run", "99"], "Unknown chapter '99'"),
        (["run", "01", "-p", "seed"], "-p takes NAME=VALUE; got 'seed'"),
        (["train", "regression-d2", "--device", "tpu"], "Unknown device 'tpu'"),
        (["train", "induction-9"], "Unknown recipe 'induction-9'. Did you mean 'induction-"),
        (["train", "lsa-1", "--jobs", "2"], "--jobs and --cluster are for several recipes"),
        (["train", "lsa-1", "--cluster", "tcp://x:1"], "'lsa-1' names one. Leave them out"),
        (["claims", "99"], "Unknown chapter '99'"),
        (["book"], "Run this in the checkout"),
        (["accept"], "Run this in the checkout"),
        (["address"], "CITATION.cff"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_options_become_parameters_of_their_type(ran: list) -> None:
    options = ["--tier", "paper", "--seed", "3", "-p", "weight=0.5", "-p", "name=a b", "--force"]
    assert main(["run", "90", *options]) == 0
    expected = {"tier": "paper", "seed": 3, "weight": 0.5, "name": "a b", "force": True}
    assert ran == [(["90"], expected)]


def test_all_runs_every_chapter_in_order(ran: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 0
    assert ran == [(["90_demo", "91_other"], {})]
    assert capsys.readouterr().out.count("ran: ") == 2


def test_an_interruption_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_chapters", interrupt)
    assert main(["run", "01"]) == 130
    assert "run again to continue" in capsys.readouterr().err


def test_train_lists_recipes_and_says_what_one_costs_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train"]) == 0
    assert capsys.readouterr().out.split() == training.all_names()
    monkeypatch.delenv("ICLUTILS_QUIET")
    monkeypatch.setattr(training, "train", lambda *_, **__: print("trains"))
    assert main(["train", "lsa-1", "--out", str(tmp_path)]) == 0
    said, then, *_ = capsys.readouterr().out.splitlines()
    steps = json.loads(zoo.log("lsa-1").read_text().splitlines()[-1])["step"]
    assert said.startswith(f"lsa-1: {steps} steps, about ")
    assert "as it took for the shipped model" in said
    assert then == "trains"
    assert main(["train", "lsa-1", "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("trains")


def test_models_lists_the_zoo_and_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    for name in [*zoo.names(), "gpt2"]:
        assert any(line.split()[0] == name for line in out.splitlines()), name


def test_claims_lists_each_claim_at_each_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims"]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    expected = [f"{tier:<6} {it.id}" for it in claims.ledger().values() for tier in it.tiers]
    assert len(listed) == len(expected)
    for line, wanted in zip(listed, expected, strict=True):
        assert wanted in line
        assert line.startswith(claims.VERDICTS)


def test_address_writes_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(ROOT / "CITATION.cff", tmp_path)
    with (tmp_path / "CITATION.cff").open("a") as citation:
        citation.write('repository-code: "https://example.org/stale/one"\n')
    assert main(["address"]) == 0
    assert f"updated {tmp_path / 'CITATION.cff'}" in capsys.readouterr().out
    assert "stale" not in (tmp_path / "CITATION.cff").read_text()
    assert main(["address"]) == 0
    assert capsys.readouterr().out == "", "nothing is left to do"


def test_the_module_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "iclutils", "run", "99"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: Unknown chapter '99'")
    assert f"{commands.BUILD}/" in (ROOT / ".gitignore").read_text().splitlines()
